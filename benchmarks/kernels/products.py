"""Every product that a step may choose between, over the layers of six families and 1 to 8,192 rows, on a GPU.

    PYTHONPATH=src:. python benchmarks/kernels/products.py [--rows 1,2,…] [--families llama-8b,…] [--json FILE]

Figures are microseconds of a product in a captured chain over several weights, together larger than the L2 cache, in
bfloat16: medians of replays. Candidates are those of `frame.plugins.platforms.cuda.products`; of gated products the
library's have the gate after them. What steps choose, after the measurement that a start makes, is marked by a star;
the lines at the end give for each family how long that measurement took and how much longer the worst choice takes
than the best candidate. Rows are those that a start measures, and some between. Each product is compared with the
library's first; the process ends with 1 where one differs, and after `--seconds` in any case. An empty
TRITON_CACHE_DIR has everything measured anew.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.linear_invariant import CACHE_BYTES, microseconds
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse
from frame.plugins.platforms.cuda.products.candidates import Shape, candidates
from frame.plugins.platforms.cuda.products.choice import Products


@dataclass(frozen=True)
class Family:
    """Sizes of a decoder layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    def products(self) -> Iterator[tuple[str, int, int, bool]]:
        """(name, outputs, inputs, gated) of the layer's four products."""
        yield "query, key, value", (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden, False
        yield "attention output", self.hidden, self.heads * self.head_dim, False
        yield "gate and up", 2 * self.inner, self.hidden, True
        yield "down", self.hidden, self.inner, False


FAMILIES = {
    "gemma3-1b": Family(1152, 4, 1, 256, 6912),
    "llama3.2-1b": Family(2048, 32, 8, 64, 8192),
    "llama-8b": Family(4096, 32, 8, 128, 14336),
    "glm4-9b": Family(4096, 32, 2, 128, 13696),
    "qwen3-14b": Family(5120, 40, 8, 128, 17408),
    "llama-70b": Family(8192, 64, 8, 128, 28672),
}
ROWS = (
    "1,2,3,4,6,8,12,16,24,32,40,48,64,96,112,128,150,160,192,256,300,320,384,448,512,700,768,1024,1300,2048,4096,8192"
)
#: Numbers of the memory that all weights are cut from.
POOL = 1 << 30
#: Calls in a captured chain, or more where the weights are small.
CHAIN = 4


def weights_of(pool: Tensor, outputs: int, inputs: int) -> list[Tensor]:
    """As many as the L2 cache does not hold."""
    size = outputs * inputs
    count = min(max(CHAIN, -(-CACHE_BYTES // (2 * size))), len(pool) // size)
    return [pool[at * size : (at + 1) * size].view(outputs, inputs) for at in range(count)]


def measure(x: Tensor, weights: list[Tensor], shape: Shape) -> dict[str, float]:
    """Microseconds by candidate; NaN for one whose result differs from the library's."""
    times: dict[str, float] = {}
    wanted: Tensor | None = None
    for name, call in candidates(len(x), shape, x.device).items():
        result = call(x, weights[0], None).float()
        wanted = result if wanted is None else wanted
        close = float((result - wanted).norm() / wanted.norm()) < 1e-2
        calls: list[Callable[[], Tensor]] = [partial(call, x, weight, None) for weight in weights]
        times[name] = microseconds(calls, 3) if close else float("nan")
    return times


def sweep(families: list[str], rows: list[int], pool: Tensor) -> list[dict[str, object]]:
    """All cases, printed."""
    results: list[dict[str, object]] = []
    for family in families:
        chosen, began = Products(pool.device), time.perf_counter()
        meet(chosen, family, pool)
        chosen.settle(max(rows))
        print(f"{family}: a start measures for {time.perf_counter() - began:.2f} s", flush=True)
        for layer, outputs, inputs, gated in FAMILIES[family].products():
            weights, shape = weights_of(pool, outputs, inputs), Shape(outputs, inputs, gated, torch.bfloat16)
            print(f"{family}, {layer}: {outputs} x {inputs}", flush=True)
            for count in rows:
                x = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda")
                times, name = measure(x, weights, shape), chosen.name(count, shape)
                results.append({"family": family, "layer": layer, "outputs": outputs, "inputs": inputs, "gated": gated,
                                "rows": count, "us": times, "chosen": name})  # fmt: skip
                told = ", ".join(f"{one}{'*' * (one == name)} {took:.1f}" for one, took in times.items())
                print(f"{count:5} rows: {told}", flush=True)
    return results


def meet(chosen: Products, family: str, pool: Tensor) -> None:
    """As a warm-up does: one product of each weight."""
    for _, outputs, inputs, gated in FAMILIES[family].products():
        weight = pool[: outputs * inputs].view(outputs, inputs)
        chosen.multiply(weight.new_empty(64, inputs), weight, gated=gated)


def worst(results: list[dict[str, object]]) -> Iterator[str]:
    """For each family the worst choice."""
    for family in dict.fromkeys(str(result["family"]) for result in results):
        cases = [(loss(result), result) for result in results if result["family"] == family]
        ratio, case = max(cases, key=lambda pair: pair[0])
        over = sum(ratio > 1.03 for ratio, _ in cases)
        yield (f"{family}: at most {ratio:.3f} of the best ({case['layer']}, {case['rows']} rows, {case['chosen']}); "
               f"{over} of {len(cases)} cases above 1.03")  # fmt: skip


def loss(result: dict[str, object]) -> float:
    """The time of what is chosen, in that of the best candidate."""
    times: dict[str, float] = result["us"]  # type: ignore[assignment]
    return times[str(result["chosen"])] / min(time for time in times.values() if time == time)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="after which this process ends itself")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    rows, families = [int(count) for count in options.rows.split(",")], options.families.split(",")
    began, pool = time.perf_counter(), torch.empty(POOL, dtype=torch.bfloat16, device="cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16", flush=True)
    rehearse(lambda: [meet(Products(pool.device), family, pool) for family in families])
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    results = sweep(families, rows, pool.normal_(std=0.02))
    if options.json:
        options.json.write_text(json.dumps(results))
    print("\n".join(worst(results)), f"\n{time.perf_counter() - began:.0f} s", flush=True)
    wrong = [result for result in results if any(time != time for time in result["us"].values())]  # type: ignore[attr-defined]
    print("\n".join(f"wrong: {result}" for result in wrong) or "all products agree", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
