"""Speed of the sampling kernels on a GPU, against the time that their bytes take to move.

    python benchmarks/kernels/sampling.py [--rows 1,64,256] [--vocab 151936] [--op NAME] [--json FILE]

`peaked` logits fall with the square of a token's rank, as a language model's do; `flat` ones are normal, which is the
worst for top-p: tens of thousands of ids are kept. Every draw, threshold and log-probability is first compared with the
reference; `differ` counts the rows that do not agree. Medians of CUDA graph replays over several inputs, together
larger than the L2 cache where rows are many; a single row stays in it, as it does behind the product that made it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from frame.core.ops import Ops
from frame.core.ops.random import seed_stream
from frame.kernels import filters, logits, logprobs, sampling

BANDWIDTH = 4.27e12  # bytes a second that an H200 was measured to copy
INPUTS_BYTES, MOST_INPUTS, REFERENCE_ROWS = 256 << 20, 16, 16
FILTERS: dict[str, tuple[int, float, float]] = {
    "top_k 50": (50, 1.0, 0.0),
    "top_p 0.9": (0, 0.9, 0.0),
    "min_p 0.05": (0, 1.0, 0.05),
    "top_k 50 top_p 0.9": (50, 0.9, 0.0),
    "every filter": (100, 0.95, 0.02),
    "top_k 5000": (5000, 1.0, 0.0),
}


@dataclass(frozen=True)
class Case:
    """`run` works on logits [N, V]; `check` runs the reference, to be compared row by row; `num_bytes` must move."""

    name: str
    run: Callable[[Tensor], object]
    check: Callable[[Tensor], object] | None
    num_bytes: float


def make_logits(kind: str, rows: int, vocab: int) -> Tensor:
    """float32 [N, V]."""
    noise = torch.randn(rows, vocab, device="cuda")
    if kind == "flat":
        return noise
    ranks = torch.rand(rows, vocab, device="cuda").argsort(-1) + 1
    return ranks.float().log_().mul_(-2).add_(noise, alpha=0.5)


def limits(name: str, rows: int) -> list[Tensor | None]:
    """(top_k, top_p, min_p) of every row, None where unused."""
    k, p, m = FILTERS[name]
    return [
        torch.full((rows,), k, dtype=torch.int32, device="cuda") if k else None,
        torch.full((rows,), p, device="cuda") if p < 1 else None,
        torch.full((rows,), m, device="cuda") if m else None,
    ]


def filtered(name: str, noise: list[Tensor], size: float) -> Iterator[Case]:
    """One mix of filters: the draw among what it keeps, and its threshold."""
    rows = len(noise[0])
    few = min(rows, REFERENCE_ROWS)
    chosen, short, part = limits(name, rows), limits(name, few), [values[:few] for values in noise]
    yield Case(
        f"draw {name}",
        lambda x: sampling.draw(x, *noise, *chosen),
        lambda x: Ops.draw(x[:few].clone(), *part, *short),
        size,
    )
    yield Case(
        f"keep_threshold {name}",
        lambda x: filters.keep_threshold(x, *chosen),
        lambda x: Ops.keep_threshold(x[:few].clone(), *short),
        size,
    )


def draws(rows: int, vocab: int) -> Iterator[Case]:
    """Everything that chooses tokens."""
    size = 4.0 * rows * vocab
    temperature = torch.full((rows,), 0.8, device="cuda")
    streams = torch.tensor([seed_stream(seed) for seed in range(rows)], device="cuda")
    noise = [temperature, streams, torch.arange(rows, device="cuda") * 31]
    part = [values[:REFERENCE_ROWS] for values in noise]
    yield Case("greedy", sampling.greedy, Ops.greedy, size)
    yield Case("draw", lambda x: sampling.draw(x, *noise), lambda x: Ops.draw(x[:REFERENCE_ROWS].clone(), *part), size)
    for name in FILTERS:
        yield from filtered(name, noise, size)


def best_of(k: int, drawn: Tensor, size: float) -> Case:
    """Log-probabilities of the k best."""
    return Case(
        f"top_logprobs {k}",
        lambda x: logprobs.top_logprobs(x, drawn, k, True),
        lambda x: Ops.top_logprobs(x, drawn, k, True),
        size,
    )


def edits(rows: int, vocab: int) -> Iterator[Case]:
    """Log-probabilities, and what changes logits; the latter are compared by the tests alone."""
    size = 4.0 * rows * vocab
    drawn = torch.randint(vocab, (rows,), dtype=torch.int32, device="cuda")
    for k in (0, 5, 20):
        yield best_of(k, drawn, size)
    every = torch.arange(rows, device="cuda")
    in_prompt = torch.rand(rows, vocab, device="cuda") < 0.01
    counts = (torch.rand(rows, vocab, device="cuda") < 0.005).int()
    penalties = [torch.full((rows,), value, device="cuda") for value in (1.1, 0.2, 0.1)]
    yield Case("penalize", lambda x: logits.penalize(x, every, in_prompt, counts, *penalties), None, 1.25 * size)
    yield Case("count_tokens", lambda x: logits.count_tokens(counts, every, drawn), None, 12.0 * rows)
    words = torch.zeros((rows, (vocab + 31) // 32), dtype=torch.int32, device="cuda")
    yield Case("apply_bitmask", lambda x: logits.apply_bitmask(x, every, words), None, size * (1 + 1 / 32))
    values = torch.ones(rows, device="cuda")
    yield Case("add_bias", lambda x: logits.add_bias(x, every, drawn.long(), values), None, 24.0 * rows)


def microseconds(calls: list[Callable[[], object]], repeats: int = 15) -> float:
    """Median time of one call, replayed from a graph that holds all of them."""
    for call in calls[:2]:
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
    return float(statistics.median(times)) * 1e3 / len(calls)


def differing(case: Case, x: Tensor) -> int | None:
    """Rows where kernel and reference do not agree, None where they are not compared; thresholds may be an ulp off."""
    if case.check is None:
        return None
    found, expected = (value[0] if isinstance(value, tuple) else value for value in (case.run(x), case.check(x)))
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        raise TypeError(f"{case.name} gave no tensor")
    found = found[: len(expected)].reshape(len(expected), -1)
    close = found.double().isclose(expected.reshape(found.shape).double(), rtol=3e-7, atol=0)
    return int((~close.all(-1)).sum())


def measure(case: Case, inputs: list[Tensor], kind: str) -> dict[str, object]:
    """One line of the table, printed."""
    rows = inputs[0].shape[0]
    wrong = differing(case, inputs[0])
    time = microseconds([partial(case.run, x) for x in inputs])
    floor = case.num_bytes / BANDWIDTH * 1e6
    print(
        f"{rows:5} {kind:7} {case.name:34} {time:9.1f} us {floor:8.2f} us {floor / time:6.1%}"
        f"  differ {'-' if wrong is None else wrong}",
        flush=True,
    )
    return {"rows": rows, "logits": kind, "op": case.name, "us": time, "floor_us": floor, "differ": wrong}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--op", default="", help="only what has this in its name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, vocabulary {options.vocab}", flush=True)
    results = []
    for rows in map(int, options.rows.split(",")):
        count = max(2, min(MOST_INPUTS, INPUTS_BYTES // (4 * rows * options.vocab)))
        for kind in ("peaked", "flat"):
            inputs = [make_logits(kind, rows, options.vocab) for _ in range(count)]
            cases = [*draws(rows, options.vocab), *(edits(rows, options.vocab) if kind == "peaked" else ())]
            results += [measure(case, inputs, kind) for case in cases if options.op in case.name]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
