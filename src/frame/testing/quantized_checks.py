"""More of the contract of quantisations: what a format must leave alone, and experts of other kinds than Llama's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from frame.core.interfaces.experts import Routing
from frame.core.interfaces.model import Model
from frame.core.interfaces.setup import ModelSetup
from frame.core.layers.methods import PlainLinear
from frame.core.layers.weights import load_weights

from .quantized_parts import EXPERTS, HIDDEN, ExpertParts, Parts, TableParts, close, inputs, routing
from .ranks import run_ranks

#: What experts of a checkpoint may have that those of Llama's kind have not.
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "biases": {"bias": True},
    "another activation": {"activation": "relu"},
    "bounds": {"alpha": 1.702, "shift": 1.0, "limit": 0.5},
    "no gate": {"gated": False, "names": ("up_proj", "down_proj"), "activation": "relu2"},
    "weights on their input": {"weights_on_input": True, "activation": "relu2"},
}


class QuantizedChecks:
    """Checks of `QuantizationSuite`, which has what they are made with."""

    if TYPE_CHECKING:
        build: Any
        found: Any
        make: Any
        layers: Any
        loader: Any

    def test_numerics_follow_from_the_setup_alone(self) -> None:
        first, second = (self.build().methods.quantization.numerics for _ in range(2))
        assert first == second, f"two engines of one setup would share no blocks: {first!r} is not {second!r}"

    def test_exact_layers_are_left(self) -> None:
        build = self.build()
        if build.methods.quantization.setup.quantization_config is not None:
            pytest.skip("it reads weights that are already quantised")
        layer = build.linear("layers.0.mlp.gate", HIDDEN, EXPERTS, exact=True)
        assert type(layer.method) is PlainLinear, "it quantises a layer whose spec is exact, such as a router"

    @pytest.mark.parametrize("kind", [Parts, ExpertParts, TableParts], ids=["linear", "experts", "tables"])
    def test_layers_of_another_stage_take_no_memory(self, kind: type[Any]) -> None:
        """A rank makes the layers of other pipeline stages on the meta device."""
        here: Model = self.layers(kind)
        build = self.build()
        build.device = torch.device("meta")
        elsewhere = dict(kind(ModelSetup(build)).named_parameters())
        for name, parameter in here.named_parameters():
            other = elsewhere[name]
            assert other.is_meta, f"{name} is made on {other.device} and not where its layer is: use layer.empty"
            assert (other.shape, other.dtype) == (parameter.shape, parameter.dtype), f"{name} has another size there"

    @pytest.mark.parametrize("kind", [Parts, ExpertParts, TableParts], ids=["linear", "experts", "tables"])
    def test_what_layers_are_given_stays_as_it_is(self, kind: type[Any]) -> None:
        model, x = self.layers(kind), inputs() * 4
        before = x.clone()
        model.products(x)
        assert torch.equal(x, before), "a layer writes into the activations that it is given"

    def test_every_rank_has_slots_for_the_tensors_of_all_experts(self) -> None:
        """Those of other ranks are in the checkpoint, too: without a slot they are reported as left over."""
        names = _names(self.layers(ExpertParts))
        made = run_ranks(2, lambda group: _names(ExpertParts(ModelSetup(self.build(group=group, spread=True)))))
        for rank, there in enumerate(made):
            missing = sorted(names - there)
            assert not missing, f"rank {rank} has no slot for {missing[0]!r}, which belongs to another rank"

    @pytest.mark.parametrize("what", _KINDS)
    def test_other_experts_are_computed_or_refused(self, what: str) -> None:
        """Experts with biases, other activations, without gates, or whose weights multiply their input."""
        spec, refusal = replace(ExpertParts.spec, **_KINDS[what]), ""
        kind = type("OtherExperts", (ExpertParts,), {"spec": spec})
        try:
            kind(ModelSetup(self.build()))
        except ValueError as error:
            refusal = str(error)
        if refusal:
            assert "layers.0.mlp.experts" in refusal, f"a refusal does not name the layer: {refusal}"
            pytest.skip(f"it refuses such layers: {refusal}")
        model, x = self.layers(kind), inputs()
        layer = model.experts
        found = layer.method.matrices(layer, x.dtype)
        if found is None:
            pytest.skip("it gives no matrices to compare with")
        matrices, biases = found
        assert not spec.bias or biases[0] is not None, "experts have biases, which the format has no tensors for"
        for bias in biases if spec.bias else ():
            bias.data.fill_(float("nan"))
        load_weights(model, self.loader())
        matrices, biases = layer.method.matrices(layer, x.dtype)
        assert not spec.bias or all(bias.isfinite().all() for bias in biases), "no tensor fills the biases of experts"
        given, chosen = x, routing(len(x))
        if spec.weights_on_input:
            given = (x[:, None] * chosen.weights[..., None]).flatten(0, 1)
            chosen = Routing(torch.ones(len(given), 1), chosen.ids.reshape(-1, 1))
        expected: Tensor = layer.ops.fused_experts(
            given, *matrices, chosen.weights, chosen.ids, gating=spec.gating, biases=biases
        )
        expected = expected.view(len(x), -1, HIDDEN).sum(1)
        close(model.products(x)[0], expected, 1e-2, f"experts with {what} compute something else")
        near = 5e-2 if self.found().online else 1e-4  # which may round by what each rank has
        for found in run_ranks(2, lambda group: self.layers(kind, self.build(group=group)).products(x)[0]):
            close(found, model.products(x)[0], near, f"experts with {what}: two ranks compute something else than one")


def _names(model: Any) -> set[str]:
    return {name for slot in model.experts.weight_slots() for name in (slot.name, *slot.covers)}
