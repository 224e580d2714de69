"""Finds the quickest tile for products of 9 to 64 rows in two halves with nibbles: `kernels/nibbles_hopper`.

    PYTHONPATH=src:. python benchmarks/kernels/nibbles_sweep.py [--seconds 55] [--json nibbles_sweep.json]

The products of layers of Llama 8B, of half of one, of Qwen3 0.6B and 14B, with groups of 128 inputs, x in bf16,
replayed graphs over more weights than the L2 cache holds. "now" is what steps launch without that kernel, "bf16" the
library with weights of 16 bits, "split" the halves of x alone, which products include, "rule" the tile that the
kernel's module chooses; the floor is the codes and scales at 4.27 TB/s. Errors are of all results against the product
in float32; what is wrong is named and never chosen. After the products of Llama 8B the sums of the four, and a layer
without attention (norm, query, key and value; output; norm, gate and up, silu; down) over several layers. What is
compared first is not timed: other groups, zeros, odd outputs and rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
from benchmarks.kernels.ring_sweep import LAYERS, SHAPES
from frame.kernels import activation, coded_rows, halves, nibbles_hopper, norm
from frame.kernels.nibble_tiles import NibbleTile

ROWS = (64, 32, 16, 9)
#: By the rows of a tile.
CANDIDATES = {
    64: (NibbleTile(1, 2, 4), NibbleTile(2, 1, 6), NibbleTile(2, 1, 6, whole=True), NibbleTile(2, 2, 3),
         NibbleTile(1, 1, 8), NibbleTile(1, 2, 4, whole=True)),
    32: (NibbleTile(1, 2, 6), NibbleTile(2, 1, 8), NibbleTile(1, 1, 12), NibbleTile(1, 2, 6, whole=True)),
    16: (NibbleTile(1, 2, 8), NibbleTile(2, 1, 9), NibbleTile(1, 1, 12), NibbleTile(1, 2, 8, whole=True)),
}  # fmt: skip
#: Compared first: outputs, inputs, inputs of a group (0: all), zeros, rows.
OTHERS = [
    (1000, 2816, 128, True, 64), (3352, 5504, 64, True, 33), (6144, 4096, 32, True, 17), (4104, 2944, 0, True, 50),
    (1, 1152, 128, False, 9), (28672, 4096, 128, True, 64), (4096, 14336, 64, False, 41), (6144, 4096, 256, True, 12),
]  # fmt: skip
Product = Callable[[Tensor, Weight], Tensor]


def now(x: Tensor, weight: Weight) -> Tensor:
    """What steps launch without that kernel."""
    return coded_rows.few_rows(x, *weight, None)


def halved(tile: NibbleTile | None, x: Tensor, weight: Weight) -> Tensor:
    """By a tile; None: by the one that the module chooses."""
    return nibbles_hopper.product(x, *weight, None, tile)


def split(x: Tensor, _: Weight) -> Tensor:
    """The halves of x alone."""
    return halves.split_rows(x, halves.CHUNK)[0]


def weights_of(shape: tuple[int, int], count: int = 0) -> list[Weight]:
    """As many as the L2 cache does not hold, or `count`."""
    codes_bytes = shape[0] * shape[1] // 2
    return [made("int4", 128, False, *shape) for _ in range(count or 1 + min(48, CACHE_BYTES // codes_bytes))]


def timed(product: Callable[..., Tensor], x: Tensor, weights: list[Weight]) -> float:
    """Microseconds of one product."""
    calls = [partial(product, x, weight) for weight in weights]
    return microseconds(calls * max(1, -(-CHAIN // len(calls))))


class Sweep:
    """What was measured: by rows and shape, the microseconds of each way and tile."""

    def __init__(self, end: float) -> None:
        self.end, self.found, self.wrong = end, dict[tuple[int, tuple[int, int]], dict[str, float]](), 0

    def is_over(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() > self.end

    def shape(self, shape: tuple[int, int]) -> None:
        """One shape, with every number of rows."""
        weights, size = weights_of(shape), shape[0] * shape[1]
        floor = (weights[0][0].nbytes + weights[0][1].nbytes) / COPY_BYTES_PER_MICROSECOND
        exacts = [exact(weight) for weight in weights[:2]]
        plain = [exact(weight).bfloat16() for weight in weights[: 1 + min(24, CACHE_BYTES // (2 * size))]]
        for rows in ROWS:
            if self.is_over():
                return
            x = x_of(rows, shape[1])
            expected = [x.float() @ one.T for one in exacts]
            ways: dict[str, Product] = {"now": now, "rule": partial(halved, None)}
            ways |= {str(tile): partial(halved, tile) for tile in CANDIDATES[halves.room_for(rows)]}
            found, errors = {"floor": floor, "split": timed(split, x, weights)}, []
            calls = [partial(torch.nn.functional.linear, x, one) for one in plain]
            found["bf16"] = microseconds(calls * max(1, -(-CHAIN // len(calls))))
            for name, way in ways.items():
                off = self.checked(f"{rows} rows, {shape}, {name}", way, x, weights, expected)
                if off is not None:
                    found[name] = timed(way, x, weights)
                    errors.append(f"{off:.1e}")
            self.found[rows, shape] = found
            told = ", ".join(f"{name} {us:.1f}" for name, us in found.items())
            print(f"{rows} rows, {shape[0]} x {shape[1]}: {told} us; errors {' '.join(errors)}", flush=True)

    def checked(
        self, name: str, way: Product, x: Tensor, weights: list[Weight], expected: list[Tensor]
    ) -> float | None:
        """How far a way's results are from those expected; None, and told, where it is wrong or fails."""
        try:
            off = max(error(way(x, weight), right) for weight, right in zip(weights, expected, strict=False))
        except Exception as failure:
            print(f"  FAILED {name}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
            self.wrong += 1
            return None
        if off < 1e-2:
            return off
        print(f"  WRONG {name}: {off:.1e}", flush=True)
        self.wrong += 1
        return None

    def best(self, rows: int, shape: tuple[int, int]) -> NibbleTile | None:
        """The quickest tile, where one was measured."""
        found = self.found.get((rows, shape), {})
        tiles = [tile for tile in CANDIDATES[halves.room_for(rows)] if str(tile) in found]
        return min(tiles, key=lambda tile: found[str(tile)], default=None)

    def sums(self) -> None:
        """Prints the four products of a layer of Llama 8B together."""
        for rows in ROWS:
            layer = [self.found[rows, shape] for shape in SHAPES[:4] if (rows, shape) in self.found]
            if len(layer) == 4:
                names = ("floor", "now", "bf16", "rule")
                told = [f"{name} {sum(one.get(name, float('inf')) for one in layer):.1f}" for name in names]
                best = [min(us for name, us in one.items() if name not in names and name != "split") for one in layer]
                print(f"{rows} rows, four products: {', '.join(told)}, best {sum(best):.1f} us", flush=True)

    def layer(self, rows: int) -> None:
        """Prints the time of a layer without attention."""
        weights = [weights_of(shape, LAYERS) for shape in SHAPES[:4]]
        x, gain = x_of(rows, SHAPES[0][1]), x_of(1, SHAPES[0][1])[0]

        def apart(products: list[Product], number: int) -> Tensor:
            given = [partial(one, weight=several[number]) for one, several in zip(products, weights, strict=True)]
            normed, total = norm.add_rms_norm(x, x, gain, 1e-5, 0.0)
            out = given[1](given[0](normed)[:, : SHAPES[1][1]])
            normed, total = norm.add_rms_norm(out, total, gain, 1e-5, 0.0)
            return given[3](activation.silu_mul(given[2](normed)))

        ways = {"now": [now] * 4, "rule": [partial(halved, None)] * 4}
        ways["best"] = [partial(halved, self.best(rows, shape)) for shape in SHAPES[:4]]
        usual = apart(ways["now"], 0).float()
        for name, products in ways.items():
            off = error(apart(products, 0), usual)
            us = microseconds([partial(apart, products, number) for number in range(LAYERS)] * 2)
            print(f"{rows} rows, a layer without attention, {name}: {us:.1f} us, {off:.1e} from now", flush=True)

    def others(self) -> None:
        """Compares what is not timed."""
        for outputs, depth, group, zeros, rows in OTHERS:
            weight, x = made("int4", group, zeros, outputs, depth), x_of(rows, depth)
            name = f"{rows} rows, {outputs} x {depth} by {group}, zeros {zeros}"
            off = self.checked(name, partial(halved, None), x, [weight], [x.float() @ exact(weight).T])
            if off is not None:
                print(f"{name}: compared, {off:.1e}", flush=True)


def launch_all() -> None:
    """Every kernel that is measured, once."""
    for shape in SHAPES:
        weight = weights_of(shape, 1)[0]
        for rows in ROWS:
            x = x_of(rows, shape[1])
            now(x, weight)
            for tile in (None, *CANDIDATES[halves.room_for(rows)]):
                halved(tile, x, weight)
    for outputs, depth, group, zeros, rows in OTHERS:
        halved(None, x_of(rows, depth), made("int4", group, zeros, outputs, depth))


@torch.inference_mode()
def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=55, help="Compiling included; the process ends soon after.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()
    sweep = Sweep(begin + options.seconds)
    compile_all(launch_all)
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    sweep.others()
    for shape in SHAPES[:4]:
        sweep.shape(shape)
    sweep.sums()
    for rows in ROWS[:1] if not sweep.is_over() else ():
        sweep.layer(rows)
    for shape in SHAPES[4:]:
        sweep.shape(shape)
    if options.json:
        told = {f"{rows} rows, {shape}": found for (rows, shape), found in sweep.found.items()}
        options.json.write_text(json.dumps(told, indent=1))
    for rows, shape in sweep.found:
        print(f"{rows} rows, {shape}: {sweep.best(rows, shape)}")
    print(f"{sweep.wrong} wrong, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
