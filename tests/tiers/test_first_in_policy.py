"""The tier policy that the documentation shows."""

from __future__ import annotations

from frame.interfaces import TierPolicySetup
from frame.testing import TierPolicySuite
from tests.tiers.first_in_policy import FirstInPolicy


class TestFirstInPolicy(TierPolicySuite):
    target = "tests.tiers.first_in_policy:FirstInPolicy"


def test_the_end_of_the_first_prompt_goes_first() -> None:
    policy = FirstInPolicy(TierPolicySetup(num_blocks=4))
    policy.insert([b"a1", b"a2"])
    policy.insert([b"b1", b"b2"])
    policy.touch([b"a1", b"a2"])
    assert [policy.evict(b"c1", {b"a1"}) for _ in range(3)] == [b"a2", b"b2", b"b1"]
