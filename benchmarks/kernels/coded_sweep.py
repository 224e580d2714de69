"""Finds the quickest kernel of few rows and codes for shapes and numbers of rows: the table of `kernels/coded_choice`.

    PYTHONPATH=src:. python benchmarks/kernels/coded_sweep.py [--seconds 175] [--json coded_sweep.json]

Shapes are outputs × inputs, x is bf16, int4 has groups of 128 columns (fp8 scales of rows). Kernels of a stage (a
format and a number of rows) are compiled in processes of their own, then each candidate is compared with the product of
the weight in float32 and timed: in a replayed graph over several weights, together larger than the L2 cache. "now" is
what `frame.kernels` did before, "bf16" the library with a weight of 16 bits; the floor is the codes and scales at 4.27
TB/s. What is wrong is marked and never chosen. Other groups, zeros, float16 and odd sizes are compared at the end, not
timed. Results are written after each shape. The process ends itself after `--seconds`, and at SIGINT after the launch
under way, with the table of all that was measured; it ends with 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from frame.core.ops import quantized as references
from frame.kernels import coded_choice, coded_rows, quantized
from frame.kernels.coded_choice import Sizes
from frame.kernels.coded_fragments import Fragments, bucket
from frame.kernels.coded_warpgroups import Warpgroups

SHAPES = "6144x4096,4096x4096,28672x4096,4096x14336,1000x2816,3352x5504"
STAGES = "int4:1,int4:16,int4:64,fp8:1,fp8:16,fp8:64,int4:4,int4:32,fp8:4,fp8:32"
COPY_BYTES_PER_MICROSECOND = 4.27e6
CACHE_BYTES = 120 << 20
CHAIN = 24
MULTIPROCESSORS = 132
FP8 = torch.float8_e4m3fn
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
#: By rows of a program: (tiles, warps across, warps of other inputs, chunks on their way, programs).
FEW = [
    (1, 1, 4, 1), (1, 1, 4, 2), (1, 1, 4, 4), (1, 1, 8, 1), (1, 1, 8, 2), (1, 1, 8, 4), (1, 1, 16, 1), (1, 1, 16, 2),
    (1, 2, 4, 1), (1, 2, 4, 2), (1, 2, 8, 1), (1, 2, 8, 2), (2, 1, 4, 1), (2, 1, 4, 2), (2, 1, 8, 1), (2, 1, 8, 2),
    (1, 4, 4, 2), (1, 1, 2, 4), (4, 1, 4, 1), (4, 1, 8, 1), (1, 1, 4, 2, 6), (1, 1, 4, 4, 4), (1, 1, 8, 2, 3),
    (2, 1, 4, 1, 6), (2, 1, 4, 2, 4),
]  # fmt: skip
SOME = [
    (1, 1, 4, 1), (1, 1, 8, 1), (1, 1, 8, 2), (1, 2, 4, 1), (1, 2, 4, 2), (1, 2, 8, 1), (1, 4, 2, 2), (1, 4, 4, 1),
    (2, 1, 4, 1), (2, 1, 8, 1), (2, 2, 4, 1), (2, 4, 2, 1), (1, 1, 16, 1), (1, 1, 4, 2, 5), (2, 1, 4, 1, 4),
    (1, 2, 4, 2, 2),
]  # fmt: skip
MORE = [
    (1, 1, 4, 1), (1, 1, 8, 1), (1, 2, 4, 1), (1, 2, 4, 2), (1, 2, 8, 1), (1, 4, 1, 2), (1, 4, 2, 1), (1, 4, 2, 2),
    (1, 4, 4, 1), (1, 8, 1, 2), (1, 8, 2, 1), (2, 2, 2, 1), (2, 4, 1, 1), (2, 4, 2, 1),
]  # fmt: skip
MOST = [(1, 1, 4, 1), (1, 1, 8, 1), (1, 2, 2, 1), (1, 2, 4, 1), (1, 4, 1, 1), (1, 4, 2, 1), (1, 8, 1, 1), (2, 4, 2, 1)]
CANDIDATES = {8: FEW, 16: SOME, 32: MORE, 64: MOST}
#: By rows of a program: (warps, chunks on their way, words of a load, registers) of the other kernel.
SHARED = {
    8: [],
    16: [(4, 2, 4), (8, 1, 4), (8, 2, 4)],
    32: [(4, 1, 4), (8, 1, 4), (8, 2, 4), (8, 4, 2)],
    64: [(4, 1, 4), (4, 4, 2), (8, 1, 4, 128), (8, 2, 4), (8, 2, 2, 128), (8, 4, 2), (16, 1, 4), (16, 2, 2)],
}
#: Compared at the end: format, columns of a group (0: all), zeros, type of x, outputs, inputs.
OTHERS = [
    ("int4", 32, False, torch.bfloat16, 77, 1184), ("int4", 64, True, torch.float16, 4104, 1088),
    ("int4", 0, True, torch.bfloat16, 200, 4128), ("int4", 128, True, torch.bfloat16, 4096, 4096),
    ("int4", 128, True, torch.float16, 77, 2176), ("int4", 256, False, torch.float16, 1000, 2816),
    ("fp8", 64, False, torch.float16, 333, 1088), ("fp8", 128, False, torch.bfloat16, 333, 2176),
    ("fp8", 0, False, torch.float16, 4096, 4128),
]  # fmt: skip
Weight = tuple[Tensor, Tensor, tuple[int, int], Tensor | None]


class Ended(Exception):
    """The time is over, or the process was told to end."""


class Broken(Exception):
    """The device serves this process no more, because of the sizes that are named."""


def made(kind: str, group: int, zeros: bool, outputs: int, depth: int) -> Weight:
    """A made-up weight: codes, scales, block, zeros."""
    groups = depth // group if group else 1
    if kind == "int4":
        codes = torch.randint(-(2**31), 2**31 - 1, (outputs, depth // 8), dtype=torch.int32, device=DEVICE)
        scales = (torch.rand(outputs, groups, device=DEVICE) / 64 + 0.01).half()
    else:
        codes = torch.randint(0, 256, (outputs, depth), dtype=torch.uint8, device=DEVICE)
        codes = torch.where((codes & 127) == 127, codes - 1, codes).view(FP8)
        scales = torch.rand(outputs, groups, device=DEVICE) / 256 + 0.001
    zero = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8, device=DEVICE) if zeros else None
    return codes, scales, (1, group or depth), zero


def exact(weight: Weight) -> Tensor:
    """Its values in float32."""
    codes, scales, block, zeros = weight
    if not INTERPRETED:
        return quantized.dequantize(codes, scales, block, zeros, torch.float32)
    if codes.dtype == torch.int32:
        return references.dequantize_packed(codes, scales, zeros)
    return references.dequantize(codes, scales, block, zeros)


def error(found: Tensor, expected: Tensor) -> float:
    """How far a product is from the one in float32; not a number where it holds some."""
    return float((found.float() - expected).norm() / expected.norm())


def now(x: Tensor, weight: Weight) -> Tensor:
    """What was launched before."""
    codes, scales, block, zeros = weight
    if codes.dtype == FP8 and len(x) > 16:
        from frame.plugins.platforms.cuda.products import rounded

        return rounded.product(x, codes, scales, block)
    known = coded_rows.fits(codes, scales, block, len(x))
    return (coded_rows.product if known else quantized.few_rows)(x, codes, scales, block, zeros, None)


def candidates(kind: str, rows: int, outputs: int, depth: int) -> list[Sizes]:
    """What is tried: no more chunks at once than there are, nor many more programs than the chip holds."""
    chunks = depth // (128 if kind == "int4" else 64)
    found: list[Sizes] = []
    for given in CANDIDATES[bucket(rows)]:
        sizes = Fragments(*given)
        tiles = -(-outputs // (16 * sizes.tiles * sizes.across))
        if sizes.parts * sizes.ring <= 2 * chunks and tiles > sizes.programs * MULTIPROCESSORS:
            found.append(sizes)
    for warps, ring, wide, *most in SHARED[bucket(rows)]:
        too_many = wide == 4 and (warps == 16 or bool(most))  # registers, of nibbles
        if too_many if kind == "int4" else wide == 2:
            continue
        tiles = -(-outputs // (16 * warps))
        for splits in (1, 2, 4, 8):
            if splits <= chunks // 2 and (splits == 1 or tiles * splits * warps <= MULTIPROCESSORS * 24):
                found.append(Warpgroups(warps, splits, ring, wide, *most))
    return found


def told(sizes: Sizes) -> str:
    """The sizes as Python writes them."""
    return f"{type(sizes).__name__}{astuple(sizes)}"


def compile_all(launch: Callable[[], Any]) -> None:
    """Compiles what `launch` launches, side by side."""
    if not INTERPRETED:
        from frame.plugins.platforms.cuda.compile.rehearsal import rehearse

        rehearse(launch)


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """The median time of one call."""
    if INTERPRETED:
        return 1.0
    from benchmarks.kernels.linear_invariant import microseconds as replayed

    return replayed(calls, 5)


class Sweep:
    """The results so far, and when to end."""

    def __init__(self, seconds: float, path: Path, without: list[str]) -> None:
        self.begin, self.end, self.path = time.monotonic(), time.monotonic() + seconds, path
        self.results: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.told, self.without = False, without
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._tell)

    def _tell(self, *_: object) -> None:
        self.told = True

    def check_time(self) -> None:
        """Raises where it is over."""
        if self.told or time.monotonic() > self.end:
            raise Ended

    def log(self, text: str) -> None:
        """A line with the seconds since the begin."""
        print(f"[{time.monotonic() - self.begin:5.1f}] {text}", flush=True)

    def save(self) -> None:
        """Writes the results."""
        self.path.write_text(json.dumps({"results": self.results, "wrong": self.wrong}, indent=1))

    def resume(self) -> None:
        """Goes on from the results that were written."""
        found = json.loads(self.path.read_text())
        self.results, self.wrong = found["results"], found["wrong"]

    def stage(self, kind: str, rows: int, shapes: list[tuple[int, int]]) -> None:
        """Compiles, compares and times one format and number of rows."""

        def launch_all() -> None:
            for outputs, depth in shapes:
                weight, x = made(kind, 128 if kind == "int4" else 0, False, outputs, depth), x_of(rows, depth)
                now(x, weight)
                for sizes in self.tried(kind, rows, outputs, depth):
                    coded_choice.product(x, *weight, None, sizes)

        compile_all(launch_all)
        self.log(f"{kind}, {rows} rows: compiled")
        for outputs, depth in shapes:
            self.check_time()
            result: dict[str, Any] = {"kind": kind, "rows": rows, "outputs": outputs, "depth": depth, "times": []}
            self.results.append(result)
            try:
                self.shape(result)
            finally:
                best = sorted(result["times"])[:3]
                names = ", ".join(f"{sizes} {took:.1f}" for took, sizes in best)
                self.log(
                    f"{kind}, {outputs} x {depth}, {rows} rows: floor {result.get('floor', 0):.1f}, now "
                    f"{result.get('now', 0):.1f}, bf16 {result.get('bf16', 0):.1f} us; {names}"
                )
                self.save()

    def tried(self, kind: str, rows: int, outputs: int, depth: int) -> list[Sizes]:
        """The candidates that broke no device."""
        return [sizes for sizes in candidates(kind, rows, outputs, depth) if told(sizes) not in self.without]

    def shape(self, result: dict[str, Any]) -> None:
        """Fills the result of one shape."""
        kind, rows, outputs, depth = (result[name] for name in ("kind", "rows", "outputs", "depth"))
        weights = [made(kind, 128 if kind == "int4" else 0, False, outputs, depth)]
        size = weights[0][0].nbytes + weights[0][1].nbytes
        result["floor"] = size / COPY_BYTES_PER_MICROSECOND
        if not INTERPRETED:
            weights += [made(kind, 128 if kind == "int4" else 0, False, outputs, depth)
                        for _ in range(min(48, CACHE_BYTES // size))]  # fmt: skip
        x = x_of(rows, depth)
        expected = x.float() @ exact(weights[0]).T

        def timed(product: Callable[[Tensor, Any], Tensor], several: list[Any]) -> float:
            calls = [partial(product, x, weight) for weight in several]
            return microseconds(calls * max(1, -(-CHAIN // len(calls))))

        result["now"] = timed(now, weights)
        if not INTERPRETED:
            plain = [
                exact(weight).to(x.dtype) for weight in weights[: max(1, -(-CACHE_BYTES // (2 * outputs * depth)))]
            ]
            result["bf16"] = timed(torch.nn.functional.linear, plain)
            del plain
        for sizes in self.tried(kind, rows, outputs, depth):
            self.check_time()
            given = told(sizes)
            try:
                product = partial(multiply, sizes)
                off = error(product(x, weights[0]), expected)
                if not off < 1e-2:
                    self.wrong.append(f"{kind}, {outputs} x {depth}, {rows} rows, {given}: {off:.3g}")
                    self.log("WRONG " + self.wrong[-1])
                    continue
                result["times"].append((timed(product, weights), given))
            except (RuntimeError, TritonError) as failure:  # too little of something for one candidate
                self.wrong.append(f"{kind}, {outputs} x {depth}, {rows} rows, {given}: {str(failure)[:200]}")
                self.log("FAILED " + self.wrong[-1])
                if not works():
                    raise Broken(given) from failure

    def others(self) -> None:
        """Compares what is not timed."""
        for rows in (1, 5, 16, 31, 64):
            sizes: list[Sizes] = [Fragments(*given) for given in CANDIDATES[bucket(rows)][:6]]
            sizes += [Warpgroups(warps, 2, *more) for warps, *more in SHARED[bucket(rows)]]

            def launch_all(rows: int = rows, sizes: list[Sizes] = sizes) -> None:
                for index, (kind, group, zeros, dtype, outputs, depth) in enumerate(OTHERS):
                    weight = made(kind, group, zeros, outputs, depth)
                    coded_choice.product(x_of(rows, depth, dtype), *weight, None, sizes[index % len(sizes)])

            compile_all(launch_all)
            for index, (kind, group, zeros, dtype, outputs, depth) in enumerate(OTHERS):
                self.check_time()
                weight, x = made(kind, group, zeros, outputs, depth), x_of(rows, depth, dtype)
                expected = x.float() @ exact(weight).T
                off = error(coded_choice.product(x, *weight, None, sizes[index % len(sizes)]), expected)
                name = f"{kind} by {group}, zeros {zeros}, {dtype}, {outputs} x {depth}, {rows} rows"
                if not off < 1e-2:
                    self.wrong.append(f"{name}, {sizes[index % len(sizes)]}: {off:.3g}")
                    self.log("WRONG " + self.wrong[-1])
            self.log(f"others, {rows} rows: compared")

    def table(self) -> Iterator[str]:
        """The lines of `MEASURED` in the kernel's module."""
        found: dict[tuple[bool, int], dict[tuple[int, int], str | None]] = {}
        for result in self.results:
            if result["times"]:
                took, sizes = min(result["times"])
                key, shape = (result["kind"] == "int4", bucket(result["rows"])), (result["outputs"], result["depth"])
                found.setdefault(key, {}).setdefault(shape, sizes if took < result["now"] else None)  # one row's, not 4
        yield "MEASURED: dict[tuple[bool, int], dict[tuple[int, int], Sizes | None]] = {"
        for key, by_shape in found.items():
            yield f"    {key}: {{"
            yield from (f"        {shape}: {sizes}," for shape, sizes in by_shape.items())
            yield "    },"
        yield "}"


def works() -> bool:
    """Whether the device still serves this process."""
    try:
        if not INTERPRETED:
            torch.zeros(1, device=DEVICE).add_(1).item()
    except RuntimeError:
        return False
    return True


def multiply(sizes: Sizes, x: Tensor, weight: Weight) -> Tensor:
    """By one candidate."""
    return coded_choice.product(x, *weight, None, sizes)


def x_of(rows: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Made-up rows."""
    return torch.randn(rows, depth, device=DEVICE).to(dtype)


def main() -> None:
    """Sweeps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--stages", default=STAGES, help="Formats and rows, in this order.")
    parser.add_argument("--seconds", type=float, default=175.0)
    parser.add_argument("--json", type=Path, default=Path("coded_sweep.json"))
    parser.add_argument("--only-compare", action="store_true", help="Leave out what is timed.")
    parser.add_argument("--without", default="", help="Sizes to leave out, divided by semicolons.")
    parser.add_argument("--resume", action="store_true", help="Go on from what is in the file.")
    options = parser.parse_args()
    shapes = [(int(outputs), int(depth)) for outputs, depth in (one.split("x") for one in options.shapes.split(","))]
    sweep = Sweep(options.seconds, options.json, [one for one in options.without.split(";") if one])
    if options.resume:
        sweep.resume()
    if not INTERPRETED:
        sweep.log(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    stages = [] if options.only_compare else options.stages.split(",")
    try:
        while stages:
            kind, rows = stages[0].split(":")
            sweep.stage(kind, int(rows), shapes)
            del stages[0]
        sweep.others()
    except Broken as broken:  # a new process goes on with this stage, without those sizes
        sweep.results = [one for one in sweep.results if f"{one['kind']}:{one['rows']}" != stages[0]]
        sweep.save()
        left = [f"--stages={','.join(stages)}", f"--seconds={sweep.end - time.monotonic():.0f}", "--resume"]
        left += [f"--without={';'.join([*sweep.without, str(broken)])}", f"--json={options.json}"]
        command = [sys.executable, *sys.argv[:1], *left, f"--shapes={options.shapes}"]
        os.execv(sys.executable, command)  # noqa: S606
    except (Ended, KeyboardInterrupt):
        sweep.log("ended early")
    finally:
        sweep.save()
        print("\n".join(sweep.table()), flush=True)
        print(f"{len(sweep.wrong)} wrong" + "".join(f"\n  {one}" for one in sweep.wrong), flush=True)
    sys.exit(bool(sweep.wrong))


if __name__ == "__main__":
    main()
