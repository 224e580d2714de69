"""Attention within chunks of rows, by backends that know nothing of chunks: against a mask, around the borders."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frame.core.layers.chunked import ChunkPlanner
from frame.interfaces import AttentionSpec, BackendSetup, ChunkedKV, GroupBatch, LayerParams
from frame.ops import Ops
from frame.plugins.attention.torch import TorchAttention
from frame.testing.reference_attention import ReferenceAttention

pytestmark = pytest.mark.product

CHUNK, BLOCK, HEADS, DIM = 8, 4, 2, 16
#: Of each row its query tokens and all its tokens.
STEPS = {
    "one token": [(1, 1), (1, 7), (1, 8), (1, 9), (1, 30)],
    "prompts": [(7, 7), (8, 8), (9, 9), (17, 17)],
    "continued": [(3, 10), (1, 16), (5, 17), (20, 31), (1, 17)],
    "with a row of padding": [(1, 12), (9, 20), (0, 0)],
}


def spec_of() -> AttentionSpec:
    f32 = torch.float32
    return AttentionSpec(HEADS, HEADS, DIM, 0.25, f32, f32, BLOCK, "cpu", chunk=CHUNK)


@pytest.mark.parametrize("kind", [ReferenceAttention, TorchAttention])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_tokens_see_their_own_chunk(rows: list[tuple[int, int]], kind: type[TorchAttention]) -> None:
    torch.manual_seed(0)
    spec = spec_of()
    backend = kind(BackendSetup(spec, Ops()))
    counts, lengths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    most, total = -(-int(lengths.max()) // BLOCK), int(counts.sum())
    table = (torch.randperm(len(rows) * most) + 1).view(len(rows), most).int()
    shape = kind.kv_format(spec).shape
    cache = torch.zeros(shape[0], len(rows) * most + 1, *shape[1:])
    past = [torch.randn(2, length, HEADS, DIM) for length in lengths.tolist()]
    slots, news = [], []
    for row, (count, length) in enumerate(rows):
        places = torch.arange(length)
        where = table[row][places // BLOCK].long() * BLOCK + places % BLOCK
        # what lies before the chunk of a row's first query is not in the cache any more
        kept = places >= (length - count) // CHUNK * CHUNK
        Ops.write_kv(past[row][0], past[row][1], cache, torch.where(kept, where, -1))
        slots.append(where[length - count :])
        news.append(past[row][:, length - count :])
    query, (key, value) = torch.randn(total, HEADS, DIM), torch.cat(news, 1)
    starts = np.concatenate(([0], counts.cumsum()))
    batch = GroupBatch(
        num_tokens=total,
        query_start=torch.from_numpy(starts.astype(np.int32)),
        seq_lens=torch.from_numpy(lengths),
        block_table=table,
        slot_mapping=torch.cat(slots),
        host_query_lens=counts,
        host_seq_lens=lengths,
        max_query_len=int(counts.max()),
        max_seq_len=int(lengths.max()),
    )
    out = backend.forward(LayerParams(spec), query, key, value, cache, ChunkPlanner(backend, CHUNK).plan(batch))
    for row, (count, length) in enumerate(rows):
        keys, values = past[row].double()
        places = torch.arange(length)
        ends = places[length - count :, None]
        hidden = (ends < places) | (ends // CHUNK != places // CHUNK)
        part = query[starts[row] : starts[row + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", part, keys) * spec.scale
        want = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
        torch.testing.assert_close(out[starts[row] : starts[row + 1]].double(), want, atol=1e-5, rtol=1e-5)


def test_chunks_that_are_cut_by_blocks_are_refused() -> None:
    backend = ReferenceAttention(BackendSetup(spec_of(), Ops()))
    with pytest.raises(ValueError, match="chunks of 6 tokens cannot be cut into blocks of 4"):
        ChunkPlanner(backend, 6)


def test_blocks_of_older_chunks_are_given_back() -> None:
    kept = ChunkedKV(num_kv_heads=1, head_dim=8, dtype="float32", chunk=32)
    assert [kept.first_needed(position) for position in (0, 31, 32, 100)] == [0, 0, 32, 96]
    assert [kept.max_live_blocks(16, tokens) for tokens in (1, 16, 17, 32, 500)] == [1, 1, 2, 2, 3]
    assert kept.retention == ("chunk", 32)


class Waits(TorchDispatchMode):
    """Notes copies to a device for which the host waits. The device is "meta", from which nothing can be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        arrives = isinstance(out, torch.Tensor) and out.device.type == "meta"
        if arrives and any(one.device.type == "cpu" and one.dim() for one in tensors):
            waits = not (kwargs.get("non_blocking") or any(one is True for one in args))
            self.found += [str(func)] if waits else []
        return out


@pytest.mark.parametrize("rows", [STEPS["one token"], STEPS["continued"]], ids=["one token", "continued"])
def test_the_host_does_not_wait_for_the_device(rows: list[tuple[int, int]]) -> None:
    """Steps that were launched before would have to end first."""
    counts, lengths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    backend = SimpleNamespace(spec=spec_of(), needs_python=False, plan=lambda batch: batch)

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    batch = GroupBatch(
        num_tokens=int(counts.sum()),
        query_start=made(len(rows) + 1),
        seq_lens=made(len(rows)),
        block_table=made(len(rows), 8),
        slot_mapping=made(int(counts.sum())),
        host_query_lens=counts,
        host_seq_lens=lengths,
        max_query_len=int(counts.max()),
        max_seq_len=int(lengths.max()),
        exact_lens=True,  # as without drafts in flight
    )
    with Waits() as waits:
        plan = ChunkPlanner(backend, CHUNK).plan(batch)
    assert not waits.found
    # kernels are compiled for whether their arguments begin at 16 bytes
    assert (plan.seq_lens.storage_offset() * 4) % 16 == (plan.query_start.storage_offset() * 4) % 16 == 0
    assert len(plan.host_query_lens) == len(plan.seq_lens) == len(plan.block_table)
