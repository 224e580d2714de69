"""Finds the quickest decode attention for a few rows, in the chain of launches that it stands in.

    PYTHONPATH=src:. python -m benchmarks.kernels.few_decodes [--seconds 40] [--shapes llama-8b,gpt-oss] [--json FILE]
    PYTHONPATH=src:. python -m benchmarks.kernels.few_decodes --long --seconds 55 --shapes llama-8b,gpt-oss

Six layers of query-key-value product, rotary, attention and output product (bf16), chained in a replayed graph, over
pages of 16 at random places. A number is a layer's microseconds more than those of the same layer without attention,
whose own are said first. "captured" is what captured steps launch with `few_decodes` off, which plan for the longest
row that a graph may meet, the longest of `--contexts`; "asked" is the same with `few_decodes` on; "exact" is planned
for the rows as they are; "no rotary" has attention as captured, of heads that nobody turned. The others are launches of
`frame.kernels.decode_few`: tile x warps / most splits >= keys of the shortest split, "late" where cached keys are read
after the wait, "shut" where the next kernel begins after it. Each fits all lengths, as a captured step must. `--long`
has other launches and contexts of up to 131,072 tokens: 26 GB for Llama 8B, 13 for gpt-oss. What a launch
gives and stores is compared with the formula before it is timed; what is wrong is said and not timed. Kernels are
compiled side by side before. The process ends with 1 where something was wrong, and measures nothing more after
`--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.linear_invariant import microseconds as timed
from frame.core.interfaces.attention import AttentionSpec, GroupBatch, LayerParams
from frame.core.ops import attention as reference
from frame.interfaces import BackendSetup
from frame.kernels import decode_few
from frame.kernels.decode_few import FewLaunch
from frame.ops import Ops
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.attention.triton_options import TritonOptions
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse
from frame.plugins.platforms.cuda.ops import CudaOps

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
#: The interpreter multiplies bfloat16 as if its bits were integers.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
LAYERS, PAGE, REPEATS = 6, 16, 15
#: The most rows.
ROWS = 8
#: Tokens of rows, without and with `--long`.
CONTEXTS, LONG_CONTEXTS = "64,160,288,512,1024,4096", "1024,4096,16384,32768,131072"
MULTIPROCESSORS = 132
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; every second one has the window."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    sinks: bool = False


SHAPES = {
    "llama-8b": Shape(4096, 32, 8, 128),
    "gpt-oss": Shape(2880, 64, 8, 64, window=128, sinks=True),
    "llama-70b/2": Shape(8192, 32, 4, 128),
    "qwen3-0.6b": Shape(1024, 16, 8, 128),
}
#: For a look at the results without a GPU.
SMALL = {"small": Shape(64, 8, 2, 64, window=24, sinks=True)}


def random(*shape: int) -> Tensor:
    """Numbers of the model's type on the device."""
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


class Model:
    """Six layers of a shape, with room for the most rows of `longest` tokens, for which captured steps plan."""

    def __init__(self, shape: Shape, longest: int) -> None:
        self.longest = longest
        self.shape, self.ops = shape, Ops() if INTERPRETED else CudaOps()
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
        self.joined = [random((heads + 2 * kv_heads) * dim, shape.hidden) / shape.hidden**0.5 for _ in range(LAYERS)]
        self.output = [random(shape.hidden, heads * dim) / (heads * dim) ** 0.5 for _ in range(LAYERS)]
        blocks = -(-longest // PAGE)
        self.caches = [random(2, ROWS * blocks, PAGE, kv_heads, dim) for _ in range(LAYERS)]
        self.blocks = torch.randperm(ROWS * blocks, device=DEVICE).int().view(ROWS, blocks)
        self.angles, self.start = torch.rand(longest, dim, device=DEVICE), random(ROWS, shape.hidden)
        sinks = torch.randn(heads, device=DEVICE) if shape.sinks else None
        specs = [
            AttentionSpec(
                heads, kv_heads, dim, dim**-0.5, DTYPE, DTYPE, PAGE, DEVICE,
                window=shape.window * (index % 2), sinks=shape.sinks,
            )
            for index in range(2)
        ]  # fmt: skip
        self.layers = [LayerParams(spec, sinks=sinks) for spec in specs]
        self.backends = {
            few: [TritonAttention(BackendSetup(spec, Ops()), TritonOptions(few_decodes=few)) for spec in specs]
            for few in (False, True)
        }

    def run(self, attend: Attend, rows: int, positions: Tensor, layers: int = LAYERS, *, turns: bool = True) -> Tensor:
        """The layers one after the other."""
        shape, x = self.shape, self.start[:rows]
        for index in range(layers):
            heads = self.ops.linear(x, self.joined[index]).view(rows, -1, shape.dim)
            query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
            if turns:
                query, key = self.ops.rotary(query, key, positions, self.angles)
            x = self.ops.linear(attend(index, query, key, value), self.output[index])
        return x


class Case:
    """Rows of a model, all behind `context` tokens."""

    def __init__(self, model: Model, rows: int, context: int) -> None:
        self.model, self.rows, self.context = model, rows, context
        self.lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        self.table = model.blocks[:rows]
        last = context - 1
        self.slots = self.table[:, last // PAGE].long() * PAGE + last % PAGE
        self.positions = torch.full((rows,), last, device=DEVICE)
        longest = model.longest
        self.plans = {
            name: [backend.plan(self._batch(tokens)) for backend in model.backends[few]]
            for name, few, tokens in (("captured", False, longest), ("exact", False, context), ("asked", True, longest))
        }
        # early, as in a capture: no step writes these lengths and blocks
        self.plans["asked"] = [replace(one, few=replace(one.few, early=True)) for one in self.plans["asked"]]
        self.arrivals = torch.zeros(ROWS * model.shape.kv_heads, dtype=torch.int32, device=DEVICE)
        shape = model.shape
        self.given = [random(rows, heads, shape.dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]

    def _batch(self, longest: int) -> GroupBatch:
        return GroupBatch(
            num_tokens=self.rows, query_start=torch.arange(self.rows + 1, dtype=torch.int32, device=DEVICE),
            seq_lens=self.lens, block_table=self.table, slot_mapping=self.slots,
            host_query_lens=np.ones(self.rows, np.int32), host_seq_lens=np.full(self.rows, longest, np.int32),
            max_query_len=1, max_seq_len=longest,
        )  # fmt: skip

    def planned(self, name: str, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """By what a plan chose."""
        which, model = index % 2, self.model
        given = query, key, value, model.caches[index], self.plans[name][which]
        out = model.backends[name == "asked"][which].forward(model.layers[which], *given)
        return (out if isinstance(out, Tensor) else out[0]).flatten(1)

    def few(self, launch: FewLaunch, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """By the kernel for few rows; layers with a window have no more to split than others."""
        layer, out = self.model.layers[index % 2], torch.empty_like(query, memory_format=torch.contiguous_format)
        return decode_few.decode_attention(
            query, key, value, self.model.caches[index], self.slots, self.lens, self.table, scale=layer.spec.scale,
            out=out, launch=launch, arrivals=self.arrivals, window=layer.spec.window, sinks=layer.sinks,
        ).flatten(1)  # fmt: skip

    def nothing(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The queries in the place of attention."""
        return query.flatten(1)

    def expected(self, index: int) -> Tensor:
        """Attention by the formula, of the first or second layer."""
        layer, cache = self.model.layers[index], self.model.caches[index]
        reference.write_kv(self.given[1], self.given[2], cache, self.slots)
        start = torch.arange(self.rows + 1, dtype=torch.int32, device=DEVICE)
        found = reference.paged_attention(
            self.given[0].float(), cache, start, self.lens, self.table, scale=layer.spec.scale,
            window=layer.spec.window, sinks=layer.sinks,
        )  # fmt: skip
        return found.flatten(1)

    def error(self, attend: Attend, expected: list[Tensor]) -> float:
        """How far from the formula; infinite where another token is stored."""
        worst = 0.0
        for index, right in enumerate(expected):
            pages = self.model.caches[index].flatten(1, 2)
            pages[:, self.slots] = float("nan")
            found = attend(index, *self.given).float()
            stored = torch.stack(self.given[1:])
            if not torch.equal(pages[:, self.slots], stored):
                return float("inf")
            worst = max(worst, float((found - right).norm() / right.norm()))
        return worst


def most_splits(rows: int, kv_heads: int) -> int:
    """As many as multiprocessors have a program each, as a power of two up to 16."""
    return min(16, 1 << (max(1, MULTIPROCESSORS // (rows * kv_heads)).bit_length() - 1))


def long_candidates(shape: Shape, rows: int) -> list[FewLaunch]:
    """Launches for rows that may be very long: two programs for each multiprocessor, and more."""
    splits = sorted({max(2, 2 * most_splits(rows, shape.kv_heads)), 32, 64})
    tiles = ((32, 4, 64), (32, 8, 64), (64, 4, 128), (64, 8, 128), (128, 8, 256))
    found = [FewLaunch(keys, warps, most, span) for keys, warps, span in tiles for most in splits]
    if shape.dim == 64:
        found += [replace(one, lets_in=False) for one in found if one.block_n == 128]
    return found


def candidates(shape: Shape, rows: int) -> list[FewLaunch]:
    """Launches for rows of any length."""
    most = most_splits(rows, shape.kv_heads)
    usual = FewLaunch(128, 8, most, 256)
    found = [
        FewLaunch(64, 8, most, 128), FewLaunch(64, 8, most, 256), FewLaunch(64, 8, 2 * most, 128),
        usual, replace(usual, min_span=128), replace(usual, min_span=512), replace(usual, splits=2 * most),
        replace(usual, early=False), replace(usual, lets_in=False), replace(usual, early=False, lets_in=False),
        FewLaunch(64, 8), FewLaunch(128, 8), FewLaunch(32, 4, 2 * most, 64),
    ]  # fmt: skip
    if shape.dim == 64:
        found += [FewLaunch(64, 4, most, 128), FewLaunch(64, 4, most, 256), FewLaunch(128, 16, most, 256)]
    return found


def told(launch: FewLaunch) -> str:
    """In short."""
    words = f"{launch.block_n}x{launch.num_warps}/{launch.splits}"
    if launch.splits > 1:
        words += f">={launch.min_span}"
    return words + (" late" if not launch.early else "") + (" shut" if not launch.lets_in else "")


def ways(case: Case, *, long: bool) -> Iterator[tuple[str, Attend]]:
    """What is compared, by name."""
    for name in case.plans:
        yield name, partial(case.planned, name)
    for launch in (long_candidates if long else candidates)(case.model.shape, case.rows):
        yield told(launch), partial(case.few, launch)


def microseconds(call: Callable[[], Tensor]) -> float:
    """The median time of a layer, replayed from a graph."""
    if INTERPRETED:
        call()
        return 1.0
    return timed([call], REPEATS) / LAYERS


def measure(case: Case, end: float, wrong: list[str], *, long: bool) -> dict[str, float]:
    """Times by way; "nothing" is the layer without attention, of which the others tell what they add."""
    run = partial(case.model.run, rows=case.rows, positions=case.positions)
    expected = [case.expected(index) for index in range(2)]
    found = {"nothing": microseconds(partial(run, case.nothing))}
    for name, attend in ways(case, long=long):
        if time.monotonic() > end:
            break
        try:
            off = case.error(attend, expected)
            if not off < 1e-2:
                wrong.append(f"{name}, {case.rows} rows of {case.context}: {off:.1e}")
                continue
            found[name] = microseconds(partial(run, attend)) - found["nothing"]
        except Exception as failure:
            wrong.append(f"{name}, {case.rows} rows of {case.context}: {type(failure).__name__} {str(failure)[:160]}")
    plain = partial(case.planned, "captured")
    found["no rotary"] = microseconds(partial(run, plain, turns=False)) - found["nothing"]
    return found


def table(name: str, rows: int, found: dict[int, dict[str, float]]) -> str:
    """Ways down, contexts across; a star marks the least that an attention takes."""
    ways = list(dict.fromkeys(way for times in found.values() for way in times))
    least = {
        context: min((us for way, us in times.items() if way not in ("nothing", "no rotary")), default=0.0)
        for context, times in found.items()
    }
    lines = [f"{name}, rows {rows}:{'':16}" + "".join(f"{context:>8}" for context in found)]
    for way in ways:
        cells = []
        for context, times in found.items():
            us = times.get(way)
            mark = "*" if us == least[context] and way != "no rotary" else " "
            cells.append(f"{'-':>7} " if us is None else f"{us:7.1f}{mark}")
        lines.append(f"  {way:28}" + "".join(cells))
    return "\n".join(lines)


def launch_all(cases: dict[tuple[str, int, int], Case], *, long: bool) -> None:
    """Every kernel once."""
    for case in cases.values():
        for attend in (case.nothing, *(attend for _, attend in ways(case, long=long))):
            case.model.run(attend, case.rows, case.positions, layers=2)


@torch.inference_mode()
def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,2,4,8", help=f"Up to {ROWS}.")
    parser.add_argument("--long", action="store_true", help="Launches and contexts of long rows.")
    parser.add_argument("--contexts", help=f"Tokens of a row; by default {CONTEXTS} or {LONG_CONTEXTS}.")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--json", type=Path, help="File for the results.")
    options = parser.parse_args()
    begin = time.monotonic()
    end = begin + options.seconds
    wrong: list[str] = []
    results: list[dict[str, Any]] = []
    given = options.contexts or (LONG_CONTEXTS if options.long else CONTEXTS)
    rows, contexts = ([int(part) for part in text.split(",")] for text in (options.rows, given))
    models = {name: Model((SHAPES | SMALL)[name], max(contexts)) for name in options.shapes.split(",")}
    cases = {
        (name, count, context): Case(model, count, context)
        for count in rows
        for name, model in models.items()
        for context in contexts
    }
    compiled = {key: case for key, case in cases.items() if key[2] in (contexts[0], contexts[-1])}
    if not INTERPRETED:
        rehearse(partial(launch_all, compiled, long=options.long))
    device = "interpreted" if INTERPRETED else torch.cuda.get_device_name()
    print(f"{device}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    for count in rows:
        for name in models:
            found = {}
            for context in contexts:
                if time.monotonic() < end:
                    found[context] = measure(cases[name, count, context], end, wrong, long=options.long)
                    results.append({"shape": name, "rows": count, "context": context, "microseconds": found[context]})
            if found:
                print(table(name, count, found), flush=True)
            if options.json:
                options.json.write_text(json.dumps({"results": results, "wrong": wrong}, indent=1))
    print(*(f"WRONG {line}" for line in wrong), f"ended after {time.monotonic() - begin:.0f} s", sep="\n", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
