"""The contract of adapters: tokens without one get what the model gives, others what their slot holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from frame.core.interfaces.adapters import AdapterResolver, Adapters, ReadAdapter
from frame.core.interfaces.collectives import Groups
from frame.core.interfaces.experts import ExpertSpec, Routing
from frame.core.layers.build import Build
from frame.core.layers.methods import Methods
from frame.core.ops import Ops

from .plugin_suite import PluginSuite

_WIDTH, _OUTPUTS = 32, 24
_KNOWN = "an-adapter"
_ODD = (
    "no-such-adapter",
    "",
    " ",
    ".",
    "..",
    "../x",
    "/",
    "/x",
    "a/../..",
    "a\nb",
    "\x00",
    "µ/é",
    "\ud800",
    "a" * 10_000,
)


class AdaptersSuite(PluginSuite):
    """The contract of `frame.interfaces.Adapters`.

        class TestMine(AdaptersSuite):
            plugin = "mine"               # or target = "package.module:Class"

            def write(self, folder, seed): ...

    `write` puts an adapter into a folder, of a linear layer "layer" with 32 inputs and 24 outputs; others for other
    seeds. Without it, what adapters add is not looked at.
    """

    kind = "adapters"

    def write(self, folder: Path, seed: int) -> None:
        """Writes an adapter of the layer "layer"."""
        pytest.skip("nothing writes adapters; override `write`")

    def adapted(self) -> tuple[Adapters, Any]:
        """The plugin with 2 slots, and a layer that it was asked about."""
        made = self.make()
        assert isinstance(made, Adapters), f"{type(made).__name__} does not derive from Adapters"
        layer: Any = self.build(made).linear("layer", _WIDTH, _OUTPUTS)
        torch.nn.init.normal_(layer.weight)
        return made, layer

    def build(self, made: Adapters) -> Build:
        """What makes layers that the plugin wraps."""
        return Build(
            config=SimpleNamespace(max_position_embeddings=32),
            dtype=torch.float32,
            device=torch.device("cpu"),
            ops=Ops(),
            groups=Groups.single(),
            kv_dtype=torch.float32,
            device_type="cpu",
            methods=Methods(adapters=made),
        )

    def found_in(self, made: Adapters, seed: int) -> ReadAdapter:
        """An adapter that was written and read."""
        folder = self.scratch(f"adapter-{seed}")
        self.write(folder, seed)
        return made.read(folder)

    def step(self, made: Adapters, layer: Any, x: Tensor, slots: list[int]) -> Tensor:
        """What the layer gives in a step whose tokens have these slots."""
        made.slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        made.active = True
        made.prepare(len(slots))
        try:
            out: Tensor = layer(x)
        finally:
            made.active = False
        return out

    def test_slots_lie_where_they_lay(self) -> None:
        made, _ = self.adapted()
        assert made.max_adapters == 2
        assert made.slots.dtype == torch.int32
        assert made.slots.data_ptr() == made.slots.data_ptr()

    @torch.inference_mode()
    def test_without_adapters_a_layer_is_as_it_was(self) -> None:
        made, layer = self.adapted()
        x = torch.randn(5, _WIDTH)
        plain = torch.nn.functional.linear(x, layer.weight)
        torch.testing.assert_close(layer(x), plain)
        torch.testing.assert_close(self.step(made, layer, x, [0] * 5), plain)

    @torch.inference_mode()
    def test_without_adapters_experts_are_as_they_were(self) -> None:
        made = self.make()
        routing = Routing(torch.rand(5, 2), torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]], dtype=torch.int32))
        x, spec = torch.randn(5, _WIDTH), ExpertSpec(2, _WIDTH, _OUTPUTS, 2)
        layer: Any = self.build(made).experts("experts", spec)
        for weight in layer.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        gate_up, down = layer.parameters()
        plain = Ops.fused_experts(x, gate_up, down, routing.weights, routing.ids)
        torch.testing.assert_close(layer(x, routing), plain)
        torch.testing.assert_close(self.step(made, lambda x: layer(x, routing), x, [0] * 5), plain)

    @pytest.mark.parametrize("content", ["nothing", "a file", "no folder"])
    def test_what_is_no_adapter_is_refused_in_one_sentence(self, content: str) -> None:
        made, _ = self.adapted()
        folder = self.scratch("bad") if content != "no folder" else self.folder / "absent"
        if content == "a file":
            (folder / "adapter_config.json").write_bytes(b"\xff\x00")
        with pytest.raises(ValueError, match=r"\S") as caught:
            made.read(folder)
        assert "\n" not in str(caught.value), f"the error is more than one line: {caught.value}"

    @torch.inference_mode()
    def test_each_token_gets_what_its_slot_holds(self) -> None:
        made, layer = self.adapted()
        one, two = self.found_in(made, 1), self.found_in(made, 2)
        assert one.digest != two.digest, "adapters of unlike content have one digest"
        assert one.digest == self.found_in(made, 1).digest, "an adapter has another digest when it is read again"
        made.load(1, one)
        made.load(2, two)
        x = torch.randn(1, _WIDTH)
        alone = [self.step(made, layer, x, [slot]) for slot in (0, 1, 2)]
        assert not any(torch.allclose(alone[a], alone[b]) for a, b in ((0, 1), (0, 2), (1, 2))), "adapters add nothing"
        order = [2, 0, 1, 1, 0, 2]
        mixed = self.step(made, layer, x.expand(6, -1).contiguous(), order)
        torch.testing.assert_close(mixed, torch.cat([alone[slot] for slot in order]))
        made.load(1, two)
        torch.testing.assert_close(self.step(made, layer, x, [1]), alone[2])
        torch.testing.assert_close(layer(x), alone[0])


class AdapterResolverSuite(PluginSuite):
    """The contract of `frame.interfaces.AdapterResolver`.

        class TestMine(AdapterResolverSuite):
            plugin = "mine"               # or target = "package.module:Class"
            known = "an-adapter"          # a name that it finds where the tests run

    Without `known` it is asked for "an-adapter", which is a folder in each folder that an option of type `Path` names;
    a resolver that knows it is tested with it.
    """

    kind = "adapter-resolver"
    known: ClassVar[str] = ""

    @pytest.mark.parametrize("name", _ODD, ids=ascii)
    def test_odd_names_are_unknown(self, name: str) -> None:
        assert self.resolver().resolve(name) is None

    def test_a_known_name_is_a_folder(self) -> None:
        for root in () if self.known else self.scratch_options().values():
            (Path(root) / _KNOWN).mkdir(exist_ok=True)
            (Path(root) / _KNOWN / "adapter_config.json").write_text("{}")
        found = self.resolver().resolve(self.known or _KNOWN)
        if found is None and not self.known:
            pytest.skip(f"it does not know the folder {_KNOWN!r} in those of its options; set `known`")
        assert isinstance(found, Path), f"resolve must return a Path, gave {found!r}"
        assert found.is_dir(), f"{found} is no folder"

    def test_a_file_is_no_adapter(self) -> None:
        roots = [Path(root) for root in self.scratch_options().values()]
        for root in roots:
            (root / "a-file").write_text("{}")
        assert self.resolver().resolve("a-file") is None, "a file was found where a folder must be"

    def resolver(self) -> AdapterResolver:
        """A new resolver."""
        made = self.make()
        assert isinstance(made, AdapterResolver), f"{type(made).__name__} does not derive from AdapterResolver"
        return made
