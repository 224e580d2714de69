"""Speed of latent attention on a GPU: decode against the device's own copy and product rates, and prompts in TFLOP/s.

    python benchmarks/kernels/latent_decode.py [--sweep] [--json FILE]

Latents of 512 + 64 numbers in bf16, pages of 16, 16 and 128 heads. Rates are shares of what the device does in the same
run: latents read against a copy of a gigabyte, read and written, and multiplications of scores and sums against a
product of two matrices of 8,192. With 16 heads the first decides, with 128 the second. The kernel's result is first
compared with the formula. Medians; decode is replayed from a CUDA graph. `whole` is the layer: queries absorbed, the
token is stored, values are made of the sums. `--sweep` tries other launches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

from frame.core.interfaces.attention import GroupBatch
from frame.core.interfaces.latent import LatentParams, LatentSpec
from frame.core.interfaces.setup import BackendSetup
from frame.core.ops import Ops
from frame.kernels.latent_decode import LatentLaunch, latent_decode
from frame.plugins.attention.triton_latent import TritonLatent

RANK, ROPE, NOPE, VALUE, PAGE = 512, 64, 128, 128, 16
HEADS = (16, 128)
DECODES = [(64, 8192), (8, 32768), (1, 32768), (128, 8192), (256, 1024)]
#: (rows, tokens in the cache, new ones)
PROMPTS = [(8, 0, 1024), (1, 0, 8192), (1, 32768, 2048)]


def median(call: Callable[[], Tensor], *, graph: bool = False) -> float:
    """Milliseconds."""
    torch.cuda.synchronize()  # the graph is captured on a stream that would not wait for the inputs
    return float((do_bench_cudagraph if graph else do_bench)(call, return_mode="median"))


def copy_rate() -> float:
    """Bytes a second, read and written."""
    source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(lambda: target.copy_(source)) * 1e3


def product_rate() -> float:
    """Floating-point operations a second."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / median(lambda: left @ right) * 1e3


def spec_of(heads: int) -> LatentSpec:
    """The layer of DeepSeek V3 with so many heads on a device."""
    half = torch.bfloat16
    return LatentSpec(heads, NOPE, ROPE, VALUE, RANK, (NOPE + ROPE) ** -0.5, half, half, PAGE, "cuda")


def batch_of(rows: int, cached: int, new: int) -> GroupBatch:
    """Equal rows over randomly placed pages."""
    length = cached + new
    pages = -(-length // PAGE)
    table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    places = torch.arange(cached, length, device="cuda")
    slots = table.long()[:, places // PAGE] * PAGE + places % PAGE
    return GroupBatch(
        num_tokens=rows * new,
        query_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda") * new,
        seq_lens=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        block_table=table,
        slot_mapping=slots.flatten(),
        host_query_lens=np.full(rows, new, np.int32),
        host_seq_lens=np.full(rows, length, np.int32),
        max_query_len=new,
        max_seq_len=length,
    )


def tensors(spec: LatentSpec, batch: GroupBatch) -> tuple[LatentParams, Tensor, Tensor, Tensor]:
    """(layer, query, latent, cache) of random numbers."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=spec.dtype, device="cuda")

    up = random(spec.num_heads, NOPE + VALUE, RANK) * RANK**-0.5
    cache = random(batch.block_table.numel(), PAGE, spec.width)
    tokens = batch.num_tokens
    return LatentParams(spec, up), random(tokens, spec.num_heads, NOPE + ROPE), random(tokens, spec.width), cache


def error(out: Tensor, query: Tensor, cache: Tensor, batch: GroupBatch, scale: float) -> float:
    """Relative error of the first row's sums against float32."""
    latents = cache[batch.block_table[0].long()].flatten(0, 1)[: int(batch.seq_lens[0])].float()
    weights = (query[0].float() @ latents.t() * scale).softmax(-1)
    want = weights @ latents[:, :RANK]
    return float((out[0].float() - want).norm() / want.norm())


def decode(heads: int, rows: int, length: int, rates: tuple[float, float], *, sweep: bool) -> dict[str, Any]:
    """Prints a line, and with `sweep` the best of other launches."""
    spec, batch = spec_of(heads), batch_of(rows, length - 1, 1)
    backend = TritonLatent(BackendSetup(spec, Ops()))
    layer, query, latent, cache = tensors(spec, batch)
    plan, absorbed = backend.plan(batch), layer.absorb(query)

    numbers, stored = torch.arange(rows, dtype=torch.int32, device="cuda"), torch.full((rows,), -1, device="cuda")
    given = (latent, cache, stored, batch.seq_lens, numbers, batch.block_table)

    def kernel(launch: LatentLaunch) -> Callable[[], Tensor]:
        how: dict[str, Any] = {"rank": RANK, "scale": spec.scale, "launch": launch}
        return lambda: latent_decode(absorbed, *given, **how)

    num_bytes, operations = rows * length * spec.width * 2, 2 * rows * length * heads * (2 * RANK + ROPE)

    def shares(time: float) -> tuple[float, float]:
        return num_bytes / time * 1e3 / rates[0], operations / time * 1e3 / rates[1]

    call = kernel(plan.decode)
    wrong, time = error(call(), absorbed, cache, batch, spec.scale), median(call, graph=True)
    whole = median(lambda: backend.forward(layer, query, latent, cache, plan, None), graph=True)
    copied, multiplied = shares(time)
    print(
        f"decode {heads:4} heads {rows:4}x{length:6}: {time * 1e3:8.1f} us, {copied:.2f} of the copy rate, "
        f"{multiplied:.2f} of the product rate; whole {whole * 1e3:8.1f} us, error {wrong:.1e}, {plan.decode}",
        flush=True,
    )
    if sweep:
        found = []
        for block_n, warps, stages, more in itertools.product((16, 32, 64, 128), (4, 8), (1, 2, 3), (0.5, 1, 2, 4)):
            splits = max(1, int(plan.decode.splits * more))
            launch = replace(plan.decode, block_n=block_n, num_warps=warps, num_stages=stages, splits=splits)
            try:
                found.append((*shares(median(kernel(launch), graph=True)), str(launch)))
            except Exception as failure:
                found.append((0.0, 0.0, f"{launch}: {type(failure).__name__}"))
        for copied_share, multiplied_share, text in sorted(found, reverse=True)[:6]:
            print(f"  sweep: {copied_share:.2f}, {multiplied_share:.2f}  {text}", flush=True)
    return {
        "heads": heads, "rows": rows, "length": length, "us": time * 1e3, "copy share": copied,
        "product share": multiplied, "whole us": whole * 1e3, "error": wrong,
    }  # fmt: skip


def prompt(heads: int, rows: int, cached: int, new: int, product: float) -> dict[str, Any]:
    """Prints a line: the products of expansion and of scores and sums, the causal half of the new tokens alone."""
    spec, batch = spec_of(heads), batch_of(rows, cached, new)
    backend = TritonLatent(BackendSetup(spec, Ops()))
    layer, query, latent, cache = tensors(spec, batch)
    plan = backend.plan(batch)
    time = median(lambda: backend.forward(layer, query, latent, cache, plan, None))
    pairs = rows * (cached * new + new * new // 2)
    expansion = rows * (cached + new) * RANK * (NOPE + VALUE)
    operations = 2 * heads * (pairs * (NOPE + ROPE + VALUE) + expansion)
    share = operations / time * 1e3 / product
    print(
        f"prompt {heads:4} heads {rows:4}x{new:6} behind {cached:6}: {time * 1e3:8.1f} us, {share:.2f} of the product "
        f"rate",
        flush=True,
    )
    return {
        "heads": heads, "rows": rows, "cached": cached, "new": new, "us": time * 1e3, "product share": share,
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates = copy_rate(), product_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies {rates[0] / 1e12:.2f} TB/s, products ",
        end="",
    )
    print(f"{rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    results = []
    for heads, (rows, length) in itertools.product(HEADS, DECODES):
        sweep = options.sweep and (rows, length) in DECODES[:2]
        results.append(decode(heads, rows, length, rates, sweep=sweep))
    for heads, (rows, cached, new) in itertools.product(HEADS, PROMPTS):
        results.append(prompt(heads, rows, cached, new, rates[1]))
    if options.json:
        options.json.write_text(json.dumps({"copy": rates[0], "product": rates[1], "cases": results}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
