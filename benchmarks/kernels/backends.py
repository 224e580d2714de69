"""One layer of each attention backend that serves it, on a GPU: decodes and prompts, microseconds.

    PYTHONPATH=src:. python benchmarks/kernels/backends.py [--backends triton,flash,cudnn] [--json FILE]

32 query heads, 8 KV heads, 128 wide, bfloat16. Each call stores the step's keys and values and attends, as an engine
has a backend do it, with the backend's own block size where 16 does not suit it. Decodes are timed from a CUDA graph,
prompts as they are launched; medians. Results are compared with our own kernels' first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.linear_invariant import microseconds
from frame.core.interfaces.attention import AttentionSpec, GroupBatch, LayerParams
from frame.core.interfaces.setup import BackendSetup
from frame.core.ops import Ops
from frame.plugins.attention.cudnn import CudnnAttention
from frame.plugins.attention.flash import FlashAttention
from frame.plugins.attention.triton import TritonAttention

HEADS, KV_HEADS, DIM = 32, 8, 128
DECODES = [(1, 32768), (8, 4096), (64, 1024), (64, 8192), (256, 1024), (256, 4096)]
BACKENDS: dict[str, Any] = {"triton": TritonAttention, "flash": FlashAttention, "cudnn": CudnnAttention}
PROMPTS = [(16, 1024), (4, 4096), (2, 8192), (1, 16384)]


def batch_of(rows: int, new: int, length: int, page: int) -> GroupBatch:
    """`rows` of `length` tokens in the cache after the step, of which the last `new` are the step's."""
    pages = -(-length // page)
    table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    at = torch.arange(length - new, length, device="cuda")
    slots = (table[:, at // page].long() * page + at % page).flatten()
    return GroupBatch(
        num_tokens=rows * new,
        query_start=torch.arange(0, (rows + 1) * new, new, dtype=torch.int32, device="cuda"),
        seq_lens=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        block_table=table,
        slot_mapping=slots,
        host_query_lens=np.full(rows, new, np.int32),
        host_seq_lens=np.full(rows, length, np.int32),
        max_query_len=new,
        max_seq_len=length,
    )


def layer_of(backend: Any, batch: GroupBatch, spec: AttentionSpec, seed: int) -> Callable[[], Tensor]:
    """One layer's step; equal seeds give equal queries, keys and values, in the order of tokens."""
    draw = torch.Generator("cuda").manual_seed(seed)
    rows, pages = batch.block_table.shape
    dense = torch.randn(
        2, rows, pages * spec.block_size, KV_HEADS, DIM, dtype=spec.dtype, device="cuda", generator=draw
    )
    cache = torch.empty(2, rows * pages, spec.block_size, KV_HEADS, DIM, dtype=spec.dtype, device="cuda")
    cache[:, batch.block_table.flatten().long()] = dense.view(2, rows * pages, spec.block_size, KV_HEADS, DIM)
    query, key, value = (
        torch.randn(batch.num_tokens, heads, DIM, dtype=spec.dtype, device="cuda", generator=draw)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    plan, layer = backend.plan(batch), LayerParams(spec)
    return lambda: backend.forward(layer, query, key, value, cache, plan)


def eager(call: Callable[[], Tensor]) -> float:
    """Median microseconds of single calls."""
    call()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--backends", default="triton,flash,cudnn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    results: list[dict[str, Any]] = []
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, torch.bfloat16, torch.bfloat16, 16, "cuda")
    for kind, cases in (("decode", DECODES), ("prompt", PROMPTS)):
        for rows, length in cases:
            wanted: Tensor | None = None
            told = []
            for name in options.backends.split(","):
                backend_class = BACKENDS[name]
                sizes = (16, 64, 128, 256)
                pages = [page for page in sizes if not backend_class.supports(replace(spec, block_size=page))]
                if not pages:
                    told.append(f"{name}: {backend_class.supports(spec)}")
                    continue
                own = replace(spec, block_size=pages[0])
                backend = backend_class(BackendSetup(own, Ops()))
                batch = batch_of(rows, 1 if kind == "decode" else length, length, pages[0])
                call = layer_of(backend, batch, own, rows + length)
                found = call()
                wanted = found if wanted is None else wanted
                wrong = float((found.float() - wanted.float()).norm() / wanted.float().norm())
                time = microseconds([call] * 4) if kind == "decode" else eager(call)
                bytes_read, operations = 4 * rows * length * KV_HEADS * DIM, 2 * rows * length**2 * HEADS * DIM
                decoded, computed = f"{bytes_read / time / 1e6:.2f} TB/s", f"{operations / time / 1e6:.0f} TFLOP/s"
                rate = decoded if kind == "decode" else computed
                told.append(f"{name} (pages of {pages[0]}) {time:.1f} us, {rate}, difference {wrong:.1e}")
                results.append({"kind": kind, "rows": rows, "length": length, "backend": name, "page": pages[0],
                                "us": time, "difference": wrong})  # fmt: skip
            print(f"{kind} {rows} x {length}: " + "; ".join(told), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
