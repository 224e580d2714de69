"""Memory of another worker that is mapped here: offers, probes, and pieces that must lie in what was offered."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from frame.interfaces import Mark
from frame.plugins.connectors.blocks.mapped_memory import MAX_REGIONS, Offer, Region
from frame.plugins.connectors.nixl.direct import Direct
from frame.plugins.connectors.nixl.maps import LayerRows, Rows
from tests.connectors.direct_memory import FakeSharing


def worker(num_regions=2, machine="here", **given):
    """A worker's memory: `num_regions` tensors of eight rows."""
    tensors = [torch.arange(64, dtype=torch.int64).view(8, 8) + 1000 * i for i in range(num_regions)]
    return tensors, Direct(FakeSharing(**given), machine, tensors)


def test_rows_of_two_regions_are_read_in_one_go():
    theirs, there = worker()
    ours, here = worker()
    for one in ours:
        one.zero_()
    opened = here.open(msgspec.msgpack.decode(msgspec.msgpack.encode(there.offer), type=Offer))
    layers = np.array([[mine.data_ptr(), other.data_ptr()] for mine, other in zip(ours, theirs[::-1], strict=True)])
    pairs = [(1, 7), (7, 0), (0, 3)]
    both = LayerRows(layers, Rows(*(np.array([64 * pair[i] for pair in pairs]) for i in (1, 0)), np.full(3, 64)))
    alone = LayerRows(layers[:1], Rows(np.array([64 * 5]), np.array([64 * 6]), np.array([64])))
    nothing = LayerRows(layers[:0], both.pieces)
    assert [len(part) for part in (both, alone, nothing)] == [6, 1, 0]
    here.read(opened, [both, nothing, alone]).wait()
    wanted = [torch.zeros_like(one) for one in ours]
    for mine, other in zip(wanted, theirs[::-1], strict=True):
        for source, target in pairs:
            mine[target] = other[source]
    wanted[0][5] = theirs[1][6]
    assert all(torch.equal(*one) for one in zip(ours, wanted, strict=True))
    here.read(opened, []).wait()
    opened.close()
    opened.close()
    assert not here._sharing.opened.total()


@pytest.mark.parametrize("start", [-8, 449, 512, 1 << 40])
def test_what_was_not_offered_is_not_read(start):
    theirs, there = worker(1)
    _, here = worker(1)
    opened = here.open(there.offer)
    target = torch.zeros(8, dtype=torch.int64)
    layer = np.array([[target.data_ptr(), theirs[0].data_ptr()]])
    right = LayerRows(layer, Rows(np.array([0]), np.array([64]), np.array([64])))
    for starts in ([start], [64, start], [start, 64]):
        wrong = LayerRows(layer, Rows(np.zeros_like(starts), np.array(starts), np.full(len(starts), 64)))
        with pytest.raises(ValueError, match="outside of the memory that was offered"):
            here.read(opened, [right, wrong])
    for starts in ([64, (1 << 63) - 8], [64 - (1 << 62), 64 + (1 << 62)], [-(1 << 63), (1 << 63) - 64]):
        wrong = LayerRows(layer, Rows(np.zeros_like(starts), np.array(starts), np.full(len(starts), 64)))
        with pytest.raises(ValueError, match="outside of any memory"):
            here.read(opened, [wrong])
    assert not target.any()


def test_what_was_begun_has_ended_when_a_read_fails():
    theirs, there = worker(1)
    ours, here = worker(1)
    opened = here.open(there.offer)
    layer = np.array([[ours[0].data_ptr(), theirs[0].data_ptr()]])
    part = LayerRows(layer, Rows(np.array([0]), np.array([64]), np.array([64])))
    copy, waited = here._sharing.copy, []

    class Waited(Mark):
        def wait(self):
            waited.append(self)

    def one_copy(*given):
        here._sharing.faults.add("copy")
        return Waited()

    here._sharing.copy = lambda *given: copy(*given) if here._sharing.faults else one_copy(*given)
    with pytest.raises(RuntimeError, match="the launch fails"):
        here.read(opened, [part, part])
    assert len(waited) == 1


@pytest.mark.parametrize("faults", [["open"], ["copy"], ["probe"]])
def test_memory_that_cannot_be_read_rightly_is_left_to_nixl(faults):
    _, there = worker()
    _, here = worker(faults=faults)
    assert here.open(there.offer) is None
    assert not here._sharing.opened.total()


def test_a_probe_is_read_to_no_memory_that_steps_may_still_use(monkeypatch):
    """Copies wait for no step, so that what is allocated on the device between steps is not yet theirs."""
    _, there = worker()
    _, here = worker()
    allocated = []
    for name in ("zeros", "zeros_like", "empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *given, make=make, **how: allocated.append(1) or make(*given, **how))
    for _ in range(2):
        opened = here.open(there.offer)
        assert opened is not None
        opened.close()
    assert not allocated


def test_a_worker_whose_memory_has_no_handles_offers_nothing_and_opens_nothing():
    _, there = worker(faults=["export"])
    _, here = worker()
    assert there.offer is None
    assert here.open(there.offer) is None
    assert there.open(here.offer) is None


def test_another_machine_s_handles_are_not_tried():
    _, there = worker(machine="there")
    _, here = worker(faults=["open"])
    assert here.open(there.offer) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"regions": [Region(0, 1, b"")] * MAX_REGIONS},
        {"regions": [Region(0, 1, bytes(300))]},
        {"probe": b"short"},
        {"probed": Region(0, 8, b"")},
    ],
    ids=["too many", "too long", "short probe", "small probe"],
)
def test_an_offer_is_bounded(changes):
    offer = Offer("here", [], Region(0, 256, b""), bytes(256))
    with pytest.raises(ValueError, match="a worker offers"):
        msgspec.structs.replace(offer, **changes).__post_init__()
    data = {**msgspec.to_builtins(offer), **{name: msgspec.to_builtins(one) for name, one in changes.items()}}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(data, Offer)


def test_long_pieces_are_divided_and_short_ones_are_not():
    from frame.plugins.connectors.blocks.pieces import _PIECE_BYTES, _divided

    short = np.array([[10, 20, 5, 1], [30, 40, _PIECE_BYTES, 2]])
    assert _divided(short) is short
    long = np.array([[1000, 5000, 2 * _PIECE_BYTES + 8, 7], [10, 20, 5, 1]])
    step = _PIECE_BYTES
    assert _divided(long).tolist() == [
        [1000, 5000, step, 7],
        [1000 + step, 5000 + step, step, 7],
        [1000 + 2 * step, 5000 + 2 * step, 8, 7],
        [10, 20, 5, 1],
    ]


def test_a_table_is_spread_over_layers_on_the_device(monkeypatch):
    pytest.importorskip("triton")
    from frame.kernels import block_copies
    from frame.plugins.connectors.blocks.pieces import _PIECE_BYTES, copy_pieces

    launched = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(block_copies, "copy_pieces", lambda *given, **how: launched.append((*given, how)))
    table = np.array([[32, 64, 16, 0], [1 << 20, 0, _PIECE_BYTES + 8, 0]])
    behind = np.array([[1 << 33, 1 << 34, 0, 0], [4, 1 << 35, 0, 0]])
    copy_pieces(table, torch.device("cpu"), behind=behind)
    ((made, most, unit, _),) = launched
    divided = [*table[:1].tolist(), [1 << 20, 0, _PIECE_BYTES, 0], [(1 << 20) + _PIECE_BYTES, _PIECE_BYTES, 8, 0]]
    assert made.tolist() == [
        [one + more for one, more in zip(row, add, strict=True)] for add in behind.tolist() for row in divided
    ]
    assert (most, unit) == (_PIECE_BYTES, 4)
    copy_pieces(table[:1], torch.device("cpu"))
    assert (launched[1][0].tolist(), *launched[1][1:3]) == ([[32, 64, 16, 0]], 16, 16)
