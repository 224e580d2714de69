"""`frame bench serve`: drives an OpenAI-compatible server and times every answer."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from typing import Any, cast

from frame.interfaces import Command
from frame.quoting import quoted
from frame.settings import ConfigError, FlagParser, read_json, read_mapping

from .client import Target
from .datasets import add_dataset_flags, make_requests
from .load import Load, Run, ask_model, run_load, wait_ready
from .metrics import METRICS, parse_goodput, serve_figures
from .output import add_output_flags, finish, progress_bar, stamp
from .serve_plots import metric_table, serve_plots
from .serve_results import save_results
from .text_source import TextSource, text_source

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
#: Above this share of one processor the client is assumed to limit the figures.
_BUSY = 0.85
_KEYS = ("FRAME_API_KEY", "OPENAI_API_KEY")
#: Sampling flags, sent only when given.
_SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}
_SAMPLING_HELP = {
    "temperature": "Sampling temperature; default: 0, always the likeliest token.",
    "top_p": "Draw from the likeliest tokens that add up to this probability.",
    "top_k": "Draw from this many of the likeliest tokens.",
    "min_p": "Draw from tokens at least this likely, as a share of the likeliest one's.",
}


class ServeBench(Command):
    """Sends requests at a rate or a concurrency; exits with 1 when none succeeded."""

    help = "Drive any OpenAI-compatible server and report TTFT, TPOT, ITL, end-to-end times and goodput."
    examples = (
        "frame bench serve --num-prompts 200 --random-input-len 512 --random-output-len 128 --ignore-eos",
        "frame bench serve --base-url http://host:8000 --request-rate 8 --goodput ttft:500 tpot:50 --html report.html",
        "frame bench serve --dataset-name sharegpt --dataset-path sharegpt.json --tokenizer /models/qwen3",
        "frame bench serve --endpoint chat --max-concurrency 32 --save-result --result-dir results",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """vLLM's flags."""
        _add_server_flags(parser)
        _add_load_flags(parser)
        add_dataset_flags(parser, num_prompts=1000)
        _add_result_flags(parser)
        cast("FlagParser", parser).mappings["extra_body"] = read_json

    def run(self, arguments: argparse.Namespace) -> int:
        """Returns 1 when no request succeeded."""
        plan = _Plan(arguments)
        run = asyncio.run(_measure(arguments, plan))
        records = run.records
        done = [record for record in records if record.success]
        if not done:
            print(f"frame: none of {len(records)} requests succeeded; the first: {records[0].error}", file=sys.stderr)
            return 1
        results = _results(arguments, plan, run)
        plots = serve_plots(records, plan.metrics)
        finish(arguments, "Serving benchmark", results, plots, [metric_table(records, plan.metrics, plan.percents)])
        if len(done) < len(records):
            first = next(record.error for record in records if not record.success)
            print(f"frame: {len(records) - len(done)} requests failed; the first: {first}", file=sys.stderr)
        if run.client_cpu > _BUSY:
            print(
                f"frame: the client took {run.client_cpu:.0%} of a processor, so it may have held the server back; "
                "lower the rate, or run several clients",
                file=sys.stderr,
            )
        save_results(arguments, results, records)
        return 0


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--base-url", metavar="URL", help="Address of the server; default: http://HOST:PORT.")
    add("--host", default="127.0.0.1", help="Host of the server (default: %(default)s).")
    add("--port", type=int, default=8000, help="Port of the server (default: %(default)s).")
    add("--endpoint", metavar="NAME", help="completions (the default), chat, or a path such as /v1/completions.")
    add(
        "--backend",
        default="openai",
        choices=("openai", "openai-chat", "vllm"),
        help="vLLM's flag for the route: openai-chat means --endpoint chat (default: %(default)s).",
    )
    add("--model", metavar="NAME", help="Model to ask for; default: the first that the server lists.")
    add("--served-model-name", metavar="NAME", help="The model's name in requests, where --model is a folder.")
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="Folder with tokenizer.json; default: the one in --model; without any, prompts are common words.",
    )
    add("--header", nargs="*", default=[], metavar="NAME=VALUE", help="HTTP headers to send.")
    add(
        "--extra-body",
        type=read_mapping,
        default={},
        metavar="JSON",
        help="Fields to add to the body of every request.",
    )
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=600.0,
        metavar="S",
        help="Seconds to wait until the server answers (default: 600).",
    )
    add(
        "--request-timeout-sec",
        type=float,
        default=21600.0,
        metavar="S",
        help="Longest pause of an answer in seconds (default: 21600).",
    )


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    add = group.add_argument
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="Requests a second; inf sends all at once (default: inf).",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="Regularity of arrivals: 1 is a Poisson process, less comes in bursts, more is steadier (default: 1).",
    )
    add("--max-concurrency", type=int, metavar="N", help="Most requests in flight; the client holds the others back.")
    add("--num-warmups", type=int, default=0, metavar="N", help="Requests to send before the measurement (default: 0).")
    add("--ignore-eos", action="store_true", help="Ask for outputs of full length (frame, vLLM, SGLang).")
    for name, kind in _SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=_SAMPLING_HELP[name])


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    group = parser.add_argument_group("results")
    add = group.add_argument
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="NAMES",
        help="Metrics to report, of ttft, tpot, itl, e2el (default: all).",
    )
    add(
        "--metric-percentiles",
        default="50,90,95,99",
        metavar="P,…",
        help="Percentiles to report (default: %(default)s).",
    )
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="Limits in milliseconds of requests that count as good: ttft:500 tpot:50 e2el:…",
    )
    add("--save-result", action="store_true", help="Write JSON under --result-dir.")
    add("--save-detailed", action="store_true", help="Write also the times, text and error of every request.")
    add("--result-dir", default=".", metavar="FOLDER", help="Folder of the result (default: the current one).")
    add("--result-filename", metavar="NAME", help="File name; default: made of backend, rate, model and date.")
    add("--label", help="Label to write into the result.")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Fields to add to the result.")


class _Plan:
    """The checked arguments; raises `ConfigError`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.percents = _percents(arguments.metric_percentiles)
        self.metrics = [name.strip() for name in arguments.percentile_metrics.split(",") if name.strip()]
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(f"no metric {quoted(name)} for --percentile-metrics; there are: {', '.join(METRICS)}")
        self.goodput = parse_goodput(arguments.goodput)
        self.metadata = _pairs("--metadata", arguments.metadata)
        for name in ("request_rate", "burstiness"):
            if not getattr(arguments, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(arguments, name)}")
        if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {arguments.max_concurrency}")
        self.endpoint = arguments.endpoint or ("chat" if arguments.backend == "openai-chat" else "completions")
        self.path = _PATHS.get(self.endpoint, self.endpoint)
        if not self.path.startswith("/"):
            raise ConfigError(f"--endpoint must be completions, chat or a path, got {quoted(self.endpoint)}")
        url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://, got {quoted(url)}")
        self.base_url = url.rstrip("/").removesuffix("/v1")
        self.source: TextSource = text_source(arguments.tokenizer, arguments.model)
        self.model = arguments.served_model_name or arguments.model or ""
        self.headers = {"Content-Type": "application/json", **_pairs("--header", arguments.header)}
        key = next((os.environ[name] for name in _KEYS if os.environ.get(name)), None)
        if key is not None:
            self.headers.setdefault("Authorization", f"Bearer {key}")

    def target(self, arguments: argparse.Namespace) -> Target:
        """Address and fields of every request; called once the model's name is known."""
        sampling = {name: value for name in _SAMPLING if (value := getattr(arguments, name)) is not None}
        return Target(
            base_url=self.base_url,
            path=self.path,
            model=self.model,
            chat="chat" in self.path,
            fields={**sampling, **arguments.extra_body},
            headers=self.headers,
            ignore_eos=arguments.ignore_eos,
        )


def _percents(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= value <= 100 for value in found):
        raise ConfigError(f"--metric-percentiles must be numbers from 0 to 100 with commas between, got {quoted(text)}")
    return found


def _pairs(flag: str, items: list[str]) -> dict[str, str]:
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} takes NAME=VALUE, got {quoted(item)}")
        found[name] = value
    return found


async def _measure(arguments: argparse.Namespace, plan: _Plan) -> Run:
    await wait_ready(plan.base_url, plan.headers, arguments.ready_check_timeout_sec)
    plan.model, longest = await ask_model(plan.base_url, plan.headers, plan.model)
    load = Load(
        requests=make_requests(arguments, plan.source, longest),
        rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        max_concurrency=arguments.max_concurrency,
        seed=arguments.seed,
        num_warmups=arguments.num_warmups,
        timeout=arguments.request_timeout_sec,
    )
    with progress_bar(arguments, len(load.requests), "requests") as bar:
        return await run_load(plan.target(arguments), load, bar.update)


def _results(arguments: argparse.Namespace, plan: _Plan, run: Run) -> dict[str, Any]:
    rate = arguments.request_rate
    figures = serve_figures(
        run.records, run.seconds, metrics=plan.metrics, percents=plan.percents, goodput=plan.goodput
    )
    return {
        **stamp(),
        "backend": arguments.backend,
        "endpoint_type": arguments.backend,
        "endpoint": plan.path,
        "label": arguments.label,
        "model_id": plan.model,
        "tokenizer_id": plan.source.name,
        "dataset_name": arguments.dataset_name,
        "num_prompts": arguments.num_prompts,
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **plan.metadata,
        "client_cpu": run.client_cpu,
        **figures,
    }
