"""What a class of transformers computes by many small operations, as one of frame's: gated layers, turns of heads.

A class's own code is tried on small tensors first; only what gives the very bits of frame's operation is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import Build
from frame.ops import Ops

Turn = Callable[..., tuple[Tensor, Tensor]]

#: The layers of a gated layer, and all that its module may have.
GATED = ("gate_proj", "up_proj", "down_proj")
_TURN = "apply_rotary_pos_emb"


class GatedPart(nn.Module):
    """down(silu(gate(x)) · up(x)); gate and up are one product."""

    def __init__(self, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down_proj = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] → the same."""
        inner: Tensor = self.gate_up.silu_mul(x.flatten(0, -2))  # type: ignore[operator]
        out: Tensor = self.down_proj(inner)
        return out.view(x.shape)


def is_gated(module: nn.Module) -> bool:
    """Whether a module computes what `GatedPart` does, from three plain layers and nothing else."""
    if {name for name, _ in module.named_children()} - {*GATED, "act_fn"} or list(module.parameters(recurse=False)):
        return False
    layers = [module._modules.get(name) for name in GATED]
    if not all(type(layer) is nn.Linear for layer in layers):
        return False
    draw, clone = torch.Generator().manual_seed(0), copy(module)
    small = dict(zip(GATED, (_layer(8, 16, draw), _layer(8, 16, draw), _layer(16, 8, draw)), strict=True))
    clone.__dict__["_modules"] = {**module._modules, **small}
    x = torch.randn(1, 5, 8, generator=draw)
    gate, up, down = small.values()
    try:
        with torch.inference_mode():
            found, expected = clone(x), down(nn.functional.silu(gate(x)) * up(x))
    except Exception:  # a class's own: it takes more than a tensor, or looks at sizes
        return False
    return isinstance(found, Tensor) and torch.equal(found, expected)


def _layer(inputs: int, outputs: int, draw: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device="cpu", dtype=torch.float32)
    layer.weight = nn.Parameter(torch.randn(outputs, inputs, generator=draw), requires_grad=False)
    return layer


class Turning:
    """Stands for a class's function that turns queries and keys by cosines and sines, whose halves are equal.

    What it is not made for, `original` does. All layers of a step are given the same cosines.
    """

    def __init__(self, ops: Ops, original: Turn, interleaved: bool) -> None:
        self._ops, self._original, self._interleaved = ops, original, interleaved
        self._given: Tensor | None = None
        self._table = self._places = torch.empty(0)

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if more or unsqueeze_dim != 1 or q.is_meta or q.dim() != 4 or cos.dim() != 3 or len(q) != 1 or len(cos) != 1:
            return self._original(q, k, cos, sin, unsqueeze_dim, **more)
        if self._given is not cos:
            half = cos.shape[-1] // 2
            self._table = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
            self._places = torch.arange(cos.shape[1], device=cos.device)
            self._given = cos
        query, key = (one[0].transpose(0, 1) for one in (q, k))
        query, key = self._ops.rotary(query, key, self._places, self._table, self._interleaved)
        return query.transpose(0, 1)[None], key.transpose(0, 1)[None]


def fuse_turns(build: Build, base: nn.Module) -> int:
    """Has the attention of `base` turn its heads by one operation, where its class does what that does; counts them."""
    if not _halves_are_equal(base):
        return 0
    made, count = dict[Turn, Turning | None](), 0
    for module in base.modules():
        forward = type(module).forward
        original = getattr(forward, "__globals__", {}).get(_TURN)
        if not hasattr(module, "frame_attention") or original is None or _TURN not in forward.__code__.co_names:
            continue
        if original not in made:
            way = _way(original)
            made[original] = None if way is None else Turning(build.ops, original, way)
        turning = made[original]
        if turning is not None:
            module.forward = MethodType(_with_global(forward, _TURN, turning), module)
            count += 1
    return count


def _with_global(function: Any, name: str, value: Any) -> FunctionType:
    """The same function, for which `name` is another thing."""
    made = FunctionType(
        function.__code__, {**function.__globals__, name: value}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@cache
def _way(turn: Turn) -> bool | None:
    """Whether a class's function turns pairs of neighbours; False: pairs of halves; None: something else."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 8, generator=draw).to(torch.bfloat16) for heads in (4, 2))
    angles = torch.rand(1, 5, 4, generator=draw) * 6
    cos, sin = (torch.cat((one, one), -1).to(torch.bfloat16) for one in (angles.cos(), angles.sin()))
    try:
        expected = turn(q, k, cos, sin)
        for interleaved in (False, True):
            found = Turning(Ops(), turn, interleaved)(q, k, cos, sin)
            if all(torch.equal(*pair) for pair in zip(found, expected, strict=True)):
                return interleaved
    except Exception:  # a class's own: it takes other things
        return None
    return None


def _halves_are_equal(base: nn.Module) -> bool:
    """Whether the first half of all cosines and sines that the class makes is its second half."""
    found = list(_angles(base))
    return bool(found) and all(
        one.dim() == 3 and one.shape[-1] % 2 == 0 and torch.equal(*one.chunk(2, -1)) for one in found
    )


def _angles(base: nn.Module) -> Iterator[Tensor]:
    """Cosines and sines of some positions, of every module that makes them; what is none of them where one fails."""
    for module in base.modules():
        if not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            continue
        frequencies = next(module.buffers(recurse=False))
        if frequencies.is_meta:
            yield torch.empty(0)
            return
        places = torch.arange(3, 12, device=frequencies.device)[None]
        x = torch.zeros(1, places.shape[1], 1, device=frequencies.device)
        layers = sorted(set(getattr(module, "layer_types", ()) or ())) or [None]
        takes = inspect.signature(module.forward).parameters
        try:
            for layer in layers:
                given = {"layer_type": layer} if "layer_type" in takes else {}
                with torch.inference_mode():
                    yield from module(x, places, **given)
        except Exception:  # a class's own: it takes other things
            yield torch.empty(0)
            return
