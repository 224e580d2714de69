"""Speed of decode attention over a KV cache of 8 bits, beside one of 16 bits.

    python -m benchmarks.kernels.decode_fp8 [--cases 64x8192,256x1024] [--json FILE]

A layer of Llama 8B by the Triton backend, in the launches that it chooses: 32 query heads, 8 KV heads, 128 wide, pages
of 16, the cache in bf16 and in e4m3. A case is rows and the tokens of each, its newest one stored by the same launch.
Each is first compared with torch's own attention on the same keys. Medians, replayed from a CUDA graph; TB/s count the
keys and values that are read. The keys of small cases stay in the L2 cache, as they would not beside other layers.
Elsewhere than on a GPU only the comparison is made, by Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from benchmarks.kernels.paged_rows import DIM, HEADS, KV_HEADS, PAGE, PagedRows, microseconds, sizes
from frame.interfaces import AttentionSpec, BackendSetup, GroupBatch, LayerParams
from frame.ops import Ops
from frame.plugins.attention.triton import TritonAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = "64x8192,64x2048,256x1024,8x32768,1x32768,512x1024"
KINDS = {"16 bits": torch.bfloat16 if DEVICE == "cuda" else torch.float32, "8 bits": torch.float8_e4m3fn}


def decoding(rows: PagedRows, kv_dtype: torch.dtype) -> Callable[[], Any]:
    """A call of the backend, which stores what each row's newest token has in the cache already."""
    dtype = rows.query.dtype
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, dtype, kv_dtype, PAGE, DEVICE)
    backend = TritonAttention(BackendSetup(spec, Ops()))
    last = rows.length - 1
    block = rows.block_table[:, last // PAGE].long()
    batch = GroupBatch(
        num_tokens=rows.num_rows,
        query_start=rows.query_start,
        seq_lens=rows.seq_lens,
        block_table=rows.block_table,
        slot_mapping=block * PAGE + last % PAGE,
        host_query_lens=np.ones(rows.num_rows, np.int32),
        host_seq_lens=np.full(rows.num_rows, rows.length, np.int32),
        max_query_len=1,
        max_seq_len=rows.length,
    )
    key, value = rows.kv_cache[:, block, last % PAGE].to(dtype)
    plan, layer = backend.plan(batch), LayerParams(spec)
    return lambda: backend.forward(layer, rows.query, key, value, rows.kv_cache, plan)


def measure(num_rows: int, length: int) -> dict[str, Any]:
    """Of each kind of cache the error and, on a GPU, the time in µs."""
    found: dict[str, Any] = {"rows": num_rows, "length": length}
    for name, kv_dtype in KINDS.items():
        rows = PagedRows.made(num_rows, length, 1, kv_dtype, DEVICE)
        call = decoding(rows, kv_dtype)
        found[f"{name} off"] = rows.error(call())
        if DEVICE == "cuda":
            time = microseconds(call)
            found |= {
                f"{name} µs": time,
                f"{name} TB/s": num_rows * length * rows.kv_cache[:, 0, 0].nbytes / time / 1e6,
            }
    return found


def main() -> None:
    """Measures each case."""
    parser = argparse.ArgumentParser(description="Decode attention over caches of 16 and of 8 bits.")
    parser.add_argument("--cases", default=CASES, help="Rows x tokens of each, with commas between them.")
    parser.add_argument("--json", type=Path, help="File for the results.")
    options = parser.parse_args()
    try:
        cases = sizes(options.cases, ("ROWS", "TOKENS"))
    except ValueError as error:
        parser.error(str(error))
    results = []
    for num_rows, length in cases:
        found = measure(num_rows, length)
        results.append(found)
        print(f"{num_rows:3} rows of {length:6}:", end=" ")
        for name in KINDS if DEVICE == "cuda" else ():
            print(f"{name} {found[f'{name} µs']:8.1f} µs, {found[f'{name} TB/s']:.2f} TB/s;", end=" ")
        if DEVICE == "cuda":
            print("8 bits {:.2f} times as fast;".format(found["16 bits µs"] / found["8 bits µs"]), end=" ")
        print("off by {16 bits off:.1e} and {8 bits off:.1e}".format(**found), flush=True)
    if options.json:
        name = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
        options.json.write_text(json.dumps({"device": name, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
