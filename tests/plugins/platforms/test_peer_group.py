"""Which sums over CUDA devices the kernels take, and which NCCL; neither runs here."""

from types import SimpleNamespace

import pytest
import torch

from frame.interfaces import SingleHost

pytest.importorskip("triton")
kernels = pytest.importorskip("frame.kernels.all_reduce")
collectives = pytest.importorskip("frame.plugins.platforms.cuda.collectives")


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


def make_group(invariant=False):
    words = torch.zeros(2, dtype=torch.int64)
    buffers = kernels.PeerBuffers(0, 2, words, words, 1 << 10, 1 << 16)
    owner = SimpleNamespace(is_silent=False, num_calls=0)
    ops = SimpleNamespace(invariant=invariant)
    return collectives.PeerGroup("tensor", 0, 2, Nccl(), SingleHost(), owner, buffers, ops)


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
