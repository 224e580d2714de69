"""Speed of routed experts with many rows each on Hopper: the parts of the work, and every way worth a measurement.

    PYTHONPATH=src:. python benchmarks/kernels/experts_hopper.py [--tokens 1024,2048,4096,8192] [--even] [--json FILE]

Defaults to the experts of Qwen3 30B-A3B in bf16; `--even` gives all experts as many rows, a multiple of 128. Every way
is compared with the reference in float32. Medians of CUDA graph replays over several inputs, together larger than
the L2 cache; rates count no padding. The process ends itself after `--seconds`, since a kernel that waits for ever
cannot be interrupted.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.experts import Case, cases_of, error, floor, layers_of, microseconds, total
from frame.kernels import experts_hopper
from frame.kernels.expert_launch import Shape, launch_for
from frame.kernels.experts import chip_of, combine
from frame.kernels.experts_hopper import GroupedTile
from frame.kernels.gating import SILU
from frame.kernels.routing import Blocks, align, spread
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse


def whole(case: Case, tile: GroupedTile) -> Tensor:
    """Everything that takes the place of the Triton kernel's launches."""
    layer = case.layer
    return experts_hopper.fused_experts(case.hidden, layer.gate_up, layer.down, case.weights, case.ids, tile)


def launch_all(case: Case) -> None:
    """Every kernel that is measured, once."""
    for tile in experts_hopper.CANDIDATES:
        whole(case, tile)


def level(case: Case, num_experts: int) -> None:
    """Gives all experts as many rows."""
    pairs = case.ids.numel()
    case.ids.view(-1).copy_(torch.arange(pairs, device="cuda") % num_experts)


def parts(shape: Shape, cases: list[Case]) -> tuple[dict[str, float], list[tuple[Case, Blocks, Tensor]]]:
    """Microseconds of what surrounds the products, and what the first product is of."""
    count = shape.num_experts
    every = []
    for case in cases:
        blocks = align(case.ids, range(count), 128)
        every.append((case, blocks, spread(case.hidden, case.ids, range(count), blocks)))
    times = {
        "sort": microseconds([partial(align, c.ids, count, 128) for c in cases]),
        "copy": microseconds([partial(spread, c.hidden, c.ids, count, b) for c, b, _ in every]),
        "add": microseconds([partial(combine, x, c.weights, c.ids, count, b.places) for c, b, x in every]),
    }
    return times, every


def measure(shape: Shape, cases: list[Case]) -> list[dict[str, object]]:
    """Times of all tiles, printed."""
    tokens = len(cases[0].hidden)
    work = 2e-6 * tokens * shape.top_k * shape.hidden_size * shape.intermediate_size
    least, bound = floor(shape, cases)
    triton = total(cases, launch_for(shape, tokens, chip_of(cases[0].hidden.device)))
    times, every = parts(shape, cases)
    around = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
    print(f"{tokens:6} tokens: floor {least:.1f} us ({bound}), Triton {triton:.1f} us; {around} us", flush=True)
    results = []
    for tile in experts_hopper.CANDIDATES:
        multiply = partial(experts_hopper.grouped_product, tile=tile)
        gate_up = partial(multiply, gating=SILU, shared=shape.top_k if tile.gathers else 0)
        rows = [c.hidden if tile.gathers else x for c, _, x in every]
        gating = microseconds(
            [partial(gate_up, x, c.layer.gate_up, b) for (c, b, _), x in zip(every, rows, strict=True)]
        )
        inner = [multiply(x, c.layer.gate_up, b, gating=SILU) for c, b, x in every]
        adding = microseconds(
            [partial(multiply, x, c.layer.down, b) for (c, b, _), x in zip(every, inner, strict=True)]
        )
        all_of_it = microseconds([partial(whole, case, tile) for case in cases])
        wrong = error(cases[0], whole(cases[0], tile))
        way = (
            f"{tile.block_n}/{tile.stages}/{tile.parts}/{tile.group}{' gathers' * tile.gathers}{' draws' * tile.draws}"
        )
        print(
            f"    {way:26} {all_of_it:8.1f} us, "
            f"{least / all_of_it:4.0%} of the floor; gate and up {gating:6.1f} us ({2 * work / gating:4.0f} TFLOP/s), "
            f"down {adding:6.1f} us ({work / adding:4.0f} TFLOP/s); error {wrong:.1e}",
            flush=True,
        )
        if not wrong < 1e-2:
            raise RuntimeError(f"relative error {wrong} with {tokens} tokens and {tile}")
        figures = {"us": all_of_it, "gate_up_us": gating, "down_us": adding, "triton_us": triton, "floor_us": least}
        results.append({"tokens": tokens, "tile": repr(tile), **figures, **times})
    return results


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1024,2048,4096,8192")
    parser.add_argument("--shape", default="128,8,2048,768", help="experts, chosen of them, hidden and inner size")
    parser.add_argument("--even", action="store_true", help="as many rows for each expert")
    parser.add_argument("--seconds", type=float, default=110.0, help="after which this process ends itself")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    experts, top_k, hidden, inner = map(int, options.shape.split(","))
    shape, results = Shape(experts, top_k, hidden, inner, torch.bfloat16), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {shape.name}", flush=True)
    layers = layers_of(shape, 2)
    case = cases_of(shape, layers, 512)[0]
    rehearse(partial(launch_all, case))
    for count in map(int, options.tokens.split(",")):
        cases = cases_of(shape, layers, count)
        for each in cases if options.even else ():
            level(each, experts)
        results += measure(shape, cases)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
