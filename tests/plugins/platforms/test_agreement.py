"""Workers of one engine capture alike and choose the same kernels, whatever each measures."""

import pytest
import torch

from frame.interfaces import HostGroup
from frame.plugins.platforms.cuda.agreement import Agreement
from frame.plugins.platforms.cuda.products.candidates import Shape
from frame.plugins.platforms.cuda.products.choice import Products
from frame.plugins.platforms.cuda.products.times import packed, unpacked
from frame.testing import run_ranks


def test_the_largest_number_and_the_first_bytes_count():
    def work(group):
        agreement = Agreement(group.host)
        return agreement.most(7 - group.rank), agreement.first(b"rank %d" % group.rank)

    assert run_ranks(3, work) == [(7, b"rank 0")] * 3
    alone = Agreement()
    assert (alone.most(5), alone.first(b"x")) == (5, b"x")


class FirstRank(HostGroup):
    """A second rank, to which the first one's bytes come."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def gather(self, data: bytes, timeout_seconds: float = 0) -> list[bytes]:
        return [self.data, data]


def test_products_follow_the_times_of_the_first_worker():
    shape = Shape(64, 32, False, torch.bfloat16)
    theirs = {one: {1: {"cublas": 2.0, "rows": 1.0}} for one in (shape, Shape(8, 16, True, torch.float32))}
    ours = {shape: {1: {"cublas": 1.0, "rows": 2.0}}}
    assert unpacked(packed(theirs)) == theirs
    products = Products(torch.device("cpu"), measure=lambda *_: ours)
    products._met = {shape: torch.empty(64, 32)}
    products.settle(8, Agreement(FirstRank(packed(theirs))).first)
    assert products._table == theirs


@pytest.mark.parametrize("error", [ValueError("no"), torch.OutOfMemoryError("no")], ids=["refused", "memory"])
def test_an_error_that_is_told_on_names_the_worker_that_had_it(error):
    """As a stage tells all others what it has agreed on."""

    def work(group):
        agreement = Agreement(group.host, (4, 5), 4 + group.rank)
        agreed = agreement.failure(error if group.rank == 1 else None)
        again = agreement.failure(agreed)
        return isinstance(again, torch.OutOfMemoryError), str(again)

    memory = isinstance(error, torch.OutOfMemoryError)
    assert run_ranks(2, work) == [(memory, f"worker 5: {type(error).__name__}: no"), (memory, "no")]
