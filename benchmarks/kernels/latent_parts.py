"""Time of what latent attention does between its products and attention itself: one launch against one for each step.

    python -m benchmarks.kernels.latent_parts [--tokens 1,64,512,8192] [--ways op,chain,rotary] [--sweep] [--json FILE]

DeepSeek V2-Lite, and V3 on one device and on one of eight. `op` is `Ops.latent_rotary` of the CUDA platform, `chain`
the norm of the latents, the turned parts of queries and latents and the two tensors joined from them, `rotary` the
second of these alone; a line of Llama's heads, whose halves turn, has that only. `copy` is what a copy of as many bytes
as the op must read and write takes. The op is first compared with its reference. Medians of calls that are replayed
from a CUDA graph: of few tokens everything stays in the L2 cache. `--sweep` tries other sizes of programs. Elsewhere
than on a GPU only the comparison is made, by Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from benchmarks.kernels.paged_rows import microseconds
from frame.kernels import latent_rotary, rotary
from frame.ops import Ops
from frame.plugins.platforms.cuda.ops import CudaOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
RANK, ROPE, NOPE, POSITIONS, EPS = 512, 64, 128, 16384, 1e-6
#: Model → heads, numbers of the queries' latent.
MODELS = {"V2-Lite": (16, 0), "V3": (128, 1536), "V3 of 8": (16, 1536)}
TOKENS, WAYS = "1,64,512,8192", ("op", "chain", "rotary")
#: What `--sweep` tries: most heads and warps of a program of the op, warps of a program that turns many tokens.
PROGRAMS, WARPS = ((4, 1), (8, 1), (16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (64, 4)), (1, 2, 4)
#: Query and key heads of Llama 8B, and their size.
LLAMA = 32, 8, 128


@dataclass(frozen=True)
class Inputs:
    """What the products before attention gave for so many tokens."""

    query: Tensor
    latent: Tensor
    weight: Tensor
    positions: Tensor
    table: Tensor

    @classmethod
    def made(cls, tokens: int, heads: int, before: int) -> Inputs:
        """Random ones; `before` numbers stand before a latent in the result of its product."""
        return cls(
            _random(tokens, heads, NOPE + ROPE),
            _random(tokens, before + RANK + ROPE)[:, before:],
            _random(RANK),
            torch.arange(tokens, device=DEVICE),
            _table(ROPE),
        )

    @property
    def moved(self) -> int:
        """Bytes that must be read and written."""
        tokens, heads, _ = self.query.shape
        return 2 * tokens * (heads * ROPE + RANK + ROPE) * self.query.itemsize

    def op(self, ops: Ops) -> Tensor:
        """The latents; the queries are turned in place."""
        return ops.latent_rotary(self.query, self.latent, (self.weight, EPS, 0.0), self.positions, self.table, True)

    def turned(self, ops: Ops) -> tuple[Tensor, Tensor]:
        """The turned parts of queries and latents."""
        return ops.rotary(self.query[..., NOPE:], self.latent[:, None, RANK:], self.positions, self.table, True)

    def chain(self, ops: Ops) -> tuple[Tensor, Tensor]:
        """Queries and latents, one step after the other."""
        first = ops.rms_norm(self.latent[:, :RANK], self.weight, EPS)
        query, key = self.turned(ops)
        return torch.cat((self.query[..., :NOPE], query), -1), torch.cat((first, key.squeeze(1)), -1)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def _table(dim: int) -> Tensor:
    angles = torch.rand(POSITIONS, dim // 2, device=DEVICE) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)


def error(inputs: Inputs, ops: Ops) -> float:
    """The largest difference between the op and its reference, in latents and queries."""
    want_query, want = inputs.chain(Ops())
    found = inputs.op(ops)
    return max(float((one - other).abs().max()) for one, other in ((found, want), (inputs.query, want_query)))


def copied(num_bytes: int) -> float:
    """Microseconds of a copy that reads and writes so many bytes together."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return float(microseconds(lambda: target.copy_(source)))


def measure(tokens: int, heads: int, before: int, ways: list[str], ops: Ops) -> dict[str, float]:
    """Microseconds by way, and the op's error."""
    inputs, found = Inputs.made(tokens, heads, before), dict[str, float]()
    if "op" in ways:
        found["off"] = error(Inputs.made(min(tokens, 64), heads, before), ops)
    calls: dict[str, Callable[[], Any]] = {
        "op": lambda: inputs.op(ops), "chain": lambda: inputs.chain(ops), "rotary": lambda: inputs.turned(ops)
    }  # fmt: skip
    if DEVICE == "cuda":
        found |= {way: float(microseconds(calls[way])) for way in ways}
        found["copy"] = copied(inputs.moved)
    return found


def llama(tokens: int, ops: Ops) -> dict[str, float]:
    """Microseconds that turn the heads of Llama 8B, and of a copy of as many bytes."""
    query_heads, key_heads, dim = LLAMA
    query, key = _random(tokens, query_heads + 2 * key_heads, dim).split([query_heads, 2 * key_heads], 1)
    given = query, key[:, :key_heads], torch.arange(tokens, device=DEVICE), _table(dim)
    moved = 2 * tokens * (query_heads + key_heads) * dim * query.itemsize
    return {"rotary": float(microseconds(lambda: ops.rotary(*given))), "copy": copied(moved)}


def sweep(tokens: int, heads: int, before: int, ops: Ops) -> dict[str, float]:
    """Microseconds by the size of a program, of the op and of the kernel that only turns."""
    inputs, found = Inputs.made(tokens, heads, before), dict[str, float]()
    kept = latent_rotary.MOST_HEADS, latent_rotary.NUM_WARPS, rotary.MANY_WARPS
    for most, warps in PROGRAMS:
        latent_rotary.MOST_HEADS, latent_rotary.NUM_WARPS = most, warps
        found[f"op, {most} heads and {warps} warps"] = float(microseconds(lambda: inputs.op(ops)))
    for warps in WARPS if tokens >= rotary.MANY_TOKENS else ():
        rotary.MANY_WARPS = warps
        found[f"rotary, {warps} warps"] = float(microseconds(lambda: inputs.turned(ops)))
    latent_rotary.MOST_HEADS, latent_rotary.NUM_WARPS, rotary.MANY_WARPS = kept
    return found


@torch.inference_mode()
def main() -> None:
    """Prints a line for each model and number of tokens."""
    parser = argparse.ArgumentParser(description="What latent attention does before attention itself.")
    parser.add_argument("--tokens", default=TOKENS, help="Numbers of tokens, with commas between them.")
    parser.add_argument("--ways", default=",".join(WAYS), help="What to time, with commas between them.")
    parser.add_argument("--sweep", action="store_true", help="Try other sizes of programs.")
    parser.add_argument("--json", type=Path, help="File for the results.")
    options = parser.parse_args()
    ways, ops, results = options.ways.split(","), CudaOps(), []
    if unknown := sorted({*ways} - {*WAYS}):
        parser.error(f"no way {unknown[0]!r}; there are: {', '.join(WAYS)}")
    for tokens in map(int, options.tokens.split(",")):
        lines = {name: measure(tokens, *sizes, ways, ops) for name, sizes in MODELS.items()}
        if "rotary" in ways and DEVICE == "cuda":
            lines["Llama"] = llama(tokens, ops)
        for name, found in lines.items():
            results.append({"model": name, "tokens": tokens, **found})
            times = ", ".join(f"{way} {found[way]:7.1f} µs" for way in (*ways, "copy") if way in found)
            print(f"{name:8} {tokens:5} tokens: {times}", f"off by {found.get('off', 0.0):.1e}", flush=True)
            if options.sweep and DEVICE == "cuda" and name in MODELS:
                for way, time in sweep(tokens, *MODELS[name], ops).items():
                    print(f"  {way}: {time:.1f} µs", flush=True)
    if options.json:
        name = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
        options.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
