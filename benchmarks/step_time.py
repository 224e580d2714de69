"""Host time of one decode step with a one-layer model, and which part of the step it goes to.

    python benchmarks/step_time.py [--steps 100] [--percentile 50] [--json FILE]

Greedy requests of 16 prompt tokens, 64 wide, 4 heads, 512 ids, float32, one thread, batch 1 / 64 / 256. The engine is
called as the front calls it, without a front: no text. Medians (`--percentile`) over steady decode steps. On a CPU the
forward pass, logits included, is work of the device that happens to be the host; `host` is the wall time of the step
without it, taken with no other clock running. The parts follow from steps of their own: the thread's processor time,
with the cost of their clocks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine
from frame.core.interfaces.engine import EngineRequest
from frame.core.interfaces.sampling import SamplingParams
from frame.core.plugin_host.registry import Registry
from frame.offline.in_process import make_engine
from frame.testing.checkpoints import make_checkpoint

BATCHES = {1: 0.4, 64: 1.2, 256: 3.0}
PROMPT_LEN = 16
WARM_STEPS = 100


class Stopwatch:
    """Time spent by `clock` in calls of chosen methods, a list per name with one entry a step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._running: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Times calls of `owner.method` from now on."""
        original: Callable[..., Any] = getattr(owner, method)
        clock, running = self._clock, self._running

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return original(*args, **kwargs)
            finally:
                running[name] += clock() - start

        setattr(owner, method, timed)

    def end_step(self) -> None:
        """Closes the books of one step."""
        for name, seconds in self._running.items():
            self.seconds[name].append(seconds)
        self._running.clear()


def watch_model(model: Any, watch: Stopwatch) -> None:
    """What a device would compute, but for the draw."""
    for method in ("forward", "logits"):
        watch.watch(model, method, "forward")


def watch_parts(engine: Engine, watch: Stopwatch) -> None:
    """The parts of a step, which do not overlap; what is left of the step is the loop itself and building plans."""
    runner = engine.executor._worker.runner  # type: ignore[attr-defined]
    watch.watch(engine, "step", "busy")
    watch.watch(engine.scheduler, "schedule", "schedule")
    watch.watch(engine.scheduler, "update", "update")
    watch.watch(runner, "_apply_changes", "staged writes")
    watch.watch(runner.device.ops, "build_inputs", "inputs")
    for backend in runner.planners:
        watch.watch(backend, "plan", "attention plan")
    watch_model(runner.model, watch)
    watch.watch(runner.sampler, "sample", "sample")


def start(folder: Path, batch: int, num_tokens: int) -> Engine:
    """An engine with `batch` requests that decode `num_tokens` each."""
    engine = make_engine(
        from_flat({"model": str(folder), "dtype": "float32", "max_num_seqs": 256, "max_num_batched_tokens": 8192}),
        Registry.load(),
    )
    draw = np.random.default_rng(0)
    for index in range(batch):
        engine.add(
            EngineRequest(
                request_id=str(index),
                prompt_ids=draw.integers(5, engine.info.vocab_size, PROMPT_LEN, dtype=np.int32),
                params=SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
                max_tokens=num_tokens,
                seed=index,
            )
        )
    return engine


def measure(folder: Path, batch: int, steps: int, percentile: float) -> dict[str, float]:
    """Milliseconds a step: "step" and "host" (wall), then "busy" (processor time of the step) and its parts."""
    engine = start(folder, batch, WARM_STEPS + 2 * steps + 10)
    for _ in range(WARM_STEPS):
        engine.step()
    forward, wall = Stopwatch(time.perf_counter), []
    watch_model(engine.executor._worker.runner.model, forward)  # type: ignore[attr-defined]
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        wall.append(time.perf_counter() - began)
        forward.end_step()
    parts = Stopwatch(time.thread_time)
    watch_parts(engine, parts)
    for _ in range(steps):
        engine.step()
        parts.end_step()
    engine.close()
    hosts = [whole - device for whole, device in zip(wall, forward.seconds["forward"], strict=True)]
    found = {"step": wall, "host": hosts, **dict(sorted(parts.seconds.items()))}
    return {name: 1e3 * float(np.percentile(seconds, percentile)) for name, seconds in found.items()}


def main() -> None:
    """Prints a table with one column a batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--percentile", type=float, default=50, help="which step of all is told, from 0, the quickest")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_checkpoint(folder, "llama", num_hidden_layers=1, max_position_embeddings=2048)
        found = {batch: measure(folder, batch, options.steps, options.percentile) for batch in BATCHES}
    print(f"torch {torch.__version__}, 1 thread, milliseconds a step")
    print("| part | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |")
    print("|---|" + "---|" * len(BATCHES))
    for name in next(iter(found.values())):
        print(f"| {name} | " + " | ".join(f"{found[batch][name]:.3f}" for batch in BATCHES) + " |")
    print("| target for host | " + " | ".join(f"≤ {limit}" for limit in BATCHES.values()) + " |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
