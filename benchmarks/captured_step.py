"""Host time of one decode step where the device's work is captured and takes no time: what is left is Python.

    python benchmarks/captured_step.py [--batches 1 64 256] [--steps 400] [--temperature 0.6]

An `LLMEngine` on the CPU platform with the CUDA platform's graphs, whose replay does nothing; ids in and out, final
outputs only, prompts of 128 tokens. On a GPU's host come on top, for each step, two graph launches, a copy each way and
the wait for the tokens. Milliseconds: the quickest twentieth and the median of all steps, then of parts, on further
steps, the cost of their clocks included.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.core.config.flat import from_flat
from frame.core.interfaces.platform_steps import Steps
from frame.core.interfaces.sampling import RequestOutputKind, SamplingParams
from frame.core.worker.start.profile import NoAttention
from frame.offline.engine import LLMEngine
from frame.plugins.attention import torch as torch_attention
from frame.plugins.platforms.cpu import CpuPlatform
from frame.plugins.platforms.cuda.graphs.capture import Captured
from frame.plugins.platforms.cuda.graphs.cuda_graphs import CudaGraphs
from frame.plugins.platforms.cuda.graphs.piecewise import PiecewiseGraphs
from frame.plugins.platforms.cuda.graphs.shapes import CudaShapes
from frame.plugins.platforms.options import CudaOptions
from frame.testing.checkpoints import make_checkpoint

PROMPT_LEN, MAX_LEN, WARM_STEPS = 128, 4096, 100


class Capturer:
    """What is captured runs once."""

    def capture(self, forward: Callable[[], Tensor]) -> Captured:
        """As `cuda_capturer.Capturer`."""
        return Captured(lambda: None, forward(), 0)

    def forget(self) -> None:
        """There is nothing to forget."""


class Unattended(NoAttention):
    """Attention that nobody computes, and that may be captured."""

    needs_python = False


def make_steps(platform: CpuPlatform) -> Steps:
    """Steps of which every size is captured before the first request."""
    most = platform.config.scheduler.max_num_seqs
    options = CudaOptions(graph_sizes_at_start=most)
    graphs = CudaGraphs(Capturer(), options, most, pieces=PiecewiseGraphs(Capturer()), max_tokens=0)  # type: ignore[arg-type]
    return Steps(CudaShapes(graphs), graphs, compiler=graphs)


def start(folder: Path, batch: int, steps: int, temperature: float) -> LLMEngine:
    """An engine whose `batch` requests decode for that many steps."""
    settings = {"model": str(folder), "dtype": "float32", "max_num_seqs": batch, "max_model_len": MAX_LEN,
                "skip_tokenizer_init": True, "num_gpu_blocks_override": batch * MAX_LEN // 16 + 2}  # fmt: skip
    engine = LLMEngine.from_config(from_flat(settings))
    draw, vocab_size = random.Random(0), engine.core.info.vocab_size  # type: ignore[attr-defined]
    params = SamplingParams(
        temperature=temperature,
        max_tokens=min(2 * steps + WARM_STEPS + 50, MAX_LEN - PROMPT_LEN),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for number in range(batch):
        ids = [draw.randrange(vocab_size) for _ in range(PROMPT_LEN)]
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    return engine


class Parts:
    """Seconds of chosen methods without those they call, a list per name with one entry a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._running: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Times calls of `owner.method` from now on."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return original(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self._running[name] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        setattr(owner, method, timed)

    def end_step(self) -> None:
        """Closes the books of one step."""
        for name, seconds in self._running.items():
            self.seconds[name].append(seconds)
        self._running.clear()


def measure(folder: Path, batch: int, steps: int, temperature: float) -> dict[str, list[float]]:
    """Seconds of each step, and of its parts."""
    engine = start(folder, batch, steps, temperature)
    core: Any = engine.core
    runner = core.executor._worker.runner
    runner.device.ops.write_rows = lambda *_: None  # the one launch of some steps that is not captured
    for _ in range(WARM_STEPS):
        engine.step()
    whole = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - began)
    parts = Parts()
    for owner, method, name in (
        (core, "step", "loop"), (core.scheduler, "schedule", "schedule"), (core.scheduler, "update", "update"),
        (core, "_answer", "result"), (runner, "execute", "execute"), (runner.inputs, "build", "inputs"),
        (runner, "_apply_changes", "changes"), (runner, "sample", "sample"), (engine.front, "process", "front"),
    ):  # fmt: skip
        parts.watch(owner, method, name)
    for _ in range(steps):
        engine.step()
        parts.end_step()
    engine.close()
    return {"step": whole, **parts.seconds}


def main() -> None:
    """Prints a line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    CpuPlatform.steps = make_steps  # type: ignore[method-assign,assignment]
    torch_attention.TorchAttention = Unattended  # type: ignore[misc,assignment]
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(Path(scratch), "llama", num_hidden_layers=1, max_position_embeddings=MAX_LEN)
        for batch in options.batches:
            found = measure(folder, batch, options.steps, options.temperature)
            told = {name: np.percentile(1e3 * np.array(seconds), (5, 50)) for name, seconds in found.items()}
            print(f"batch {batch}: " + ", ".join(f"{name} {low:.3f}/{half:.3f}" for name, (low, half) in told.items()))


if __name__ == "__main__":
    main()
