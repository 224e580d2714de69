"""Speed of paged attention on a GPU: decode in TB/s of keys and values read, prefill in TFLOP/s.

    python benchmarks/kernels/attention.py [--sweep] [--json FILE]

32 query heads, 8 KV heads, 128 wide, bf16, pages of 16. Every case is first compared with torch's own attention on the
same keys. Medians: decode replayed from a CUDA graph (its keys exceed the L2 cache), prefill by do_bench with the cache
flushed between runs. `--sweep` tries other tile sizes and prints the best of each kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench, do_bench_cudagraph

from frame.core.interfaces.attention import AttentionSpec
from frame.kernels.attention import Launch, launch_for, paged_attention
from frame.plugins.attention.triton import TritonAttention

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
DECODES = [(1, 32768), (8, 4096), (64, 1024), (64, 8192), (256, 1024), (256, 4096)]
PROMPTS = [(16, 1024), (4, 4096), (2, 8192), (1, 16384)]
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


def error(inputs: dict[str, Tensor], launch: Launch, rows: int, causal: bool) -> float:
    """Relative error against torch in float32, on the first row."""
    out = paged_attention(**inputs, scale=SPEC.scale, launch=launch).view(rows, -1, HEADS, DIM)[:1]
    query, keys, values = (x[:1].float() for x in dense(inputs, rows))
    want = scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True).transpose(1, 2)
    return float((out.float() - want).norm() / want.norm())


def milliseconds(inputs: dict[str, Tensor], launch: Launch) -> float:
    """Median time of one call, output allocation included."""
    torch.cuda.synchronize()  # the graph is captured on a stream that would not wait for the inputs
    bench = do_bench_cudagraph if launch.decode else do_bench
    return float(bench(lambda: paged_attention(**inputs, scale=SPEC.scale, launch=launch), return_mode="median"))


def decode_rate(rows: int, length: int, time: float) -> float:
    """TB/s of keys and values."""
    return rows * length * 2 * KV_HEADS * DIM * 2 / time / 1e9


def prompt_rate(rows: int, length: int, time: float) -> float:
    """TFLOP/s, counting only the half that a causal mask leaves."""
    return 2 * rows * length**2 * HEADS * DIM / time / 1e9


def sweep(kind: str, inputs: dict[str, Tensor], rows: int, length: int) -> None:
    """Prints the rate of every tile size."""
    decode = kind == "decode"
    base = launch_for(
        DIM, HEADS // KV_HEADS, torch.bfloat16, decode=decode, splits=_splits(rows, length) if decode else 1
    )
    found = []
    sizes = (
        itertools.product((16,), (32, 64, 128), (2, 4), (2, 3, 4), (1, 2) if rows < 256 else (1,))
        if decode
        else itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3), (1,))
    )
    for block_m, block_n, num_warps, num_stages, more in sizes:
        launch = replace(
            base,
            block_m=block_m,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            splits=base.splits * more,
        )
        try:
            time = milliseconds(inputs, launch)
        except Exception as failure:
            found.append((0.0, f"{launch}: {type(failure).__name__}"))
            continue
        found.append(((decode_rate if decode else prompt_rate)(rows, length, time), str(launch)))
    for rate, launch_text in sorted(found, reverse=True)[:6]:
        print(f"  sweep {kind} {rows}x{length}: {rate:8.2f}  {launch_text}", flush=True)


def _splits(rows: int, length: int) -> int:
    return TritonAttention(SPEC, config=None, ops=None)._splits(rows, length)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    groups, results = HEADS // KV_HEADS, []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for rows, length in DECODES:
        inputs = case(rows, length, 1)
        launch = launch_for(DIM, groups, torch.bfloat16, decode=True, splits=_splits(rows, length))
        time = milliseconds(inputs, launch)
        wrong = error(inputs, launch, rows, False)
        rate = decode_rate(rows, length, time)
        print(
            f"decode {rows:4}x{length:6}: {time * 1e3:8.1f} us {rate:6.2f} TB/s, error {wrong:.1e}, {launch}",
            flush=True,
        )
        results.append({"kind": "decode", "rows": rows, "length": length, "us": time * 1e3, "TB/s": rate})
        if options.sweep and (rows, length) in ((8, 4096), (256, 4096)):
            sweep("decode", inputs, rows, length)
        del inputs
    for rows, length in PROMPTS:
        inputs = case(rows, length, length)
        launch = launch_for(DIM, groups, torch.bfloat16)
        time = milliseconds(inputs, launch)
        wrong = error(inputs, launch, rows, True) if length <= 8192 else float("nan")
        rate = prompt_rate(rows, length, time)
        query, keys, values = dense(inputs, rows)
        sdpa = do_bench(
            lambda q=query, k=keys, v=values: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            return_mode="median",
        )
        print(
            f"prefill {rows:3}x{length:6}: {time * 1e3:8.1f} us {rate:6.1f} TFLOP/s, error {wrong:.1e};"
            f" torch SDPA contiguous {prompt_rate(rows, length, sdpa):6.1f}",
            flush=True,
        )
        results.append({"kind": "prefill", "rows": rows, "length": length, "us": time * 1e3, "TFLOP/s": rate})
        if options.sweep and length == 4096:
            sweep("prefill", inputs, rows, length)
        del inputs, query, keys, values
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
