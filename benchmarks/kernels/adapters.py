"""Speed of what adapters add to the products of a layer.

    python -m benchmarks.kernels.adapters [--rows 64] [--slots 8] [--rank 16] [--sweep] [--json FILE]

Products of Llama 8B: query, key and value; the attention's output; gate and up; down. Each row's adapter is one of the
slots in turn. The result is first compared with the reference. Medians of both launches, replayed from a CUDA graph
of `--layers` layers. `--sweep` tries other spans of outputs and numbers of pieces of the inputs, each
in all products. Elsewhere than on a GPU only the comparison is made, by Triton's interpreter, on products a 64th as
wide.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from benchmarks.kernels.paged_rows import microseconds
from frame.core.ops.adapters import SlotGroups, add_adapters as reference, group_slots
from frame.kernels import adapters as kernels
from frame.ops import AdapterWeights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: By name: inputs, and the outputs of each tensor that the layer puts together.
PRODUCTS = {
    "query, key, value": (4096, (4096, 1024, 1024)),
    "output": (4096, (4096,)),
    "gate and up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
#: Outputs of a span, and most pieces of the inputs, that `--sweep` tries.
SPANS, PIECES = (64, 128, 256), (4, 8, 16)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Sizes(NamedTuple):
    """What the command says."""

    rows: int
    slots: int
    rank: int
    layers: int


class Layer(NamedTuple):
    """One layer's inputs."""

    y: Tensor
    x: Tensor
    weights: AdapterWeights


def layers_of(name: str, sizes: Sizes) -> list[Layer]:
    """Layers of random numbers, whose results are about as large as what they are added to."""
    inputs, parts = PRODUCTS[name]
    if DEVICE == "cpu":
        inputs, parts = inputs // 64, tuple(part // 64 for part in parts)
    ends = list(itertools.accumulate(parts))
    whole = [(end - part, end, place) for place, (part, end) in enumerate(zip(parts, ends, strict=True))]
    step = kernels.SPAN
    spans = [(at, min(at + step, end), place) for first, end, place in whole for at in range(first, end, step)]
    made = []
    for _ in range(sizes.layers):
        x, y, down, up = (
            torch.randn(shape, dtype=DTYPE, device=DEVICE)
            for shape in (
                (sizes.rows, inputs),
                (sizes.rows, ends[-1]),
                (sizes.slots, len(parts) * sizes.rank, inputs),
                (sizes.slots, ends[-1], sizes.rank),
            )
        )
        scaled = down * inputs**-0.5, up * sizes.rank**-0.5
        made.append(
            Layer(y, x, AdapterWeights(*scaled, torch.tensor(spans, dtype=torch.int32, device=DEVICE), tuple(whole)))
        )
    return made


def groups_of(sizes: Sizes) -> SlotGroups:
    """The rows by slot, one slot after the other."""
    groups = SlotGroups.allocate(sizes.rows, sizes.slots, torch.device(DEVICE))
    groups.slots.copy_(torch.arange(sizes.rows, device=DEVICE) % sizes.slots + 1)
    group_slots(groups, sizes.rows)
    return groups


def measure(name: str, sizes: Sizes) -> dict[str, Any]:
    """The error of a product and, on a GPU, the time of a layer in µs."""
    layers, groups = layers_of(name, sizes), groups_of(sizes)
    y, x, weights = layers[0]
    want = reference(y.clone().float(), x.float(), _in_float32(weights), groups)
    out = kernels.add_adapters(y.clone(), x, weights, groups)
    found: dict[str, Any] = {"product": name, "off": float((out - want).norm() / want.norm())}
    if DEVICE == "cuda":
        every = microseconds(lambda: [kernels.add_adapters(*layer, groups) for layer in layers])
        found["µs"] = every / len(layers)
    return found


def _in_float32(weights: AdapterWeights) -> AdapterWeights:
    return AdapterWeights(weights.down.float(), weights.up.float(), weights.spans, weights.host_spans)


def sweep(sizes: Sizes) -> None:
    """Prints the times of all products by other sizes of the launches, the quickest first."""
    found, kept = [], (kernels.SPAN, kernels._PIECES)
    for span, pieces in itertools.product(SPANS, PIECES):
        kernels.SPAN, kernels._PIECES = span, pieces
        times = [measure(name, sizes)["µs"] for name in PRODUCTS]
        found.append((sum(times), f"spans of {span}, {pieces} pieces: " + ", ".join(f"{time:.1f}" for time in times)))
    kernels.SPAN, kernels._PIECES = kept
    for total, text in sorted(found):
        print(f"  {total:7.1f} µs  {text}", flush=True)


def main() -> None:
    """Measures each product."""
    parser = argparse.ArgumentParser(description="What adapters add to the products of a layer.")
    parser.add_argument("--rows", type=int, default=64, help="Tokens of the step.")
    parser.add_argument("--slots", type=int, default=8, help="Adapters.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8, help="Layers of a graph.")
    parser.add_argument("--sweep", action="store_true", help="Try other sizes of both launches.")
    parser.add_argument("--json", type=Path, help="File for the results.")
    options = parser.parse_args()
    sizes = Sizes(options.rows, options.slots, options.rank, options.layers if DEVICE == "cuda" else 1)
    if min(sizes) < 1:
        parser.error(f"--rows, --slots, --rank and --layers must be at least 1, got {', '.join(map(str, sizes))}")
    results = []
    for name in PRODUCTS:
        found = measure(name, sizes)
        results.append(found)
        time = f"{found['µs']:6.1f} µs, " if DEVICE == "cuda" else ""
        print(f"{name:17}: {time}off by {found['off']:.1e}", flush=True)
    if options.sweep and DEVICE == "cuda":
        sweep(sizes)
    if options.json:
        name = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
        options.json.write_text(json.dumps({"device": name, **sizes._asdict(), "products": results}, indent=1))


if __name__ == "__main__":
    main()
