"""Speed of the recurrences of Mamba-2 and of the delta rule over prompts on a GPU, whole and in segments, in bf16.

    python benchmarks/kernels/scans.py [--json FILE]

Sizes of Mamba-2 2.7B, Nemotron-H 8B, and Qwen3-Next 80B on one and on four ranks. Each prompt is timed with rows whole
and with several lengths of segments, and the delta rule also with chunks of 16 that have no tables. Times are medians,
beside what the inputs, outputs and states take at the device's own copy rate. `off` is the largest difference from the
reference in float32 on a row of 600 tokens that goes on from a state, of the largest number.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from frame.kernels import delta, scans
from frame.kernels.segments import WHOLE
from frame.ops import Ops, ScanWeights, StateRows

#: (rows, tokens of each)
PROMPTS = [(1, 2048), (1, 8192), (1, 32768), (8, 1024), (4, 4096)]
#: heads, size of a head, size of a state, groups
SCANS = {"Mamba-2 2.7B": (80, 64, 128, 1), "Nemotron-H 8B": (128, 64, 128, 8)}
#: heads of keys, heads of values, numbers of both
DELTAS = {"Qwen3-Next": (16, 32, 128), "Qwen3-Next, four ranks": (4, 8, 128)}
SEGMENTS = {"ssd": (WHOLE, 128, 256, 512, 1024), "delta": (WHOLE, 512, 1024, 2048)}
#: A call and the arguments that it and the reference take: the last two are states and rows.
Case = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Any]]


def rows_of(rows: int, tokens: int, *, begins: bool) -> StateRows:
    """Equal rows, in blocks from 1 on."""
    starts, numbers = (torch.arange(n + 1, dtype=torch.int32, device="cuda") for n in (rows, rows))
    return StateRows(starts * tokens, numbers[1:], torch.full((rows,), begins, device="cuda"), tokens)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device="cuda").to(dtype)


def scan_case(name: str, rows: StateRows) -> Case:
    """Mamba-2's."""
    (heads, size, width, groups), count = SCANS[name], int(rows.query_start[-1])
    decay, skip, bias = (random(heads, dtype=torch.float32) for _ in range(3))
    weights = ScanWeights(-decay.abs() - 0.1, skip, bias - 3, (0.0, 1.0))
    state = random(len(rows.blocks) + 1, heads, size, width, dtype=torch.float32)
    inputs = [random(count, heads, size), random(count, heads), random(count, groups, width) / 8]
    return scans.ssd_scan, Ops.ssd_scan, [*inputs, random(count, groups, width) / 8, weights, state, rows]


def delta_case(name: str, rows: StateRows) -> Case:
    """The delta rule's."""
    (keys, heads, width), count = DELTAS[name], int(rows.query_start[-1])
    query, key, value = (random(count, number, width) for number in (keys, keys, heads))
    decay, beta = -random(count, heads, dtype=torch.float32).abs() / 8, random(count, heads).sigmoid()
    state = random(len(rows.blocks) + 1, heads, width, width, dtype=torch.float32) / 8
    return delta.gated_delta, Ops.gated_delta, [query, key, value, decay, beta, state, rows]


def off(case: Case) -> float:
    """The larger of the relative differences of outputs and of states."""
    kernel, reference, arguments = case
    mine, theirs = [[one.clone() if isinstance(one, Tensor) else one for one in arguments] for _ in range(2)]
    theirs = [one.float() if isinstance(one, Tensor) else one for one in theirs]
    pairs = [(kernel(*mine), reference(*theirs)), (mine[-2], theirs[-2])]
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)


def measure(kind: str, name: str, copy_rate: float, *, tables: bool = True) -> list[dict[str, Any]]:
    """Prints a line for each prompt and segment."""
    module, make = (scans, scan_case) if kind == "ssd" else (delta, delta_case)
    results = []
    for (rows, tokens), segment in itertools.product(PROMPTS, SEGMENTS[kind]):
        module.SEGMENT = min(segment, 256) if segment != WHOLE else WHOLE
        wrong = off(make(name, rows_of(1, 600, begins=False)))
        module.SEGMENT = segment
        kernel, _, arguments = make(name, rows_of(rows, tokens, begins=True))
        found = {"kind": name, "rows": rows, "tokens": tokens, "segment": segment % WHOLE, "tables": tables}
        moved = sum(one.nbytes for one in arguments if isinstance(one, Tensor)) + 2 * arguments[0].nbytes
        found |= {"us": float(do_bench(lambda: kernel(*arguments), return_mode="median")) * 1e3, "off": wrong}  # noqa: B023
        found["of copy"] = moved / found["us"] * 1e6 / copy_rate
        print(", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
        results.append(found)
    return results


@torch.inference_mode()
def main() -> None:
    """Prints the table; segments 0 are whole rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / float(do_bench(lambda: target.copy_(source), return_mode="median")) * 1e3
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies {rate / 1e12:.2f} TB/s", flush=True)
    results = [one for name in SCANS for one in measure("ssd", name, rate)]
    results += [one for name in DELTAS for one in measure("delta", name, rate)]
    delta.MOST_BYTES = 0
    results += [one for name in DELTAS for one in measure("delta", name, rate, tables=False)]
    if options.json:
        options.json.write_text(json.dumps({"copy": rate, "cases": results}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
