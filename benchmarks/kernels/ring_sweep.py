"""Finds the quickest ring of copies for products of one row with codes: the table `ONE_ROW` of `kernels/coded_choice`.

    PYTHONPATH=src:. python benchmarks/kernels/ring_sweep.py [--seconds 90] [--kinds int4,fp8] [--json ring_sweep.json]

The products of a layer of Llama 8B, as in `coded_sweep.py`: int4 with groups of 128 columns, fp8 with scales of rows, x
in bf16, replayed graphs over more weights than the L2 cache holds; "now" is what steps launch. What is wrong is named
and never chosen. At the end the four products one after the other, as a layer has them, over several layers: now, by
the best ring of each, and by the best of both; what a layer gains there is what a step gains.
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
from frame.kernels import coded_ring, coded_rows
from frame.kernels.coded_ring import Ring

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
#: (steps on their way, programs of a multiprocessor): with less than half of its shared memory the next kernel's
#: programs come in beside it.
RINGS = [
    Ring(4, 1), Ring(5, 1), Ring(8, 1), Ring(12, 1), Ring(2, 2), Ring(3, 2), Ring(4, 2), Ring(5, 2), Ring(2, 3),
    Ring(3, 3), Ring(2, 4),
]  # fmt: skip
LAYERS = 6


def now(x: Tensor, weight: Weight) -> Tensor:
    """What steps launch."""
    codes, scales, block, zeros = weight
    return coded_rows.few_rows(x, codes, scales, block, zeros, None)


def ringed(sizes: Ring, x: Tensor, weight: Weight) -> Tensor:
    """By a ring."""
    return coded_ring.product(x, weight[0], weight[1], None, sizes)


def weights_of(kind: str, shape: tuple[int, int], count: int = 0) -> list[Weight]:
    """As many as the L2 cache does not hold, or `count`."""
    first = made(kind, 128 if kind == "int4" else 0, False, *shape)
    count = count or 1 + min(48, CACHE_BYTES // first[0].nbytes)
    return [first, *(made(kind, 128 if kind == "int4" else 0, False, *shape) for _ in range(count - 1))]


def timed(product: Callable[[Tensor, Weight], Tensor], x: Tensor, weights: list[Weight]) -> float:
    """Microseconds of one product."""
    calls = [partial(product, x, weight) for weight in weights]
    return microseconds(calls * max(1, -(-CHAIN // len(calls))))


def sweep(kind: str, end: float) -> dict[tuple[int, int], tuple[float, float, Ring | None]]:
    """By shape: (time now, the best ring's, the ring)."""
    found: dict[tuple[int, int], tuple[float, float, Ring | None]] = {}
    for shape in SHAPES:
        weights, x = weights_of(kind, shape), x_of(1, shape[1])
        floor = (weights[0][0].nbytes + weights[0][1].nbytes) / COPY_BYTES_PER_MICROSECOND
        expected = x.float() @ exact(weights[0]).T
        before, times = timed(now, x, weights), []
        for sizes in RINGS:
            if time.monotonic() > end:
                print("no time", flush=True)
                break
            try:
                off = max(error(ringed(sizes, x, weight), x.float() @ exact(weight).T) for weight in weights[:2])
                if not off < 1e-2:
                    print(f"  WRONG {kind}, {shape}, {sizes}: {off:.1e}", flush=True)
                    continue
                times.append((timed(partial(ringed, sizes), x, weights), sizes))
            except Exception as failure:
                print(f"  FAILED {kind}, {shape}, {sizes}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
        times.sort(key=lambda pair: pair[0])
        best = ", ".join(f"{sizes} {us:.1f}" for us, sizes in times[:4])
        print(f"{kind}, {shape[0]} x {shape[1]}: floor {floor:.1f}, now {before:.1f} us (error "
              f"{error(now(x, weights[0]), expected):.1e}); {best}", flush=True)  # fmt: skip
        found[shape] = (before, *(times[0] if times else (float("inf"), None)))
        del weights
    return found


def layer(kind: str, found: dict[tuple[int, int], tuple[float, float, Ring | None]]) -> None:
    """Prints the time of the four products in turn."""
    weights = [weights_of(kind, shape, LAYERS) for shape in SHAPES]
    xs = [x_of(1, depth) for _, depth in SHAPES]
    choices: dict[str, list[Callable[[Tensor, Weight], Tensor]]] = {"now": [now] * len(SHAPES)}
    rings = [found[shape][2] for shape in SHAPES]
    choices["rings"] = [now if ring is None else partial(ringed, ring) for ring in rings]
    choices["best of both"] = [
        now if ring is None or found[shape][0] <= found[shape][1] else partial(ringed, ring)
        for shape, ring in zip(SHAPES, rings, strict=True)
    ]
    for stages, programs in ((4, 1), (4, 2), (3, 2)):
        choices[f"Ring({stages}, {programs})"] = [partial(ringed, Ring(stages, programs))] * len(SHAPES)
    for name, products in choices.items():
        calls = [
            partial(product, x, of_shape[number])
            for number in range(LAYERS)
            for product, x, of_shape in zip(products, xs, weights, strict=True)
        ]
        print(f"{kind}, four products of a layer, {name}: {microseconds(calls) * len(SHAPES):.1f} us", flush=True)


@torch.inference_mode()
def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="int4,fp8")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin, kinds, results = time.monotonic(), options.kinds.split(","), dict[str, Any]()

    def launch_all() -> None:
        for kind in kinds:
            for shape in SHAPES:
                weight, x = weights_of(kind, shape, 1)[0], x_of(1, shape[1])
                now(x, weight)
                for sizes in RINGS:
                    ringed(sizes, x, weight)

    compile_all(launch_all)
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    lines = []
    for kind in kinds:
        found = sweep(kind, begin + options.seconds)
        layer(kind, found)
        lines.append(f"    {kind == 'int4'}: {{")
        lines += [f"        {shape}: {ring if us < before else None}," for shape, (before, us, ring) in found.items()]
        lines.append("    },")
        results[kind] = {str(shape): (before, us, str(ring)) for shape, (before, us, ring) in found.items()}
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    print("\n".join(["ONE_ROW: dict[bool, dict[tuple[int, int], Ring | None]] = {", *lines, "}"]))


if __name__ == "__main__":
    main()
