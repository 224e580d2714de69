"""Speed of decode attention over a shared prefix on a GPU: each row by itself, and in tiles that read it once.

    python benchmarks/kernels/cascade.py [--sweep] [--json FILE]

32 query heads, 8 KV heads, 128 wide, bf16, pages of 16; every row has 128 tokens of its own behind the prefix. Both
ways are first compared with each other, then timed from a CUDA graph. "saved" is what `shared_prefix_min_tokens` is
measured in: the default should be where "ratio" passes 1. `--sweep` tries other sizes of the prefix kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from frame.core.interfaces.attention import AttentionSpec, GroupBatch, LayerParams, SharedPrefix
from frame.core.interfaces.setup import BackendSetup
from frame.core.ops import Ops
from frame.core.worker.step.prefix_tiles import num_tiles
from frame.kernels.cascade import PrefixLaunch
from frame.plugins.attention.triton import TritonAttention, TritonPlan

HEADS, KV_HEADS, DIM, PAGE, OWN = 32, 8, 128, 16, 128
CASES = [(2, 16384), (4, 16384), (16, 1024), (16, 4096), (64, 256), (64, 1024), (64, 4096), (64, 16384), (256, 1024)]
SPEC = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, torch.bfloat16, torch.bfloat16, PAGE, "cuda")


def batch_of(rows: int, shared: int) -> GroupBatch:
    """Rows over one prefix of `shared` tokens, with the tiles that say so."""
    common, own = shared // PAGE, OWN // PAGE
    pages = torch.randperm(common + rows * own, device="cuda").int()
    table = torch.cat((pages[:common].expand(rows, -1), pages[common:].view(rows, own)), 1).contiguous()
    tiles, used = num_tiles(rows), -(-rows // TritonAttention.prefix_tile_rows)
    members = torch.full((tiles * TritonAttention.prefix_tile_rows,), -1, dtype=torch.int32, device="cuda")
    members[:rows] = torch.arange(rows, dtype=torch.int32, device="cuda")
    lens = torch.zeros(tiles, dtype=torch.int32, device="cuda")
    lens[:used] = shared
    row_lens = torch.full((rows,), shared, dtype=torch.int32, device="cuda")
    return GroupBatch(
        num_tokens=rows,
        query_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.full((rows,), shared + OWN, dtype=torch.int32, device="cuda"),
        block_table=table,
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device="cuda"),
        host_query_lens=np.ones(rows, np.int32),
        host_seq_lens=np.full(rows, shared + OWN, np.int32),
        max_query_len=1,
        max_seq_len=shared + OWN,
        prefix=SharedPrefix(members.view(tiles, TritonAttention.prefix_tile_rows), lens, row_lens),
    )


class Case:
    """One batch, and the backend that serves it."""

    def __init__(self, rows: int, shared: int) -> None:
        self.backend = TritonAttention(BackendSetup(SPEC, Ops()))
        self.batch = batch_of(rows, shared)
        blocks = (shared + rows * OWN) // PAGE
        self.cache = torch.randn(blocks, 2, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
        self.query = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.token = torch.zeros(rows, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")

    def plan(self, *, shared: bool) -> TritonPlan:
        """What the backend plans with or without the prefix."""
        return self.backend.plan(self.batch if shared else replace(self.batch, prefix=None))

    def call(self, plan: TritonPlan) -> Callable[[], Tensor]:
        """One layer's step."""
        layer = LayerParams(SPEC)
        return lambda: self.backend.forward(layer, self.query, self.token, self.token, self.cache, plan)

    def sweep(self) -> None:
        """Prints the best sizes of the prefix kernel."""
        plan, found = self.plan(shared=True), []
        for block_n, splits, warps, stages in itertools.product((32, 64), (2, 4, 8, 16), (4, 8), (2, 3, 4)):
            launch = PrefixLaunch(block_n, splits, warps, stages)
            try:
                found.append((median(self.call(replace(plan, prefix=launch))) * 1e3, str(launch)))
            except Exception as failure:
                found.append((float("inf"), f"{launch}: {type(failure).__name__}"))
        for time, text in sorted(found)[:5]:
            print(f"  sweep: {time:8.1f} us  {text}", flush=True)


def median(call: Callable[[], Tensor]) -> float:
    """Milliseconds."""
    torch.cuda.synchronize()
    return float(do_bench_cudagraph(call, return_mode="median"))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for rows, shared in CASES:
        case = Case(rows, shared)
        alone, together = (case.call(case.plan(shared=way)) for way in (False, True))
        wrong = float((alone().float() - together().float()).norm() / alone().float().norm())
        apart_us, shared_us = median(alone) * 1e3, median(together) * 1e3
        saved = (rows - -(-rows // TritonAttention.prefix_tile_rows)) * shared
        print(
            f"{rows:4} rows over {shared:6}: {apart_us:8.1f} us apart, {shared_us:8.1f} us shared, "
            f"ratio {apart_us / shared_us:5.2f}, saved {saved:8}, difference {wrong:.1e}",
            flush=True,
        )
        results.append({"rows": rows, "shared": shared, "apart_us": apart_us, "shared_us": shared_us, "saved": saved})
        if options.sweep and shared == 16384:
            case.sweep()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
