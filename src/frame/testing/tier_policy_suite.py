"""The contract of policies of tiers: only blocks that are held go, none that is in use, and nothing grows for ever."""

from __future__ import annotations

import random

from frame.tiers.policy import TierPolicy

from .plugin_suite import PluginSuite

_NUM_BLOCKS = 16


class TierPolicySuite(PluginSuite):
    """The contract of `frame.interfaces.TierPolicy`.

        class TestMine(TierPolicySuite):
            plugin = "mine"            # or target = "package.module:Class"

    How good the choices are is not part of the contract.
    """

    kind = "tier-policy"

    def policy(self) -> TierPolicy:
        """A new policy."""
        made = self.make(num_blocks=_NUM_BLOCKS)
        assert isinstance(made, TierPolicy), f"{type(made).__name__} does not derive from TierPolicy"
        return made

    def test_only_what_is_held_and_not_in_use_goes(self) -> None:
        for seed in range(20):
            self.life(random.Random(seed))

    def life(self, draw: random.Random, steps: int = 400) -> list[bytes]:
        """A random life of a tier; returns the keys that went, in order."""
        policy, held, gone = self.policy(), set[bytes](), list[bytes]()
        keys = [bytes([number]) * 32 for number in range(48)]
        for _ in range(steps):
            prompt = draw.sample(keys, draw.randrange(1, 5))
            policy.touch([key for key in prompt if key in held])
            kept = set(draw.sample(sorted(held), min(len(held), draw.randrange(4))))
            new = [key for key in prompt if key not in held]
            for number, key in enumerate(new):
                while len(held) + number + 1 > _NUM_BLOCKS:
                    victim = policy.evict(key, kept)
                    assert victim is not None, "evict found nothing, although blocks that are not in use are held"
                    assert victim in held, "evict named a block that is not held"
                    assert victim not in kept, "evict named a block that is in use"
                    held.discard(victim)
                    gone.append(victim)
            policy.insert(new)
            held.update(new)
            if draw.random() < 0.1:
                lost = draw.choice(sorted(held))
                policy.remove(lost)
                held.discard(lost)
        assert policy.evict(b"next", held) is None, "evict must give None where all blocks are in use"
        while held:
            victim = policy.evict(b"next", ())
            assert victim in held, f"evict gave {victim!r} while {len(held)} blocks are held"
            held.discard(victim)
        assert policy.evict(b"next", ()) is None, "evict named a block of an empty tier"
        return gone

    def test_choices_depend_on_the_calls_alone(self) -> None:
        assert self.life(random.Random(1)) == self.life(random.Random(1))

    def test_what_is_not_held_is_ignored(self) -> None:
        policy = self.policy()
        policy.remove(b"never")
        policy.touch([])
        policy.insert([])
        victim = policy.evict(b"next", ())
        assert victim is None, f"evict gave {victim!r} although no block is held"
