"""Which blocks the policies of tiers let go."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from frame.plugins.tiers.arc import ArcPolicy
from frame.plugins.tiers.lru import LruPolicy
from frame.testing import TierPolicySuite
from frame.tiers.policy import TierPolicySetup
from tests.contract.installed import classes

globals().update(classes(TierPolicySuite))


class ReferenceArc:
    """ARC as in the paper's Figure 4: one request for a key at a time; returns the key that went, or None."""

    def __init__(self, size):
        self.size, self.target = size, 0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict() for _ in range(4))

    def replace(self, key):
        if self.t1 and (len(self.t1) > self.target or (key in self.b2 and len(self.t1) == self.target)):
            victim = self.t1.popitem(last=False)[0]
            self.b1[victim] = None
        else:
            victim = self.t2.popitem(last=False)[0]
            self.b2[victim] = None
        return victim

    def request(self, key):
        victim, size = None, self.size
        if key in self.t1 or key in self.t2:
            self.t1.pop(key, None)
            self.t2.pop(key, None)
            self.t2[key] = None
        elif key in self.b1:
            self.target = min(size, self.target + max(1, len(self.b2) // len(self.b1)))
            victim = self.replace(key)
            del self.b1[key]
            self.t2[key] = None
        elif key in self.b2:
            self.target = max(0, self.target - max(1, len(self.b1) // len(self.b2)))
            victim = self.replace(key)
            del self.b2[key]
            self.t2[key] = None
        else:
            if len(self.t1) + len(self.b1) == size:
                if len(self.t1) < size:
                    self.b1.popitem(last=False)
                    victim = self.replace(key)
                else:
                    victim = self.t1.popitem(last=False)[0]
            elif sum(map(len, (self.t1, self.t2, self.b1, self.b2))) >= size:
                if sum(map(len, (self.t1, self.t2, self.b1, self.b2))) == 2 * size:
                    self.b2.popitem(last=False)
                victim = self.replace(key)
            self.t1[key] = None
        return victim


@pytest.mark.parametrize("seed", range(20))
def test_arc_does_as_the_paper_says(seed):
    draw, size = random.Random(seed), 8
    policy, reference, held = ArcPolicy(TierPolicySetup(num_blocks=size)), ReferenceArc(size), set()
    for _ in range(2000):
        key = bytes([min(draw.randrange(40), draw.randrange(40))])
        expected, victim = reference.request(key), None
        if key in held:
            policy.touch([key])
        else:
            if len(held) == size:
                victim = policy.evict(key, ())
                held.discard(victim)
            policy.insert([key])
            held.add(key)
        assert victim == expected


def test_arc_keeps_what_is_used_again_where_lru_does_not():
    """Between two rounds of a few blocks that are used twice come more blocks than there is room for, used once."""
    misses = {}
    for made in (LruPolicy, ArcPolicy):
        policy, held, missed = made(TierPolicySetup(num_blocks=16)), set(), 0
        hot = [b"hot%d" % (number // 2) for number in range(16)]
        for around in range(20):
            for key in (*hot, *(b"once%d-%d" % (around, number) for number in range(30))):
                if key in held:
                    policy.touch([key])
                    continue
                missed += key in hot
                if len(held) == 16:
                    held.discard(policy.evict(key, ()))
                policy.insert([key])
                held.add(key)
        misses[made] = missed
    assert misses == {LruPolicy: 20 * 8, ArcPolicy: 8}


def test_arc_remembers_no_more_than_it_may():
    policy, held = ArcPolicy(TierPolicySetup(num_blocks=4)), set()
    for number in range(1000):
        key = b"%d" % (number % 37)
        if len(held) == 4:
            held.discard(policy.evict(key, ()))
        if number % 5:  # others are never inserted
            policy.insert([key])
            held.add(key)
    remembered = [vars(policy)[name] for name in ("_once", "_again", "_gone_once", "_gone_again", "_returning")]
    assert sum(map(len, remembered)) <= 3 * 4


@pytest.mark.parametrize("made", [LruPolicy, ArcPolicy])
def test_the_beginning_of_a_prompt_stays_longest(made):
    policy = made(TierPolicySetup(num_blocks=4))
    policy.insert([b"a", b"b", b"c", b"d"])
    assert [policy.evict(b"x", ()) for _ in range(4)] == [b"d", b"c", b"b", b"a"]
    policy.insert([b"a", b"b", b"c", b"d"])
    policy.touch([b"a", b"b", b"c", b"d"])
    assert [policy.evict(b"x", ()) for _ in range(4)] == [b"d", b"c", b"b", b"a"]
