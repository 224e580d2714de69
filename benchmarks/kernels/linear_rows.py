"""Products of 1 to 16 rows with a weight: our kernels, the library, and what reading the weight takes.

    PYTHONPATH=src:. python benchmarks/kernels/linear_rows.py [--rows 1,2,3,4,8,16] [--shapes 4096x1024,…] [--json FILE]

Shapes are outputs of the weight × inputs, in bf16: by default layers of Qwen3 0.6B, of Qwen3 30B-A3B and of Llama 8B.
Figures are microseconds of a product in a captured chain of them over several weights, together larger than the L2
cache; medians of replays. "one" is `kernels/linear.py`, for one row, "normed" `kernels/norm_linear.py`, with the norm
before it; "rows" is `kernels/linear_rows.py`, for up to 16 on Hopper, followed by its candidates (warps / steps on
their way); what ordinary steps take is marked by a star.
Weights of the shapes in `--gated` hold a gate and a factor, for which the library takes a product and our gate. The
floor is the weight's bytes at 4.27 TB/s, an H200's copy rate. Each product is compared with float32 first; the process
ends with 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.linear_invariant import CACHE_BYTES, microseconds, random
from frame.kernels import linear as one_row, linear_rows, norm, norm_linear
from frame.kernels.activation import silu_mul
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse

SHAPES = "4096x1024,1024x2048,1024x3072,5120x2048,2048x4096,128x2048,6144x4096,4096x4096,28672x4096,4096x14336"
GATED = "6144x1024,12288x2048,28672x4096"
COPY_BYTES_PER_MICROSECOND = 4.27e6
#: Products in a captured chain, or more.
CHAIN = 100
Product = Callable[[Tensor, Tensor], Tensor]


def products(rows: int, gated: bool) -> dict[str, Product]:
    """What can multiply so many rows, by name."""
    library: Product = torch.nn.functional.linear
    found: dict[str, Product] = {"library": (lambda x, w: silu_mul(library(x, w))) if gated else library}
    if rows == 1:
        found |= one_row_products(gated)
    if rows <= linear_rows.ROWS and torch.cuda.get_device_capability() == (9, 0):
        found["rows"] = partial(linear_rows.product, gated=gated)
        for tile in linear_rows.CANDIDATES if rows > 1 else ():
            found[f"{tile.warps}/{tile.stages}"] = partial(linear_rows.product, tile=tile, gated=gated)
    return found


def one_row_products(gated: bool) -> dict[str, Product]:
    """Of one row: the product, after the norm of the row added to itself, and with that norm in it."""

    def one(x: Tensor, weight: Tensor) -> Tensor:
        return one_row.linear_silu_mul(x, weight) if gated else one_row.linear(x, weight)

    def norm_and_one(x: Tensor, weight: Tensor) -> Tensor:
        return one(norm.add_rms_norm(x, x, ones(x.shape[1]), 1e-6)[0], weight)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        product = norm_linear.norm_linear_silu_mul if gated else norm_linear.norm_linear
        return product(x, x, (ones(x.shape[1]), 1e-6, 0.0), weight)[0]

    return {"one": one, "norm, one": norm_and_one, "normed": normed}


@cache
def ones(size: int) -> Tensor:
    """The weight of a norm."""
    return torch.ones(size, dtype=torch.bfloat16, device="cuda")


def chosen(x: Tensor, weight: Tensor, gated: bool) -> str:
    """The name of what ordinary steps take, of one row after a norm."""
    if len(x) == 1:
        return "normed"
    return "rows" if len(x) <= linear_rows.ROWS else "library"


def error(product: Product, x: Tensor, weight: Tensor, gated: bool) -> float:
    """Relative to float32."""
    wide = x.float() @ weight.float().t()
    if gated:
        gate, factor = wide.chunk(2, 1)
        wide = torch.nn.functional.silu(gate) * factor
    return float((product(x, weight).float() - wide).norm() / wide.norm())


def measure(shape: tuple[int, int], rows: list[int], gated: bool) -> list[dict[str, object]]:
    """Times of all products of a shape, printed."""
    outputs, inputs = shape
    size = 2 * outputs * inputs
    weights = [random(outputs, inputs) / inputs**0.5 for _ in range(-(-CACHE_BYTES // size))]
    floor = size / COPY_BYTES_PER_MICROSECOND
    print(f"{outputs} x {inputs}{', gated' * gated}: floor {floor:.1f} us", flush=True)
    results: list[dict[str, object]] = []
    for count in rows:
        x, told = norm.rms_norm(random(count, inputs), ones(inputs), 1e-6), []  # so that a norm changes nothing
        taken = chosen(x, weights[0], gated)
        for name, product in products(count, gated).items():
            wrong = error(product, x, weights[0], gated)
            calls = [partial(product, x, weight) for weight in weights]
            time = microseconds(calls * -(-CHAIN // len(calls)))
            told.append(f"{name}{'*' * (name == taken)} {time:.1f}")
            results.append({"outputs": outputs, "inputs": inputs, "gated": gated, "rows": count, "name": name,
                            "us": time, "error": wrong, "floor_us": floor, "chosen": name == taken})  # fmt: skip
        print(f"{count:5} rows: " + ", ".join(told), flush=True)
    return results


def shapes_of(text: str) -> list[tuple[int, int]]:
    """Of "4096x1024,…"."""
    pairs = [word.split("x") for word in text.split(",") if word]
    return [(int(outputs), int(inputs)) for outputs, inputs in pairs]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,2,3,4,8,16")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--gated", default=GATED)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    cases = [(shape, False) for shape in shapes_of(options.shapes)]
    cases += [(shape, True) for shape in shapes_of(options.gated)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16", flush=True)

    def launch_all() -> None:
        for shape, gated in cases:
            for count in rows:
                for product in products(count, gated).values():
                    product(random(count, shape[1]), random(*shape))

    rehearse(launch_all)
    results = [result for shape, gated in cases for result in measure(shape, rows, gated)]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    wrong = [result for result in results if not float(str(result["error"])) < 1e-2]
    print("\n".join(f"wrong: {result}" for result in wrong) or "all products are right", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
