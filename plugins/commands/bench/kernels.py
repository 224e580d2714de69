"""`frame bench kernels`: lists the device operations, and times those that this machine can run.

Reference ops run everywhere; the Triton kernels of the same names need a CUDA device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from frame.interfaces import Command
from frame.quoting import quoted
from frame.settings import ConfigError, near

from .metrics import percentile
from .output import add_output_flags, finish, progress_bar, stamp
from .plots import Plot, Series
from .report import Table

#: Op → the module of `frame.kernels` that has a kernel of the same name.
KERNELS = {
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "silu_mul": "activation",
    "gelu_tanh_mul": "activation",
    "rotary": "rotary",
    "route": "routing",
    "greedy": "sampling",
    "draw": "sampling",
    "keep_threshold": "filters",
    "top_logprobs": "logprobs",
}
#: Ops without a kernel of the same name: on a GPU a library or the attention backend runs them.
PLAIN = ("linear", "write_kv", "paged_attention")
OPS = (*PLAIN, *KERNELS)
_NO_DEVICE = "needs a CUDA device"


class KernelsBench(Command):
    """Reports the median time of a call; on a CUDA device its queue is empty before and after each call."""

    help = "List the kernels and time those that this device runs."
    examples = (
        "frame bench kernels --list",
        "frame bench kernels --op rms_norm --op draw --num-tokens 256",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Which ops, of what sizes."""
        add = parser.add_argument
        add("--list", action="store_true", dest="only_list", help="List the ops and measure nothing.")
        add("--op", action="append", default=[], metavar="NAME", help="Measure only this op; may be repeated.")
        add("--num-tokens", type=int, default=64, metavar="N", help="Rows of every input (default: %(default)s).")
        add("--hidden-size", type=int, default=1024, metavar="N", help="Columns (default: %(default)s).")
        add("--vocab-size", type=int, default=32000, metavar="N", help="Columns of logits (default: %(default)s).")
        add("--num-iters", type=int, default=20, metavar="N", help="Timed runs (default: %(default)s).")
        add_output_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Lists or measures."""
        for name in arguments.op:
            if name not in OPS:
                raise ConfigError(f"no op {quoted(name)}{near(name, OPS)}; there are: {', '.join(OPS)}")
        for name, least in (("num_tokens", 1), ("hidden_size", 128), ("vocab_size", 64), ("num_iters", 1)):
            if getattr(arguments, name) < least:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}"
                )
        device = _device()
        chosen = arguments.op or list(OPS)
        if arguments.only_list:
            for name in chosen:
                print(f"{name:<16} reference: runs   kernel: {_state(name, device)}")
            return 0
        rows = _measure(arguments, chosen, device)
        for row in rows:
            took = f"{row['median_us']:12,.1f} us" if row["median_us"] is not None else f"   {row['note']}"
            print(f"{row['op']:<16} {row['implementation']:<10} {took}")
        results = {**stamp(), "device": device, "num_tokens": arguments.num_tokens, "kernels": rows}
        table = Table("Operations", list(rows[0]), [list(row.values()) for row in rows])
        finish(arguments, "Kernels", results, [_plot(rows)], [table])
        return 0


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _state(name: str, device: str) -> str:
    if name not in KERNELS:
        return "none of this name; a library or the attention backend does it"
    return "runs" if device == "cuda" else _NO_DEVICE


def _measure(arguments: argparse.Namespace, names: Sequence[str], device: str) -> list[dict[str, Any]]:
    from .kernel_cases import Sizes, cases, kernel, reference

    sizes = Sizes(arguments.num_tokens, arguments.hidden_size, arguments.vocab_size)
    rows: list[dict[str, Any]] = []
    made = cases(device, sizes)
    with progress_bar(arguments, len(names), "ops") as bar:
        for name in names:
            inputs = made[name]
            took = _time(partial(reference(name), *inputs), arguments.num_iters, device)
            rows.append({"op": name, "implementation": "reference", "median_us": took, "note": ""})
            if name in KERNELS:
                mine: float | None = None
                if device == "cuda":
                    fast = kernel(KERNELS[name], name)
                    mine = _time(partial(fast, *inputs), arguments.num_iters, device)
                note = "" if mine is not None else _NO_DEVICE
                rows.append({"op": name, "implementation": "triton", "median_us": mine, "note": note})
            bar.update()
    return rows


def _time(call: Callable[[], Any], count: int, device: str) -> float:
    """The median microseconds of a call, after three calls that do not count."""
    import torch

    def drain() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.inference_mode():
        for _ in range(3):
            call()
        took = []
        for _ in range(count):
            drain()
            start = time.perf_counter()
            call()
            drain()
            took.append((time.perf_counter() - start) * 1e6)
    return percentile(took, 50)


def _plot(rows: Sequence[dict[str, Any]]) -> Plot:
    series = []
    for kind in ("reference", "triton"):
        chosen = [row for row in rows if row["implementation"] == kind and row["median_us"] is not None]
        order = list(dict.fromkeys(row["op"] for row in rows))
        points = [(float(order.index(row["op"]) + 1), row["median_us"]) for row in chosen]
        if points:
            series.append(Series(kind, points, "points", [row["op"] for row in chosen]))
    return Plot("Time of a call", "operation, by its place in the table", "median time (µs)", series)
