"""Speed of routed experts on a GPU, against the floor of the weights' bytes and of the arithmetic.

    python benchmarks/kernels/experts.py [--tokens 1,64,512] [--held 64] [--tune] [--table FILE] [--json FILE]

Defaults to the experts of Qwen3 30B-A3B in bf16, all of them; `--held`: so many, as on one of several ranks. Every case
is first compared with the reference in float32. Medians of CUDA graph replays over several inputs, together larger than
the L2 cache; beside a batch that ordinary steps multiply with the kernel for Hopper, its time (`experts_hopper.py` has
more of that one). `--tune` measures tile sizes, and keeps the fastest for each number of tokens in the table that the
kernels read (`kernels/experts.json`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from frame.core.ops import layers as reference
from frame.interfaces import RouterSpec
from frame.kernels.expert_launch import Launch, Shape, Tile, entry_of, launch_for, rule
from frame.kernels.experts import (
    chip_of,
    combine,
    fused_experts,
    grouped_product,
    hopper_experts,
    vector_down,
    vector_gate_up,
)
from frame.kernels.gating import SILU
from frame.kernels.routing import align, route

BANDWIDTH, ARITHMETIC = 4.27e12, 690e12  # measured on an H200: bytes copied and bf16 operations a second
SHARED_MEMORY = 227 << 10
TABLE = Path(__file__).parents[2] / "kernels" / "experts.json"


@dataclass(frozen=True)
class Weights:
    """One layer's experts."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Case:
    """One layer's inputs."""

    layer: Weights
    logits: Tensor
    hidden: Tensor
    weights: Tensor
    ids: Tensor

    def run(self, launch: Launch) -> Tensor:
        """The whole product."""
        return fused_experts(self.hidden, self.layer.gate_up, self.layer.down, self.weights, self.ids, launch)

    def on_hopper(self) -> Tensor | None:
        """The whole product by the kernel for Hopper, where steps would choose it."""
        of_all = self.logits.shape[1]
        return hopper_experts(self.hidden, self.layer.gate_up, self.layer.down, self.weights, self.ids, of_all)


def layers_of(shape: Shape, count: int, held: int) -> list[Weights]:
    """Random experts, `held` of all, whose products are of size one."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    return [
        Weights(
            torch.randn(held, 2 * inner, hidden, dtype=shape.dtype, device="cuda") / hidden**0.5,
            torch.randn(held, hidden, inner, dtype=shape.dtype, device="cuda") / inner**0.5,
        )
        for _ in range(count)
    ]


def cases_of(shape: Shape, layers: list[Weights], tokens: int) -> list[Case]:
    """Inputs enough that what one replay reads does not stay in the L2 cache."""
    cases = []
    for layer, _ in zip(itertools.cycle(layers), range(8 if tokens <= 16 else 2), strict=False):
        logits = torch.randn(tokens, shape.num_experts, dtype=shape.dtype, device="cuda")
        hidden = torch.randn(tokens, shape.hidden_size, dtype=shape.dtype, device="cuda")
        cases.append(Case(layer, logits, hidden, *route(logits, RouterSpec(shape.num_experts, shape.top_k))))
    return cases


def microseconds(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Median time of one call, replayed from a graph that holds all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del kept
    return statistics.median(times) * 1e3 / len(calls)


def total(cases: list[Case], launch: Launch) -> float:
    """Microseconds of the whole product."""
    return microseconds([lambda case=case: case.run(launch) for case in cases])


def floor(shape: Shape, cases: list[Case]) -> tuple[float, str]:
    """Microseconds that the touched weights and the tokens take to move, or the arithmetic if that is longer."""
    held = len(cases[0].layer.down)
    here = [case.ids[case.ids < held] for case in cases]
    touched = statistics.mean(int(ids.unique().numel()) for ids in here)
    size = 3 * shape.hidden_size * shape.intermediate_size
    tokens = cases[0].hidden.shape[0]
    moving = (touched * size + 2 * tokens * shape.hidden_size) * shape.dtype.itemsize / BANDWIDTH
    computing = 2 * statistics.mean(ids.numel() for ids in here) * size / ARITHMETIC
    return max(moving, computing) * 1e6, "bytes" if moving > computing else "arithmetic"


def error(case: Case, found: Tensor) -> float:
    """Relative error against the reference in float32."""
    wide = [matrix.float() for matrix in (case.hidden, case.layer.gate_up, case.layer.down)]
    expected = reference.fused_experts(*wide, case.weights, case.ids)
    return float((found.float() - expected).norm() / expected.norm())


def tiles(block_m: int, matrices: int) -> Iterator[Tile]:
    """Tiles worth a try, for a product whose step reads `matrices` weight tiles."""
    sides = (False, True) if block_m <= 32 else (False,)
    widths = (64, 128) if block_m <= 32 else (64, 128, 256)
    every = itertools.product(widths, (64, 128), (4, 8), (3, 4), sides, (False, True))
    for block_n, block_k, warps, stages, swap, copier in every:
        step = (block_m + matrices * block_n) * block_k * 2
        sums = block_m * block_n * matrices // (warps * 32)
        if step * stages <= SHARED_MEMORY and 4 <= sums <= 128:
            yield Tile(block_n, block_k, warps, stages, swap, copier)


def vector_tiles(shape: Shape) -> tuple[list[Tile], list[Tile]]:
    """Tiles of the two matrix-vector products worth a try."""
    gate_up = [Tile(n, k, w) for n, k, w in itertools.product((1, 2, 4, 8), (512, 1024, 2048), (2, 4, 8))]
    down = [Tile(n, k, w) for n, k, w in itertools.product((1, 2, 4, 8), (256, 512, 1024), (2, 4, 8))]

    def fits(tile: Tile, most: int) -> bool:
        return 8 <= tile.block_n * tile.block_k // (tile.num_warps * 32) <= most

    return [tile for tile in gate_up if fits(tile, 32)], [tile for tile in down if fits(tile, 64)]


def block_sizes(shape: Shape, tokens: int) -> list[int]:
    """Block sizes around the mean number of rows an expert gets."""
    rows = tokens * shape.top_k / shape.num_experts
    return [size for size in (16, 32, 64, 128) if rows / 4 <= size <= max(16, 4 * rows) or size == 128 < rows / 4]


def stages_of(shape: Shape, cases: list[Case], block_m: int) -> Iterator[tuple[str, Tile, list[Callable[[], object]]]]:
    """(stage, tile, calls) of everything worth a try at one block size."""
    if block_m == 0:
        gate_up, down = vector_tiles(shape)
        inner = [vector_gate_up(c.hidden, c.layer.gate_up, c.ids, gate_up[0]) for c in cases]
        for tile in gate_up:
            calls = [lambda c=c, t=tile: vector_gate_up(c.hidden, c.layer.gate_up, c.ids, t) for c in cases]
            yield "gate_up", tile, calls
        for tile in down:
            yield (
                "down",
                tile,
                [
                    lambda c=c, x=x, t=tile: vector_down(x, c.layer.down, c.weights, c.ids, t)
                    for c, x in zip(cases, inner, strict=True)
                ],
            )
        return
    sorted_cases = [(c, align(c.ids, range(len(c.layer.down)), block_m)) for c in cases]
    for tile in tiles(block_m, 2):
        yield (
            "gate_up",
            tile,
            [
                lambda c=c, b=b, t=tile: grouped_product(
                    c.hidden, c.layer.gate_up, b, t, shared=shape.top_k, gating=SILU
                )
                for c, b in sorted_cases
            ],
        )
    inner = [
        torch.randn(c.ids.numel(), shape.intermediate_size, dtype=shape.dtype, device="cuda") for c, _ in sorted_cases
    ]
    for tile in tiles(block_m, 1):
        yield (
            "down",
            tile,
            [
                lambda c=c, b=b, x=x, t=tile: grouped_product(x, c.layer.down, b, t)
                for (c, b), x in zip(sorted_cases, inner, strict=True)
            ],
        )


def tune(shape: Shape, cases: list[Case]) -> tuple[float, Launch]:
    """The fastest launch and its time: the best tile of each product at each block size, then the best block size."""
    tokens, found = cases[0].hidden.shape[0], []
    for block_m in ([0] if tokens <= 24 else []) + (block_sizes(shape, tokens) if tokens >= 8 else []):
        best: dict[str, tuple[float, Tile]] = {}
        for stage, tile, calls in stages_of(shape, cases, block_m):
            try:
                time = microseconds(calls, 3)
            except OutOfResources as failure:
                print(f"  {stage} {tile}: {failure}", flush=True)
                continue
            if time < best.get(stage, (float("inf"),))[0]:
                best[stage] = time, tile
        launch = Launch(block_m, best["gate_up"][1], best["down"][1])
        found.append((total(cases, launch), launch))
        print(
            f"  {tokens} tokens, gate_up {best['gate_up'][0]:.1f} us, down {best['down'][0]:.1f} us, {launch}",
            flush=True,
        )
    return min(found, key=lambda pair: pair[0])


def compile_part(shape: Shape, held: int, part: int, parts: int, tokens: list[int]) -> None:
    """Compiles every `parts`-th candidate into Triton's cache, by running it on a few tokens."""
    layer = layers_of(shape, 1, held)[0]
    logits = torch.randn(16, shape.num_experts, dtype=shape.dtype, device="cuda")
    chosen = route(logits, RouterSpec(shape.num_experts, shape.top_k))
    case = Case(layer, logits, torch.randn_like(layer.gate_up[0, :16]), *chosen)
    sizes = {size for count in tokens if count >= 8 for size in block_sizes(shape, count)}
    sizes |= {0} if min(tokens) <= 24 else set()
    every = (stage for size in sorted(sizes) for stage in stages_of(shape, [case], size))
    for _, _, calls in itertools.islice(every, part, None, parts):
        with suppress(OutOfResources):
            calls[0]()


def compile_all(parts: int) -> None:
    """Compiles the candidates in as many processes; what fails there is told when it is measured."""
    command = [sys.executable, *sys.argv, "--compile"]
    started = [subprocess.Popen([*command, f"{part}/{parts}"], stderr=subprocess.DEVNULL) for part in range(parts)]
    for process in started:
        process.wait()


def keep(path: Path, chip: str, shape: Shape, tokens: int, launch: Launch) -> None:
    """Adds a launch to the table."""
    table = json.loads(path.read_text()) if path.is_file() else {}
    counts = table.setdefault(chip, {}).setdefault(shape.name, {})
    counts[str(tokens)] = entry_of(launch)
    table[chip][shape.name] = dict(sorted(counts.items(), key=lambda item: int(item[0])))
    path.write_text(text_of(table))


def text_of(table: dict[str, dict[str, dict[str, object]]]) -> str:
    """The table as JSON, a launch a line."""
    chips = []
    for chip, shapes in table.items():
        rows = (
            f"  {json.dumps(name)}: {{\n"
            + ",\n".join(f"   {json.dumps(tokens)}: {json.dumps(entry)}" for tokens, entry in counts.items())
            + "\n  }"
            for name, counts in shapes.items()
        )
        chips.append(f" {json.dumps(chip)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(chips) + "\n}\n"


def measure(shape: Shape, cases: list[Case], launch: Launch, ruled: Launch) -> dict[str, object]:
    """One line of the table, printed."""
    tokens = cases[0].hidden.shape[0]
    least, bound = floor(shape, cases)
    time = total(cases, launch)
    routing = microseconds([lambda c=c: route(c.logits, RouterSpec(shape.num_experts, shape.top_k)) for c in cases])
    by_rule = total(cases, ruled)
    sorting = adding = 0.0
    if launch.block_m:
        products = torch.randn(tokens * shape.top_k, shape.hidden_size, dtype=shape.dtype, device="cuda")
        sorting = microseconds([lambda c=c: align(c.ids, range(len(c.layer.down)), launch.block_m) for c in cases])
        adding = microseconds(
            [lambda c=c: combine(products, c.weights, c.ids, range(len(c.layer.down))) for c in cases]
        )
    wrong, hopper, told = error(cases[0], cases[0].run(launch)), None, ""
    if (found := cases[0].on_hopper()) is not None:
        wrong = max(wrong, error(cases[0], found))
        hopper = microseconds([case.on_hopper for case in cases])
        told = f" for Hopper {hopper:8.1f} us, {least / hopper:4.0%};"
    print(
        f"{tokens:6} tokens: {time:8.1f} us, {least / time:4.0%} of the floor ({bound});{told}"
        f" by rule {by_rule:8.1f} us;"
        f" route {routing:5.1f}, sort {sorting:5.1f}, add {adding:5.1f} us; error {wrong:.1e}",
        flush=True,
    )
    if not wrong < 1e-2:
        raise RuntimeError(f"relative error {wrong} with {tokens} tokens and {launch}")
    times = {"us": time, "hopper_us": hopper, "floor_us": least, "rule_us": by_rule, "route_us": routing}
    return {"tokens": tokens, "bound": bound, **times}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,64,512,4096,2,4,8,16,32,128,256,1024,2048,8192")
    parser.add_argument("--shape", default="128,8,2048,768", help="experts, chosen of them, hidden and inner size")
    parser.add_argument("--held", type=int, help="experts of this rank, all by default")
    parser.add_argument("--tune", action="store_true", help="measure tile sizes and keep the best in the table")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    experts, top_k, hidden, inner = map(int, options.shape.split(","))
    shape = Shape(experts, top_k, hidden, inner, torch.bfloat16)
    tokens = [int(count) for count in options.tokens.split(",")]
    held = options.held or experts
    if options.compile:
        part, parts = map(int, options.compile.split("/"))
        compile_part(shape, held, part, parts, tokens)
        return
    if options.tune:
        compile_all(12)
    facts = chip_of(torch.device("cuda", torch.cuda.current_device()))
    print(f"{facts.name}, torch {torch.__version__}, {shape.name}, {held} held", flush=True)
    layers, results = layers_of(shape, 2, held), []
    for count in tokens:
        cases = cases_of(shape, layers, count)
        launch = launch_for(shape, count, facts)
        if options.tune:
            _, launch = tune(shape, cases)
            keep(options.table, facts.name, shape, count, launch)
        results.append(measure(shape, cases, launch, rule(shape, count, facts)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
