"""Speed of experts multiplied by their codes on a GPU, against the device's own copy and product rates.

    python benchmarks/kernels/coded_experts.py [--kinds mxfp4,int4] [--tokens 1,64,512] [--sweep] [--json FILE]

A layer of gpt-oss-20b's shape: 32 experts, 4 of them a token, hidden and inner size 2880, biases, the clamped gate.
`bytes` is what the codes and scales of the experts that were chosen take to move at the rate of a copy of a gigabyte
in the same run, `products` what multiplications take at the rate of a product of two matrices of 8,192; the share is
that of the longer. `dequantised` is the time of what steps did before: all weights, or those of the chosen experts, put
together and multiplied as bf16 ones are; `bf16` the time of the bf16 kernels alone, on weights of the same shape. The
kernel's result is first compared with weights in float32. Medians, replayed from a CUDA graph over more layers than the
L2 cache holds. `--sweep` tries other tiles. `--candidates` times the kernels of few tokens in all their tiles instead
(`coded_candidates.py`), for which this is run as a module: `python -m benchmarks.kernels.coded_experts --candidates`.
Elsewhere than on a GPU only the comparison is made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if "--device" in sys.argv and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from triton.runtime.errors import OutOfResources

from frame.core.ops import Ops, layers as reference
from frame.interfaces import Gating, RouterSpec
from frame.kernels import coded_experts, experts
from frame.kernels.expert_launch import Launch, Tile, coded_launch
from frame.ops import CodedWeights
from frame.plugins.platforms.cuda.ops import CudaOps
from frame.plugins.quantization.codebook import FP4

OSS = Gating(alpha=1.702, shift=1.0, limit=7.0)
KINDS = ("mxfp4", "nvfp4", "int4", "zeros", "fp8", "fp8-blocks")
#: Columns that share a scale; of fp8 rows have one.
GROUPS = {"mxfp4": 32, "nvfp4": 16, "int4": 64, "zeros": 64, "fp8-blocks": 128}
#: Bytes of weights that a graph reads at least, so that none of them stay in the L2 cache.
ENOUGH_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """One layer's inputs."""

    gate_up: CodedWeights
    down: CodedWeights
    hidden: Tensor
    weights: Tensor
    ids: Tensor
    biases: tuple[Tensor, Tensor]
    rounds: bool

    @property
    def given(self) -> tuple[Any, ...]:
        """What `coded_experts` takes."""
        return self.hidden, self.gate_up, self.down, self.weights, self.ids

    def run(self, launch: Launch | None = None) -> Tensor:
        """The kernel."""
        how: dict[str, Any] = {"gating": OSS, "biases": self.biases, "rounds": self.rounds}
        return coded_experts.fused_experts(*self.given, launch, **how)

    def dequantised(self, ops: Ops) -> Tensor:
        """What steps do where the kernel does not serve."""
        return Ops.coded_experts(ops, *self.given, gating=OSS, biases=self.biases)

    def exact(self) -> Tensor:
        """In float32, one expert after the other."""
        biases = tuple(bias.float() for bias in self.biases)
        total = torch.zeros_like(self.hidden, dtype=torch.float32)
        for number in self.ids.unique().tolist():
            one = torch.tensor([number], device=self.ids.device)
            pair = [part.chosen(one).weight(Ops(), torch.float32) for part in (self.gate_up, self.down)]
            own = biases[0][one], biases[1][one]
            total += reference.fused_experts(
                self.hidden.float(), *pair, self.weights, self.ids, first=number, gating=OSS, biases=own
            )
        return total


def coded(kind: str, num_experts: int, rows: int, depth: int, device: str) -> CodedWeights:
    """Random experts whose products are of size one."""
    group = GROUPS.get(kind, depth)
    block = (128, 128) if kind == "fp8-blocks" else (1, group)
    shape = num_experts, -(-rows // block[0]), -(-depth // block[1])
    zeros = numbers = table = None
    scales = (torch.rand(shape, device=device) + 0.5) * depth**-0.5
    if kind.startswith("fp8"):
        codes = (torch.randn(num_experts, rows, depth, device=device) * 60).to(torch.float8_e4m3fn)
        return CodedWeights(codes, scales / 64, block)
    codes = torch.randint(-(2**31), 2**31, (num_experts, rows, depth // 8), device=device).to(torch.int32)
    scales /= 4
    if kind == "zeros":
        zeros = torch.randint(0, 16, shape, device=device).to(torch.uint8)
    if kind == "mxfp4":
        scales = torch.randint(117, 121, shape, device=device).to(torch.uint8)
    if kind == "nvfp4":
        scales = (torch.rand(shape, device=device) * 32 + 16).to(torch.float8_e4m3fn)
        numbers = torch.full((num_experts, rows, 1), depth**-0.5 / 128, device=device)
    if "fp4" in kind:
        table = torch.tensor(FP4, device=device)
    return CodedWeights(codes, scales, block, zeros, table, numbers, is_float4=table is not None)


def cases_of(kind: str, sizes: tuple[int, int, int, int], tokens: int, device: str) -> list[Case]:
    """Layers enough that what one replay reads does not stay in the L2 cache."""
    num_experts, top_k, hidden, inner = sizes
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    chosen = min(num_experts, tokens * top_k)
    layer_bytes = 3 * chosen * hidden * inner // (1 if kind.startswith("fp8") else 2)
    cases: list[Case] = []
    for _ in range(max(1, ENOUGH_BYTES // layer_bytes) if device == "cuda" else 1):
        pair = coded(kind, num_experts, 2 * inner, hidden, device), coded(kind, num_experts, hidden, inner, device)
        x = torch.randn(tokens, hidden, dtype=dtype, device=device)
        routed = reference.route(torch.randn(tokens, num_experts, device=device), RouterSpec(num_experts, top_k))
        biases = tuple(torch.randn(num_experts, size, dtype=dtype, device=device) for size in (2 * inner, hidden))
        cases.append(Case(*pair, x, *routed, (biases[0], biases[1]), kind.startswith("fp8")))
    return cases


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one call, replayed from a graph that holds all of them."""
    from triton.testing import do_bench_cudagraph

    torch.cuda.synchronize()  # the graph is captured on a stream that would not wait for the inputs
    return float(do_bench_cudagraph(lambda: [call() for call in calls], return_mode="median")) * 1e3 / len(calls)


def rates() -> tuple[float, float]:
    """(bytes read and written, operations) a second that the device reaches in a copy and in a product."""
    source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copy = 2 * source.nbytes / microseconds([lambda: target.copy_(source)]) * 1e6
    return copy, 2 * 8192**3 / microseconds([lambda: left @ right]) * 1e6


def bytes_of(case: Case) -> float:
    """Bytes of the codes, scales and the like of the experts that were chosen."""
    share = case.ids.unique().numel() / len(case.gate_up.codes)
    held = [
        one
        for part in (case.gate_up, case.down)
        for one in (part.codes, part.scales, part.zeros, part.numbers)
        if one is not None
    ]
    return share * sum(one.nbytes for one in held)


def tiles(block_m: int) -> list[Tile]:
    """Other tiles worth a measurement, for blocks of so many pairs."""
    swaps = (False, True) if block_m <= 32 else (False,)
    every = itertools.product((32, 64, 128), (64, 128), (4, 8), (3, 4), swaps)
    return [Tile(*sizes) for sizes in every if sizes[0] >= 64 or not sizes[-1]]


def best_of(cases: list[Case], launch: Launch) -> list[tuple[float, Launch]]:
    """(microseconds, launch) of the six quickest that differ from `launch` in one of the products."""
    found: list[tuple[float, Launch]] = []
    for part, tile in itertools.product(("gate_up", "down"), tiles(launch.block_m)):
        tried = replace(launch, **{part: tile})
        try:
            found.append((microseconds([lambda case=case, one=tried: case.run(one) for case in cases]), tried))
        except OutOfResources as failure:
            print(f"  {tried}: {failure}", flush=True)
    return sorted(found, key=lambda pair: pair[0])[:6]


def error(kind: str, case: Case) -> float:
    """Relative error of the kernel against float32; raises `RuntimeError` for one that rounding does not explain."""
    expected = case.exact()
    wrong = float((case.run().float() - expected).norm() / expected.norm())
    if not wrong < (6e-2 if case.rounds and len(case.hidden) >= coded_experts.MANY_TOKENS else 1e-2):
        raise RuntimeError(f"relative error {wrong} of {kind} with {len(case.hidden)} tokens")
    return wrong


def measure(kind: str, cases: list[Case], device: tuple[float, float], *, sweep: bool) -> dict[str, Any]:
    """Prints a line."""
    case, (tokens, top_k) = cases[0], cases[0].ids.shape
    wrong, num_bytes = error(kind, case), sum(map(bytes_of, cases)) / len(cases)
    operations = 2 * tokens * top_k * 3 * case.hidden.shape[1] * case.gate_up.codes.shape[1] // 2
    floors = {"bytes": num_bytes / device[0] * 1e6, "products": operations / device[1] * 1e6}
    bound = max(floors, key=floors.__getitem__)
    time, ops = microseconds([one.run for one in cases]), CudaOps()
    before = microseconds([lambda one=one: one.dequantised(ops) for one in cases])
    plain = [part.weight(Ops(), torch.bfloat16) for part in (case.gate_up, case.down)]
    given = case.hidden, *plain, case.weights, case.ids
    bf16 = microseconds([lambda: experts.fused_experts(*given, gating=OSS, biases=case.biases)])
    print(
        f"{kind:10} {tokens:5} tokens: {time:8.1f} us, {floors[bound] / time:4.0%} of the floor ({bound}); dequantised "
        f"{before:8.1f} us, bf16 {bf16:8.1f} us; error {wrong:.1e}",
        flush=True,
    )
    result = {"kind": kind, "tokens": tokens, "us": time, "floor us": floors[bound], "bound": bound, "error": wrong}
    if sweep:
        shape = coded_experts.shape_of(case.hidden, case.down, top_k)
        for quick, launch in best_of(cases, coded_launch(shape, tokens)):
            print(f"  sweep: {quick:8.1f} us  {launch}", flush=True)
    return {**result, "dequantised us": before, "bf16 us": bf16}


@torch.inference_mode()
def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="mxfp4,int4,zeros,fp8", help="Of: " + ", ".join(KINDS))
    parser.add_argument("--tokens", default="1,64,512,4096")
    parser.add_argument("--shape", default="32,4,2880,2880", help="experts, chosen of them, hidden and inner size")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--candidates", action="store_true")
    parser.add_argument("--seconds", type=float, default=85.0, help="how long --candidates may take")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    a, b, c, d = map(int, options.shape.split(","))
    if options.candidates:
        from benchmarks.kernels.coded_candidates import sweep

        counts = [int(tokens) for tokens in options.tokens.split(",")]
        sweep(options.kinds.split(","), counts, (a, b, c, d), options.seconds, options.json)
        return
    on_gpu, results = options.device == "cuda", []
    device = rates() if on_gpu else (0.0, 0.0)
    if on_gpu:
        name = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        print(f"{name}: copies {device[0] / 1e12:.2f} TB/s, products {device[1] / 1e12:.0f} TFLOP/s", flush=True)
    for kind, tokens in itertools.product(options.kinds.split(","), map(int, options.tokens.split(","))):
        cases = cases_of(kind, (a, b, c, d), tokens, options.device)
        if on_gpu:
            results.append(measure(kind, cases, device, sweep=options.sweep))
        else:
            results.append({"kind": kind, "tokens": tokens, "error": error(kind, cases[0])})
            print("{kind:10} {tokens:5} tokens: error {error:.1e}".format(**results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"copy": device[0], "product": device[1], "cases": results}, indent=1))


if __name__ == "__main__":
    main()
