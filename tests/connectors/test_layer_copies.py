"""Copies between blocks of layers and rows, by torch's ops and by the kernel, of which a stand-in is tried here."""

from __future__ import annotations

import ctypes

import pytest
import torch

from frame.plugins.connectors.blocks import layer_copies
from frame.plugins.connectors.blocks.layer_copies import LayerCopies
from frame.plugins.connectors.blocks.messages import Move
from frame.plugins.connectors.blocks.step_worker import Part
from frame.plugins.platforms.cpu import HostStreams

CPU = torch.device("cpu")
#: (group, type, values of a block, blocks of the group in a stored block)
LAYERS = [(0, torch.bfloat16, 12, 1), (0, torch.float32, 6, 1), (1, torch.bfloat16, 8, 2), (1, torch.int8, 4, 2)]


def copy_by_bytes(table, device, *, finite=None, dtype=None):
    """What the kernel does."""
    for source, target, size, owner in table.tolist():
        ctypes.memmove(target, source, size)
        if dtype is not None:
            found = torch.frombuffer(bytearray(ctypes.string_at(source, size)), dtype=dtype)
            finite[owner] &= bool(found.isfinite().all())


@pytest.fixture(params=["ops", "kernel"])
def copies(request, monkeypatch):
    launched = []
    monkeypatch.setattr(layer_copies, "has_kernel", lambda device: request.param == "kernel")
    monkeypatch.setattr(
        layer_copies,
        "copy_pieces",
        lambda table, device, **how: launched.append(1) or copy_by_bytes(table, device, **how),
    )
    made = LayerCopies(HostStreams(), CPU)
    made.launched = launched
    yield made
    assert bool(launched) == (request.param == "kernel")


def make_parts(layers=LAYERS):
    parts, start = [], 0
    for group, dtype, size, count in layers:
        values = torch.arange(10 * size).view(10, size).remainder(50) + 1
        cache = values.to(dtype).view(torch.uint8).clone()
        end = start + count * cache.shape[1]
        parts.append(Part(group, cache, dtype, count, start, end))
        start = end
    return parts


def moves_of(*blocks):
    return [Move("owner", b"key", list(map(list, one)), number) for number, one in enumerate(blocks)]


def test_what_is_gathered_is_scattered_to_other_blocks(copies):
    parts = make_parts()
    before = [part.cache.clone() for part in parts]
    rows = torch.zeros(2, parts[-1].end, dtype=torch.uint8)
    good = copies.gather(parts, moves_of(([3], [1, 2]), ([9], [7, 5])), rows)
    assert good.tolist() == [True, True]
    assert torch.equal(rows[1, : parts[0].end], before[0][9])
    copies.scatter(parts, moves_of(([4], [6, 8]), ([1], [0, 3])), rows)
    for part, old in zip(parts, before, strict=True):
        pairs = {4: 3, 1: 9} if part.group == 0 else {6: 1, 8: 2, 3: 5}
        for block in range(10):
            assert torch.equal(part.cache[block], old[pairs.get(block, block)]), (part.group, block)
    if copies.launched:
        assert len(copies.launched) == 4  # of three kinds of values out, and all of them in


def test_the_kernel_is_compiled_for_each_kind_of_values(copies):
    parts = make_parts()
    rows = torch.arange(64, dtype=torch.uint8).view(1, 64)
    copies.compile(parts, rows)
    assert len(copies.launched) in (0, 3)
    assert torch.equal(rows, torch.arange(64, dtype=torch.uint8).view(1, 64))
    copies.gather(parts, moves_of(([3], [1, 2])), torch.zeros(1, parts[-1].end, dtype=torch.uint8))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_values_that_are_not_finite_are_named(copies, layer):
    parts = make_parts()
    parts[layer].cache.view(parts[layer].dtype)[7, 3] = float("inf")
    rows = torch.zeros(3, parts[-1].end, dtype=torch.uint8)
    good = copies.gather(parts, moves_of(([1], [1, 2]), ([7], [3, 7]), ([2], [4, 5])), rows)
    assert good.tolist() == [True, False, True]


def test_values_at_odd_addresses_are_left_to_ops(monkeypatch):
    monkeypatch.setattr(layer_copies, "has_kernel", lambda device: True)
    monkeypatch.setattr(layer_copies, "copy_pieces", lambda *given, **how: pytest.fail("launched"))
    parts = make_parts([(0, torch.bfloat16, 3, 1), (0, torch.float32, 2, 1)])
    rows = torch.zeros(1, parts[-1].end, dtype=torch.uint8)
    copies = LayerCopies(HostStreams(), CPU)
    assert copies.gather(parts, moves_of([[4]]), rows).tolist() == [True]
    before = [part.cache[4].clone() for part in parts]
    copies.scatter(parts, moves_of([[5]]), rows)
    assert all(torch.equal(part.cache[5], old) for part, old in zip(parts, before, strict=True))


def test_nothing_is_copied_for_groups_that_need_no_block(copies):
    parts = make_parts()
    before = [part.cache.clone() for part in parts]
    copies.scatter(parts, moves_of(([0], [0, 0])), torch.ones(1, parts[-1].end, dtype=torch.uint8))
    assert all(torch.equal(part.cache, old) for part, old in zip(parts, before, strict=True))
