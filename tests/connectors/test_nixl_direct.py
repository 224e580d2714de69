"""Memory of another worker that is mapped here: offers, probes, and pieces that must lie in what was offered."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from frame.plugins.connectors.blocks.mapped_memory import MAX_REGIONS, Offer, Region
from frame.plugins.connectors.nixl.direct import Direct
from frame.plugins.connectors.nixl.maps import Rows
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
    pairs = [(theirs[0][1], ours[1][7]), (theirs[1][7], ours[0][0]), (theirs[0][0], ours[0][3])]
    sources, targets = (np.array([pair[i].data_ptr() for pair in pairs]) for i in range(2))
    here.read(opened, Rows(targets, sources, np.full(3, 64))).wait()
    assert all(torch.equal(source, target) for source, target in pairs)
    assert sum(int(one.count_nonzero()) for one in ours) == sum(int(one.count_nonzero()) for one, _ in pairs)
    opened.close()
    opened.close()
    assert not here._sharing.opened.total()


@pytest.mark.parametrize("start", [-8, 449, 512, 1 << 40])
def test_what_was_not_offered_is_not_read(start):
    theirs, there = worker(1)
    _, here = worker(1)
    opened = here.open(there.offer)
    target = torch.zeros(8, dtype=torch.int64)
    rows = Rows(*(np.array([number]) for number in (target.data_ptr(), theirs[0].data_ptr() + start, 64)))
    with pytest.raises(ValueError, match="outside of the memory that was offered"):
        here.read(opened, rows)
    assert not target.any()


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
