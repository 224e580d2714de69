"""Finds the quickest sizes of `kernels/coded_hopper` for products of some rows with nibbles, and compares them.

    PYTHONPATH=src:. python benchmarks/kernels/coded_hopper_sweep.py [--seconds 120] [--json coded_hopper_sweep.json]

The products of a layer of Llama 8B with 64, 32 and 16 rows in bf16: groups of 128 columns, 16-bit scales, replayed
graphs over more weights than the L2 cache holds. "now" is what steps launch, "bf16" the library with a weight of 16
bits; the floor is the codes and scales at 4.27 TB/s. What is wrong is named and never chosen. At the end the table of
the quickest sizes, None where what steps launch now is quicker, and the sums of the four products.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.coded_sweep import (
    CACHE_BYTES,
    CHAIN,
    COPY_BYTES_PER_MICROSECOND,
    Weight,
    compile_all,
    error,
    exact,
    made,
    microseconds,
    x_of,
)
from frame.kernels import coded_hopper, coded_rows
from frame.kernels.coded_hopper import Staged

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
ROWS = (64, 32, 16)
#: By rows: (parts of a tile, steps on their way, warps that fetch, whether two products run at once).
CANDIDATES = {
    64: [
        Staged(1, 4), Staged(1, 4, 4, twice=False), Staged(1, 3), Staged(1, 4, 8), Staged(2, 3, 4, twice=False),
        Staged(2, 3, 8, twice=False), Staged(2, 2, 4, twice=False),
    ],
    32: [
        Staged(1, 5), Staged(1, 6, 4, twice=False), Staged(1, 3), Staged(2, 4), Staged(2, 4, 4, twice=False),
        Staged(2, 3),
    ],
    16: [Staged(1, 6), Staged(1, 8, 4, twice=False), Staged(1, 4), Staged(2, 5), Staged(2, 4, 4, twice=False)],
}  # fmt: skip
#: As far as nothing else is wrong, by how much bf16 rounds.
MOST_ERROR = 4e-3


def now(x: Tensor, weight: Weight) -> Tensor:
    """What steps launch."""
    codes, scales, block, zeros = weight
    return coded_rows.few_rows(x, codes, scales, block, zeros, None)


def staged(sizes: Staged, x: Tensor, weight: Weight) -> Tensor:
    """By the kernel that is measured."""
    return coded_hopper.product(x, weight[0], weight[1], None, sizes)


def timed(product: Any, x: Tensor, weights: list[Any]) -> float:
    """Microseconds of one product."""
    calls = [partial(product, x, weight) for weight in weights]
    return microseconds(calls * max(1, -(-CHAIN // len(calls))))


def measure(rows: int, shape: tuple[int, int], end: float) -> dict[str, Any]:
    """One shape: times of now and bf16, those of the sizes that are right, the quickest first."""
    outputs, depth = shape
    weights = [made("int4", 128, False, *shape) for _ in range(1 + min(24, CACHE_BYTES // (outputs * depth // 2)))]
    x, times = x_of(rows, depth), []
    floor = (weights[0][0].nbytes + weights[0][1].nbytes) / COPY_BYTES_PER_MICROSECOND
    before = timed(now, x, weights)
    wide = [exact(weights[0]).bfloat16() for _ in range(1 + min(8, CACHE_BYTES // (2 * outputs * depth)))]
    bf16 = timed(torch.nn.functional.linear, x, wide)
    del wide
    for sizes in CANDIDATES[rows]:
        if time.monotonic() > end:
            print("no time", flush=True)
            break
        try:
            off = max(error(staged(sizes, x, weight), x.float() @ exact(weight).T) for weight in weights[:2])
            if not off < MOST_ERROR:
                print(f"  WRONG {rows} rows, {shape}, {sizes}: {off:.1e}", flush=True)
                continue
            times.append((timed(partial(staged, sizes), x, weights), sizes))
        except Exception as failure:
            print(f"  FAILED {rows} rows, {shape}, {sizes}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
    times.sort(key=lambda pair: pair[0])
    best = ", ".join(f"{sizes} {us:.1f}" for us, sizes in times)
    off = error(now(x, weights[0]), x.float() @ exact(weights[0]).T)
    known = f"floor {floor:.1f}, bf16 {bf16:.1f}, now {before:.1f} us (error {off:.1e})"
    print(f"{rows} rows, {outputs} x {depth}: {known}; {best}", flush=True)
    quickest = times[0] if times else (float("inf"), None)
    return {
        "rows": rows, "shape": shape, "floor": floor, "bf16": bf16, "now": before, "best": quickest[0],
        "sizes": str(quickest[1]), "times": [(us, str(sizes)) for us, sizes in times],
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()

    def launch_all() -> None:
        for rows in ROWS:
            for shape in SHAPES:
                weight, x = made("int4", 128, False, *shape), x_of(rows, shape[1])
                for call in (now, *(partial(staged, sizes) for sizes in CANDIDATES[rows])):
                    call(x, weight)

    compile_all(launch_all)
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    found = []
    for rows in ROWS:
        for shape in SHAPES:
            found.append(measure(rows, shape, begin + options.seconds))
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
        own = [one for one in found if one["rows"] == rows]
        sums = {kind: sum(one[kind] for one in own) for kind in ("floor", "bf16", "now", "best")}
        print(f"{rows} rows, a layer: " + ", ".join(f"{kind} {us:.1f}" for kind, us in sums.items()), flush=True)
    print("STAGED: dict[int, dict[tuple[int, int], Staged | None]] = {")
    for rows in ROWS:
        print(f"    {rows}: {{")
        for one in found:
            if one["rows"] == rows:
                print(f"        {one['shape']}: {one['sizes'] if one['best'] < one['now'] else None},")
        print("    },")
    print("}")


if __name__ == "__main__":
    main()
