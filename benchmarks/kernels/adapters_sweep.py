"""Finds the quickest kernels of what adapters add to the products of a layer of Llama 8B.

    PYTHONPATH=src:. python benchmarks/kernels/adapters_sweep.py [--seconds 100] [--rows 64,16] [--json FILE]

8 slots of rank 16, which tokens take in turn; query, key and value, the output, gate and up, and down. "now" is what
steps launch, "other" what they would without `frame.kernels.few_adapters`, and a number is a size of those. Each is
compared with the products in float32, then timed in a replayed graph over the weights of several layers, with a product
between two of them as in a step; the product's own time is taken off. The sum over a layer must come to 39 us or less
from 59 for 0.88 of the speed without adapters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels.linear_invariant import microseconds
from frame.core.ops import adapters as reference
from frame.kernels import adapters, few_adapters
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse

LAYERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336)), "down": (14336, (4096,))
}  # fmt: skip
RANK, SLOTS, COUNT, BF16 = 16, 8, 12, torch.bfloat16
#: Inputs of a program of *down*.
PIECES = (512, 1024, 2048)


class Case:
    """Several layers of one kind, and tokens that take slots in turn."""

    def __init__(self, name: str, rows: int, count: int = COUNT) -> None:
        inputs, parts = LAYERS[name]
        outputs, device = sum(parts), torch.device("cuda")
        ends = [sum(parts[: number + 1]) for number in range(len(parts))]
        spans = [
            (first, min(first + adapters.SPAN, end), part)
            for part, (end, size) in enumerate(zip(ends, parts, strict=True))
            for first in range(end - size, end, adapters.SPAN)
        ]
        table = torch.tensor(spans, dtype=torch.int32, device=device)
        runs = tuple((end - size, end, part) for part, (end, size) in enumerate(zip(ends, parts, strict=True)))
        self.weights = [
            reference.AdapterWeights(
                torch.randn(SLOTS, len(parts) * RANK, inputs, device=device, dtype=BF16) / 64,
                torch.randn(SLOTS, outputs, RANK, device=device, dtype=BF16) / 4, table, runs,
            )
            for _ in range(count)
        ]  # fmt: skip
        self.x = torch.randn(rows, inputs, device=device, dtype=BF16)
        self.base = torch.randn(outputs, inputs, device=device, dtype=BF16) / 64
        self.groups = reference.SlotGroups.allocate(rows, SLOTS, device)
        self.groups.slots.copy_(torch.arange(rows, dtype=torch.int32, device=device) % SLOTS + 1)
        reference.group_slots(self.groups, rows)

    def product(self) -> Tensor:
        """What adapters add to."""
        return torch.nn.functional.linear(self.x, self.base)

    def error(self, add: Callable[..., Tensor]) -> float:
        """How far what is added is from the reference, relative."""
        zeros = torch.zeros_like(self.product())
        exact = reference.add_adapters(zeros.clone(), self.x, self.weights[0], self.groups).float()
        found = add(zeros.clone(), self.x, self.weights[0], self.groups).float()
        return float((found - exact).norm() / exact.norm())

    def time(self, add: Callable[..., Tensor]) -> float:
        """Microseconds of one layer's adapters behind its product, less the product."""
        both = microseconds([lambda w=w: add(self.product(), self.x, w, self.groups) for w in self.weights])  # type: ignore[misc]
        return both - microseconds([self.product] * len(self.weights))


def other(*given: Any) -> Tensor:
    """What steps would launch without the kernels of few slots."""
    with patch.object(adapters, "FEW", {}):
        return adapters.add_adapters(*given)


def measure(rows: int, end: float) -> dict[str, Any]:
    """Prints the times of all sizes at so many rows, the best of each product, and of a whole layer."""
    found: dict[str, list[tuple[float, str]]] = {}
    for name in LAYERS:
        case = Case(name, rows)
        tried: list[tuple[str, Callable[..., Tensor]]] = [("now", adapters.add_adapters), ("other", other)]
        tried += [(str(piece), partial(few_adapters.add_adapters, piece=piece)) for piece in PIECES]
        times = []
        for text, add in tried:
            if time.monotonic() > end:
                print("no time", flush=True)
                break
            try:
                off = case.error(add)
                if not off < 2e-2:
                    print(f"  WRONG {name}, {rows} rows, {text}: {off:.1e}", flush=True)
                    continue
                times.append((case.time(add), text))
            except Exception as failure:
                print(
                    f"  FAILED {name}, {rows} rows, {text}: {type(failure).__name__} {str(failure)[:160]}", flush=True
                )
        now = next((us for us, text in times if text == "now"), float("nan"))
        found[name] = sorted(times)
        print(f"{rows} rows, {name}: now {now:.1f} us", flush=True)
        for us, text in found[name][:4]:
            print(f"  {us:6.1f} us {text}", flush=True)
    common = set.intersection(*({text for _, text in times} for times in found.values()))
    sums = sorted((sum(us for times in found.values() for us, own in times if own == text), text) for text in common)
    for us, text in sums[:5]:
        print(f"{rows} rows, a layer: {us:6.1f} us {text}", flush=True)
    return {"rows": rows, "times": found}


@torch.inference_mode()
def main() -> None:
    """Measures all numbers of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="64,32,16,1,128")
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin, counts, results = time.monotonic(), [int(rows) for rows in options.rows.split(",")], []

    def launch_all() -> None:
        for rows in counts:
            for name in LAYERS:
                case = Case(name, rows, 1)
                given = case.product(), case.x, case.weights[0], case.groups
                adapters.add_adapters(*given)
                other(*given)
                for piece in PIECES:
                    few_adapters.add_adapters(*given, piece)

    rehearse(launch_all)
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    for rows in counts:
        if time.monotonic() < begin + options.seconds:
            results.append(measure(rows, begin + options.seconds))
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
