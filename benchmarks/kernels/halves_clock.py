"""Times layers of experts computed whole and in two halves, with what the halves' results differ by."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from expert_ranks import Pair, Ranks
from expert_stack import Beside, InTurn, Late, Part, Stack, Still
from torch import Tensor

from frame.interfaces import Activations

#: Measurements of which the median is taken, and passes in each, so that ranks need not begin at one moment.
REPEATS, PASSES = 5, 2
PARTS = ("attention", "router", "dispatch", "exchange", "experts")

#: Returns what a pass computes.
Work = Callable[[], Tensor]


class HalvesClock:
    """Runs and times passes on this rank; the other one makes the same calls at the same time."""

    def __init__(self, stack: Stack, ranks: Ranks, *, graphs: bool) -> None:
        self._stack, self._host, self._on_gpu = stack, ranks.groups.expert.host, ranks.device.type == "cuda"
        self._lanes = self._new_lanes()
        self._firsts: dict[int, Tensor] = {}  # what the first exchange gave, by the number of tokens
        self._graphs = graphs and self._on_gpu
        # one for all captures: libraries keep memory for each
        self._stream = torch.cuda.Stream() if self._graphs else None

    def works(self, parts: list[Part], pair: Pair) -> dict[str, Work]:
        """The ways to compute a batch; `parts` are it and its halves."""
        stack, whole, halves = self._stack, parts[:1], parts[1:]
        return {
            "whole": partial(stack.after_another, whole, pair.first),
            "alone": partial(stack.after_another, whole, Still(pair.first)),
            "apart": partial(stack.after_another, halves, pair.first),
            **{
                name: partial(stack.overlapped, halves, [pair.first, pair.second], lanes)
                for name, lanes in self._lanes.items()
            },
        }

    def _new_lanes(self) -> dict[str, list[InTurn]]:
        """A way for the exchanges of each half, by the name of how halves overlap."""
        kinds: dict[str, type[InTurn]] = {"overlap": Beside, "late": Late} if self._on_gpu else {"overlap": InTurn}
        return {name: [kind() for _ in range(2)] for name, kind in kinds.items()}

    def run_all(self, parts: list[Part], pair: Pair) -> None:
        """One pass each way, unless the exchange does not serve so many tokens."""
        if pair.serves(len(parts[0])):
            for work in self.works(parts, pair).values():
                work()

    def measure(self, parts: list[Part], pair: Pair) -> dict[str, Any]:
        """Microseconds of a layer by how it is run and which way, and of the parts of the whole; and the distances."""
        works = self.works(parts, pair)
        found: dict[str, Any] = {"launched": {}, "replayed": {}, "parts": {}}
        outs = {name: work().clone() for name, work in works.items()}
        found["from apart"] = max((outs[name] - outs["apart"]).abs().max().item() for name in self._lanes)
        first = self._firsts.setdefault(len(parts[0]), outs["whole"])
        found["from first"] = _distance(outs["whole"], first)
        found["from whole"] = _distance(outs["overlap"], outs["whole"])
        for name, work in works.items():
            found["launched"][name] = self._timed(work)
        if self._graphs:
            for name, work in works.items():
                if pair.captured or name == "alone":
                    found["replayed"][name] = self._replayed(work, outs[name], found)
        for name, part in self._parts_of(parts[0], pair).items():
            quick = self._graphs and (pair.captured or name in ("attention", "router", "experts"))
            found["parts"][name] = self._replayed(part) if quick else self._timed(part)
        return self._slowest(found)

    def _parts_of(self, whole: Part, pair: Pair) -> dict[str, Work]:
        """Each part of the layers, for all of them, with what goes in computed before."""
        stack, exchange, hidden = self._stack, pair.first, whole.hidden
        layer = stack.layers[0]
        normed, routing, _ = stack.route(layer, hidden, hidden)
        sent = exchange.dispatch(Activations(normed), routing, whole.step)
        exchange.combine(torch.zeros_like(sent.values), sent)
        kept = Still(exchange).dispatch(Activations(normed), routing, whole.step)

        def dispatch(_: Any) -> Tensor:
            return exchange.dispatch(Activations(normed), routing, whole.step).values

        def there_and_back(_: Any) -> Tensor:
            sent = exchange.dispatch(Activations(normed), routing, whole.step)
            return exchange.combine(sent.values, sent)

        calls: dict[str, Callable[[Any], Tensor]] = {
            "attention": lambda layer: stack.attention(layer, hidden, hidden, whole)[0],
            "router": lambda layer: stack.route(layer, hidden, hidden)[0],
            "exchange": there_and_back,
            "experts": lambda layer: stack.compute(layer, kept),
        }
        if pair.separable:
            calls["dispatch"] = dispatch
        return {name: partial(self._for_all, call) for name, call in calls.items()}

    def _for_all(self, call: Callable[[Any], Tensor]) -> Tensor:
        for layer in self._stack.layers:
            out = call(layer)
        return out

    def _timed(self, work: Callable[[], Any]) -> float:
        """Microseconds of a layer: the median of several passes, which both ranks begin together."""
        for _ in range(2):
            work()
        times = []
        for _ in range(REPEATS):
            self._synchronize()
            self._host.barrier()
            times.append(self._microseconds(work))
        return sorted(times)[REPEATS // 2] / PASSES / len(self._stack.layers)

    def _microseconds(self, work: Callable[[], Any]) -> float:
        if not self._on_gpu:
            began = time.perf_counter()
            for _ in range(PASSES):
                work()
            return 1e6 * (time.perf_counter() - began)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(PASSES):
            work()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def _replayed(self, work: Work, wanted: Tensor | None = None, found: dict[str, Any] | None = None) -> float:
        """As `_timed`, from a CUDA graph; how far its result is from `wanted` is added to `found`."""
        graph = torch.cuda.CUDAGraph()
        self._synchronize()
        with torch.cuda.stream(self._stream):
            work()
            self._synchronize()
            self._host.barrier()
            out = self._captured(graph, work)
            if out is None:
                return float("nan")
            took = self._timed(graph.replay)
            self._synchronize()
        if wanted is not None and found is not None:
            gap = (out - wanted).abs().max().item()
            found["from launched"] = max(gap, found.get("from launched", 0.0))
        return took

    def _captured(self, graph: torch.cuda.CUDAGraph, work: Work) -> Tensor | None:
        """What a replay will write its result to; None where the work cannot be captured, which is said."""
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            out = work()
        except RuntimeError as error:
            print(f"cannot be captured: {str(error).splitlines()[0]}", flush=True)
            out = None
        try:
            graph.capture_end()
        except RuntimeError as error:
            print(f"cannot be captured: {str(error).splitlines()[0]}", flush=True)
            out = None
        if out is None:  # what was being captured may not be used any more
            self._lanes, self._stream = self._new_lanes(), torch.cuda.Stream()
        return out

    def _slowest(self, found: dict[str, Any]) -> dict[str, Any]:
        """Of each number the largest of all ranks."""
        every = [json.loads(data) for data in self._host.gather(json.dumps(found).encode())]

        def most(values: list[Any]) -> Any:
            if isinstance(values[0], dict):
                return {key: most([one[key] for one in values]) for key in values[0]}
            return float(f"{max(values):.4g}")

        result: dict[str, Any] = most(every)
        return result

    def trace(self, parts: list[Part], pair: Pair, path: Path) -> None:
        """Writes a trace of one pass each way, for a browser."""
        from torch.profiler import ProfilerActivity, profile

        works = self.works(parts, pair)
        for work in works.values():
            work()
        self._synchronize()
        self._host.barrier()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]) as traced:
            for name in ("whole", "apart", "overlap"):
                works[name]()
                self._synchronize()
        path.parent.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(path))

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def _distance(one: Tensor, other: Tensor) -> float:
    """The median over rows of how far they are apart, relative to how long they are."""
    apart = (one.float() - other.float()).norm(dim=1) / other.float().norm(dim=1)
    return apart.median().item()
