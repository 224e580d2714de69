"""The batch-invariant product on a GPU: right, the same in every tile, and how fast against the library's.

    python benchmarks/kernels/linear_invariant.py [--rows 64,128,256,512,2048,8192] [--layers 0,1,2,3,4] [--tune]

The layers are those of an 8B model (Llama 3.1 8B), in bf16. What is launched is compiled first, each kernel in a
process of its own. Then the products are compared with float32 and, bit by bit, with each other. Then come medians of
CUDA graph replays over several weights, together larger than the L2 cache, in TFLOP/s: of the library, of the kernel in
Triton, of the tile chosen in Gluon and of all candidates (outputs of a tile / stages / parts / group), and of the gated
product in one kernel and in two. `--tune` measures every tile in Triton instead and names the fastest; the tables that
launches read are in `kernels/linear_invariant.py` and `kernels/linear_hopper.py`. The process ends itself after
`--seconds`, since a kernel that waits for ever cannot be interrupted. It ends with 1 where a product is wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from frame.kernels import linear_hopper
from frame.kernels.activation import silu_mul
from frame.kernels.linear_hopper import HopperTile
from frame.kernels.linear_invariant import CANDIDATES, Tile, linear_invariant, tiled_product
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse

#: name → (outputs, inputs)
LAYERS = {
    "query, key, value": (6144, 4096),
    "attention output": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
GATED = "gate and up"
CACHE_BYTES = 120 << 20
Product = Callable[..., Tensor]


def products(gated: bool) -> dict[str, Product]:
    """What is measured, by name; the first is what the others' bits are compared with."""
    found: dict[str, Product] = {"Triton": tiled_product}
    if torch.cuda.get_device_capability() == (9, 0):
        found["chosen"] = linear_hopper.product
        for tile in linear_hopper.CANDIDATES:
            found[label(tile)] = partial(linear_hopper.product, tile=tile)
    if gated:
        fused = {name: partial(call, gated=True) for name, call in found.items() if fits_gate(name)}
        found = {"Triton": lambda x, w: silu_mul(tiled_product(x, w)), **fused}
    return found


def label(tile: HopperTile) -> str:
    """Outputs, stages, parts and groups of a candidate."""
    return f"{tile.block_n}/{tile.stages}/{tile.parts}/{tile.group}"


def fits_gate(name: str) -> bool:
    """Whether that product can be gated in one kernel."""
    return name == "chosen" or (name != "Triton" and not name.startswith("64/"))


def microseconds(calls: Sequence[Callable[[], Tensor]], repeats: int = 5) -> float:
    """Median time of one call, replayed from a graph that holds all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times)) * 1e3 / len(calls)


def weights_of(outputs: int, depth: int) -> list[Tensor]:
    """As many as the cache does not hold."""
    count = max(1, min(8, -(-CACHE_BYTES // (2 * outputs * depth))))
    return [random(outputs, depth) / depth**0.5 for _ in range(count)]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def launch_all(rows: list[int]) -> None:
    """Everything that is measured, once."""
    for outputs, depth in LAYERS.values():
        weight = torch.empty(outputs, depth, dtype=torch.bfloat16, device="cuda")
        for count in {1, *rows}:
            x = torch.empty(count, depth, dtype=torch.bfloat16, device="cuda")
            linear_invariant(x, weight)
            tiled_product(x, weight)
    x = torch.empty(max(rows), depth, dtype=torch.bfloat16, device="cuda")
    for gated in (False, True):
        for product in products(gated).values():
            product(x, weight)


def faults() -> list[str]:
    """Which products are wrong, or have other bits than the first one."""
    found = []
    for rows, outputs, depth in ((64, 6144, 4096), (300, 1000, 520), (1100, 4096, 14336), (8192, 28672, 4096)):
        shape = f"{rows} x {outputs} x {depth}"
        x, weight = random(rows, depth), random(outputs, depth) / depth**0.5
        wide = x.float() @ weight.float().t()
        first = tiled_product(x, weight)
        wrong = float((first.float() - wide).norm() / wide.norm())
        del wide
        if not wrong < 1e-2:
            found.append(f"relative error {wrong} of {shape}")
        if not torch.equal(linear_invariant(x[:7], weight), first[:7]):
            found.append(f"7 rows have other bits than {shape}")
        for gated in (False, True) if outputs % 16 == 0 else (False,):
            expected = silu_mul(first) if gated else first
            for name, product in products(gated).items():
                different = product(x, weight).float() - expected.float()
                if count := int((different != 0).sum()):
                    most = float(different.abs().max())
                    found.append(f"{count} of {expected.numel()} outputs of {name} of {shape}, {gated=}, by {most}")
    return found


def measure(name: str, rows: int, weights: list[Tensor], gated: bool) -> None:
    """Rates of all products of a layer, printed."""
    outputs, depth = weights[0].shape
    x, work = random(rows, depth), 2e-6 * rows * outputs * depth
    library: Product = torch.nn.functional.linear
    rates: dict[str, float] = {}
    theirs: Product = (lambda x, w: silu_mul(library(x, w))) if gated else library
    every: dict[str, Product] = {"library": theirs, **products(gated)}
    for called, product in every.items():
        rates[called] = work / microseconds([partial(product, x, weight) for weight in weights])
    best = max((called for called in rates if called != "library"), key=lambda called: rates[called])
    told = "  ".join(f"{called} {rate:5.0f}" for called, rate in rates.items())
    extra = f" (tile {label(linear_hopper.tile_for(rows, outputs, processors(), 128 if gated else 64))})"
    print(f"{name + ', gated' * gated:19} {rows:5} rows: {told}; best {best},", end=" ")
    print(f"{rates[best] / rates['library']:4.0%} of the library{extra if 'chosen' in rates else ''}", flush=True)


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def tune(name: str, rows: int, weights: list[Tensor]) -> None:
    """The fastest tile in Triton, printed."""
    found: list[tuple[float, Tile]] = []
    x = random(rows, weights[0].shape[1])
    for tile in CANDIDATES:
        if tile.block_m <= max(64, 2 * rows):
            try:
                calls = [partial(tiled_product, x, weight, tile=tile) for weight in weights]
                found.append((microseconds(calls, 3), tile))
            except OutOfResources:
                continue
    best, tile = min(found, key=lambda pair: pair[0])
    print(f"{name:18} {rows:5} rows: {best:8.1f} us: {tile}", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", default="64,128,256,512,2048,8192")
    parser.add_argument("--layers", default="0,1,2,3,4", help="numbers of the layers, of " + ", ".join(LAYERS))
    parser.add_argument("--tune", action="store_true", help="measure all tiles in Triton instead")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which this process ends itself")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    rows, began = [int(count) for count in options.rows.split(",")], time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, TFLOP/s", flush=True)
    wrong: list[str] = []
    if not options.tune:
        rehearse(partial(launch_all, rows))
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
        wrong = faults()
        print("\n".join(wrong) or "all products are right and have the same bits", flush=True)
    names = list(LAYERS)
    for name in (names[int(number)] for number in options.layers.split(",")):
        weights = weights_of(*LAYERS[name])
        for count in rows:
            if count > 512 and name == "head":  # a step's logits have a row a request
                continue
            if options.tune:
                tune(name, count, weights)
                continue
            measure(name, count, weights, False)
            if name == GATED:
                measure(name, count, weights, True)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
