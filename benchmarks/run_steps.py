"""Where the seconds of a run of offline_gpu.py go: steps by kind and size, those that took long, and what is no step.

    python benchmarks/run_steps.py --model llama-70b --runs 1,2 --extra '{"tensor_parallel_size": 2}'
    python benchmarks/run_steps.py --model demo      # the same, tiny, on any machine

A step is answered when its tokens reach the scheduler; its time is that since the answer before, or since its launch
where none was on its way. Of each kind: how many steps, their seconds, the median, and by how many seconds those beyond
1.3 times the median exceed it. Passes of Python's garbage collector in the process of the scheduler are timed, too.
`--freeze` first takes the objects that exist then out of its sight. Runs are timed as by offline_gpu.py, but for a
clock read in every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from offline_gpu import MODELS, Run, timed

from frame import LLM, SamplingParams

DEMO = [Run(6, (20, 40), (8, 12))]
#: Rows of decodes and tokens of steps with prompts up to which steps count as one kind.
ROWS = 1, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512
TOKENS = 256, 512, 1024, 2048, 4096, 8192, 16384, 32768
#: A step is long if it takes so many times the median of its kind.
LONG = 1.3


@dataclass(frozen=True)
class Step:
    """A step that was answered: when, in seconds, how long after the answer before, and what it computed."""

    at: float
    seconds: float
    rows: int
    tokens: int
    captures: bool

    @property
    def kind(self) -> str:
        """The name of its kind, which sorts by size."""
        prompts = self.tokens > self.rows
        bounds, size, name = (TOKENS, self.tokens, "tokens") if prompts else (ROWS, self.rows, "rows")
        bound = next((bound for bound in bounds if size <= bound), bounds[-1])
        return f"{'prompts' if prompts else 'decodes'} up to {bound:6,} {name}"


class Watch:
    """Notes the steps of a scheduler, and passes of the garbage collector: (generation, seconds)."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[Step] = []
        self.passes: list[tuple[int, float]] = []
        self._plan: Callable[..., Any] = scheduler.schedule
        self._take: Callable[..., Any] = scheduler.update
        self._launched: dict[int, float] = {}
        self._last = self._began = 0.0
        scheduler.schedule, scheduler.update = self._schedule, self._update
        gc.callbacks.append(self._collected)

    def forget(self) -> None:
        """Begins anew."""
        self.steps.clear()
        self.passes.clear()

    def _schedule(self, *arguments: Any, **keywords: Any) -> Any:
        plan = self._plan(*arguments, **keywords)
        if plan is not None:
            self._launched[plan.step] = time.perf_counter()
        return plan

    def _update(self, plan: Any, result: Any) -> Any:
        now = time.perf_counter()
        begun = max(self._last, self._launched.pop(plan.step))
        self.steps.append(Step(now, now - begun, len(plan.slots), plan.num_tokens, plan.capture))
        self._last = now
        return self._take(plan, result)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.passes.append((info["generation"], time.perf_counter() - self._began))


def kinds(steps: list[Step]) -> list[dict[str, Any]]:
    """Of each kind of steps: how many, their seconds, the median in ms, and what long ones took beyond it."""
    found = defaultdict[str, list[float]](list)
    for step in steps:
        found[step.kind].append(step.seconds)
    rows: list[dict[str, Any]] = []
    for kind, times in sorted(found.items()):
        median = statistics.median(times)
        beyond = [one - median for one in times if one > LONG * median]
        rows.append(
            {"kind": kind, "steps": len(times), "seconds": round(sum(times), 3), "median ms": round(1e3 * median, 2)}
            | {"long": len(beyond), "beyond s": round(sum(beyond), 3)}
        )
    return rows


def longest(steps: list[Step], count: int) -> list[tuple[int, Step, float]]:
    """The steps that exceed the median of their kind by most: (place, step, seconds beyond it)."""
    medians = {row["kind"]: row["median ms"] / 1e3 for row in kinds(steps)}
    beyond = [(place, step, step.seconds - medians[step.kind]) for place, step in enumerate(steps)]
    return sorted(beyond, key=lambda one: -one[2])[:count]


def report(watch: Watch, began: float, seconds: float, made: int) -> dict[str, Any]:
    """Prints where the seconds of a run went that `began` then and made so many tokens; returns it."""
    steps, end = watch.steps, began + seconds
    ends = [began, *(step.at for step in steps), end]
    between = sum(after - before for before, after in pairwise(ends)) - sum(step.seconds for step in steps)
    before, behind = steps[0].at - steps[0].seconds - began, end - steps[-1].at
    print(f"  {seconds:.3f} s, {made / seconds:.0f} out/s, {len(steps)} steps")
    print(f"  no step was on its way for {between:.3f} s: {before:.3f} before the first, {behind:.3f} behind the last")
    rows = kinds(steps)
    for row in rows:
        print("  {kind}: {steps} steps, {seconds} s, median {median ms} ms; {long} long, {beyond s} s".format(**row))
    for place, step, beyond in longest(steps, 8):
        capture = ", captures" if step.captures else ""
        print(f"  step {place} of {step.rows} rows, {step.tokens} tokens{capture}: {1e3 * beyond:.1f} ms beyond")
    passes = {}
    for generation in range(3):
        took = [one for found, one in watch.passes if found == generation]
        passes[generation] = len(took), round(sum(took), 3)
    print(f"  garbage collector, passes and seconds by generation: {passes}", flush=True)
    idle = {"idle": between, "before": before, "behind": behind, "passes": passes}
    return {"seconds": seconds, "tokens_out": made, "kinds": rows, **idle}


def main() -> None:
    """Reads the arguments, starts the engine, and makes each run twice, as offline_gpu.py does."""
    parser = argparse.ArgumentParser(description="Steps of a run by kind and size.")
    parser.add_argument("--model", default="demo", help="A model of offline_gpu.py, or demo.")
    parser.add_argument("--runs", default="", help="Comma-separated numbers of the model's runs; all by default.")
    parser.add_argument("--extra", default="{}", type=json.loads, help="JSON of more arguments of LLM.")
    parser.add_argument("--freeze", action="store_true", help="Hide what exists after the start from the collector.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "demo":
            llm, vocabulary, runs = LLM(**options.extra), 2000, DEMO
        else:
            config, longest_sequence, runs = MODELS[options.model]
            (Path(folder) / "config.json").write_text(json.dumps(config))
            settings = {"dtype": "bfloat16", "seed": 0, "gpu_memory_utilization": 0.9, "load_format": "dummy"}
            settings |= {"max_model_len": longest_sequence, "skip_tokenizer_init": True}
            llm, vocabulary = LLM(model=folder, **{**settings, **options.extra}), config["vocab_size"]
    timed(llm, SamplingParams, vocabulary, Run(4, (64, 64), (16, 16)), 0)
    if options.freeze:
        gc.freeze()
    watch, results = Watch(llm.llm_engine.core.scheduler), list[dict[str, Any]]()
    chosen = {int(number) for number in options.runs.split(",") if number}
    for run in (run for number, run in enumerate(runs) if not chosen or number in chosen):
        for seed in (1, 2):
            watch.forget()
            print(f"{options.model} {run}, seed {seed}", flush=True)
            seconds, _, made = timed(llm, SamplingParams, vocabulary, run, seed)
            results.append({"run": str(run), **report(watch, time.perf_counter() - seconds, seconds, made)})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    llm.close()


if __name__ == "__main__":
    main()
