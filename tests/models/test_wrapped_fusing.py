"""Gated layers and turns of heads of transformers' classes: replaced where frame's operation gives their very bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from frame.ops import Ops
from frame.plugins.models.wrapped import fusing
from frame.testing.checkpoints import make_checkpoint
from tests.models.dense import make_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def gated_layer(forward, act=nn.SiLU, extra=None):
    made = type("MLP", (nn.Module,), {"forward": forward})()
    for name, sizes in zip(fusing.GATED, ((32, 64), (32, 64), (64, 32)), strict=True):
        made.add_module(name, nn.Linear(*sizes, device="meta"))
    made.act_fn = act()
    if extra is not None:
        made.extra = extra
    return made


def plain(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (gated_layer(plain), True),
        (gated_layer(lambda self, x: plain(self, x) * 1.0), True),  # in other words
        (gated_layer(plain, nn.GELU), False),
        (gated_layer(lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))), False),
        (gated_layer(lambda self, x: plain(self, x) * 0.5), False),
        (gated_layer(lambda self, x, y: plain(self, x)), False),
        (gated_layer(lambda self, x: plain(self, x.view(3, 32))), False),
        (gated_layer(plain, extra=nn.Dropout()), False),
        (gated_layer(plain, extra=nn.Parameter(torch.ones(1))), False),
    ],
    ids=range(9),
)
def test_gated_layers_are_known_by_what_they_compute(module, expected):
    before = dict(module._modules)
    assert fusing.is_gated(module) == expected
    assert module._modules == before


def turn_halves(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = (torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) for x in (q, k))
    return tuple(x * cos + other * sin for x, other in zip((q, k), turned, strict=True))


def turn_pairs(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    cos, sin = (one[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for one in (cos, sin))
    turned = (torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k))
    return tuple(x * cos + other * sin for x, other in zip((q, k), turned, strict=True))


def test_turns_are_known_by_what_they_compute():
    assert fusing._way(turn_halves) is False
    assert fusing._way(turn_pairs) is True
    assert fusing._way(lambda q, k, cos, sin, unsqueeze_dim=1: turn_halves(q, k, sin, cos)) is None
    assert fusing._way(lambda q, k, cos, sin: (q, k)) is None
    assert fusing._way(lambda q, k, cos: (q, k)) is None


def test_a_turn_does_what_its_class_does_for_all_that_it_is_given():
    calls = []

    def original(*given, **more):
        calls.append(given)
        return turn_halves(*given, **more)

    turning = fusing.Turning(Ops(), original, False)
    torch.manual_seed(0)
    for shapes, unsqueeze_dim, asks in [
        (((1, 4, 7, 8), (1, 2, 7, 8), (1, 7, 8)), 1, False),
        (((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 8)), 1, False),
        (((2, 4, 7, 8), (2, 2, 7, 8), (2, 7, 8)), 1, True),
        (((1, 7, 4, 8), (1, 7, 2, 8), (1, 7, 8)), 2, True),
    ]:
        q, k = (torch.randn(shape) for shape in shapes[:2])
        cos, sin = (torch.randn(*shapes[2][:-1], 4).repeat(1, 1, 2) for _ in range(2))
        calls.clear()
        for _ in range(2):  # layers of a step
            found = turning(q, k, cos, sin, unsqueeze_dim)
            assert all(
                torch.equal(*pair) for pair in zip(found, turn_halves(q, k, cos, sin, unsqueeze_dim), strict=True)
            )
        assert bool(calls) == asks


@pytest.mark.parametrize(
    ("family", "gated", "turned"),
    [
        ("llama", True, True),
        ("qwen3", True, True),
        ("gemma3", False, True),
        ("phi3", False, True),
        ("gpt2", False, False),
    ],
)
def test_classes_of_the_library(family, gated, turned, tmp_path):
    model = make_model(make_checkpoint(tmp_path, family), name="*")
    parts = [one for one in model.modules() if isinstance(one, fusing.GatedPart)]
    turns = [one for one in model.modules() if "forward" in vars(one)]
    layers = model.whole.config.num_hidden_layers
    assert len(parts) == (layers if gated else 0)
    assert len(turns) == (layers if turned else 0)
