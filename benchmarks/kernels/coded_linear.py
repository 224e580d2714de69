"""Products with weights of codes: our kernels of few rows, the weight put together and the library, and the floor.

    PYTHONPATH=src:. python benchmarks/kernels/coded_linear.py [--rows 1,2,4,8,16,32,64,128] [--shapes 6144x4096,…]
    PYTHONPATH=src:. python benchmarks/kernels/coded_linear.py --sweep --formats "fp8 by rows" --rows 1,16,64

Shapes are outputs × inputs, activations bf16. "codes" reads the codes once, "small groups" is the kernel for groups
that it does not take, "whole" puts the weight together and multiplies by the library, "rounded" and "library" round the
activations too and multiply codes, by our kernel and the library's; "bf16" is the library with a weight of 16 bits.
Figures are microseconds of a product in a captured chain over several weights, together larger than the L2 cache;
medians of replays. The floor is the weight's bytes, with scales, at 4.27 TB/s, an H200's copy rate. Each product is
compared with the weight put together in float32 first; the process ends with 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.linear_invariant import CACHE_BYTES, microseconds, random
from frame.kernels import codebook, coded_rows, nibble_rows, quantized
from frame.kernels.nibbles import Nibbles
from frame.ops import Ops
from frame.plugins.gguf.superblocks import SUPER, sizes_of
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse
from frame.plugins.platforms.cuda.products import rounded
from frame.plugins.quantization.codebook import FP4

SHAPES = "6144x4096,4096x4096,28672x4096,4096x14336"
COPY_BYTES_PER_MICROSECOND = 4.27e6
CHAIN = 50
#: Products of few rows.
FEW = ("codes", "small groups")
#: Of tables: columns of a group, and the type of scales.
TABLED = {"nf4": (64, torch.float32), "mxfp4": (32, torch.uint8), "nvfp4": (16, torch.float8_e4m3fn)}
#: Of codes without a table: their type, and columns of a group.
FP8 = torch.float8_e4m3fn
PLAIN = {"int8 by rows": (torch.int8, 0), "fp8 by rows": (FP8, 0), "fp8 by blocks": (FP8, 128),
         "int4 by 128": (torch.int32, 128), "Q8_0": (torch.int8, 32), "Q4_0": (torch.int32, 32)}  # fmt: skip
#: Sizes that `--sweep` tries: of one row, and of more.
ONE_ROW = [(block, pieces, warps) for block in (1, 2, 4, 8) for pieces in (32, 64, 128) for warps in (1, 2, 4)]
MORE_ROWS = [
    (outputs, depth, stages, splits)
    for outputs in (64, 128) for depth in (64, 128, 256) for stages in (3, 4, 5) for splits in (1, 2, 4, 8)
]  # fmt: skip
Product = Callable[[Tensor], Tensor]


def nibbles(kind: str, outputs: int, depth: int) -> Nibbles:
    """A made-up weight."""
    words = partial(torch.randint, -(2**31), 2**31, dtype=torch.int32, device="cuda")
    if kind in TABLED:
        group, dtype = TABLED[kind]
        size = outputs, depth // group
        exponents = torch.randint(118, 124, size, dtype=torch.uint8, device="cuda")
        scales = exponents if dtype == torch.uint8 else (torch.rand(size, device="cuda") / 32).to(dtype)
        return Nibbles(words((outputs, depth // 8)), scales, torch.tensor(FP4, device="cuda"))
    found = {}
    for name, (size, dtype) in sizes_of(kind, depth).items():
        if dtype == torch.int32:
            found[name] = words((outputs, *size))
        elif dtype == torch.float16:
            found[name] = (torch.rand(outputs, *size, device="cuda") / 256).half()
        else:
            found[name] = torch.randint(0, 63, (outputs, *size), dtype=dtype, device="cuda")
    return Nibbles(found.pop("low"), found.pop("scales"), zero=SUPER[kind].zero, **found)


def plain_weight(kind: str, outputs: int, depth: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """(codes, scales, block) of a made-up weight without a table."""
    dtype, group = PLAIN[kind]
    block = (128 if kind == "fp8 by blocks" else 1, group or depth)
    if dtype == FP8:
        codes = (torch.randn(outputs, depth, device="cuda") * 60).to(FP8)
    else:
        high, columns = (2**31, depth // 8) if dtype == torch.int32 else (128, depth)
        codes = torch.randint(-high, high, (outputs, columns), dtype=dtype, device="cuda")
    scales = torch.rand(-(-outputs // block[0]), depth // block[1], device="cuda") / 256
    return codes, scales if dtype == FP8 or kind == "int8 by rows" else scales.half(), block


def ways(kind: str, outputs: int, depth: int) -> tuple[int, Tensor, dict[str, Product]]:
    """(bytes of a made-up weight, its values in float32, what multiplies by it)."""
    if kind in PLAIN:
        codes, scales, block = given = plain_weight(kind, outputs, depth)
        whole = partial(quantized.dequantize, *given, None)
        made: dict[str, Product] = {}
        made["small groups"] = lambda x: quantized.few_rows(x, *given, None, None)
        if all(coded_rows.fits(codes, scales, block, rows) for rows in (1, 2)):
            made["codes"] = lambda x: coded_rows.product(x, *given, None, None)
        if codes.dtype == FP8:
            made["rounded"] = lambda x: quantized.rounded_product(x, *given)
        if rounded.library_takes(random(1, depth), *given):
            made["library"] = lambda x: rounded.library_product(x, codes, scales)
        size = codes.nbytes + scales.nbytes
    else:
        weight = nibbles(kind, outputs, depth)
        whole = partial(codebook.dequantize, weight)
        made = {"codes": lambda x: nibble_rows.product(x, weight)}
        size = sum(tensor.nbytes for tensor in weight.pointers if tensor is not None)
    return size, whole(torch.float32), {**made, "whole": lambda x: Ops.linear(x, whole(x.dtype))}


def swept(count: int, block: tuple[int, int], depth: int) -> list[tuple[int, ...]]:
    """The sizes that `--sweep` tries for a product of `count` rows."""
    if count == 1:
        return list(ONE_ROW)
    return [sizes for sizes in MORE_ROWS if block[1] % sizes[1] == 0 and depth // sizes[1] >= sizes[3]]


def sweep(kind: str, outputs: int, depth: int, rows: list[int]) -> None:
    """Prints the best sizes of the kernel of plain codes for each number of rows."""
    weights = [plain_weight(kind, outputs, depth)]

    def launch_all() -> None:
        for count in rows:
            for sizes in swept(count, weights[0][2], depth):
                coded_rows.product(random(count, depth), *weights[0], None, None, sizes)

    rehearse(launch_all)
    weights += [plain_weight(kind, outputs, depth) for _ in range(CACHE_BYTES // weights[0][0].nbytes)]
    for count in rows:
        x, times = random(count, depth), []
        for sizes in swept(count, weights[0][2], depth):
            calls = [partial(coded_rows.product, x, *weight, None, None, sizes) for weight in weights]
            with suppress(OutOfResources):
                times.append((microseconds(calls * -(-CHAIN // len(calls)), 3), sizes))
        best = ", ".join(f"{sizes} {time:.1f}" for time, sizes in sorted(times)[:4])
        print(f"{kind}, {outputs} x {depth}, {count} rows: {best}", flush=True)


def measure(kind: str, outputs: int, depth: int, rows: list[int]) -> bool:
    """Prints the times of a format and a shape; whether all were right."""
    first = ways(kind, outputs, depth)
    several = [first, *(ways(kind, outputs, depth) for _ in range(CACHE_BYTES // first[0]))]
    plain = [random(outputs, depth) for _ in range(-(-CACHE_BYTES // (2 * outputs * depth)))]
    print(f"{kind}, {outputs} x {depth}: floor {first[0] / COPY_BYTES_PER_MICROSECOND:.1f} us", flush=True)
    right = True
    for count in rows:
        x, told = random(count, depth), []
        for name in first[2]:
            if name in FEW and count > nibble_rows.FEW_ROWS:
                continue
            allowed = 5e-2 if name in ("rounded", "library") else 1e-2
            expected = x.float() @ first[1].t()
            error = float((first[2][name](x).float() - expected).norm() / expected.norm())
            right &= error < allowed
            calls = [partial(made[name], x) for _, _, made in several]
            told.append(f"{name} {microseconds(calls * -(-CHAIN // len(calls))):.1f}{' WRONG' * (error >= allowed)}")
        calls = [partial(Ops.linear, x, weight) for weight in plain]
        told.append(f"bf16 {microseconds(calls * -(-CHAIN // len(calls))):.1f}")
        print(f"{count:5} rows: " + ", ".join(told), flush=True)
    return right


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--formats", default=",".join([*TABLED, *SUPER, *PLAIN]))
    parser.add_argument("--sweep", action="store_true", help="Try other sizes of the kernel of plain codes.")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in options.shapes.split(",")]
    cases = [(kind, *shape) for kind in options.formats.split(",") for shape in shapes]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16", flush=True)

    def launch_all() -> None:
        for kind, outputs, depth in cases:
            made = ways(kind, outputs, depth)[2]
            for count in rows:
                for name, product in made.items():
                    if name not in FEW or count <= nibble_rows.FEW_ROWS:
                        product(random(count, depth))

    if options.sweep:
        for kind, outputs, depth in cases:
            sweep(kind, outputs, depth, rows)
        return
    rehearse(launch_all)
    right = [measure(kind, outputs, depth, rows) for kind, outputs, depth in cases]
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
