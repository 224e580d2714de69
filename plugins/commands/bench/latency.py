"""`frame bench latency`: how long one batch takes in an engine of this process."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from frame.interfaces import Command
from frame.settings import ConfigError

from .metrics import percentile
from .offline import IdSource, add_engine_flags, as_prompts, engine_config, engine_facts, start_engine
from .output import finish, progress_bar, stamp
from .plots import Plot, Series

_PERCENTS = (10, 25, 50, 75, 90, 99)
_COUNTS = ("input_len", "output_len", "batch_size", "n", "num_iters")


class LatencyBench(Command):
    """Runs the same batch several times, each time with an empty prefix cache."""

    help = "Time one batch of requests from start to end, in this process."
    examples = (
        "frame bench latency --input-len 32 --output-len 128 --batch-size 8",
        "frame bench latency /models/qwen3 --dtype bfloat16 --output-json latency.json",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """vLLM's flags, then the engine's."""
        add = parser.add_argument
        add("--input-len", type=int, default=32, metavar="N", help="Prompt tokens (default: %(default)s).")
        add("--output-len", type=int, default=128, metavar="N", help="Output tokens (default: %(default)s).")
        add("--batch-size", type=int, default=8, metavar="N", help="Requests of a batch (default: %(default)s).")
        add("--n", type=int, default=1, metavar="N", help="Outputs of a request (default: %(default)s).")
        add(
            "--num-iters-warmup",
            type=int,
            default=10,
            metavar="N",
            help="Batches to run before the measurement (default: %(default)s).",
        )
        add("--num-iters", type=int, default=30, metavar="N", help="Batches to measure (default: %(default)s).")
        add("--disable-detokenize", action="store_true", help="Do not convert output tokens to text.")
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Measures and reports."""
        for name in _COUNTS:
            if getattr(arguments, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
        config = engine_config(arguments)
        llm = start_engine(config)
        took = _measure(llm, arguments)
        results = {
            **stamp(),
            **engine_facts(llm, config),
            **{name: getattr(arguments, name) for name in _COUNTS},
            "avg_latency": statistics.fmean(took),
            "median_latency": percentile(took, 50),
            "latencies": took,
            "percentiles": {str(percent): percentile(took, percent) for percent in _PERCENTS},
            "output_tokens_per_second": arguments.batch_size
            * arguments.n
            * arguments.output_len
            / percentile(took, 50),
        }
        runs = [(float(index), seconds) for index, seconds in enumerate(took, start=1)]
        finish(arguments, "Latency of a batch (s)", results, [_plot(runs)])
        return 0


def _plot(runs: list[tuple[float, float]]) -> Plot:
    return Plot("Latency of a batch, run by run", "run", "latency (s)", [Series("batches", runs, "points")])


def _measure(llm: Any, arguments: argparse.Namespace) -> list[float]:
    from frame import SamplingParams

    draw = random.Random(0)
    source = IdSource(llm.llm_engine.core.info.vocab_size)
    prompts = as_prompts([source.ids(arguments.input_len, draw) for _ in range(arguments.batch_size)])
    params = SamplingParams(
        n=arguments.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=arguments.output_len,
        detokenize=not arguments.disable_detokenize,
    )
    took = []
    total = arguments.num_iters_warmup + arguments.num_iters
    with progress_bar(arguments, total, "batches") as bar:
        for index in range(total):
            llm.llm_engine.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if index >= arguments.num_iters_warmup:
                took.append(time.perf_counter() - start)
            bar.update()
    return took
