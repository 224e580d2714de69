"""Finds the quickest run of programs that put weights of nibbles together: `RUN` of `kernels/codebook`.

    PYTHONPATH=src:. python benchmarks/kernels/codebook_sweep.py [--seconds 25] [--json codebook_sweep.json]

The weights of gpt-oss-20b's experts in mxfp4, with numbers made of their bits ("bits") and looked up in the table, and
one of Llama 8B in nf4, nvfp4 and Q4_K, to bfloat16. "rows" is what steps did before, programs of 16 rows and 128
columns; the others are runs. Times are of replayed graphs over more weights than the L2 cache holds; the share is that
of the rate of a copy of a gigabyte in the same process, of bytes that are read and written. What has other bits than
"rows" is named and never chosen. Elsewhere than on a GPU small weights are compared alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.kernels.coded_sweep import CACHE_BYTES, DEVICE, INTERPRETED, compile_all, microseconds
from frame.kernels.codebook import RUN, Run, dequantize
from frame.kernels.nibbles import Nibbles, nibble_weights, read_nibbles
from frame.plugins.quantization.bitsandbytes_4bit import TABLES
from frame.plugins.quantization.codebook import FP4

#: Name, format, rows, columns.
CASES = (
    ("gate_up, bits", "float4", 32 * 5760, 2880), ("down, bits", "float4", 32 * 2880, 2880),
    ("gate_up, table", "mxfp4", 32 * 5760, 2880), ("8B, nf4", "nf4", 4096, 14336), ("8B, Q4_K", "Q4_K", 4096, 14336),
    ("8B, nvfp4", "nvfp4", 4096, 14336), ("down, table", "mxfp4", 32 * 2880, 2880),
)  # fmt: skip
RUNS = tuple(itertools.starmap(Run, ((8, 4), (4, 4), (8, 2), (4, 2), (4, 8), (8, 8), (8, 1), (16, 2), (16, 1))))
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
_ROWS, _COLUMNS = 16, 128


@triton.jit
def _tiles(
    low, high, scales, minima, outer, table, numbers, out, rows, depth, groups,
    GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, HIGH: tl.constexpr, MINIMA: tl.constexpr,
    OUTER: tl.constexpr, EXPONENTS: tl.constexpr, NUMBERS: tl.constexpr, TABLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    there = row < rows
    own = row.to(tl.float32)
    if NUMBERS:
        own = tl.load(numbers + row, mask=there, other=0.0)
    words, more, factors, least, wide, least_wide = read_nibbles(
        low, high, scales, minima, outer, row, there, first, depth, groups,
        GROUP, SPAN, HIGH, MINIMA, OUTER, BLOCK_K,
    )  # fmt: skip
    weight = nibble_weights(
        words, more, factors, least, wide, least_wide, table, own,
        ZERO, HIGH, MINIMA, OUTER, EXPONENTS, NUMBERS, TABLE, SPAN, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    lane = first + tl.arange(0, BLOCK_K)
    at = out + row[:, None] * depth + lane[None, :]
    tl.store(at, weight.to(out.dtype.element_ty), mask=there[:, None] & (lane < depth)[None, :])


def by_rows(weight: Nibbles) -> Tensor:
    """[N, K] of DTYPE, by programs of rows and columns."""
    (rows, groups), depth = weight.scales.shape, weight.depth
    out = torch.empty((rows, depth), dtype=DTYPE, device=weight.low.device)
    _tiles[(triton.cdiv(rows, _ROWS), triton.cdiv(depth, _COLUMNS))](
        *weight.pointers, out, rows, depth, groups, **weight.sizes(_COLUMNS),
        BLOCK_N=_ROWS, BLOCK_K=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def by_run(run: Run, weight: Nibbles) -> Tensor:
    """[N, K] of DTYPE, by runs of words."""
    return dequantize(weight, DTYPE, run)


def made(kind: str, rows: int, depth: int) -> Nibbles:
    """A random weight of a format."""
    low = torch.randint(-(2**31), 2**31, (rows, depth // 8), dtype=torch.int32, device=DEVICE)
    group = {"nf4": 64, "nvfp4": 16}.get(kind, 32)
    size = rows, depth // group
    if kind == "Q4_K":
        scales, minima = (torch.randint(0, 64, size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        return Nibbles(low, scales, minima=minima, outer=torch.rand(rows, depth // 256, 2, device=DEVICE).half())
    table = torch.tensor(TABLES["nf4"] if kind == "nf4" else FP4, device=DEVICE)
    if kind in ("mxfp4", "float4"):
        scales = torch.randint(110, 131, size, dtype=torch.uint8, device=DEVICE)
        return Nibbles(low, scales, table, is_float4=kind == "float4")
    scales = torch.rand(size, device=DEVICE) + 0.5
    if kind == "nf4":
        return Nibbles(low, scales, table)
    return Nibbles(low, scales.to(torch.float8_e4m3fn), table, torch.rand(rows, 1, device=DEVICE))


def ways() -> dict[str, Callable[[Nibbles], Tensor]]:
    """What is measured, by name."""
    return {"rows": by_rows} | {str(run): partial(by_run, run) for run in RUNS}


def bytes_of(weight: Nibbles) -> int:
    """Bytes that are read and written."""
    return sum(one.nbytes for one in weight.pointers if one is not None) + weight.low.numel() * 8 * DTYPE.itemsize


def copy_rate() -> float:
    """Bytes read and written in a microsecond by a copy of a gigabyte."""
    source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds([lambda: target.copy_(source)])


def measured(case: tuple[str, str, int, int], rate: float, end: float) -> dict[str, float]:
    """Prints and returns the shares of the copy's rate of all ways with the right bits."""
    name, kind, rows, depth = case
    weights = [made(kind, rows, depth)]
    weights += [made(kind, rows, depth) for _ in range(min(8, CACHE_BYTES // weights[0].low.nbytes))]
    floor, expected = bytes_of(weights[0]) / rate, by_rows(weights[0])
    found: dict[str, float] = {}
    for told, way in ways().items():
        if time.monotonic() > end:
            print(f"{name}: no time for {told}")
            break
        if not torch.equal(way(weights[0]), expected):
            print(f"{name}, {told}: WRONG", flush=True)
            continue
        us = microseconds([partial(way, weight) for weight in weights])
        found[told] = floor / us
        print(f"{name}, {told}: {us:.1f} us, {floor / us:.0%} of a copy's rate ({floor:.0f} us)", flush=True)
    return found


def compared() -> None:
    """Small weights, every way."""
    for name, kind, _, depth in CASES:
        weight = made(kind, 19, depth)
        expected = by_rows(weight)
        wrong = [told for told, way in ways().items() if not torch.equal(way(weight), expected)]
        print(f"{name}: {'WRONG ' + ', '.join(wrong) if wrong else 'equal'}", flush=True)


def launch_all() -> None:
    """Every kernel that is measured, once."""
    for _, kind, _, depth in CASES:
        weight = made(kind, 16, depth)
        for way in ways().values():
            way(weight)


def best(found: dict[str, dict[str, float]], runs: tuple[Run, ...], names: list[str]) -> str:
    """The run with the largest product of shares, and its shares."""
    shares = {str(run): [found[name].get(str(run), 0.0) for name in names] for run in runs}
    chosen = max(shares, key=lambda told: math.prod(shares[told]))
    return f"{chosen}: " + ", ".join(f"{name} {share:.0%}" for name, share in zip(names, shares[chosen], strict=True))


@torch.inference_mode()
def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25, help="Compiling included; the process ends soon after.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()
    if INTERPRETED:
        compared()
        return
    compile_all(launch_all)
    rate = copy_rate()
    name = torch.cuda.get_device_name()
    print(f"{name}: compiled after {time.monotonic() - begin:.0f} s; copies {rate / 1e6:.2f} TB/s", flush=True)
    found = {case[0]: measured(case, rate, begin + options.seconds) for case in CASES}
    print(f"RUN is {RUN}; {time.monotonic() - begin:.0f} s")
    print("the best for all:", best(found, RUNS, list(found)))
    print("the best for experts:", best(found, RUNS, [name for name in found if "bits" in name]))
    if options.json:
        options.json.write_text(json.dumps({"copy bytes/us": rate, "shares": found}, indent=1))


if __name__ == "__main__":
    main()
