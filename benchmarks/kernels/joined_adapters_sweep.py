"""Finds the sizes of `joined_adapters`, and says whether one product for weight and A is worth it, for Llama 8B.

    PYTHONPATH=src:. python benchmarks/kernels/joined_adapters_sweep.py [--rows 64,8192] [--seconds 55] [--json FILE]

8 slots of rank 16, which tokens take in turn, or prompts of 512 tokens where there are more than 256. Each of the four
products of a layer is timed with what follows it (gate and up are gated), in a replayed graph over the weights of
several layers: "alone" without adapters, "now" with `add_adapters`, and with A behind the weight by each size. Times
are microseconds more than "alone". Each result is compared with the reference first.

What it decides: `SIZES` of `frame.kernels.joined_adapters`, and whether `shared_products` of the plugin `lora` is on by
default, which it is while the sum of a layer is less than "now" with every number of rows. The last line says what the
sums come to for 64 requests of 512 tokens that answer with 256: 32 layers x (256 x a layer of 64 rows + 4 x a layer of
8,192 rows).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.linear_invariant import microseconds
from frame.core.ops import adapters as reference
from frame.kernels import adapters
from frame.kernels.activation import silu_mul
from frame.kernels.joined_adapters import Sizes, add_joined_adapters
from frame.kernels.linear_invariant import hopper_product
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse

#: By name: inputs, outputs of each part; the halves of the third are gated.
LAYERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336)), "down": (14336, (4096,))
}  # fmt: skip
RANK, SLOTS, BF16, PROMPT = 16, 8, torch.bfloat16, 512


def sizes_of(rows: int) -> list[Sizes]:
    """What is tried with so many rows."""
    if rows > 256:
        many = itertools.product((64, 128), (64, 128), (16,), (4, 8), (False,))
        return [one for one in map(Sizes._make, many) if one.tokens * one.outputs <= 2048 * one.num_warps]
    tokens = [size for size in (16, 32, 64) if size < 2 * rows or size == 16]
    early = itertools.product(tokens, (32, 64, 128), (128,), (4, 8), (True,))
    late = itertools.product(tokens[:1], (32, 64, 128), (16, 128), (4,), (False,))
    return list(map(Sizes._make, (*early, *late)))


class Case:
    """Several layers of one kind, each with A behind its weight."""

    def __init__(self, name: str, rows: int, count: int) -> None:
        inputs, parts = LAYERS[name]
        self.outputs, self.gated, device = sum(parts), name == "gate_up", torch.device("cuda")
        ends = list(itertools.accumulate(parts))
        runs = tuple((end - size, end, part) for part, (end, size) in enumerate(zip(ends, parts, strict=True)))
        spans = [
            (first, min(first + adapters.SPAN, end), part)
            for begin, end, part in runs
            for first in range(begin, end, adapters.SPAN)
        ]
        table = torch.tensor(spans, dtype=torch.int32, device=device)
        height = len(parts) * RANK
        shape = self.outputs + SLOTS * height, inputs
        self.wholes = [torch.randn(shape, device=device, dtype=BF16) / inputs**0.5 for _ in range(count)]
        self.weights = [
            reference.AdapterWeights(
                whole[self.outputs :].view(SLOTS, height, inputs),
                torch.randn(SLOTS, self.outputs, RANK, device=device, dtype=BF16) / 4, table, runs,
            )
            for whole in self.wholes
        ]  # fmt: skip
        self.x = torch.randn(rows, inputs, device=device, dtype=BF16)
        self.groups = reference.SlotGroups.allocate(rows, SLOTS, device)
        place = torch.arange(rows, dtype=torch.int32, device=device)
        self.groups.slots.copy_((place if rows <= 256 else place // PROMPT) % SLOTS + 1)
        reference.group_slots(self.groups, rows)

    def alone(self, index: int) -> Tensor:
        """Without adapters."""
        weight = self.wholes[index][: self.outputs]
        if self.gated and len(self.x) > 256:
            gated = hopper_product(self.x, weight, None, gated=True)
            if gated is not None:
                return gated
        return self._end(functional.linear(self.x, weight))

    def now(self, index: int) -> Tensor:
        """As steps launch it."""
        y = functional.linear(self.x, self.wholes[index][: self.outputs])
        return self._end(adapters.add_adapters(y, self.x, self.weights[index], self.groups))

    def joined(self, index: int, sizes: Sizes) -> Tensor:
        """By one product for weight and A."""
        both = functional.linear(self.x, self.wholes[index])
        return add_joined_adapters(both, self.weights[index], self.groups, halves=self.gated, sizes=sizes)

    def exact(self) -> Tensor:
        """The reference's result of the first layer."""
        y = functional.linear(self.x, self.wholes[0][: self.outputs])
        return self._end(reference.add_adapters(y, self.x, self.weights[0], self.groups)).float()

    def time(self, call: Callable[[int], Tensor]) -> float:
        """Microseconds of one layer."""
        return microseconds([partial(call, index) for index in range(len(self.wholes))])

    def _end(self, y: Tensor) -> Tensor:
        return silu_mul(y) if self.gated else y


def measure(rows: int, end: float) -> dict[str, Any]:
    """Prints the times of each product with so many rows, and of a layer."""
    found: dict[str, dict[str, float]] = {}
    for name in LAYERS:
        case = Case(name, rows, 12 if rows <= 256 else 2)
        exact, alone = case.exact(), case.time(case.alone)
        calls: dict[str, Callable[[int], Tensor]] = {"now": case.now}
        calls |= {str(tuple(sizes)): partial(case.joined, sizes=sizes) for sizes in sizes_of(rows)}
        times = found[name] = {}
        for text, call in calls.items():
            if time.monotonic() > end:
                print("no time", flush=True)
                break
            try:
                off = float((call(0).float() - exact).norm() / exact.norm())
                if not off < 2e-2:
                    print(f"  WRONG {name}, {rows} rows, {text}: {off:.1e}", flush=True)
                    continue
                times[text] = case.time(call) - alone
            except Exception as failure:
                print(
                    f"  FAILED {name}, {rows} rows, {text}: {type(failure).__name__} {str(failure)[:160]}", flush=True
                )
        best = sorted((us, text) for text, us in times.items() if text != "now")[:4]
        print(f"{rows} rows, {name}: alone {alone:.1f} us, now +{times.get('now', float('nan')):.1f}", flush=True)
        for us, text in best:
            print(f"  +{us:6.1f} us {text}", flush=True)
        del case, calls
    common = set.intersection(*map(set, found.values()))
    sums = sorted((sum(times[text] for times in found.values()), text) for text in common)
    for us, text in sums[:4] + [one for one in sums[4:] if one[1] == "now"]:
        print(f"{rows} rows, a layer: +{us:6.1f} us {text}", flush=True)
    return {"rows": rows, "sums": sums, "times": found}


def launch_all(counts: list[int]) -> None:
    """Every kernel that is measured."""
    for rows, name in itertools.product(counts, LAYERS):
        case = Case(name, rows, 1)
        case.alone(0)
        case.now(0)
        for sizes in sizes_of(rows):
            case.joined(0, sizes)


@torch.inference_mode()
def main() -> None:
    """Measures all numbers of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="64,8192,16,1")
    parser.add_argument("--seconds", type=float, default=55)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin, counts, results = time.monotonic(), [int(rows) for rows in options.rows.split(",")], []
    rehearse(partial(launch_all, counts))
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    for rows in counts:
        if time.monotonic() < begin + options.seconds:
            results.append(measure(rows, begin + options.seconds))
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    sums = {one["rows"]: one["sums"] for one in results}
    if 64 in sums and 8192 in sums:
        for kind in ("now", "joined"):
            decode, prompt = (
                next((us for us, text in sums[rows] if (text == "now") == (kind == "now")), float("nan"))
                for rows in (64, 8192)
            )
            ms = 32 * (256 * decode + 4 * prompt) / 1e3
            print(f"{kind}: {ms:.0f} ms more, {2329 / (2329 + ms):.2f} of the rate without adapters (>= 0.88)")


if __name__ == "__main__":
    main()
