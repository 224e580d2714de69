"""Finds the quickest tile for products of 2 to 64 rounded rows with 8-bit floats: `kernels/rounded_hopper`.

    PYTHONPATH=src:. timeout 200 python benchmarks/kernels/rounded_sweep.py [--seconds 120] [--json rounded_sweep.json]

The products of layers of Llama 8B, of half of one, of Qwen3 0.6B and 14B, x in bf16, rounding included, replayed graphs
over more weights than the L2 cache holds. "now" is what steps launch, "other" what they would without
`kernels/rounded_hopper`, "library" the library's product, "bf16" its product with weights of 16 bits, "alone" the best
tile without rounding; the floor is the codes and scales at 4.27 TB/s. What is wrong is named and never chosen. At the
end a layer of Llama 8B without attention (norm, query, key and value; output; norm, gate and up, silu; down), over
several layers: now, without that kernel, and with the best tiles.
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
    microseconds,
    x_of,
)
from benchmarks.kernels.ring_sweep import LAYERS, SHAPES, timed, weights_of
from frame.kernels import activation, norm, quantized, rounded_hopper
from frame.kernels.rounded_hopper import TILE, RoundedTile
from frame.plugins.platforms.cuda import ops
from frame.plugins.platforms.cuda.ops import CudaOps
from frame.plugins.platforms.cuda.products import rounded

ROWS = (64, 32, 16, 8, 2)
CANDIDATES = (RoundedTile(64, 256, 6), RoundedTile(64, 128, 12), RoundedTile(128, 128, 8), RoundedTile(64, 256, 3))
Product = Callable[[Tensor, Weight], Tensor]
Found = dict[tuple[int, tuple[int, int]], dict[str, object]]


OPS = CudaOps()


def now(x: Tensor, weight: Weight) -> Tensor:
    """What steps launch."""
    return OPS.scaled_linear(x, *weight[:3], rounds=True)


def other(x: Tensor, weight: Weight) -> Tensor:
    """What steps would launch without a ring."""
    with patch.object(ops, "ringed", lambda *_: None):
        return now(x, weight)


def library(x: Tensor, weight: Weight) -> Tensor:
    """By the library."""
    return rounded.library_product(x, *weight[:2])


def ringed(tile: RoundedTile, x: Tensor, weight: Weight) -> Tensor:
    """By a tile."""
    return rounded_hopper.product(x, *weight[:2], tile=tile)


def expected_of(x: Tensor, weight: Weight) -> Tensor:
    """The product of x, rounded, in float32."""
    codes, scales = quantized.round_rows(x, weight[0].dtype, x.shape[1])
    return (codes.float() * scales) @ exact(weight).T


def tried(
    shape: tuple[int, int], rows: int, weights: list[Weight], plain: list[Tensor], end: float
) -> dict[str, object]:
    """The times of one shape and number of rows."""
    x = x_of(rows, shape[1])
    expected = [expected_of(x, weight) for weight in weights[:2]]
    found: dict[str, object] = {}
    names: dict[str, Product] = {"now": now, "other": other, "library": library}
    for name, product in names.items():
        found[name] = timed(product, x, weights)
    calls = [partial(torch.nn.functional.linear, x, weight) for weight in plain]
    found["bf16"] = microseconds(calls * max(1, -(-CHAIN // len(calls))))
    times: list[tuple[float, RoundedTile]] = []
    for tile in CANDIDATES:
        if time.monotonic() > end:
            print("no time", flush=True)
            break
        try:
            off = max(error(ringed(tile, x, one), right) for one, right in zip(weights, expected, strict=False))
            if not off < 1e-2:
                print(f"  WRONG {shape}, {rows} rows, {tile}: {off:.1e}", flush=True)
                continue
            times.append((timed(partial(ringed, tile), x, weights), tile))
        except Exception as failure:
            print(f"  FAILED {shape}, {rows} rows, {tile}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
    times.sort(key=lambda pair: pair[0])
    found["tiles"] = [(us, str(tile)) for us, tile in times]
    if times:
        found["best"], best = times[0]
        found["tile"] = best
        codes, own = quantized.round_rows(x, weights[0][0].dtype, shape[1])
        alone = [
            partial(rounded_hopper.rounded_product, codes, own, *weight[:2], None, x.dtype, best) for weight in weights
        ]
        found["alone"] = microseconds(alone * max(1, -(-CHAIN // len(alone))))
    return found


def sweep(end: float) -> Found:
    """By rows and shape: the times."""
    found: Found = {}
    kept = {shape: weights_of(shape) for shape in SHAPES}
    for rows in ROWS:
        for shape in SHAPES:
            if time.monotonic() > end:
                return found
            weights, size = kept[shape], shape[0] * shape[1]
            plain = [exact(weight).bfloat16() for weight in weights[: 1 + min(24, CACHE_BYTES // (2 * size))]]
            one = tried(shape, rows, weights, plain, end)
            found[rows, shape] = one
            floor = (weights[0][0].nbytes + weights[0][1].nbytes) / COPY_BYTES_PER_MICROSECOND
            told = ", ".join(f"{name} {us:.1f}" for name, us in one.items() if isinstance(us, float))
            best = "; ".join(f"{us:.1f} {tile}" for us, tile in one["tiles"][:5])  # type: ignore[index]
            print(f"{rows} rows, {shape[0]} x {shape[1]}: floor {floor:.1f}, {told} us; {best}", flush=True)
    return found


def layer(found: Found, rows: int) -> None:
    """Prints the time of a layer without attention, and how far its results are from those of now."""
    shapes = SHAPES[:4]
    weights = [weights_of(shape, LAYERS) for shape in shapes]
    plain = [[exact(weight).bfloat16() for weight in several] for several in weights]
    x, gain = x_of(rows, SHAPES[0][1]), x_of(1, SHAPES[0][1])[0]
    norm_of = gain, 1e-5, 0.0

    def apart(products: list[Callable[[Tensor, int], Tensor]], number: int) -> Tensor:
        normed, total = norm.add_rms_norm(x, x, *norm_of)
        qkv = products[0](normed, number)
        out = products[1](qkv[:, : SHAPES[1][1]], number)
        normed, total = norm.add_rms_norm(out, total, *norm_of)
        inner = activation.silu_mul(products[2](normed, number))
        return products[3](inner, number)

    def of_codes(product: Product, index: int) -> Callable[[Tensor, int], Tensor]:
        return lambda given, number: product(given, weights[index][number])

    def of_numbers(index: int) -> Callable[[Tensor, int], Tensor]:
        return lambda given, number: torch.nn.functional.linear(given, plain[index][number])

    best = [found.get((rows, shape), {}).get("tile", TILE) for shape in shapes]
    by_tile = [of_codes(partial(ringed, tile), index) for index, tile in enumerate(best)]  # type: ignore[arg-type]
    ways = {
        "bf16": [of_numbers(index) for index in range(4)],
        "now": [of_codes(now, index) for index in range(4)],
        "library": [of_codes(library, index) for index in range(4)],
        f"tiles {[str(tile) for tile in best]}": by_tile,
        "other": [of_codes(other, index) for index in range(4)],
    }
    usual = apart(ways["now"], 0)
    for name, products in ways.items():
        try:
            off = error(apart(products, 0), usual.float())
            us = microseconds([partial(apart, products, number) for number in range(LAYERS)] * 2)
            print(f"{rows} rows, a layer without attention, {name}: {us:.1f} us, {off:.1e} from now", flush=True)
        except Exception as failure:
            print(f"  FAILED {name}: {type(failure).__name__} {str(failure)[:160]}", flush=True)


@torch.inference_mode()
def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()

    def launch_all() -> None:
        for shape in SHAPES:
            weight = weights_of(shape, 1)[0]
            for rows in ROWS:
                x = x_of(rows, shape[1])
                for tile in CANDIDATES:
                    ringed(tile, x, weight)
                now(x, weight)

    compile_all(launch_all)
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    found = sweep(begin + options.seconds)
    for rows in dict.fromkeys(rows for rows, _ in found):
        layer(found, rows)
    if options.json:
        told = {f"{rows} rows, {shape}": {**one, "tile": str(one.get("tile"))} for (rows, shape), one in found.items()}
        options.json.write_text(json.dumps(told, indent=1))
    for (rows, shape), one in found.items():
        quicker = one.get("best", float("inf")) < min(one["other"], one["library"])  # type: ignore[operator, type-var]
        print(f"{rows} rows, {shape}: {one['tile'] if quicker else None}")


if __name__ == "__main__":
    main()
