"""Decoder layers without attention at few rows: products by cuBLAS, and as ordinary steps choose on this device.

    PYTHONPATH=src:. python benchmarks/kernels/layers.py [--rows 1,2,4,8,16,32,64] [--models llama-8b,…]

Norms, products, rotary positions and the gate (for experts: the router and its choice) of several layers one after the
other, in one capture. Figures are microseconds a layer, medians of replays; the floor is the weights' bytes at
4.27 TB/s, an H200's copy rate. Of one row both have our products, and the first takes the norms apart.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.linear_invariant import microseconds, random
from frame.core.ops import Norm, Ops
from frame.interfaces import RouterSpec
from frame.plugins.platforms.cuda.ops import CudaOps

COPY_BYTES_PER_MICROSECOND = 4.27e6
HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; `inner` are the outputs of the gate, or with `routed` of the router. `layers` are timed."""

    hidden: int
    heads: int
    kv_heads: int
    inner: int
    layers: int
    routed: bool = False


MODELS = {
    "llama-8b": Shape(4096, 32, 8, 14336, 8),
    "qwen3-0.6b": Shape(1024, 16, 8, 3072, 28),
    "qwen3-30b-a3b": Shape(2048, 32, 4, 128, 24, routed=True),
}


class Apart(CudaOps):
    """Takes the norm of one row by itself, too."""

    norm_linear = Ops.norm_linear
    norm_linear_silu_mul = Ops.norm_linear_silu_mul


class CuBLAS(CudaOps):
    """Leaves products to torch as it is."""

    linear = staticmethod(torch.nn.functional.linear)  # type: ignore[assignment]


class Layer:
    """One layer's weights, and the ops on them."""

    def __init__(self, shape: Shape) -> None:
        query, joined = shape.heads * HEAD_DIM, (shape.heads + 2 * shape.kv_heads) * HEAD_DIM
        self.shape = shape
        self.norm: Norm = (random(shape.hidden), 1e-6, 0.0)
        self.inputs, self.output = scaled(joined, shape.hidden), scaled(shape.hidden, query)
        self.inner = scaled(shape.inner * (1 if shape.routed else 2), shape.hidden)
        self.down = None if shape.routed else scaled(shape.hidden, shape.inner)

    def weights(self) -> list[Tensor]:
        """All that a step reads."""
        return [weight for weight in (self.inputs, self.output, self.inner, self.down) if weight is not None]

    def __call__(
        self, ops: Ops, hidden: Tensor, residual: Tensor, positions: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        joined, _, residual = ops.norm_linear(hidden, residual, self.norm, self.inputs)
        heads = joined.view(len(hidden), -1, HEAD_DIM)
        query, key, _ = heads.split([self.shape.heads, self.shape.kv_heads, self.shape.kv_heads], 1)
        query, _ = ops.rotary(query, key, positions, table)
        hidden = ops.linear(query.flatten(1), self.output)
        if self.down is None:
            logits, hidden, residual = ops.norm_linear(hidden, residual, self.norm, self.inner)
            ops.route(logits, RouterSpec(logits.shape[-1], 8))
            return hidden, residual
        inner, residual = ops.norm_linear_silu_mul(hidden, residual, self.norm, self.inner)
        return ops.linear(inner, self.down), residual


def scaled(outputs: int, inputs: int) -> Tensor:
    """A weight whose product is about as large as what it multiplies."""
    return random(outputs, inputs) / inputs**0.5


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,2,4,8,16,32,48,64,96,128")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16", flush=True)
    table = torch.rand(4096, HEAD_DIM, device="cuda")
    for name in options.models.split(","):
        layers = [Layer(MODELS[name]) for _ in range(MODELS[name].layers)]
        size = sum(weight.numel() * weight.element_size() for weight in layers[0].weights())
        print(f"{name}: floor {size / COPY_BYTES_PER_MICROSECOND:.1f} us", flush=True)
        chosen = CudaOps()
        layers[0](chosen, *(random(8, MODELS[name].hidden) for _ in range(2)), torch.arange(8, device="cuda"), table)
        chosen.products.settle(512)
        for rows in (int(count) for count in options.rows.split(",")):
            x, positions = random(rows, MODELS[name].hidden), torch.arange(rows, device="cuda")
            others: Ops = Apart() if rows == 1 else CuBLAS("deterministic")
            times = [time_of(ops, layers, x, positions, table) for ops in (others, chosen)]
            print(f"{rows:5} rows: {times[0]:.1f} -> {times[1]:.1f}", flush=True)


def time_of(ops: Ops, layers: list[Layer], x: Tensor, positions: Tensor, table: Tensor) -> float:
    """Microseconds a layer."""

    def run() -> Tensor:
        hidden, residual = x, x
        for layer in layers:
            hidden, residual = layer(ops, hidden, residual, positions, table)
        return hidden

    return microseconds([run]) / len(layers)


if __name__ == "__main__":
    main()
