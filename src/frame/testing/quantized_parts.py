"""Layers of each kind that a quantisation may hold, without anything between them, and what of memory they keep."""

from __future__ import annotations

import gc
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frame.core.interfaces.experts import ExpertSpec, Routing
from frame.core.interfaces.model import ForwardStep, Model, ModelInputs
from frame.core.interfaces.setup import ModelSetup

HIDDEN, INNER = 256, 512
#: Experts, of which each token has two; two ranks do not divide them evenly.
EXPERTS = 5
#: Rows of a vocabulary, which two ranks do not divide evenly.
ROWS = 129


class _Parts(Model):
    """Layers that are called one by one."""

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Parts(_Parts):
    """One linear layer of each kind."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        build = setup.build
        self.inputs = build.attention_input("layers.0.attention", HIDDEN, 4, 4, 64)
        self.gate_up = build.linear(
            "layers.0.mlp", HIDDEN, 2 * INNER, shard="column", parts={"gate_proj": INNER, "up_proj": INNER}
        )
        self.down = build.linear("layers.0.mlp.down_proj", INNER, HIDDEN, bias=True, shard="row")

    def products(self, x: Tensor) -> list[Tensor]:
        """Of x [T, hidden]: queries, keys, values [T, heads · size], gate and up [T, size]; and what they become."""
        joined = [part.flatten(1) for part in self.inputs(x)]
        halves = self.gate_up(x).chunk(2, -1)
        inner = self.gate_up.silu_mul(x)  # type: ignore[operator]
        return [*joined, *halves, self.down(inner)]


class ExpertParts(_Parts):
    """A layer of routed experts."""

    spec: ClassVar[ExpertSpec] = ExpertSpec(EXPERTS, HIDDEN, INNER, 2)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self.experts = setup.build.experts("layers.0.mlp.experts", self.spec)

    def products(self, x: Tensor) -> list[Tensor]:
        """Of x [T, hidden]: what its experts give, [T, hidden]."""
        return [self.experts(x, routing(len(x)))]


class TableParts(_Parts):
    """An embedding and a head, apart from it."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        build = setup.build
        self.embedding = build.embedding("embedding", ROWS, HIDDEN)
        self.head = build.head("head", HIDDEN, ROWS)

    def products(self, x: Tensor) -> list[Tensor]:
        """Of x [T, hidden]: every row [ROWS, hidden], and scores of all rows, [T, ROWS]."""
        return [self.embedding(torch.arange(ROWS)), self.head(x)]


def routing(num_tokens: int) -> Routing:
    """Two experts for each token, in turn."""
    first = torch.arange(num_tokens, dtype=torch.int32)
    ids = torch.stack([first % EXPERTS, (first * 2 + 3) % EXPERTS], 1)
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], (ids[:, 0] + 1) % EXPERTS, ids[:, 1])
    weights = torch.rand(num_tokens, 2, generator=torch.Generator().manual_seed(5)) + 0.1
    return Routing(weights, ids)


def inputs(seed: int = 0) -> Tensor:
    """Activations [5, hidden]."""
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Within `tolerance` of the length of what is expected."""
    far = float(nn.functional.mse_loss(found.float(), expected.float()).sqrt() / expected.float().std())
    assert far <= tolerance, f"{what}: they differ by {far:.2g} of their spread"


def bytes_of_tensors(*, apart_from: nn.Module | None = None) -> int:
    """The bytes of the memory of all tensors that live, without that of a model's parameters."""
    gc.collect()
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter) and item.layout == torch.strided and not item.is_meta:
            memory = item.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    for parameter in () if apart_from is None else apart_from.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(found.values())
