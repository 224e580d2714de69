"""Finds the quickest launch of decode attention over a cache of e4m3, and what it gains over bf16.

    PYTHONPATH=src:. python benchmarks/kernels/narrow_sweep.py [--seconds 120] [--json narrow_sweep.json]

A layer of Llama 8B (32 query and 8 KV heads of 128, pages of 16 at random places), rows of equal length and, with an
"r" behind the shape, of a third of it to all. "bf16" and "now" are what steps launch today over caches of 16 and 8
bits; the others are launches of `frame.kernels.decode_narrow`. Each is compared with `now` and, for its first row, with
float32 before it is timed in a replayed graph. `ratio` is the time of bf16 over its own; the target is 1.7 at 64x8192.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.linear_invariant import microseconds
from frame.core.interfaces.attention import AttentionSpec, GroupBatch, LayerParams
from frame.core.ops import attention as reference
from frame.interfaces import BackendSetup
from frame.kernels import decode_narrow
from frame.kernels.decode_narrow import NarrowLaunch
from frame.kernels.row_order import longest_first
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse

SHAPES = "64x8192,64x2048,64x8192r,256x1024,256x1024r,16x8192,8x32768,1x32768,1x2048,4x8192,128x4096,128x4096r"
HEADS, KV_HEADS, DIM, PAGE, SCALE = 32, 8, 128, 16, 128**-0.5
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
#: Groups of 16 keys in a tile.
TILES = (2, 1)
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32, 64)


class Case:
    """Rows of a layer over a cache of one type."""

    def __init__(self, lengths: list[int], kv_dtype: torch.dtype) -> None:
        rows, longest = len(lengths), max(lengths)
        self.spec = AttentionSpec(HEADS, KV_HEADS, DIM, SCALE, BF16, kv_dtype, PAGE, "cuda")
        self.backend = TritonAttention(BackendSetup(self.spec, SimpleNamespace()))
        blocks = -(-longest // PAGE)
        drawn = torch.randn(2, rows * blocks, PAGE, KV_HEADS, DIM, device="cuda", dtype=BF16)
        self.cache = drawn if kv_dtype == BF16 else drawn.to(kv_dtype)
        table = torch.randperm(rows * blocks, device="cuda").int().view(rows, blocks)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        last = self.lens.long() - 1
        slots = table.gather(1, (last // PAGE)[:, None])[:, 0].long() * PAGE + last % PAGE
        self.batch = GroupBatch(
            num_tokens=rows, query_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda"), seq_lens=self.lens,
            block_table=table, slot_mapping=slots, host_query_lens=np.ones(rows, np.int32),
            host_seq_lens=np.array(lengths, np.int32), max_query_len=1, max_seq_len=longest, prefix=None,
        )  # fmt: skip
        self.plan, self.layer = self.backend.plan(self.batch), LayerParams(self.spec, sinks=None, alibi_slopes=None)
        torch.manual_seed(1)
        self.query, self.key, self.value = (
            torch.randn(rows, heads, DIM, device="cuda", dtype=BF16) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.order = longest_first(self.lens)
        self.arrivals = torch.zeros(rows * KV_HEADS, dtype=torch.int32, device="cuda")

    def now(self) -> Tensor:
        """What a step launches."""
        found = self.backend.forward(self.layer, self.query, self.key, self.value, self.cache, self.plan)
        return found if isinstance(found, Tensor) else found[0]

    def narrow(self, launch: NarrowLaunch, sorts: bool) -> Tensor:
        """By the other kernel; `sorts`: the longest rows first."""
        batch = self.batch
        return decode_narrow.decode_attention(
            self.query, self.key, self.value, self.cache, batch.slot_mapping, batch.seq_lens, batch.block_table,
            scale=SCALE, out=torch.empty_like(self.query), launch=launch, arrivals=self.arrivals,
            order=self.order if sorts else None,
        )  # fmt: skip

    def expected(self) -> Tensor:
        """The first row in float32."""
        start = torch.arange(2, dtype=torch.int32, device="cuda")
        given = self.query[:1].float(), self.cache, start, self.lens[:1], self.batch.block_table[:1]
        return reference.paged_attention(*given, scale=SCALE)


def lengths_of(shape: str) -> list[int]:
    """The lengths of "rowsxlength", with an "r" behind it from a third of it to all."""
    rows, length = map(int, shape.rstrip("r").split("x"))
    if shape.endswith("r"):
        return np.random.default_rng(7).integers(length // 3, length + 1, rows).tolist()
    return [length] * rows


def candidates(lengths: list[int]) -> list[tuple[NarrowLaunch, bool]]:
    """What is worth a measurement: no splits of fewer than 256 keys, up to 40 programs a multiprocessor."""
    pairs = len(lengths) * KV_HEADS
    found = []
    for groups in TILES:
        for splits in SPLITS:
            few = pairs * splits < 132 * 4 and splits < SPLITS[-1] and splits * 512 < max(lengths)
            if few or pairs * splits > 132 * 40 or (splits > 1 and max(lengths) // splits < 256):
                continue
            found.append((NarrowLaunch(splits, 0, groups), False))
            if len(set(lengths)) > 1:
                found.append((NarrowLaunch(splits, 1024, groups), True))
    return found


def error(found: Tensor, expected: Tensor) -> float:
    """Relative; not a number where `found` holds some."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def measure(shape: str, end: float) -> dict[str, Any]:
    """Prints the best launches of a shape."""
    lengths = lengths_of(shape)
    size = 2 * sum(lengths) * KV_HEADS * DIM
    plain = Case(lengths, BF16)
    bf16 = microseconds([plain.now] * 4)
    del plain
    torch.cuda.empty_cache()
    case = Case(lengths, E4M3)
    now, same, exact = microseconds([case.now] * 4), case.now(), case.expected()
    chosen = case.plan.narrow or case.plan.decode
    print(
        f"{shape}: bf16 {bf16:.1f} us, {2 * size / bf16 / 1e6:.2f} TB/s; now {now:.1f} us, "
        f"{size / now / 1e6:.2f} TB/s, ratio {bf16 / now:.2f}, error {error(same[:1], exact):.1e}, {chosen}",
        flush=True,
    )
    times = []
    for launch, sorts in candidates(lengths):
        if time.monotonic() > end:
            print("no time", flush=True)
            break
        try:
            found = case.narrow(launch, sorts)
            off, wrong = error(found, same), error(found[:1], exact)
            if not (off < 1e-2 and wrong < 1e-2):
                print(f"  WRONG {launch}: {off:.1e} from now, {wrong:.1e} from float32", flush=True)
                continue
            times.append((microseconds([partial(case.narrow, launch, sorts)] * 4), str(launch), sorts, wrong))
        except Exception as failure:
            print(f"  FAILED {launch}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
    for us, launch, sorts, wrong in sorted(times)[:6]:
        print(f"  {us:7.1f} us, {size / us / 1e6:.2f} TB/s, ratio {bf16 / us:.2f}: {launch}"
              f"{', longest first' if sorts else ''}, error {wrong:.1e}", flush=True)  # fmt: skip
    return {"shape": shape, "bf16": bf16, "now": now, "times": sorted(times)}


@torch.inference_mode()
def main() -> None:
    """Measures all shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin, shapes, results = time.monotonic(), options.shapes.split(","), []

    def launch_all() -> None:
        case = Case([2048] * 4, E4M3)
        for groups in TILES:
            for splits in (1, 2, 32, 64):
                case.narrow(NarrowLaunch(splits, 0, groups), False)

    rehearse(launch_all)
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    for shape in shapes:
        if time.monotonic() < begin + options.seconds:
            results.append(measure(shape, begin + options.seconds))
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
