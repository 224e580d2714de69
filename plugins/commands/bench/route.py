"""`frame bench route`: replays requests over simulated servers, and compares route policies."""

from __future__ import annotations

import argparse
import random
from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from frame.interfaces import Command, Setup
from frame.settings import ConfigError, Registry, config_from_arguments

from .arrivals import arrival_times
from .datasets import add_dataset_flags, make_requests
from .output import add_output_flags, finish, progress_bar, stamp
from .plots import Plot, Series
from .record import BenchRequest
from .report import Table, shown
from .text_source import TextSource, TokenizerSource, text_source

if TYPE_CHECKING:
    from frame.interfaces import RoutePolicy
    from frame.routing.simulation import ServiceModel, SimulatedRun, TracedRequest

_POLICIES = ("round-robin", "least-load", "text-prefix", "prefix")
_MOST_SERVERS = 64
#: Requests a second for each server, where the trace does not say when they come.
_RATE = 2.0
#: Requests of a dataset; of a trace, each row is one.
_NUM_PROMPTS = 1000
_PERCENTS = (50, 90, 99)
_COLUMNS = (
    "servers", "policy", "hit rate", "imbalance", *(f"TTFT p{percent}, ms" for percent in _PERCENTS), "latency p50, s",
    "tokens/s",
)  # fmt: skip
#: The flags of the servers' speed and size → fields of `ServiceModel`, and what they mean.
_MODEL = {
    "prefill_rate": "Tokens of prompts that a server computes in a second",
    "step_seconds": "Seconds of a step that computes nothing",
    "request_seconds": "Seconds that each request with its prompt adds to a step",
    "max_batched_tokens": "Most tokens of a step",
    "max_requests": "Most requests of a step",
    "cache_tokens": "Tokens that a server's KV cache holds",
    "block_size": "Tokens of a block of the prefix cache",
    "event_seconds": "Seconds until the front knows what a server has cached",
}


class RouteBench(Command):
    """Needs no server and no model: what takes time is modelled."""

    help = "Replay requests over simulated servers, and compare the route policies of `frame route`."
    examples = (
        "frame bench route trace.jsonl --servers 2 8 64",
        "frame bench route --dataset-name shared-prefix --policies least-load text-prefix --html route.html",
        "frame bench route trace.jsonl --policies prefix --plugin.prefix.load-tokens 1000",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The trace, the servers and the policies."""
        add = parser.add_argument
        add(
            "trace", nargs="?", metavar="TRACE",
            help="File of --dataset-name custom, each row of which is a request; default: the dataset's requests.",
        )  # fmt: skip
        add("--servers", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="Numbers of servers (2 4 8).")
        add(
            "--policies", nargs="+", default=list(_POLICIES), metavar="NAME",
            help=f"Route policy plugins (default: {' '.join(_POLICIES)}).",
        )  # fmt: skip
        add(
            "--rate-per-server", type=float, metavar="R",
            help=f"Requests a second for each server; default: the times that all rows name, or {_RATE:g}.",
        )  # fmt: skip
        add(
            "--burstiness", type=float, default=1.0, metavar="B",
            help="Regularity of arrivals: 1 is a Poisson process, less comes in bursts, more is steadier (default: 1).",
        )  # fmt: skip
        add("--tokenizer", metavar="FOLDER", help="Folder with tokenizer.json; without it four bytes are a token.")
        _add_model_flags(parser)
        add_dataset_flags(parser, num_prompts=_NUM_PROMPTS)
        # so that a number that was typed can be told from none
        parser.set_defaults(num_prompts=None)
        add_output_flags(parser)
        from frame.routing.settings import take_plugin_options

        take_plugin_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Returns 0; raises `ConfigError` and `PluginError` before anything is simulated."""
        from frame.routing.simulation import simulate

        model = _model(arguments)
        _check(arguments)
        make = _maker(arguments)
        for name in arguments.policies:
            make(name)
        requests, source = _requests(arguments)
        tokens = [array("I", _tokens(request, source) or [0]) for request in requests]
        runs = []
        with progress_bar(arguments, len(arguments.servers) * len(arguments.policies), "replays") as bar:
            for count in arguments.servers:
                trace = _trace(arguments, requests, tokens, count)
                for name in arguments.policies:
                    runs.append(simulate(make(name), name, trace, count, model))
                    bar.update()
        _show(arguments, runs, len(requests), model)
        return 0


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    from frame.routing.simulation import ServiceModel

    group = parser.add_argument_group("simulated servers")
    for each in fields(ServiceModel):
        kind = type(each.default)
        group.add_argument(
            f"--{each.name.replace('_', '-')}", type=kind, default=each.default, metavar="N" if kind is int else "X",
            help=f"{_MODEL[each.name]} (default: {each.default:g}).",
        )  # fmt: skip


def _model(arguments: argparse.Namespace) -> ServiceModel:
    from frame.routing.simulation import ServiceModel

    for name in _MODEL:
        value, may_be_zero = getattr(arguments, name), name in ("request_seconds", "event_seconds")
        if not (0 <= value < float("inf") if may_be_zero else 0 < value < float("inf")):
            raise ConfigError(
                f"--{name.replace('_', '-')} must be {'at least' if may_be_zero else 'above'} 0 and finite, got {value}"
            )
    return ServiceModel(**{name: getattr(arguments, name) for name in _MODEL})


def _check(arguments: argparse.Namespace) -> None:
    for count in arguments.servers:
        if not 1 <= count <= _MOST_SERVERS:
            raise ConfigError(f"--servers must be numbers from 1 to {_MOST_SERVERS}, got {count}")
    for name in ("rate_per_server", "burstiness"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0 and finite, got {value}")


def _maker(arguments: argparse.Namespace) -> Any:
    """Makes a new policy by its name."""
    config = config_from_arguments(argparse.Namespace(plugin=getattr(arguments, "plugin", None)))
    registry = Registry.load()
    registry.check(config)

    def make(name: str) -> RoutePolicy:
        policy: RoutePolicy = registry.make("route-policy", name, Setup(), config)
        return policy

    return make


def _requests(arguments: argparse.Namespace) -> tuple[list[BenchRequest], TextSource]:
    source = text_source(arguments.tokenizer, None)
    if arguments.trace is not None:
        arguments.dataset_name, arguments.dataset_path = "custom", arguments.trace
    elif arguments.num_prompts is None:
        arguments.num_prompts = _NUM_PROMPTS
    return make_requests(arguments, source), source


def _tokens(request: BenchRequest, source: TextSource) -> Sequence[int]:
    """The ids of a prompt; without a tokenizer numbers that stand for four bytes each."""
    if not isinstance(request.prompt, str):
        return request.prompt
    if isinstance(source, TokenizerSource):
        return source.encode(request.prompt)
    data = request.prompt.encode(errors="replace")
    return [int.from_bytes(data[start : start + 4], "big") for start in range(0, len(data), 4)]


def _trace(
    arguments: argparse.Namespace, requests: Sequence[BenchRequest], tokens: Sequence[array[int]], num_servers: int
) -> list[TracedRequest]:
    """The requests with the times at which they arrive."""
    from frame.routing.simulation import TracedRequest

    rate, recorded = arguments.rate_per_server, [request.at for request in requests if request.at is not None]
    if rate is None and len(recorded) == len(requests):
        first = min(recorded)
        times = [at - first for at in recorded]
    else:
        draw = random.Random(arguments.seed)
        times = arrival_times(len(requests), (rate or _RATE) * num_servers, arguments.burstiness, draw)
    found = []
    for at, request, ids in zip(times, requests, tokens, strict=True):
        if request.messages:
            path, body = "/v1/chat/completions", msgspec.json.encode({"messages": request.messages})
        else:
            path, body = "/v1/completions", msgspec.json.encode({"prompt": request.prompt})
        found.append(TracedRequest(at, path, body, ids, request.output_len))
    return found


def _figures(run: SimulatedRun) -> dict[str, Any]:
    ttfts = {f"p{percent}_ttft_ms": float(np.percentile(run.ttfts, percent)) * 1e3 for percent in _PERCENTS}
    return {
        "num_servers": run.num_servers,
        "policy": run.policy,
        "hit_rate": run.hit_rate,
        "imbalance": run.imbalance,
        **ttfts,
        "p50_latency_s": float(np.percentile(run.latencies, 50)),
        "prompt_tokens_per_second": run.prompt_tokens / run.seconds,
    }


def _show(arguments: argparse.Namespace, runs: Sequence[SimulatedRun], count: int, model: ServiceModel) -> None:
    figures = [_figures(run) for run in runs]
    table = Table("Policies", _COLUMNS, [list(one.values()) for one in figures])
    rows = [[*table.columns], *([shown(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
    about = {field.name: getattr(model, field.name) for field in fields(model)}
    results = {**stamp(), "num_prompts": count, "seed": arguments.seed, **about, "runs": figures}
    finish(arguments, "Simulated routing", results, _plots(runs), [table])


def _plots(runs: Sequence[SimulatedRun]) -> list[Plot]:
    names = list(dict.fromkeys(run.policy for run in runs))

    def plot(title: str, label: str, value: Any) -> Plot:
        series = [
            Series(name, [(float(run.num_servers), value(run)) for run in runs if run.policy == name]) for name in names
        ]
        return Plot(title, "servers", label, series)

    return [
        plot("Hit rate", "share of prompts' tokens", lambda run: run.hit_rate),
        plot("TTFT, median", "time (ms)", lambda run: float(np.percentile(run.ttfts, 50)) * 1e3),
        plot("TTFT, p99", "time (ms)", lambda run: float(np.percentile(run.ttfts, 99)) * 1e3),
        plot("Imbalance", "busiest server by the mean", lambda run: run.imbalance),
    ]
