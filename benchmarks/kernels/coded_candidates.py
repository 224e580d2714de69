"""Times every kernel of up to some hundred tokens with coded experts, for `coded_experts.py --candidates`.

Kernels are compiled in processes that pretend a Hopper chip, so that the device is not waited for. A candidate is a
kernel and a tile for one of the two products; its result is compared with a product in float32 before it is timed, in
replayed graphs over more weights than the L2 cache holds. A line tells the best of each product, and the choice to put
into `kernels/expert_choice.py`; all times are written as JSON, also when the run is interrupted or its time is over.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.coded_experts import OSS, Case, bytes_of, cases_of, rates
from frame.core.ops import Ops, layers as reference
from frame.kernels import coded_experts, coded_vectors
from frame.kernels.expert_choice import Choice, Part
from frame.kernels.expert_launch import Tile, coded_launch
from frame.kernels.hopper import hopper_kernel
from frame.kernels.routing import align

PRODUCTS = ("gate_up", "down")
#: Replays of a graph that are timed.
REPLAYS = 9


@dataclass(frozen=True)
class Candidate:
    """A kernel of one product, and the pairs of its blocks; 0: none."""

    product: str
    block_m: int
    part: Part


#: By product, pairs of a block and kernel: microseconds and candidate.
Best = dict[tuple[str, int, str], tuple[float, Candidate]]


@dataclass
class Sweep:
    """What has been measured, and until when to measure."""

    until: float
    device: tuple[float, float] = (0.0, 0.0)
    rows: list[dict[str, Any]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)


def few_tiles(*, alone: bool) -> list[Tile]:
    """Of "few": outputs, inputs that a warp has on their way, warps, how many programs shall share a multiprocessor."""
    alone_sizes = [
        (16, 128, 2, 1), (16, 384, 2, 1), (16, 128, 4, 1), (16, 256, 4, 1), (16, 384, 4, 1), (16, 512, 4, 1),
        (16, 128, 4, 6), (16, 256, 4, 6), (32, 256, 4, 1), (32, 128, 8, 1), (32, 256, 8, 1), (32, 256, 8, 3),
    ]  # fmt: skip
    block_sizes = [
        (16, 128, 2, 1), (16, 128, 4, 1), (16, 256, 4, 1), (16, 256, 4, 5), (32, 256, 4, 1), (32, 128, 8, 1),
        (32, 256, 8, 1), (32, 256, 8, 2), (64, 128, 8, 1), (64, 256, 8, 1), (64, 128, 16, 1), (64, 256, 16, 1),
    ]  # fmt: skip
    return [Tile(*one) for one in (alone_sizes if alone else block_sizes)]


def warpgroup_tiles(product: str) -> list[Tile]:
    """Of "warpgroups": outputs of a matrix, inputs whose codes are on their way, warps, steps that x has room for."""
    sizes = [(64, 128, 4, 4), (64, 256, 4, 4), (128, 128, 8, 4), (128, 256, 8, 4), (128, 384, 8, 3)]
    return [Tile(n if product == "gate_up" else 2 * n, *others) for n, *others in sizes]


def block_tiles(block_m: int) -> list[Tile]:
    """Of "tiles", where experts have 16 to 64 rows: outputs, inputs of a step, warps, steps on their way, swapped."""
    sizes = [
        (64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4), (64, 128, 4, 3), (128, 128, 8, 3), (64, 64, 4, 4, True),
        (64, 128, 4, 4, True), (128, 64, 8, 4, True), (128, 128, 8, 3, True),
    ]  # fmt: skip
    return [Tile(*one) for one in sizes if block_m >= 32 or len(one) == 5]


def vector_tiles(product: str) -> list[Tile]:
    """Of "vectors": outputs, inputs of a step, warps."""
    sizes = [(2, 1024, 1), (4, 1024, 1), (4, 1024, 2), (8, 1024, 4)]
    return [Tile(*one) for one in (*sizes, *([(8, 1024, 1)] if product == "down" else []))]


def candidates(kind: str, tokens: int, shape: Any) -> list[Candidate]:
    """Those that are worth a measurement with so many tokens."""
    found = []
    for product in PRODUCTS:
        few = kind == "mxfp4"
        if few and tokens <= 8:
            found += [Candidate(product, 0, Part("few", tile)) for tile in few_tiles(alone=True)]
        if tokens <= 2 and "fp8" not in kind:
            found += [Candidate(product, 0, Part("vectors", tile)) for tile in vector_tiles(product)]
        for block_m in [m for m, least, most in ((8, 2, 127), (16, 16, 127), (32, 64, 127)) if least <= tokens <= most]:
            found += [Candidate(product, block_m, Part("few", tile)) for tile in few_tiles(alone=False) if few]
        if few:
            for block_m in [
                m for m, least, most in ((16, 64, 256), (32, 128, 512), (64, 128, 512)) if least <= tokens <= most
            ]:
                found += [Candidate(product, block_m, Part("warpgroups", tile)) for tile in warpgroup_tiles(product)]
        for block_m in [m for m, least, most in ((32, 128, 384), (64, 192, 512)) if least <= tokens <= most]:
            found += [Candidate(product, block_m, Part("tiles", tile)) for tile in block_tiles(block_m)]
        launch = coded_launch(shape, tokens)
        found.append(Candidate(product, launch.block_m, Part("tiles", getattr(launch, product))))
    return found


def run(one: Candidate, case: Case, inner: Tensor) -> Tensor:
    """One product of a case; the second one's rows are `inner`."""
    held = range(len(case.gate_up.codes))
    blocks = align(case.ids, held, one.block_m) if one.block_m else None
    return product_of(one, case, inner, blocks)


def product_of(one: Candidate, case: Case, inner: Tensor, blocks: Any) -> Tensor:
    """As `run`, of pairs that are sorted."""
    held = range(len(case.gate_up.codes))
    if one.product == "gate_up":
        given = case.hidden, case.gate_up, case.ids, held, blocks, OSS, case.biases[0]
        return coded_experts.inner_by(one.part, *given)
    given_down = inner, case.down, case.weights, case.ids, held, blocks, case.biases[1]
    return coded_experts.outer_by(one.part, *given_down)


def compile_one(one: Candidate, kind: str, sizes: tuple[int, int, int, int], tokens: int) -> None:
    """Compiles a candidate for a Hopper chip that is not here; in a process of its own."""
    from tests.kernels.ahead import DEVICE, H200, pretending
    from tests.kernels.layer_launches import _coded

    names = {
        "mxfp4": "mxfp4 by 32",
        "nvfp4": "nvfp4 by 16",
        "int4": "int4 by 64",
        "zeros": "zeros by 64",
        "fp8": "fp8 by rows",
    }
    num_experts, top_k, hidden, inner = sizes
    with pretending(H200):
        empty: Callable[..., Tensor] = lambda *shape, dtype=torch.bfloat16: torch.empty(  # noqa: E731
            shape, dtype=dtype, device=DEVICE
        )
        pair = (_coded(names[kind], rows, depth, num_experts) for rows, depth in ((2 * inner, hidden), (hidden, inner)))
        case = Case(
            *pair, empty(tokens, hidden), empty(tokens, top_k, dtype=torch.float32),
            empty(tokens, top_k, dtype=torch.int32), (empty(num_experts, 2 * inner), empty(num_experts, hidden)), False,
        )  # fmt: skip
        run(one, case, empty(tokens * top_k, inner))


def _quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def takes(one: Candidate, case: Case, inner: Tensor) -> bool:
    """Whether the kernel serves the weights."""
    x, weight = (case.hidden, case.gate_up) if one.product == "gate_up" else (inner, case.down)
    if one.part.kernel == "vectors":
        return coded_vectors.fits(x, weight)
    if one.part.kernel == "tiles":
        return coded_experts.fits(weight)
    known = hopper_kernel(x.device, "coded_few", "fits")
    return known is not None and bool(known(x, weight))


def expected(case: Case) -> tuple[Tensor, Tensor]:
    """(first products [pairs, I], results [T, H]) in float32; the second of the first ones rounded."""
    tokens, top_k = case.ids.shape
    inner = torch.zeros(tokens * top_k, case.gate_up.codes.shape[1] // 2, device=case.hidden.device)
    total = torch.zeros(tokens, case.down.codes.shape[1], device=case.hidden.device)
    flat, shares = case.ids.flatten(), case.weights.flatten()
    for number in flat.unique().tolist():
        one = torch.tensor([number], device=flat.device)
        first, second = (part.chosen(one).weight(Ops(), torch.float32)[0] for part in (case.gate_up, case.down))
        pairs = (flat == number).nonzero().flatten()
        products = case.hidden[pairs // top_k].float() @ first.T + case.biases[0][number].float()
        inner[pairs] = reference.gated(products, OSS)
        rounded = inner[pairs].to(case.hidden.dtype).float()
        products = (rounded @ second.T + case.biases[1][number].float()) * shares[pairs, None]
        total.index_add_(0, pairs // top_k, products)
    return inner, total


def graphed(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of one call in a replayed graph of all; they have run before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) * 1e3 / len(calls)


def ready(futures: dict[Candidate, Future[None]], until: float) -> Iterator[Candidate]:
    """Candidates as they are compiled."""
    left = dict(futures)
    while left and time.monotonic() < until:
        done = [one for one, future in left.items() if future.done()]
        for one in done:
            failure = left.pop(one).exception()
            if failure is None:
                yield one
            else:
                print(f"  {one}: {type(failure).__name__}: {str(failure)[-300:]}", flush=True)
        if not done:
            time.sleep(0.02)


def measure_tokens(
    kind: str, tokens: int, cases: list[Case], futures: dict[Candidate, Future[None]], to: Sweep
) -> None:
    """Prints a line for the best of each product and one for the choice."""
    exact = dict(zip(PRODUCTS, expected(cases[0]), strict=True))
    inner = exact["gate_up"].to(cases[0].hidden.dtype)
    blocks = {m: [align(case.ids, range(len(case.gate_up.codes)), m) for case in cases] for m in (8, 16, 32, 64)}
    best: Best = {}
    num_bytes = sum(map(bytes_of, cases)) / len(cases)
    for one in ready(futures, to.until):
        if not takes(one, cases[0], inner):
            continue
        try:
            found = run(one, cases[0], inner).float()
            wrong = float((found - exact[one.product]).norm() / exact[one.product].norm())
            if not wrong < 1e-2:
                print(f"  WRONG by {wrong:.1e}: {tokens} tokens, {one}", flush=True)
                continue
            sorted_pairs = blocks.get(one.block_m, [None] * len(cases))
            us = graphed(
                [partial(product_of, one, case, inner, b) for case, b in zip(cases, sorted_pairs, strict=True)]
            )
        except Exception as failure:
            print(f"  {tokens} tokens, {one}: {type(failure).__name__}: {str(failure)[-200:]}", flush=True)
            continue
        to.rows.append({"kind": kind, "tokens": tokens, "us": us, "error": wrong, **asdict(one)})
        key = one.product, one.block_m, one.part.kernel
        if key not in best or us < best[key][0]:
            best[key] = us, one
    for product in PRODUCTS:
        share = 2 / 3 if product == "gate_up" else 1 / 3
        floor = num_bytes * share / to.device[0] * 1e6
        for (of, block_m, _), (us, one) in sorted(best.items(), key=lambda pair: pair[1][0]):
            if of == product:
                print(
                    f"{kind} {tokens:3} tokens {product:7} {us:7.1f} us, {floor / us:4.0%} of {floor:5.1f}, blocks of "
                    f"{block_m:2}: {one.part.kernel} {tile_text(one.part.tile)}",
                    flush=True,
                )
    whole(kind, tokens, cases, best, to)


def tile_text(tile: Tile) -> str:
    """As Python writes it."""
    return f"Tile({tile.block_n}, {tile.block_k}, {tile.num_warps}, {tile.num_stages}, {tile.swap})"


def whole(kind: str, tokens: int, cases: list[Case], best: Best, to: Sweep) -> None:
    """Both products, with the sorting of pairs, by the best of each size of blocks and by the tiles of the rule."""
    choices = []
    for block_m, plain in itertools.product(sorted({block_m for _, block_m, _ in best}), (False, True)):
        kept = [(us, one) for us, one in best.values() if one.block_m == block_m]
        if plain:
            kept = [(us, one) for us, one in kept if one.part.kernel == "tiles"]
        pair = [[both for both in kept if both[1].product == product] for product in PRODUCTS]
        if all(pair):
            parts = (min(some, key=lambda both: both[0])[1].part for some in pair)
            choices.append(Choice(block_m, *parts))
    timed = []
    for choice in dict.fromkeys(choices):
        calls = [partial(coded_experts.by_choice, *c.given, choice, gating=OSS, biases=c.biases) for c in cases]
        for call in calls:
            call()
        timed.append((graphed(calls), choice))
    shape = coded_experts.shape_of(cases[0].hidden, cases[0].down, cases[0].ids.shape[1])
    rule = coded_launch(shape, tokens)
    calls = [partial(case.run, rule) for case in cases]
    for call in calls:
        call()
    before = graphed(calls)
    for us, choice in sorted(timed, key=lambda pair: pair[0])[:4]:
        parts = ", ".join(f'Part("{p.kernel}", {tile_text(p.tile)})' for p in (choice.gate_up, choice.down))
        print(
            f"{kind} {tokens:3} tokens WHOLE {us:7.1f} us (by tiles of the rule {before:7.1f}): "
            f"Choice({choice.block_m}, {parts})",
            flush=True,
        )
        to.choices.append({"kind": kind, "tokens": tokens, "us": us, "before": before, **asdict(choice)})


def sweep(
    kinds: list[str], counts: list[int], sizes: tuple[int, int, int, int], seconds: float, to_file: Path | None
) -> None:
    """Measures all, for at most so many seconds."""
    begun = time.monotonic()
    to = Sweep(begun + seconds)
    workers = max(1, min(24, len(os.sched_getaffinity(0)) - 1))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_quiet)
    try:
        num_experts, top_k, hidden, inner = sizes
        shape = coded_experts.Shape(num_experts, top_k, hidden, inner, torch.bfloat16)
        futures = {}
        known: dict[tuple[str, Candidate], Future[None]] = {}
        for kind in kinds:
            for tokens in counts:
                for one in candidates(kind, tokens, shape):
                    if (kind, one) not in known:
                        known[kind, one] = pool.submit(compile_one, one, kind, sizes, tokens)
                    futures[kind, tokens, one] = known[kind, one]
        to.device = rates()
        print(
            f"{torch.cuda.get_device_name()}: copies {to.device[0] / 1e12:.2f} TB/s; {len(known)} candidates, "
            f"{workers} processes, ready after {time.monotonic() - begun:.0f} s",
            flush=True,
        )
        for kind in kinds:
            for tokens in counts:
                if time.monotonic() > to.until:
                    print(f"{kind} {tokens} tokens: no time", flush=True)
                    continue
                own = {one: job for (form, count, one), job in futures.items() if (form, count) == (kind, tokens)}
                measure_tokens(kind, tokens, cases_of(kind, sizes, tokens, "cuda"), own, to)
                print(f"  at {time.monotonic() - begun:.0f} s", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        for process in list(pool._processes.values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        if to_file is not None:
            to_file.write_text(json.dumps({"copy": to.device[0], "rows": to.rows, "choices": to.choices}, indent=1))
