"""`frame bench throughput`: how many tokens a second an engine of this process makes of many requests."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from frame.interfaces import Command
from frame.settings import ConfigError, read_checkpoint

from .datasets import add_dataset_flags, make_requests
from .metrics import METRICS, summary
from .offline import add_engine_flags, as_prompts, engine_config, engine_facts, prompt_source, start_engine
from .output import finish, stamp
from .plots import Plot, Series, distribution
from .record import BenchRequest

_PERCENTS = (50.0, 90.0, 99.0)


class ThroughputBench(Command):
    """Submits all requests at once and ignores end-of-sequence, so that every output has its full length."""

    help = "Measure requests and tokens per second of many requests at once, in this process."
    examples = (
        "frame bench throughput --input-len 128 --output-len 64 --num-prompts 100",
        "frame bench throughput /models/qwen3 --dataset-name sharegpt --dataset-path sharegpt.json",
        "frame bench throughput --dataset-name shared-prefix --num-prompts 64 --html report.html",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """vLLM's flags, then the engine's; `--seed` is the seed of the engine and of the prompts."""
        add = parser.add_argument
        add("--input-len", type=int, metavar="N", help="Prompt tokens; the same as --random-input-len.")
        add("--output-len", type=int, metavar="N", help="Output tokens, whatever the dataset.")
        add("--n", type=int, default=1, metavar="N", help="Outputs of a request (default: %(default)s).")
        add(
            "--num-warmups",
            type=int,
            default=0,
            metavar="N",
            help="Requests to run before the measurement (default: 0).",
        )
        add("--disable-detokenize", action="store_true", help="Do not convert output tokens to text.")
        add_dataset_flags(parser, num_prompts=1000, seed=False)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Measures and reports."""
        for name in ("input_len", "output_len"):
            value = getattr(arguments, name)
            if value is not None:
                if value < 1:
                    raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
                setattr(arguments, f"random_{name}", value)
        config = engine_config(arguments)
        arguments.seed = config.model.seed
        longest = read_checkpoint(config).max_model_len
        requests = make_requests(arguments, prompt_source(config, arguments.dataset_name), longest)
        llm = start_engine(config)
        try:
            outputs, seconds = _measure(llm, requests, arguments)
        except ValueError as error:  # such as a prompt that is longer than max_model_len
            raise ConfigError(str(error)) from None
        figures = _figures(outputs, seconds)
        results = {
            **stamp(),
            **engine_facts(llm, config),
            "dataset_name": arguments.dataset_name,
            **figures,
        }
        finish(arguments, "Offline throughput", results, _plots(outputs))
        return 0


def _measure(llm: Any, requests: Sequence[BenchRequest], arguments: argparse.Namespace) -> tuple[list[Any], float]:
    from frame import SamplingParams

    def params(length: int) -> Any:
        return SamplingParams(
            n=arguments.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=length,
            detokenize=not arguments.disable_detokenize,
        )

    prompts = as_prompts([request.prompt for request in requests])
    lengths = [arguments.output_len or request.output_len for request in requests]
    if arguments.num_warmups:
        llm.generate(prompts[: arguments.num_warmups], params(min(8, *lengths)), use_tqdm=False)
        llm.llm_engine.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, [params(length) for length in lengths], use_tqdm=not arguments.disable_tqdm)
    return outputs, time.perf_counter() - start


def _figures(outputs: Sequence[Any], seconds: float) -> dict[str, Any]:
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    figures: dict[str, Any] = {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": prompt_tokens + output_tokens,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "output_throughput": output_tokens / seconds,
    }
    for name, values in _times(outputs).items():
        figures |= summary(values, name, _PERCENTS)
    return figures


def _times(outputs: Sequence[Any]) -> dict[str, list[float]]:
    """Times of each request since the start, in seconds."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2el": []}
    for output in outputs:
        own = output.metrics
        if own is None or own.first_token_time is None or own.last_token_time is None:
            continue
        found["ttft"].append(own.first_token_time - own.arrival_time)
        found["e2el"].append(own.last_token_time - own.arrival_time)
        count = max(len(one.token_ids) for one in output.outputs)
        if count > 1:
            found["tpot"].append((own.last_token_time - own.first_token_time) / (count - 1))
    return {name: values for name, values in found.items() if values}


def _plots(outputs: Sequence[Any]) -> list[Plot]:
    return [
        Plot(
            METRICS[name].capitalize(),
            f"{name.upper()} (s)",
            "requests up to it (%)",
            [Series(name, distribution(values), "step")],
        )
        for name, values in _times(outputs).items()
    ]
