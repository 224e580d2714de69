"""Speed of paged attention on a GPU: decode in TB/s of keys and values read, prefill in TFLOP/s.

    python benchmarks/kernels/attention.py [--sweep] [--ragged] [--json FILE]

32 query heads, 8 KV heads, 128 wide, bf16, pages of 16. Every case is first compared with torch's own attention on the
same keys. Medians: decode replayed from a CUDA graph (its keys exceed the L2 cache), prefill by do_bench with the cache
flushed between runs, once by the kernel for any batch and once by Hopper's own. `--sweep` tries other sizes of decode,
`--ragged` decodes rows of unequal length in parts of several sizes, as they come and the longest first: the sweep that
`SPLIT_RULES` of the Triton backend come from.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench, do_bench_cudagraph

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.setup import BackendSetup
from frame.core.ops import Ops
from frame.kernels import prefill
from frame.kernels.attention import paged_attention
from frame.kernels.decode import DecodeLaunch, decode_attention
from frame.kernels.row_order import longest_first
from frame.plugins.attention.triton import TritonAttention

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
DECODES = [(1, 32768), (8, 4096), (64, 1024), (64, 8192), (256, 1024), (256, 4096)]
PROMPTS = [(16, 1024), (4, 4096), (2, 8192), (1, 16384)]
#: Lengths of the rows that `--ragged` decodes: all different, equal, of a batch some of whose requests have ended, and
#: short ones beside a twelfth of long ones.
LENGTHS: dict[str, Callable[[int], Tensor]] = {
    "mixed": lambda rows: torch.randint(300, 2001, (rows,)),
    "equal": lambda rows: torch.full((rows,), 860),
    "ending": lambda rows: torch.randint(100, 1025, (rows,)) + max(60, 1024 - 4 * rows),
    "skewed": lambda rows: torch.where(torch.arange(rows) % 12 == 0, 12000, torch.randint(200, 900, (rows,))),
}
#: Most parts of a row and the fewest keys of one, in the sweep.
PARTS = [(1, 0), (2, 256), (2, 512), (2, 2048), (4, 256), (4, 512), (4, 2048), (8, 128), (8, 512), (16, 128)]
#: Variants of the Hopper kernel. A window leaves fewer products than the rate counts, and is not compared.
HOPPER: dict[str, dict[str, Any]] = {
    "hopper": {},
    "hopper, persistent": {"persistent": True},
    "hopper, cap of 50": {"soft_cap": 50.0},
    "hopper, window of 1024": {"window": 1024},
}
SPEC = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, torch.bfloat16, torch.bfloat16, PAGE, "cuda")


def case(rows: int, length: int, query_len: int) -> dict[str, Tensor]:
    """A batch of equal rows over randomly placed pages."""
    blocks = rows * length // PAGE
    cache = torch.randn(blocks, 2, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    return {
        "query": torch.randn(rows * query_len, HEADS, DIM, dtype=torch.bfloat16, device="cuda"),
        "kv_cache": cache,
        "query_start": torch.arange(rows + 1, dtype=torch.int32, device="cuda") * query_len,
        "seq_lens": torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        "block_table": torch.randperm(blocks, device="cuda").int().view(rows, -1),
    }


def dense(inputs: dict[str, Tensor], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same attention for torch: q, k, v [rows, heads, tokens, dim]."""
    pages = inputs["kv_cache"][:, inputs["block_table"].long().flatten()]
    keys, values = pages.reshape(2, rows, -1, KV_HEADS, DIM).transpose(2, 3)
    query = inputs["query"].view(rows, -1, HEADS, DIM).transpose(1, 2)
    return query, keys.contiguous(), values.contiguous()


def error(out: Tensor, inputs: dict[str, Tensor], rows: int, causal: bool) -> float:
    """Relative error against torch in float32, on the first row."""
    query, keys, values = (x[:1].float() for x in dense(inputs, rows))
    want = scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True).transpose(1, 2)
    found = out.view(rows, -1, HEADS, DIM)[:1].float()
    return float((found - want).norm() / want.norm())


def decoding(inputs: dict[str, Tensor], rows: int, launch: DecodeLaunch, *, sort: bool = False) -> Callable[[], Tensor]:
    """A call of the decode kernel that stores no token: the cache holds all of them already."""
    query = inputs["query"]
    token = torch.zeros(rows, KV_HEADS, DIM, dtype=query.dtype, device="cuda")
    slots = torch.full((rows,), -1, dtype=torch.int64, device="cuda")
    arrivals = torch.zeros(rows * KV_HEADS, dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)
    paged = (inputs["kv_cache"], slots, inputs["seq_lens"], inputs["block_table"])
    order = longest_first(inputs["seq_lens"]) if sort else None
    return lambda: decode_attention(
        query, token, token, *paged, scale=SPEC.scale, out=out, launch=launch, arrivals=arrivals, order=order
    )


def decode_rate(rows: int, length: int, time: float) -> float:
    """TB/s of keys and values."""
    return rows * length * 2 * KV_HEADS * DIM * 2 / time / 1e9


def prompt_rate(rows: int, length: int, time: float) -> float:
    """TFLOP/s, counting only the half that a causal mask leaves."""
    return 2 * rows * length**2 * HEADS * DIM / time / 1e9


def median(call: Callable[[], Tensor], *, graph: bool = False) -> float:
    """Milliseconds."""
    torch.cuda.synchronize()  # the graph is captured on a stream that would not wait for the inputs
    return float((do_bench_cudagraph if graph else do_bench)(call, return_mode="median"))


def sweep(inputs: dict[str, Tensor], rows: int, length: int) -> None:
    """Prints the rates of the best sizes of a decode launch."""
    base, found = suited(rows, length), []
    for block_n, num_warps, num_stages, more in itertools.product((32, 64, 128), (1, 2, 4), (2, 3, 4), (1, 2)):
        splits = base.splits * more
        launch = replace(base, block_n=block_n, num_warps=num_warps, num_stages=num_stages, splits=splits)
        try:
            found.append((decode_rate(rows, length, median(decoding(inputs, rows, launch), graph=True)), str(launch)))
        except Exception as failure:
            found.append((0.0, f"{launch}: {type(failure).__name__}"))
    for rate, text in sorted(found, reverse=True)[:6]:
        print(f"  sweep {rows}x{length}: {rate:8.2f}  {text}", flush=True)


def suited(rows: int, length: int) -> DecodeLaunch:
    """What the backend launches for such a batch."""
    return TritonAttention(BackendSetup(SPEC, Ops())).decode_launch(rows, length)


def ragged(rows: int, kind: str) -> None:
    """Prints the rates of decoding rows that differ in length: the backend's launch, then the best of all others."""
    lengths = LENGTHS[kind](rows).int().cuda()
    inputs = case(rows, -(-int(lengths.max()) // PAGE) * PAGE, 1)
    inputs["seq_lens"] = lengths
    backend, total = TritonAttention(BackendSetup(SPEC, Ops())), int(lengths.sum())

    def rate(launch: DecodeLaunch, sort: bool) -> tuple[float, str]:
        split = f"{launch.splits} of {launch.min_span} keys or more" if launch.splits > 1 else "whole"
        text = f"{split}, tiles of {launch.block_n}{', sorted' if sort else ''}"
        return decode_rate(1, total, median(decoding(inputs, rows, launch, sort=sort), graph=True)), text

    suits = rate(backend.decode_launch(rows, int(lengths.max())), backend._rule(rows).longest_first)
    tiles = [(32, 1, 4), (64, 2, 3)]
    others = [
        rate(DecodeLaunch(16, keys, parts, warps, stages, least), sort)
        for (keys, warps, stages), (parts, least), sort in itertools.product(tiles, PARTS, (False, True))
    ]
    best = "; ".join(f"{text}: {found:.2f}" for found, text in sorted(others, reverse=True)[:3])
    print(f"{kind} {rows:4}, TB/s: as launched ({suits[1]}) {suits[0]:.2f}; best: {best}", flush=True)


def prompt_kernels(inputs: dict[str, Tensor]) -> dict[str, tuple[Callable[[], Tensor], dict[str, Any]]]:
    """The kernels that this device has for prompts, each with the features of the layer that it serves."""
    out = torch.empty_like(inputs["query"])
    calls = {"triton": (partial(paged_attention, **inputs, scale=SPEC.scale, out=out), dict[str, Any]())}
    if prefill.serves(DIM, PAGE, torch.bfloat16):
        for name, more in HOPPER.items():
            call = partial(prefill.prefill_attention, **inputs, scale=SPEC.scale, out=out, **more)
            calls[name] = call, {feature: value for feature, value in more.items() if feature != "persistent"}
    return calls


def prompt_error(out: Tensor, inputs: dict[str, Tensor], rows: int, features: dict[str, Any]) -> float:
    """Relative error: against torch where that has such layers, else against our kernel for any batch."""
    if not features:
        return error(out, inputs, rows, True)
    found = out.clone().float()
    want = paged_attention(**inputs, scale=SPEC.scale, **features).float()
    return float((found - want).norm() / want.norm())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for rows, length in DECODES:
        inputs = case(rows, length, 1)
        call = decoding(inputs, rows, suited(rows, length))
        wrong, time = error(call(), inputs, rows, False), median(call, graph=True)
        rate = decode_rate(rows, length, time)
        print(f"decode {rows:4}x{length:6}: {time * 1e3:8.1f} us {rate:6.2f} TB/s, error {wrong:.1e}", flush=True)
        results.append({"kind": "decode", "rows": rows, "length": length, "us": time * 1e3, "TB/s": rate})
        if options.sweep and (rows, length) in ((8, 4096), (256, 4096)):
            sweep(inputs, rows, length)
        del inputs, call
    for rows, kind in itertools.product((12, 24, 48, 64, 96, 144, 200, 256), LENGTHS) if options.ragged else ():
        ragged(rows, kind)
    for rows, length in PROMPTS:
        inputs = case(rows, length, length)
        for name, (call, features) in prompt_kernels(inputs).items():
            wrong = prompt_error(call(), inputs, rows, features) if length <= 8192 else float("nan")
            rate = prompt_rate(rows, length, time := median(call))
            print(f"prefill {rows:3}x{length:6} {name}: {rate:6.1f} TFLOP/s, error {wrong:.1e}", flush=True)
            results.append({"kind": name, "rows": rows, "length": length, "us": time * 1e3, "TFLOP/s": rate})
        del inputs, call
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
