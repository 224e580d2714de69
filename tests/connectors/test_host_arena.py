"""Host memory in parts of any size: none overlap, and what was given back is whole again."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from frame.plugins.connectors.blocks.host_arena import HostArena


def arena(num_bytes=1 << 14):
    return HostArena(num_bytes, lambda count: torch.zeros(count, dtype=torch.uint8))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_parts_never_overlap_and_all_comes_back(actions):
    one, parts = arena(), []
    for number, (takes, size) in enumerate(actions):
        if takes:
            part = one.take(size)
            if part is not None:
                assert part.shape == (size,)
                part.fill_(number % 251)
                parts.append((part, number % 251))
        elif parts:
            one.give_back(parts.pop(size % len(parts))[0])
        assert all((part == value).all() for part, value in parts)
    for part, _ in parts:
        one.give_back(part.view(1, -1))
    assert one.used_bytes == 0
    assert one.take(1 << 14) is not None


def test_what_does_not_fit_is_not_given():
    one = arena(5000)
    assert one.num_bytes == 4096
    assert one.take(4097) is None
    whole = one.take(4096)
    assert one.used_bytes == 4096
    assert one.take(0) is None
    one.give_back(whole)
    assert one.take(0).shape == (0,)
