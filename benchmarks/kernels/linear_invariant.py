"""Speed of the batch-invariant product on a GPU, against the library's.

    python benchmarks/kernels/linear_invariant.py [--rows 1,8,64,256,2048,8192] [--tune]

Defaults to the layers of an 8B model (Qwen3 8B) in bf16. Medians of CUDA graph replays over several weights, together
larger than the L2 cache. `--tune` measures every candidate tile and names the fastest; the table that launches read is
`TILES` in `kernels/linear_invariant.py`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from frame.kernels.linear_invariant import CANDIDATES, Tile, linear_invariant, tile_for

#: name → (outputs, inputs)
LAYERS = {
    "query, key, value": (6144, 4096),
    "attention output": (4096, 4096),
    "gate and up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
CACHE_BYTES = 120 << 20


def microseconds(calls: list[Callable[[], Tensor]], repeats: int = 7) -> float:
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


def tune(x: Tensor, weights: list[Tensor]) -> tuple[float, Tile]:
    """The fastest candidate and its time."""
    found = []
    for tile in CANDIDATES:
        if tile.block_m > max(64, 2 * len(x)):
            continue
        try:
            time = microseconds([lambda w=weight, t=tile: linear_invariant(x, w, tile=t) for weight in weights], 3)
        except OutOfResources:
            continue
        found.append((time, tile))
    return min(found, key=lambda pair: pair[0])


def measure(name: str, rows: int, weights: list[Tensor], programs: int, tuned: bool) -> None:
    """One line of the table, printed."""
    outputs, depth = weights[0].shape
    x = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
    expected = x.float() @ weights[0].float().t()
    wrong = float((linear_invariant(x, weights[0]).float() - expected).norm() / expected.norm())
    if not wrong < 1e-2:
        raise RuntimeError(f"relative error {wrong} for {rows} rows of {name}")
    own = microseconds([lambda w=weight: linear_invariant(x, w) for weight in weights])
    library = microseconds([lambda w=weight: torch.nn.functional.linear(x, w) for weight in weights])
    moved, work = 2 * (outputs * depth + rows * (outputs + depth)), 2 * rows * outputs * depth
    print(
        f"{name:18} {rows:5} rows: {own:8.1f} us, {moved / own * 1e-6:5.2f} TB/s, {work / own * 1e-6:6.1f} TFLOP/s;"
        f" library {library:8.1f} us; {library / own:4.0%} of its speed; {tile_for(rows, outputs, programs)}",
        flush=True,
    )
    if tuned:
        time, tile = tune(x, weights)
        print(f"{'':26}best {time:8.1f} us, {library / time:4.0%}: {tile}", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,64,256,2048,8192")
    parser.add_argument("--tune", action="store_true", help="measure all candidate tiles")
    options = parser.parse_args()
    facts = torch.cuda.get_device_properties(0)
    print(f"{facts.name}, torch {torch.__version__}, bfloat16", flush=True)
    for name, (outputs, depth) in LAYERS.items():
        count = max(1, min(8, -(-CACHE_BYTES // (2 * outputs * depth))))
        weights = [torch.randn(outputs, depth, dtype=torch.bfloat16, device="cuda") / depth**0.5 for _ in range(count)]
        for rows in map(int, options.rows.split(",")):
            if rows <= 512 or name != "head":  # a step's logits have a row a request
                measure(name, rows, weights, facts.multi_processor_count, options.tune)


if __name__ == "__main__":
    main()
