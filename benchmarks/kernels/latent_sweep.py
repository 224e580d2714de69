"""Finds the quickest launch of latent attention of single tokens, among Triton's and those of the Hopper kernels.

    PYTHONPATH=src:. python benchmarks/kernels/latent_sweep.py [--seconds 110] [--heads 16,128] [--only Few]
        [--json FILE]

As `latent_decode.py`, whose layer, rows and rates these are: shares of the rate of a copy and of a product in the same
run. "now" is what steps launch of Triton's; `--only` measures no more beside it than what has a name that begins so.
Each launch is compared with the formula for its first row before it is timed. The targets are 0.75 of the copy rate
with 16 heads, and half of the product rate with 128.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.latent_decode import (
    RANK,
    batch_of,
    copy_rate,
    error,
    median,
    product_rate,
    spec_of,
    tensors,
)
from frame.core.interfaces.setup import BackendSetup
from frame.core.ops import Ops
from frame.kernels import latent_decode, latent_few, latent_hopper
from frame.kernels.latent_decode import MAX_PARTS, MOST_JOINED, LatentLaunch
from frame.plugins.attention.triton_latent import TritonLatent
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse

DECODES = [(64, 8192), (8, 32768), (128, 8192), (256, 1024), (1, 32768)]
#: By heads of a tile: (latents of a tile, warps, stages). From three stages on the block table is fetched ahead, too;
#: from five on two tiles are on their way. Two programs of 32 latents share a multiprocessor, and three of (16, 4, 6),
#: whose 49 splits of 8 rows fill the device once.
TILES = {
    16: [(32, 4, 2), (32, 4, 3), (32, 4, 4), (32, 4, 5), (32, 4, 6), (64, 8, 3), (16, 4, 5), (16, 4, 6)],
    32: [(32, 8, 2), (32, 8, 3), (32, 4, 5), (32, 8, 5)],
    64: [(64, 8, 2), (32, 8, 2), (32, 8, 3), (32, 4, 3)],
}


class Case:
    """A layer with so many heads and equal rows."""

    def __init__(self, heads: int, rows: int, length: int) -> None:
        self.heads, self.rows, self.length = heads, rows, length
        self.spec, self.batch = spec_of(heads), batch_of(rows, length - 1, 1)
        backend = TritonLatent(BackendSetup(self.spec, Ops()))
        layer, query, latent, self.cache = tensors(self.spec, self.batch)
        self.plan, self.absorbed = backend.plan(self.batch), layer.absorb(query)
        numbers, stored = torch.arange(rows, dtype=torch.int32, device="cuda"), torch.full((rows,), -1, device="cuda")
        self.given = latent, self.cache, stored, self.batch.seq_lens, numbers, self.batch.block_table

    def plain(self, launch: LatentLaunch) -> Tensor:
        """By Triton's kernel."""
        return latent_decode.latent_decode(
            self.absorbed, *self.given, rank=RANK, scale=self.spec.scale, launch=launch
        )  # fmt: skip

    def hopper(self, splits: int) -> Tensor:
        """By the Hopper kernel."""
        return latent_hopper.latent_decode(self.absorbed, *self.given, scale=self.spec.scale, splits=splits)

    def few(self, splits: int) -> Tensor:
        """By the Hopper kernel for few heads."""
        return latent_few.latent_decode(self.absorbed, *self.given, scale=self.spec.scale, splits=splits)

    def tried(self) -> list[tuple[str, Callable[[], Tensor]]]:
        """What is measured, by name: what steps launch first."""
        now = self.plan.decode
        assert now is not None
        found = [(f"now {now}", partial(self.plain, now))]
        most = min(MAX_PARTS, self.length // 128)
        programs = self.rows * -(-self.heads // now.block_h)
        full = {min(most, max(1, each * 132 // programs)) for each in (1, 2, 3, 4)}  # multiprocessors without a rest
        for block_n, warps, stages in TILES[now.block_h]:
            for splits in sorted({now.splits, *full}):
                launch = LatentLaunch(now.block_h, block_n, splits, warps, stages)
                found.append((str(launch), partial(self.plain, launch)))
        programs = self.rows * -(-self.heads // latent_hopper.HEADS)
        for waves in (1, 2, 3, 4):
            splits = min(most, max(1, waves * 132 // programs))
            if (name := f"Hopper, {splits} splits") not in [known for known, _ in found]:
                found.append((name, partial(self.hopper, splits)))
        if self.heads <= latent_few.HEADS:
            for each in (0.25, 0.5, 0.75, 1, 2):  # programs of a multiprocessor
                splits = min(MOST_JOINED, self.length // 128, max(1, int(each * 132 / self.rows)))
                if (name := f"Few, {splits} splits") not in [known for known, _ in found]:
                    found.append((name, partial(self.few, splits)))
        return found


def measure(case: Case, rates: tuple[float, float], end: float, only: str) -> dict[str, Any]:
    """Prints the best launches of a case."""
    num_bytes = case.rows * case.length * case.spec.width * 2
    operations = 2 * case.rows * case.length * case.heads * (2 * RANK + case.spec.rope_dim)
    times = []
    for name, call in case.tried():
        if not name.startswith(("now", only)):
            continue
        if time.monotonic() > end:
            print("no time", flush=True)
            break
        try:
            wrong = error(call(), case.absorbed, case.cache, case.batch, case.spec.scale)
            if not wrong < 1e-2:
                print(f"  WRONG {name}: {wrong:.1e}", flush=True)
                continue
            times.append((median(call, graph=True), name, wrong))
        except Exception as failure:
            print(f"  FAILED {name}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
    print(f"{case.heads} heads, {case.rows} x {case.length}:", flush=True)
    best = sorted(times)[:5]
    for took, name, wrong in [*[one for one in times if one[1].startswith("now")], *best]:
        copied, multiplied = num_bytes / took * 1e3 / rates[0], operations / took * 1e3 / rates[1]
        print(
            f"  {took * 1e3:8.1f} us, {copied:.2f} of the copy rate, {multiplied:.2f} of the product rate, error "
            f"{wrong:.1e}: {name}",
            flush=True,
        )
    return {"heads": case.heads, "rows": case.rows, "length": case.length, "times": sorted(times)}


@torch.inference_mode()
def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin, results = time.monotonic(), []
    counts = [int(heads) for heads in options.heads.split(",")]

    def launch_all() -> None:
        for heads in counts:
            for name, call in Case(heads, 64, 2048).tried():
                if name.startswith(("now", options.only)):
                    call()

    rehearse(launch_all)
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    rates = copy_rate(), product_rate()
    print(f"copies {rates[0] / 1e12:.2f} TB/s, products {rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    for heads in counts:
        for rows, length in DECODES:
            if time.monotonic() < begin + options.seconds:
                results.append(measure(Case(heads, rows, length), rates, begin + options.seconds, options.only))
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
