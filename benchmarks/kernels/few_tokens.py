"""Speed of attention of few new tokens behind a long context, by one program a KV head and with its keys in parts.

    python -m benchmarks.kernels.few_tokens [--cases 1x16368x16,4x16368x16] [--sweep] [--json FILE]

A layer of Llama 8B: 32 query heads, 8 KV heads, 128 wide, bf16, pages of 16. A case is rows, tokens before the new
ones, new tokens. `whole` is the launch for any batch, which does not divide a row's keys; `parts` the one that the
Triton backend chooses for such rows. Each is first compared with torch's own attention on the same keys. Medians,
replayed from a CUDA graph: the keys of small cases stay in the L2 cache, as they would not beside other layers.
`--sweep` tries other tiles and numbers of parts. Elsewhere than on a GPU only the comparison is made, by Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from benchmarks.kernels.paged_rows import DIM, HEADS, KV_HEADS, PAGE, PagedRows, microseconds, sizes
from frame.interfaces import AttentionSpec, BackendSetup
from frame.kernels.attention import Launch, launch_for, paged_attention
from frame.ops import Ops
from frame.plugins.attention.triton import TritonAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = "1x16368x16,1x4096x5,1x65536x32,1x2048x48,4x16368x16,8x8192x5,16x4096x16,1x131072x2"
#: Sizes that `--sweep` tries: query rows, keys, warps and stages of a tile, and parts of a row's keys.
TILES, PARTS = ((128, 32, 4, 3), (64, 64, 4, 3), (32, 64, 4, 3)), (1, 4, 8, 16, 33, 64)


def attend(rows: PagedRows, launch: Launch) -> torch.Tensor:
    """The kernel's result."""
    given = rows.query_start, rows.seq_lens, rows.block_table
    return paged_attention(rows.query, rows.kv_cache, *given, scale=DIM**-0.5, launch=launch)


def chosen(rows: PagedRows) -> Launch:
    """What the backend launches for the rows."""
    dtype = rows.query.dtype
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, dtype, dtype, PAGE, DEVICE)
    backend = TritonAttention(BackendSetup(spec, Ops()))
    if DEVICE == "cpu":
        backend._multiprocessors = 132  # an H200's, so that the parts are compared that are measured there
    new, lengths = (np.full(rows.num_rows, number) for number in (rows.query_len, rows.length))
    return backend.prompt_launch(new, lengths)


def sweep(rows: PagedRows) -> None:
    """Prints the best of other launches."""
    found = []
    for tile, parts in itertools.product(TILES, PARTS):
        launch = Launch(*tile, parts)
        try:
            found.append((microseconds(lambda: attend(rows, launch)), str(launch)))  # noqa: B023
        except Exception as failure:
            print(f"  {launch}: {type(failure).__name__}", flush=True)
    for time, text in sorted(found)[:3]:
        print(f"  {time:8.1f} µs  {text}", flush=True)


def measure(rows: PagedRows) -> dict[str, Any]:
    """Errors of both launches and, on a GPU, their times in µs."""
    whole = replace(launch_for(DIM, HEADS // KV_HEADS, rows.query.dtype), splits=1)
    launches = {"whole": whole, "parts": chosen(rows)}
    case = {"rows": rows.num_rows, "context": rows.length - rows.query_len, "new": rows.query_len}
    found: dict[str, Any] = {**case, "splits": launches["parts"].splits}
    for name, launch in launches.items():
        found[f"{name} off"] = rows.error(attend(rows, launch))
        if DEVICE == "cuda":
            found[f"{name} µs"] = microseconds(lambda: attend(rows, launch))  # noqa: B023
    return found


def main() -> None:
    """Measures each case."""
    parser = argparse.ArgumentParser(description="Attention of few new tokens behind a long context.")
    parser.add_argument("--cases", default=CASES, help="Rows x tokens before x new tokens, with commas between them.")
    parser.add_argument("--sweep", action="store_true", help="Try other tiles and numbers of parts.")
    parser.add_argument("--json", type=Path, help="File for the results.")
    options = parser.parse_args()
    try:
        cases = sizes(options.cases, ("ROWS", "BEFORE", "NEW"))
    except ValueError as error:
        parser.error(str(error))
    results = []
    for count, before, new in cases:
        rows = PagedRows.made(count, before + new, new, torch.bfloat16 if DEVICE == "cuda" else torch.float32, DEVICE)
        found = measure(rows)
        results.append(found)
        times = (
            "whole {whole µs:8.1f} µs, in {splits:3} parts {parts µs:8.1f} µs, "
            if DEVICE == "cuda"
            else "parts {splits}, "
        )
        text = "{rows:3} x {new:3} tokens behind {context:6}: " + times + "off by {whole off:.1e} and {parts off:.1e}"
        print(text.format(**found), flush=True)
        if options.sweep and DEVICE == "cuda":
            sweep(rows)
    if options.json:
        name = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
        options.json.write_text(json.dumps({"device": name, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
