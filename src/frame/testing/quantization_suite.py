"""The contract of quantisations: layers keep their memory, shares fit together, and what they compute is near.

Weights are made up, as by `--load-format dummy`, so that every format can be tried without a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frame.core.interfaces.collectives import Groups, ProcessGroup, SingleGroup
from frame.core.interfaces.loader import WeightLoader
from frame.core.interfaces.model import ForwardStep, Model, ModelInputs
from frame.core.interfaces.quantization import Quantization, QuantizationSpec
from frame.core.interfaces.setup import LoaderSetup, ModelSetup
from frame.core.layers.build import Build
from frame.core.layers.methods import Methods
from frame.core.layers.weights import load_weights
from frame.core.ops import Ops
from frame.core.plugin_host.registry import Registry

from .plugin_suite import PluginSuite, reason_or_none
from .ranks import run_ranks

_HIDDEN, _INNER = 256, 512
#: quantization_configs that no format should trip over
_ODD: Sequence[Mapping[str, Any]] = ({}, {"quant_method": 3}, {"quant_method": "no-such"}, {"quantization": None})


class Parts(Model):
    """One linear layer of each kind, without anything between them."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        build = setup.build
        self.inputs = build.attention_input("layers.0.attention", _HIDDEN, 4, 4, 64)
        self.gate_up = build.linear(
            "layers.0.mlp", _HIDDEN, 2 * _INNER, shard="column", parts={"gate_proj": _INNER, "up_proj": _INNER}
        )
        self.down = build.linear("layers.0.mlp.down_proj", _INNER, _HIDDEN, bias=True, shard="row")

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def products(self, x: Tensor) -> list[Tensor]:
        """Of x [T, hidden]: queries, keys, values [T, heads · size], gate and up [T, size]; and what they become."""
        joined = [part.flatten(1) for part in self.inputs(x)]
        halves = self.gate_up(x).chunk(2, -1)
        inner = self.gate_up.silu_mul(x)  # type: ignore[operator]
        return [*joined, *halves, self.down(inner)]


class QuantizationSuite(PluginSuite):
    """The contract of `frame.interfaces.Quantization`.

        class TestMine(QuantizationSuite):
            plugin = "mine"        # or target = "package.module:Class"
            tags = {"quantization_config": '{"quant_method": "mine", "bits": 4}'}   # with `target`

    The provider's tag "quantization_config" is that of a checkpoint in this format, as JSON; a format that is `online`
    needs none. Layers have sizes that are multiples of 64 on each of two ranks.
    """

    kind = "quantization"

    def stored(self) -> Mapping[str, Any] | None:
        """The quantization_config of a checkpoint in the format; None for weights that are quantised while loading."""
        tag = self.provider().tags.get("quantization_config")
        if not tag and not self.found().online:
            pytest.fail('the format must be online, or its provider have tags={"quantization_config": "{…}"}')
        return json.loads(tag) if tag else None

    def build(self, quantization: Quantization | None = None, group: ProcessGroup | None = None) -> Build:
        """A build on the CPU in float32 with the format under test."""
        made = quantization or self.make(
            spec=QuantizationSpec(torch.device("cpu"), torch.float32), quantization_config=self.stored()
        )
        return Build(
            config=SimpleNamespace(max_position_embeddings=32),
            dtype=torch.float32,
            device=torch.device("cpu"),
            ops=Ops(),
            groups=Groups.of(tensor=group or SingleGroup()),
            kv_dtype=torch.float32,
            device_type="cpu",
            methods=Methods(made),
        )

    def loader(self) -> WeightLoader:
        """Makes up weights."""
        setup = LoaderSetup(self.folder, named=True, seed=3)
        loader: WeightLoader = Registry.load().make("loader", "frame-llm:dummy", setup)
        return loader

    def loaded(self, group: ProcessGroup | None = None) -> Parts:
        """Layers with weights that were made up, the same ones for every number of ranks."""
        model = Parts(ModelSetup(self.build(group=group)))
        load_weights(model, self.loader())
        return model

    def test_reads_and_supports_never_raise(self) -> None:
        kind = self.found()
        for config in _ODD:
            assert kind.reads(config) in (True, False), f"reads({config}) must be True or False"
        made = self.build().methods.quantization
        for device in ("cpu", "cuda", "meta"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                spec = QuantizationSpec(torch.device(device), dtype, num_ranks=3, deterministic=True)
                reason_or_none(made.supports(spec), "supports")
        assert isinstance(made.numerics, str), "numerics must name the format"
        assert made.numerics, "numerics must name the format"

    def test_it_reads_its_own_configuration(self) -> None:
        stored = self.stored()
        if stored is None:
            pytest.skip("it only quantises weights while they load")
        assert self.found().reads(stored) is True
        assert not self.found().reads({**stored, "quant_method": "no-such"})

    def test_layers_keep_sizes_and_addresses(self) -> None:
        model = Parts(ModelSetup(self.build()))
        before = {name: (p.data_ptr(), p.shape, p.dtype) for name, p in model.named_parameters()}
        assert before, "layers have no parameters"
        for _ in range(2):  # weights may be read again
            load_weights(model, self.loader())
            after = {name: (p.data_ptr(), p.shape, p.dtype) for name, p in model.named_parameters()}
            assert after == before, "a parameter moved or changed while weights were loaded"

    def test_made_up_weights_give_finite_numbers_and_repeat(self) -> None:
        x = _inputs()
        model = self.loaded()
        first = model.products(x)
        for found in first:
            assert torch.isfinite(found).all(), "made-up weights give inf or nan"
            assert found.abs().max() > 1e-4, "made-up weights give nothing but zeros"
        load_weights(model, self.loader())
        for found, again in zip(model.products(x), first, strict=True):
            assert torch.equal(found, again), "weights that are loaded again compute something else"

    def test_shares_of_two_ranks_give_the_whole(self) -> None:
        x = _inputs()
        whole = self.loaded().products(x)
        shares = run_ranks(2, lambda group: self.loaded(group).products(x))
        for index, expected in enumerate(whole):
            parts = [share[index] for share in shares]
            found = parts[0] if index == len(whole) - 1 else torch.cat(parts, -1)
            near = 1e-4 if self.stored() is not None else 5e-2  # which may round by what each rank has
            _close(found, expected, near, "two ranks compute something else than one")

    def test_fused_forms_give_what_apart_gives(self) -> None:
        """The product with a norm before it, with a gate behind it, or into given memory."""
        model, x, residual = self.loaded(), _inputs(), _inputs(1)
        layer: Any = model.gate_up
        norm = (torch.ones(_HIDDEN), 1e-6, 0.0)
        normed, total = layer.ops.add_rms_norm(x, residual, *norm)
        product, *others = layer.method.apply_normed(layer, x, residual, norm, None)
        _close(product, layer(normed), 1e-2, "apply_normed is not apply of the norm")
        _close(others[0], normed, 1e-4, "apply_normed gives another norm")
        _close(others[1], total, 1e-5, "apply_normed gives another sum")
        gated, _ = layer.method.apply_normed_gated(layer, x, residual, norm, None)
        _close(gated, layer.silu_mul(normed), 1e-2, "apply_normed_gated is not apply_gated of the norm")
        _close(layer.silu_mul(x), layer.ops.silu_mul(layer(x)), 1e-2, "apply_gated is not apply and the gate")
        tanh = layer.method.apply_gated(layer, x, None, "gelu_tanh")
        _close(tanh, layer.ops.gelu_tanh_mul(layer(x)), 1e-2, "apply_gated is not apply and the gate")
        out = torch.full_like(layer(x), float("nan"))
        assert layer.method.apply_into(layer, out, x) is out, "apply_into must return what it wrote to"
        _close(out, layer(x), 1e-2, "apply_into is not apply")

    def test_weights_that_are_quantised_while_loading_stay_near(self) -> None:
        if self.stored() is not None or not self.found().online:
            pytest.skip("it reads weights that are already quantised")
        x, plain = _inputs(), Parts(ModelSetup(self.build(_plain())))
        load_weights(plain, self.loader())
        model = self.loaded()
        for found, expected in zip(model.products(x), plain.products(x), strict=True):
            _close(found, expected, 0.25, "quantised weights are far from the ones that were read")
        sizes = [sum(p.nbytes for p in one.parameters()) for one in (model, plain)]
        assert sizes[0] < sizes[1], f"quantised weights take {sizes[0]} bytes, others {sizes[1]}"


def _plain() -> Quantization:
    from frame.core.interfaces.quantization import Unquantized

    return Unquantized()


def _inputs(seed: int = 0) -> Tensor:
    return torch.randn(5, _HIDDEN, generator=torch.Generator().manual_seed(seed))


def _close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Within `tolerance` of the length of what is expected."""
    far = float(nn.functional.mse_loss(found.float(), expected.float()).sqrt() / expected.float().std())
    assert far <= tolerance, f"{what}: they differ by {far:.2g} of their spread"
