"""What each launch of a decoder layer takes at one request, and what new launches save.

    PYTHONPATH=src:. python -m benchmarks.kernels.one_row_layer [--cases gpt-oss,fp8,int4] [--context 160] [--json FILE]

Layers of gpt-oss-20b (mxfp4 experts, the rest bf16) and of Llama 8B with fp8 weights that have scales of rows, and with
int4 weights in groups of 128, in the launches that steps make, in replayed graphs over six layers. First the whole
layer by each way: "now" is what steps launch; in "apart" gates and sums over experts wait for the launches before them,
as they once did; the others sum experts in the launch of their second product. Beside it how far its result is from
that of now. Then the layer cut off behind each launch: the difference of two is what a launch takes in the chain,
beside what its weights take at the rate of a copy. Kernels are compiled side by side before. It needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.coded_experts import OSS, coded
from benchmarks.kernels.coded_sweep import COPY_BYTES_PER_MICROSECOND, compile_all, made, microseconds
from frame.interfaces import AttentionSpec, BackendSetup, GroupBatch, LayerParams, RouterSpec
from frame.kernels import activation, coded_experts, experts
from frame.kernels.expert_choice import Choice, Part, choose
from frame.kernels.expert_launch import Tile
from frame.ops import Ops
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.platforms.cuda.ops import CudaOps

LAYERS, PAGE, DTYPE = 6, 16, torch.bfloat16
GATE_UP = Part("few", Tile(16, 128, 4, 6))
#: By name the second product of experts with their sum.
SUMMED = {
    f"summed {tile.block_n}x{tile.num_warps}/{tile.num_stages}, {early} early": Choice(
        0, GATE_UP, Part("summed", tile, early)
    )
    for tile in (Tile(32, 128, 8), Tile(16, 128, 4, 6), Tile(16, 128, 8, 3))
    for early in (0, 2, 4, 6)
}
Step = Callable[[dict[str, Any]], None]


def random(*shape: int) -> Tensor:
    """Numbers of the model's type on the device."""
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


class Attention:
    """Rotary positions and attention of one row behind `context` tokens."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, context: int, *, window: int = 0, sinks: bool = False
    ) -> None:
        spec = AttentionSpec(
            heads, kv_heads, dim, dim**-0.5, DTYPE, DTYPE, PAGE, "cuda", window=window, sinks=sinks
        )  # fmt: skip
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.table, self.positions = torch.rand(4096, dim, device="cuda"), torch.tensor([context - 1], device="cuda")
        self.backend = TritonAttention(BackendSetup(spec, Ops()))
        self.layer = LayerParams(spec, sinks=torch.randn(heads, device="cuda") if sinks else None)
        pages = -(-context // PAGE)
        self.cache = random(2, pages, PAGE, kv_heads, dim)
        index = partial(torch.tensor, dtype=torch.int32, device="cuda")
        self.plan = self.backend.plan(
            GroupBatch(
                num_tokens=1, query_start=index([0, 1]), seq_lens=index([context]),
                block_table=torch.arange(pages, dtype=torch.int32, device="cuda")[None],
                slot_mapping=torch.tensor([context - 1], device="cuda"), host_query_lens=np.ones(1, np.int32),
                host_seq_lens=np.full(1, context, np.int32), max_query_len=1, max_seq_len=context,
            )
        )  # fmt: skip

    def rotate(self, ops: Ops, state: dict[str, Any]) -> None:
        """Positions of queries and keys."""
        parts = state["joined"].view(1, -1, self.dim).split([self.heads, self.kv_heads, self.kv_heads], 1)
        state["query"], state["key"] = ops.rotary(parts[0], parts[1], self.positions, self.table)
        state["value"] = parts[2]

    def attend(self, state: dict[str, Any]) -> None:
        """Stores the token's key and value and attends."""
        given = state["query"], state["key"], state["value"], self.cache, self.plan
        state["x"] = self.backend.forward(self.layer, *given).flatten(1)


class Llama:
    """A layer of Llama 8B by codes."""

    def __init__(self, kind: str, context: int, ops: CudaOps) -> None:
        self.kind, self.ops, self.attention = kind, ops, Attention(32, 8, 128, context)
        self.norms = [(random(4096), 1e-5, 0.0) for _ in range(2)]
        shapes = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
        self.weights = [made(kind, 128 if kind == "int4" else 0, False, *shape) for shape in shapes]
        if kind == "int4":  # products of size one
            self.weights = [(codes, scales * 0.1, block, zeros) for codes, scales, block, zeros in self.weights]

    def product(self, number: int, to: str, state: dict[str, Any]) -> None:
        """By one of the four weights."""
        codes, scales, block, zeros = self.weights[number]
        if self.kind == "int4":
            state[to] = self.ops.packed_linear(state["x"], codes, scales, zeros)
        else:
            state[to] = self.ops.scaled_linear(state["x"], codes, scales, block, rounds=True)

    def norm(self, number: int, state: dict[str, Any]) -> None:
        """With the residual."""
        state["x"], state["residual"] = self.ops.add_rms_norm(state["x"], state["residual"], *self.norms[number])

    def gate(self, state: dict[str, Any]) -> None:
        """Silu."""
        state["x"] = self.ops.silu_mul(state["x"])

    def steps(self) -> list[tuple[str, int, Step]]:
        """(name, bytes of the weight, launch), in order."""
        size = [codes.nbytes + scales.nbytes for codes, scales, _, _ in self.weights]
        return [
            ("norm", 0, partial(self.norm, 0)), ("query, key, value", size[0], partial(self.product, 0, "joined")),
            ("rotary", 0, partial(self.attention.rotate, self.ops)), ("attention", 0, self.attention.attend),
            ("output", size[1], partial(self.product, 1, "x")), ("norm", 0, partial(self.norm, 1)),
            ("gate and up", size[2], partial(self.product, 2, "x")), ("silu", 0, self.gate),
            ("down", size[3], partial(self.product, 3, "x")),
        ]  # fmt: skip


class GptOss:
    """A layer of gpt-oss-20b."""

    def __init__(self, index: int, context: int, ops: CudaOps) -> None:
        self.ops, self.choice = ops, None
        self.attention = Attention(64, 8, 64, context, window=128 if index % 2 else 0, sinks=True)
        self.norms = [(random(2880), 1e-5, 0.0) for _ in range(2)]
        shapes = (5120, 2880), (2880, 4096), (32, 2880)
        self.weights = [random(*shape) / shape[1] ** 0.5 for shape in shapes]
        self.biases = [random(shape[0]) for shape in shapes]
        self.gate_up, self.down = coded("mxfp4", 32, 5760, 2880, "cuda"), coded("mxfp4", 32, 2880, 2880, "cuda")
        self.expert_biases = random(32, 5760), random(32, 2880)

    def product(self, number: int, to: str, state: dict[str, Any]) -> None:
        """The norm with a product."""
        given = self.norms[number // 2], self.weights[number], self.biases[number]
        state[to], state["x"], state["residual"] = self.ops.norm_linear(state["x"], state["residual"], *given)

    def output(self, state: dict[str, Any]) -> None:
        """Of attention."""
        state["x"] = self.ops.linear(state["x"], self.weights[1], self.biases[1])

    def route(self, state: dict[str, Any]) -> None:
        """Four of 32."""
        state["shares"], state["ids"] = self.ops.route(state["logits"], RouterSpec(32, 4))

    def parts(self, state: dict[str, Any]) -> Choice:
        """What steps choose, or what is tried."""
        return state.get("choice") or choose(coded_experts.shape_of(state["x"], self.down, 4), 1)

    def first(self, state: dict[str, Any]) -> None:
        """Gate and up."""
        given = state["x"], self.gate_up, state["ids"], range(32), None, OSS, self.expert_biases[0]
        state["x"] = coded_experts.inner_by(self.parts(state).gate_up, *given)

    def second(self, state: dict[str, Any]) -> None:
        """Down, and the sum over experts."""
        given = state["x"], self.down, state["shares"], state["ids"], range(32), None, self.expert_biases[1]
        state["x"] = coded_experts.outer_by(self.parts(state).down, *given)

    def steps(self) -> list[tuple[str, int, Step]]:
        """As of `Llama`."""
        size = [weight.nbytes for weight in self.weights]
        held = [part.codes.nbytes + part.scales.nbytes for part in (self.gate_up, self.down)]
        return [
            ("norm, query, key, value", size[0], partial(self.product, 0, "joined")),
            ("rotary", 0, partial(self.attention.rotate, self.ops)), ("attention", 0, self.attention.attend),
            ("output", size[1], self.output), ("norm, router", size[2], partial(self.product, 2, "logits")),
            ("choice", 0, self.route), ("gate and up", held[0] // 8, self.first),
            ("down, sum", held[1] // 8, self.second),
        ]  # fmt: skip


def run(layers: list[Any], upto: int | None, choice: Choice | None) -> Tensor:
    """All layers one after the other, or their first launches."""
    state: dict[str, Any] = {"choice": choice}
    for layer in layers:
        if upto is not None or "x" not in state:
            state["x"] = state["residual"] = layer.start
        for _, _, step in layer.made[:upto]:
            step(state)
    out: Tensor = state["x"]
    return out


@contextmanager
def apart() -> Iterator[None]:
    """Gates and sums over experts that wait for the kernel before, as they did."""
    with ExitStack() as stack:
        for module in (activation, experts):
            stack.enter_context(patch.object(module, "chained", lambda _: {"CHAINED": False}))
        yield


@contextmanager
def as_now() -> Iterator[None]:
    """What steps launch."""
    yield


def layers_of(name: str, context: int) -> list[Any]:
    """Layers of one case."""
    ops = CudaOps()
    found: list[Any] = []
    for index in range(LAYERS):
        layer: Any = GptOss(index, context, ops) if name == "gpt-oss" else Llama(name, context, ops)
        layer.made, layer.start = layer.steps(), random(1, 2880 if name == "gpt-oss" else 4096)
        found.append(layer)
    return found


def measure(name: str, layers: list[Any]) -> dict[str, Any]:
    """Prints the case's tables."""
    ways: dict[str, tuple[Callable[[], Any], Choice | None]] = {"now": (as_now, None), "apart": (apart, None)}
    if name == "gpt-oss":
        ways |= {of: (as_now, choice) for of, choice in SUMMED.items()}
    found: dict[str, Any] = {"ways": {}, "launches": []}
    usual: Tensor | None = None
    for way, (how, choice) in ways.items():
        call = partial(run, layers, None, choice)
        try:
            with how():
                out = call()
                us = microseconds([call]) / len(layers)
        except Exception as failure:
            print(f"  FAILED {way}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
            continue
        usual = out if usual is None else usual
        off = float((out.float() - usual.float()).norm() / usual.float().norm())
        print(f"{name}: a layer, {way}: {us:.1f} us, {off:.1e} from now", flush=True)
        found["ways"][way] = us
    before = 0.0
    for number, (launch, size, _) in enumerate(layers[0].made, 1):
        us = microseconds([partial(run, layers, number, None)]) / len(layers)
        floor = size / COPY_BYTES_PER_MICROSECOND
        print(f"{name}: {launch:24} {us - before:5.1f} us (bytes {floor:4.1f}), {us:5.1f} up to it", flush=True)
        found["launches"].append((launch, us - before, floor))
        before = us
    return found


@torch.inference_mode()
def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", default="gpt-oss,fp8,int4")
    parser.add_argument("--context", type=int, default=160, help="Tokens of the row.")
    parser.add_argument("--json", type=Path, help="File for the results.")
    options = parser.parse_args()
    begin = time.monotonic()
    cases = {name: layers_of(name, options.context) for name in options.cases.split(",")}

    def launch_all() -> None:
        for name, layers in cases.items():
            for choice in (None, *(SUMMED.values() if name == "gpt-oss" else ())):
                run(layers[:2], None, choice)
            with apart():
                run(layers[:1], None, None)

    compile_all(launch_all)
    print(f"{torch.cuda.get_device_name()}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
    found = {name: measure(name, layers) for name, layers in cases.items()}
    print(f"ended after {time.monotonic() - begin:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
