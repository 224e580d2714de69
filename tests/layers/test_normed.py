"""A norm and the layer that reads it: in one op where both are plain, one after the other everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frame.core.ops import Ops
from frame.interfaces import RouterSpec
from frame.layers import Linear, RMSNorm, Router, normed_linear, normed_silu_mul
from tests.layers.test_weights import make_build

pytestmark = pytest.mark.product

SIZE = 8


class CountingOps(Ops):
    """Counts calls of the ops that do both."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def norm_linear(self, *given: Any) -> Any:
        self.calls.append("norm_linear")
        return super().norm_linear(*given)

    def norm_linear_silu_mul(self, *given: Any) -> Any:
        self.calls.append("norm_linear_silu_mul")
        return super().norm_linear_silu_mul(*given)

    def norm_route(self, *given: Any) -> Any:
        self.calls.append("norm_route")
        return super().norm_route(*given)


class Louder(Linear):
    """As a quantised layer may be."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)

    def silu_mul(self, x: Tensor) -> Tensor:
        return 2 * super().silu_mul(x)


def parts(kind: str = "linear") -> tuple[RMSNorm, Any, CountingOps]:
    torch.manual_seed(0)
    build, ops = make_build(), CountingOps()
    norm = build.norm("norm", SIZE, eps=1e-6, offset=1.0)
    if kind == "heads":
        linear = build.attention_input("attention", SIZE, 4, 2, 4)
    else:
        linear = build.linear("linear", SIZE, 12, bias=True)
        if kind == "louder":
            linear.__class__ = Louder
    for part in (norm, linear):
        part.ops = ops
        for parameter in part.parameters():
            parameter.data.normal_()
    return norm, linear, ops


def apart(norm: nn.Module, linear: Callable[[Tensor], Any], x: Tensor, residual: Tensor | None) -> tuple[Any, ...]:
    normed, total = (norm(x), x) if residual is None else norm(x, residual)
    return linear(normed), normed, total


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    return len(found) == len(expected) and all(map(same, found, expected))


@pytest.mark.parametrize("kind", ["linear", "heads", "louder"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("begins", [True, False])
def test_both_ways_give_the_same(kind: str, rows: int, begins: bool) -> None:
    norm, linear, ops = parts(kind)
    x, residual = torch.randn(rows, SIZE), None if begins else torch.randn(rows, SIZE)
    assert same(normed_linear(norm, linear, x, residual), apart(norm, linear, x, residual))
    plain = not begins and kind != "louder"
    assert ops.calls == ["norm_linear"] * plain
    if kind != "heads":
        product, _, total = apart(norm, linear.silu_mul, x, residual)
        assert same(normed_silu_mul(norm, linear, x, residual), (product, total))
        assert ops.calls == ["norm_linear", "norm_linear_silu_mul"] * plain


@pytest.mark.parametrize("which", ["norm", "linear"])
@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
def test_what_was_hung_on_a_module_is_called(which: str, how: str) -> None:
    norm, linear, ops = parts()
    module, seen = norm if which == "norm" else linear, []
    forward = module.forward
    if how == "hook":
        module.register_forward_hook(lambda *_: seen.append(how))
    elif how == "pre-hook":
        module.register_forward_pre_hook(lambda *_: seen.append(how))
    else:
        module.forward = lambda *given: (seen.append(how), forward(*given))[1]
    normed_linear(norm, linear, torch.randn(2, SIZE), torch.randn(2, SIZE))
    assert seen == [how]
    assert not ops.calls


@pytest.mark.parametrize("kind", ["plain", "begins", "wide", "louder", "other method", "hook"])
def test_a_router_with_its_norm_chooses_as_both_do(kind: str) -> None:
    torch.manual_seed(0)
    build, ops = make_build(), CountingOps()
    build.dtype = torch.bfloat16 if kind == "wide" else build.dtype
    norm = build.norm("norm", SIZE, eps=1e-6, offset=1.0)
    router = Router(build, "router", SIZE, RouterSpec(12, 3, corrected=True), bias=True, wide=kind == "wide")
    for part in (norm, router, router.linear):
        part.ops = ops
    for parameter in (*norm.parameters(), *router.parameters()):
        parameter.data.normal_()
    x, residual = torch.randn(2, 3, SIZE, dtype=build.dtype)
    if kind == "louder":
        router.linear.__class__ = Louder
    elif kind == "other method":
        method = router.linear.method
        router.linear.method = type("Other", (type(method),), {})()
    elif kind == "hook":
        norm.register_forward_hook(lambda *_: None)
    logits, normed, total = router.normed(norm, x, None if kind == "begins" else residual)
    ops.calls.clear()
    found = router.normed_choice(norm, x, None if kind == "begins" else residual)
    expected = router.choose(logits)
    assert same((found[0].weights, found[0].ids, *found[1:]), (expected.weights, expected.ids, normed, total))
    assert ("norm_route" in ops.calls) == (kind == "plain")
