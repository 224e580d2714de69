"""Which sums over CUDA devices the kernels take, and which NCCL; neither runs here."""

from types import SimpleNamespace

import pytest
import torch

from frame.interfaces import SingleHost

pytest.importorskip("triton")
kernels = pytest.importorskip("frame.kernels.all_reduce")
collectives = pytest.importorskip("frame.plugins.platforms.cuda.collectives")
peer_copies = pytest.importorskip("frame.plugins.platforms.cuda.peer_copies")


class Nccl:
    """Counts the sums that it is given."""

    def __init__(self):
        self.sums = 0

    def allreduce(self, tensors):
        self.sums += 1
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def taken(monkeypatch):
    """The names of the kernels that were launched."""
    names = []
    monkeypatch.setattr(kernels, "all_reduce", lambda x, *_, **__: names.append("sum") or x)
    monkeypatch.setattr(kernels, "all_reduce_normed", lambda x, r, *_, **__: names.append("normed") or (x, r))
    return names


class Copies:
    """Notes what copies would carry."""

    def __init__(self):
        self.calls, self.begun = [], 0

    def takes(self, tensor):
        return tensor.dtype == torch.bfloat16

    def begin(self, tensor, rows):
        self.begun = tensor.data_ptr()
        self.calls.append((rows.start, rows.stop))

    def all_reduce(self, tensor, *, rehearsed):
        self.calls.append("sum" if tensor.data_ptr() == self.begun else "whole sum")
        return tensor

    def all_reduce_normed(self, x, residual, norm, *, rehearsed):
        self.calls.append("normed" if x.data_ptr() == self.begun else "whole normed")
        return x, residual


def make_group(invariant=False, copies=None):
    words = torch.zeros(2, dtype=torch.int64)
    buffers = kernels.PeerBuffers(0, 2, words, words, 1 << 10, 1 << 16)
    owner = SimpleNamespace(is_silent=False, count=lambda name: None)
    ops = SimpleNamespace(invariant=invariant)
    return collectives.PeerGroup("tensor", 0, 2, Nccl(), SingleHost(), owner, buffers, ops, copies)


def norm(weight):
    return type("Norm", (), {"given": (weight, 1e-6, 0.0), "__call__": lambda self, x, residual: (x, residual)})()


@pytest.mark.parametrize(
    ("shape", "dtype", "by_kernel"),
    [
        ((4, 64), torch.bfloat16, True),
        ((512, 64), torch.bfloat16, True),
        ((513, 64), torch.bfloat16, False),  # more than the buffers hold
        ((4, 64), torch.int32, False),
        ((1, 3), torch.bfloat16, False),  # no whole words
    ],
)
def test_what_fits_the_buffers_is_summed_by_kernels(taken, shape, dtype, by_kernel):
    group = make_group()
    group.all_reduce(torch.zeros(shape, dtype=dtype))
    assert (taken, group.communicator.sums) == ((["sum"], 0) if by_kernel else ([], 1))


def test_the_norm_is_in_the_sum_where_rows_are_whole_words(taken):
    group = make_group()
    for dim in (64, 12):
        x, weight = torch.zeros(4, dim, dtype=torch.bfloat16), torch.ones(dim, dtype=torch.bfloat16)
        group.all_reduce_normed(x, x.clone(), norm(weight))
    assert (taken, group.communicator.sums) == (["normed"], 1)


def test_deterministic_steps_sum_everything_in_one_way(taken):
    """NCCL adds in an order that follows the size of a tensor."""
    group = make_group(invariant=True)
    weight = torch.ones(64, dtype=torch.bfloat16)
    group.all_reduce_normed(torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4, 64), norm(weight))
    group.all_reduce(torch.zeros(2048, 64, dtype=torch.bfloat16))
    assert (taken, group.communicator.sums) == (["sum"] * 5, 0)


def test_copies_carry_the_parts_of_what_the_buffers_do_not_hold(taken):
    group = make_group(copies=Copies())
    x, weight = torch.zeros(2048, 8192, dtype=torch.bfloat16), torch.ones(8192, dtype=torch.bfloat16)
    parts = group.parts_of(len(x), x.nbytes // len(x))
    assert [(part.start, part.stop) for part in parts] == [(0, 512), (512, 1024), (1024, 1536), (1536, 2048)]
    for part in parts:
        group.begin_all_reduce(x, part)
    group.all_reduce_normed(x, x.clone(), norm(weight))
    assert group._copies.calls[4:] == ["normed"]
    group.all_reduce(torch.zeros(2048, 64, dtype=torch.bfloat16))
    assert group._copies.calls[5:] == ["whole sum"]
    assert (taken, group.communicator.sums) == ([], 0)


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "inner", "rows"),
    [
        (8192, 16384, 14336, [6144, 1536, 512]),  # the product of a row takes eight times as long as its copy
        (8192, 4096, 2048, [2560, 2048, 1792, 1792]),
        (8192, 4096, 0, [2048, 2048, 2048, 2048]),
        (5000, 8192, 7168, [3840, 1160]),
        (1 << 30, 1, 0, [1 << 28] * 4),
        (3, 32 << 20, 9000, []),
        (1, 128 << 20, 1, []),
    ],
)
def test_parts_shrink_where_a_product_takes_longer_than_its_copy(num_rows, row_bytes, inner, rows):
    parts = peer_copies.copied_parts(num_rows, row_bytes, inner)
    assert [part.stop - part.start for part in parts] == rows
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]


def test_a_norm_of_another_type_follows_the_sum_that_copies_began(taken):
    group = make_group(copies=Copies())
    x = torch.zeros(2048, 8192, dtype=torch.bfloat16)
    group.begin_all_reduce(x, slice(0, 2048))
    group.all_reduce_normed(x, x.clone(), norm(torch.ones(8192)))
    assert group._copies.calls == [(0, 2048), "sum"]
    assert (taken, group.communicator.sums) == ([], 0)


@pytest.mark.parametrize("why", ["small", "another type", "deterministic", "no copies"])
def test_what_copies_do_not_carry_is_summed_as_before(why, taken):
    group = make_group(why == "deterministic", None if why == "no copies" else Copies())
    rows, dtype = 4 if why == "small" else 513, torch.int32 if why == "another type" else torch.bfloat16
    group.all_reduce(torch.zeros(rows, 64, dtype=dtype))
    assert not (group._copies and group._copies.calls)
    assert len(taken) + group.communicator.sums == {"small": 1, "deterministic": 2}.get(why, 1)


def test_the_best_of_parts_are_exchanged_by_a_kernel_where_they_fit(monkeypatch):
    calls = []
    monkeypatch.setattr(
        collectives.join, "exchange_best", lambda *given, **_: calls.append(len(given[0])) or given[1:3]
    )
    group = make_group()
    for rows in (1, 85, 86):  # 1,024 bytes of words with numbers, three for each row
        words = torch.zeros(rows), torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
        assert (group.join_best(*words) is None) == (rows == 86)
    assert calls == [1, 85]
