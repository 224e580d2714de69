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

from frame.core.interfaces.collectives import Groups, ProcessGroup, SingleGroup
from frame.core.interfaces.loader import WeightLoader
from frame.core.interfaces.quantization import Quantization, QuantizationSpec
from frame.core.interfaces.setup import LoaderSetup, ModelSetup
from frame.core.layers.build import Build
from frame.core.layers.experts import PlainExperts
from frame.core.layers.methods import Methods, PlainEmbedding
from frame.core.layers.weights import load_weights
from frame.core.ops import Ops
from frame.core.plugin_host.registry import Registry

from .plugin_suite import PluginSuite, reason_or_none
from .quantized_checks import QuantizedChecks
from .quantized_parts import HIDDEN, ExpertParts, Parts, TableParts, bytes_of_tensors, close, inputs, routing
from .ranks import run_ranks

#: quantization_configs that no format should trip over
_ODD: Sequence[Mapping[str, Any]] = ({}, {"quant_method": 3}, {"quant_method": "no-such"}, {"quantization": None})


class QuantizationSuite(QuantizedChecks, PluginSuite):
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

    def build(
        self,
        quantization: Quantization | None = None,
        group: ProcessGroup | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        spread: bool = False,
    ) -> Build:
        """A build on the CPU with the format under test; `spread`: each rank of `group` has whole experts."""
        made = quantization or self.make(
            spec=QuantizationSpec(torch.device("cpu"), dtype), quantization_config=self.stored()
        )
        groups = {"tensor": group or SingleGroup(), **({"expert": group} if spread and group else {})}
        return Build(
            config=SimpleNamespace(max_position_embeddings=32),
            dtype=dtype,
            device=torch.device("cpu"),
            ops=Ops(),
            groups=Groups.of(**groups),
            kv_dtype=dtype,
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

    def layers(self, kind: type[Any], build: Build | None = None) -> Any:
        """Layers of a kind of parts with weights that were made up; skips where the format leaves or refuses them."""
        build = self.build() if build is None else build
        try:
            model: Any = kind(ModelSetup(build))
        except ValueError as error:
            if "\n" in str(error):
                pytest.fail(f"the refusal of a layer is more than one line: {error}")
            pytest.skip(f"it refuses such layers: {error}")
        methods = [getattr(module, "method", None) for module in model.modules()]
        if all(type(method) in (PlainExperts, PlainEmbedding, type(None)) for method in methods):
            pytest.skip("it leaves such layers as they are")
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
        x = inputs()
        model = self.loaded()
        first = model.products(x)
        for found in first:
            assert torch.isfinite(found).all(), "made-up weights give inf or nan"
            assert found.abs().max() > 1e-4, "made-up weights give nothing but zeros"
        load_weights(model, self.loader())
        for found, again in zip(model.products(x), first, strict=True):
            assert torch.equal(found, again), "weights that are loaded again compute something else"

    def test_shares_of_two_ranks_give_the_whole(self) -> None:
        x = inputs()
        whole = self.loaded().products(x)
        shares = run_ranks(2, lambda group: self.loaded(group).products(x))
        for index, expected in enumerate(whole):
            parts = [share[index] for share in shares]
            found = parts[0] if index == len(whole) - 1 else torch.cat(parts, -1)
            near = 1e-4 if self.stored() is not None else 5e-2  # which may round by what each rank has
            close(found, expected, near, "two ranks compute something else than one")

    def test_fused_forms_give_what_apart_gives(self) -> None:
        """The product with a norm before it, with a gate behind it, or into given memory."""
        model, x, residual = self.loaded(), inputs(), inputs(1)
        layer: Any = model.gate_up
        norm = (torch.ones(HIDDEN), 1e-6, 0.0)
        normed, total = layer.ops.add_rms_norm(x, residual, *norm)
        product, *others = layer.method.apply_normed(layer, x, residual, norm, None)
        close(product, layer(normed), 1e-2, "apply_normed is not apply of the norm")
        close(others[0], normed, 1e-4, "apply_normed gives another norm")
        close(others[1], total, 1e-5, "apply_normed gives another sum")
        gated, _ = layer.method.apply_normed_gated(layer, x, residual, norm, None)
        close(gated, layer.silu_mul(normed), 1e-2, "apply_normed_gated is not apply_gated of the norm")
        close(layer.silu_mul(x), layer.ops.silu_mul(layer(x)), 1e-2, "apply_gated is not apply and the gate")
        tanh = layer.method.apply_gated(layer, x, None, "gelu_tanh")
        close(tanh, layer.ops.gelu_tanh_mul(layer(x)), 1e-2, "apply_gated is not apply and the gate")
        out = torch.full_like(layer(x), float("nan"))
        assert layer.method.apply_into(layer, out, x) is out, "apply_into must return what it wrote to"
        close(out, layer(x), 1e-2, "apply_into is not apply")

    @pytest.mark.parametrize("kind", [Parts, ExpertParts, TableParts], ids=["linear", "experts", "tables"])
    def test_weights_that_are_quantised_while_loading_stay_near(self, kind: type[Any]) -> None:
        if self.stored() is not None or not self.found().online:
            pytest.skip("it reads weights that are already quantised")
        x, plain = inputs(), kind(ModelSetup(self.build(_plain())))
        load_weights(plain, self.loader())
        model = self.layers(kind)
        for found, expected in zip(model.products(x), plain.products(x), strict=True):
            close(found, expected, 0.25, "quantised weights are far from the ones that were read")
        sizes = [sum(p.nbytes for p in one.parameters()) for one in (model, plain)]
        assert sizes[0] < sizes[1], f"quantised weights take {sizes[0]} bytes, others {sizes[1]}"

    def test_the_bias_of_a_layer_is_added(self) -> None:
        model, x, residual = self.loaded(), inputs(), inputs(1)
        layer: Any = model.gate_up
        product = layer(x)
        bias = torch.linspace(-1, 1, product.shape[-1]) * 3 * product.std()
        close(layer.method.apply(layer, x, bias), product + bias, 1e-2, "apply does not add the bias")
        gated = layer.ops.silu_mul(product + bias)
        close(layer.method.apply_gated(layer, x, bias), gated, 1e-2, "apply_gated does not add the bias")
        norm = (torch.ones(HIDDEN), 1e-6, 0.0)
        normed, _ = layer.ops.add_rms_norm(x, residual, *norm)
        added = layer(normed) + bias
        found = layer.method.apply_normed(layer, x, residual, norm, bias)[0]
        close(found, added, 1e-2, "apply_normed does not add the bias")
        found = layer.method.apply_normed_gated(layer, x, residual, norm, bias)[0]
        close(found, layer.ops.silu_mul(added), 1e-2, "apply_normed_gated does not add the bias")

    @pytest.mark.parametrize("kind", [Parts, ExpertParts, TableParts], ids=["linear", "experts", "tables"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_results_are_of_the_models_type(self, dtype: torch.dtype, kind: type[Any]) -> None:
        build = self.build(dtype=dtype)
        if reason := build.methods.quantization.supports(QuantizationSpec(torch.device("cpu"), dtype)):
            pytest.skip(reason)
        for found in self.layers(kind, build).products(inputs().to(dtype)):
            assert found.dtype == dtype, f"of {dtype} numbers a layer makes {found.dtype}"
            assert torch.isfinite(found).all(), "made-up weights give inf or nan"

    def test_a_product_takes_any_number_of_rows(self) -> None:
        model, x = self.loaded(), inputs()
        layer: Any = model.gate_up
        product = layer(x)
        assert layer(x[:0]).shape == (0, product.shape[-1]), "the product of no rows is no empty tensor"
        close(layer(x[None]), product[None], 1e-2, "x [1, T, width] gives something else than x [T, width]")

    @pytest.mark.parametrize("kind", [Parts, ExpertParts, TableParts], ids=["linear", "experts", "tables"])
    def test_rows_of_deterministic_steps_do_not_heed_each_other(self, kind: type[Any]) -> None:
        build = self.build()
        spec = QuantizationSpec(torch.device("cpu"), torch.float32, deterministic=True)
        if reason := build.methods.quantization.supports(spec):
            pytest.skip(reason)
        model, x = self.layers(kind, build), inputs()
        build.ops.invariant = True
        alone = model.products(x[:1])
        x[1:] *= 1000
        for found, expected in zip(model.products(x), alone, strict=True):
            close(found[:1], expected[:1], 1e-4, "a row depends on the other rows of a deterministic step")

    def test_memory_is_in_parameters_alone(self) -> None:
        """What is kept beside them is not counted when the size of the KV cache is chosen."""
        self.loaded().products(inputs())  # what is kept once for all layers, such as tables of codes
        before, model = bytes_of_tensors(), self.loaded()
        model.products(inputs())
        kept = bytes_of_tensors(apart_from=model) - before
        held = sum(parameter.nbytes for parameter in model.parameters())
        assert kept <= 0.01 * held, (
            f"layers keep {kept} bytes beside the {held} of their parameters; make by layer.empty what is kept"
        )

    @pytest.mark.parametrize("spread", [False, True], ids=["divided", "whole experts"])
    def test_experts_of_two_ranks_give_the_whole(self, *, spread: bool) -> None:
        x = inputs()
        whole = self.layers(ExpertParts).products(x)[0]
        for found in run_ranks(
            2, lambda group: self.layers(ExpertParts, self.build(group=group, spread=spread)).products(x)[0]
        ):
            near = 1e-4 if spread or self.stored() is not None else 5e-2
            close(found, whole, near, "two ranks compute something else than one")

    def test_experts_keep_sizes_and_addresses(self) -> None:
        x, model = inputs(), self.layers(ExpertParts)
        before = {name: (p.data_ptr(), p.shape, p.dtype) for name, p in model.named_parameters()}
        first = model.products(x)[0]
        assert torch.isfinite(first).all(), "made-up weights give inf or nan"
        assert first.abs().max() > 1e-4, "made-up weights give nothing but zeros"
        load_weights(model, self.loader())
        after = {name: (p.data_ptr(), p.shape, p.dtype) for name, p in model.named_parameters()}
        assert after == before, "a parameter moved or changed while weights were loaded"
        assert torch.equal(model.products(x)[0], first), "weights that are loaded again compute something else"

    def test_rows_hold_all_that_belongs_to_experts(self) -> None:
        """Experts that are moved to other slots take with them what `rows` gives."""
        layer: Any = self.layers(ExpertParts).experts
        rows = layer.method.rows(layer)
        for row in rows:
            assert row.is_contiguous(), "a tensor that rows gives is not contiguous"
            assert len(row) == layer.num_slots, f"rows gives a tensor of {len(row)} rows for {layer.num_slots} slots"
        given = {row.untyped_storage().data_ptr() for row in rows}
        for name, parameter in layer.named_parameters(recurse=False):
            if len(parameter) == layer.num_slots:  # others, such as a table of codes, belong to no expert
                assert parameter.untyped_storage().data_ptr() in given, f"rows does not give {name}"

    def test_matrices_of_experts_are_what_apply_multiplies_by(self) -> None:
        x, layer = inputs(), self.layers(ExpertParts).experts
        found = layer.method.matrices(layer, x.dtype)
        if found is None:
            pytest.skip("it gives no matrices, so its experts take no adapters")
        chosen = routing(len(x))
        expected = layer.ops.fused_experts(x, *found[0], chosen.weights, chosen.ids, biases=found[1])
        close(layer(x, chosen), expected, 1e-2, "apply is not the product of what matrices gives")

    def test_a_vocabulary_of_two_ranks_gives_the_whole(self) -> None:
        x = inputs()
        whole = self.layers(TableParts).products(x)
        for shares in run_ranks(2, lambda group: self.layers(TableParts, self.build(group=group)).products(x)):
            for found, expected in zip(shares, whole, strict=True):
                close(found, expected, 1e-4, "two ranks compute something else than one")

    def test_a_vocabulary_is_looked_up_as_it_is_multiplied(self) -> None:
        table = self.layers(TableParts).embedding
        rows = table.method.rows(table, torch.arange(table.num_rows))
        x = inputs()
        close(table.method.apply(table, x, None), x @ rows.T, 1e-2, "apply is not the product with what rows gives")


def _plain() -> Quantization:
    from frame.core.interfaces.quantization import Unquantized

    return Unquantized()
