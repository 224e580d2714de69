"""Sums over ranks through shared memory, the ranks on one device: all write, then all read, as on devices of their own.

On two GPUs, benchmarks/kernels/all_reduce.py compares them with NCCL in processes that meet.
"""

from __future__ import annotations

import os

import pytest
import torch

from frame.core.ops import layers, sampling
from frame.kernels import all_reduce as kernels, join

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
#: Bytes of values that travel with numbers, and alone.
PACKED, PLAIN = 4096, 1 << 16


def make_buffers(size: int) -> list[kernels.PeerBuffers]:
    """Buffers of `size` ranks, all on this device."""
    nothing = torch.empty(0)
    num_bytes = kernels.PeerBuffers(0, size, nothing, nothing, PACKED, PLAIN).num_bytes
    memory = torch.zeros(size, num_bytes // 8, dtype=torch.int64, device=DEVICE)
    addresses = torch.tensor([row.data_ptr() for row in memory], device=DEVICE)
    made = []
    for rank in range(size):
        state = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        made.append(kernels.PeerBuffers(rank, size, addresses, state, PACKED, PLAIN))
        made[-1].__dict__["memory"] = memory
    return made


def exchange(given, buffers, norm=None, **how):
    """What each rank gets: (sum, total or None), when all have written before the first reads."""
    results = []
    for x in given:
        weight, residual = (norm[0], norm[1]) if norm else (None, None)
        results.append((torch.empty_like(x), torch.empty_like(x) if norm else None, weight, residual))
    words = given[0].shape[-1] * given[0].dtype.itemsize // 4 if norm else kernels._PART_WORDS
    num_words = given[0].nbytes // 4
    rows = len(given[0]) if norm else -(-num_words // words)
    for phase in ({"receives": False}, {"sends": False}):
        for x, (out, total, weight, residual), own in zip(given, results, buffers, strict=True):
            eps, offset = (1e-6, norm[2]) if norm else (0.0, 0.0)
            kernels._launch(x, residual, weight, out, total, own, rows, words, num_words, eps, offset, **phase, **how)
    return [(out, total) for out, total, _, _ in results]


def inputs(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype).to(DEVICE) for _ in range(size)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_many_calls_of_all_lengths(dtype: torch.dtype, size: int) -> None:
    buffers = make_buffers(size)
    for call, shape in enumerate([(2,), (1, 512), (3, 700), (40, 256), (7, 6), (4, 3), (1, 512), (30, 512), (2,)]):
        given = inputs(size, shape, dtype, call)
        expected = sum(x.to(torch.float32) for x in given).to(dtype)
        for out, _ in exchange(given, buffers):
            assert torch.equal(out, expected), (call, shape)
        assert buffers[0].state.tolist() == [call + 1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "dim"), [(1, 256), (3, 100), (20, 512)])
def test_sums_with_residual_and_norm(dtype: torch.dtype, offset: float, rows: int, dim: int) -> None:
    buffers, given = make_buffers(2), inputs(2, (rows, dim), dtype, rows)
    residual, weight = inputs(1, (rows, dim), dtype, 7)[0], inputs(1, (dim,), dtype, 8)[0]
    summed = sum(x.to(torch.float32) for x in given).to(dtype)
    expected, total = layers.add_rms_norm(summed, residual, weight, 1e-6, offset)
    found = exchange(given, buffers, (weight, residual, offset))
    for out, carried in found:
        assert torch.equal(carried, total)
        torch.testing.assert_close(out, expected, atol=8e-3 if dtype == torch.bfloat16 else 2e-3, rtol=2e-2)
    assert torch.equal(found[0][0], found[1][0]), "ranks must get equal bits"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(20, 512), (600, 16)])
def test_bits_do_not_depend_on_whether_a_row_is_loaded_before_the_wait(dtype: torch.dtype, rows: int, dim: int) -> None:
    """The second shape has more rows than programs, of which none loads one ahead."""
    given = inputs(2, (rows, dim), dtype, rows)
    residual, weight = inputs(1, (rows, dim), dtype, 7)[0], inputs(1, (dim,), dtype, 8)[0]
    ahead, behind = (exchange(given, make_buffers(2), (weight, residual, 0.0), ahead=ahead) for ahead in (True, False))
    for pairs in zip(ahead, behind, strict=True):
        for one, other in zip(*pairs, strict=True):
            assert torch.equal(one, other)
    summed = sum(x.to(torch.float32) for x in given).to(dtype)
    assert torch.equal(ahead[0][1], layers.add_rms_norm(summed, residual, weight, 1e-6, 0.0)[1])


@pytest.mark.parametrize("size", [2, 4])
def test_the_best_of_all_ranks_between_sums(size: int) -> None:
    """One launch sends and joins; it shares the memory and the number of the call with sums."""
    buffers = make_buffers(size)
    for call, rows in enumerate([1, 7, 300, 129, 1]):
        torch.manual_seed(call)
        scores = torch.randn(size, rows).round()
        scores[torch.rand(size, rows) < 0.1] = torch.nan
        given = scores, torch.randint(0, 1 << 30, (size, rows), dtype=torch.int32), torch.randn(size, rows)
        expected = sampling.join_parts(torch.stack([one.view(torch.int32) for one in given], 1))
        ranks = [tuple(one[rank].to(DEVICE) for one in given) for rank in range(size)]
        out = [(torch.zeros_like(one[1]), torch.zeros_like(one[2])) for one in ranks]
        for phase in ({"receives": False}, {"sends": False}):
            for mine, found, own in zip(ranks, out, buffers, strict=True):
                join._launch(mine, found, own, **phase)
        for tokens, logits in out:
            assert torch.equal(tokens.cpu(), expected[0])
            assert torch.equal(logits.cpu(), expected[1])
        x = inputs(size, (3, 70), torch.float32, call)
        for summed, _ in exchange(x, buffers):
            assert torch.equal(summed, sum(x))
        assert buffers[0].state.tolist() == [2 * call + 2, 0]


def test_a_rehearsed_exchange_does_nothing() -> None:
    buffers = make_buffers(2)[0]
    given = (
        torch.zeros(3, device=DEVICE),
        torch.zeros(3, dtype=torch.int32, device=DEVICE),
        torch.zeros(3, device=DEVICE),
    )
    join.exchange_best(*given, buffers, rehearsed=True)
    assert buffers.state.tolist() == [0, 0]
    assert join.takes(PACKED // 12, buffers)
    assert not join.takes(PACKED // 12 + 1, buffers)


def test_what_cannot_be_summed_is_named() -> None:
    buffers = make_buffers(2)[0]
    fits = torch.zeros(8, device=DEVICE)
    assert kernels.why_not_reduced(fits, buffers) is None
    assert kernels.why_not_reduced(fits.long(), buffers) == "it is torch.int64"
    assert "more than the 65536 of the buffers" in (kernels.why_not_reduced(fits.repeat(4096), buffers) or "")
    assert "contiguous" in (kernels.why_not_reduced(fits[1:], buffers) or "")
