"""Finds the quickest ring of copies for products of one row with codes: the table `ONE_ROW` of `kernels/coded_choice`.

    PYTHONPATH=src:. python benchmarks/kernels/ring_sweep.py [--seconds 90] [--json ring_sweep.json]

The products of layers of Llama 8B, of half of one, of Qwen3 0.6B and 14B: 8-bit floats with scales of rows, x in bf16,
replayed graphs over more weights than the L2 cache holds. "now" is what steps launch, "other" what they would without
rings. What is wrong is named and never chosen. At the end a layer of Llama 8B without attention (norm, query, key and
value; output; norm, gate and up, silu; down), over several layers: now, and by other rings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

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
from frame.kernels import activation, coded_choice, coded_ring, coded_rows, norm
from frame.kernels.coded_ring import Ring

SHAPES = [
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
    (3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072),
    (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408),
]  # fmt: skip
#: (steps on their way, programs of a multiprocessor): with less than half of its shared memory the next kernel's
#: programs come in beside it.
RINGS = [
    Ring(4, 1), Ring(5, 1), Ring(8, 1), Ring(2, 2), Ring(3, 2), Ring(4, 2), Ring(5, 2), Ring(2, 3),
    Ring(3, 3), Ring(2, 4),
]  # fmt: skip
LAYERS = 6


def now(x: Tensor, weight: Weight) -> Tensor:
    """What steps launch."""
    codes, scales, block, zeros = weight
    return coded_rows.few_rows(x, codes, scales, block, zeros, None)


def other(x: Tensor, weight: Weight) -> Tensor:
    """What steps would launch without rings."""
    codes, scales, block, zeros = weight
    with patch.object(coded_choice, "ring_for", lambda *_: None):
        return coded_rows.few_rows(x, codes, scales, block, zeros, None)


def ringed(sizes: Ring, x: Tensor, weight: Weight) -> Tensor:
    """By a ring."""
    return coded_ring.product(x, weight[0], weight[1], None, sizes)


def weights_of(shape: tuple[int, int], count: int = 0) -> list[Weight]:
    """As many as the L2 cache does not hold, or `count`."""
    size = shape[0] * shape[1]
    return [made("fp8", 0, False, *shape) for _ in range(count or 1 + min(48, CACHE_BYTES // size))]


def timed(product: Callable[[Tensor, Weight], Tensor], x: Tensor, weights: list[Weight]) -> float:
    """Microseconds of one product."""
    calls = [partial(product, x, weight) for weight in weights]
    return microseconds(calls * max(1, -(-CHAIN // len(calls))))


def sweep(end: float) -> dict[tuple[int, int], tuple[float, float, Ring | None]]:
    """By shape: (time without a ring, the best ring's, the ring)."""
    found: dict[tuple[int, int], tuple[float, float, Ring | None]] = {}
    for shape in SHAPES:
        weights, x = weights_of(shape), x_of(1, shape[1])
        floor = (weights[0][0].nbytes + weights[0][1].nbytes) / COPY_BYTES_PER_MICROSECOND
        expected = x.float() @ exact(weights[0]).T
        chosen, before, times = timed(now, x, weights), timed(other, x, weights), []
        for sizes in RINGS:
            if time.monotonic() > end:
                print("no time", flush=True)
                break
            try:
                off = max(error(ringed(sizes, x, weight), x.float() @ exact(weight).T) for weight in weights[:2])
                if not off < 1e-2:
                    print(f"  WRONG {shape}, {sizes}: {off:.1e}", flush=True)
                    continue
                times.append((timed(partial(ringed, sizes), x, weights), sizes))
            except Exception as failure:
                print(f"  FAILED {shape}, {sizes}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
        times.sort(key=lambda pair: pair[0])
        best = ", ".join(f"{sizes} {us:.1f}" for us, sizes in times[:4])
        print(f"{shape[0]} x {shape[1]}: floor {floor:.1f}, now {chosen:.1f}, other {before:.1f} us (error "
              f"{error(now(x, weights[0]), expected):.1e}); {best}", flush=True)  # fmt: skip
        found[shape] = (before, *(times[0] if times else (float("inf"), None)))
        del weights
    return found


def layer(found: dict[tuple[int, int], tuple[float, float, Ring | None]]) -> None:
    """Prints the time of a layer without attention, and how far its results are from those of now."""
    shapes = SHAPES[:4]
    weights = [weights_of(shape, LAYERS) for shape in shapes]
    x, gain = x_of(1, 4096), x_of(1, 4096)[0]
    norm_of = gain, 1e-5, 0.0
    best = [found[shape][2] or Ring(4, 2) for shape in shapes]
    whole = [(f"rings {[str(one) for one in best]}", best)]
    whole += [(str(one), [one] * len(shapes)) for one in (Ring(4, 1), Ring(5, 1), Ring(3, 2), Ring(4, 2))]

    def apart(products: list[Callable[[Tensor, Weight], Tensor]], number: int) -> Tensor:
        normed, total = norm.add_rms_norm(x, x, *norm_of)
        qkv = products[0](normed, weights[0][number])
        out = products[1](qkv[:, :4096], weights[1][number])
        normed, total = norm.add_rms_norm(out, total, *norm_of)
        inner = activation.silu_mul(products[2](normed, weights[2][number]))
        return products[3](inner, weights[3][number])

    usual = apart([now] * len(shapes), 0)
    tried: list[tuple[str, Callable[[int], Tensor]]] = [("now", partial(apart, [now] * len(shapes)))]
    for name, sizes in whole:
        tried.append((name, partial(apart, [partial(ringed, one) for one in sizes])))
    for name, call in tried:
        try:
            off = error(call(0), usual.float())
            us = microseconds([partial(call, number) for number in range(LAYERS)] * 2)
            print(f"a layer without attention, {name}: {us:.1f} us, {off:.1e} from now", flush=True)
        except Exception as failure:
            print(f"  FAILED {name}: {type(failure).__name__} {str(failure)[:160]}", flush=True)


@torch.inference_mode()
def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()

    def launch_all() -> None:
        for shape in SHAPES:
            weight, x = weights_of(shape, 1)[0], x_of(1, shape[1])
            for call in (now, other, *(partial(ringed, sizes) for sizes in RINGS)):
                call(x, weight)

    compile_all(launch_all)
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    found = sweep(begin + options.seconds)
    layer(found)
    lines = [f"    {shape}: {ring if us < before else None}," for shape, (before, us, ring) in found.items()]
    if options.json:
        options.json.write_text(
            json.dumps({str(shape): (*times, str(ring)) for shape, (*times, ring) in found.items()})
        )
    print("\n".join(["ONE_ROW: dict[tuple[int, int], Ring | None] = {", *lines, "}"]))


if __name__ == "__main__":
    main()
