"""Matching a checkpoint's names to parameters: what is read, what is refused, and loading again in pieces."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frame.core.interfaces.collectives import Groups, SingleGroup
from frame.core.interfaces.loader import LazyTensor, WeightLoader
from frame.core.interfaces.model import ForwardStep, Model
from frame.core.ops import Ops
from frame.interfaces import Build, ModelSetup
from frame.layers import WeightError, load_weights


class MemoryTensor(LazyTensor):
    def __init__(self, name, tensor, reads):
        self.name, self.shape, self.dtype = name, tuple(tensor.shape), tensor.dtype
        self._tensor, self._reads = tensor, reads

    def read(self, index=()):
        self._reads.append(self.name)
        return self._tensor[index] if index else self._tensor


class MemoryLoader(WeightLoader):
    def __init__(self, tensors):
        self._tensors, self.reads = tensors, []

    def supports(self, folder):
        return None

    def tensors(self):
        return (MemoryTensor(name, tensor, self.reads) for name, tensor in self._tensors.items())


def make_build(group=None, **config):
    return Build(
        config=SimpleNamespace(max_position_embeddings=32, **config),
        dtype=torch.float32,
        device=torch.device("cpu"),
        ops=Ops(),
        groups=Groups.of(tensor=group or SingleGroup()),
        kv_dtype=torch.float32,
        device_type="cpu",
    )


class Toy(Model):
    renames = ((r"^old\.", "new."),)
    ignores = (r".*\.inv_freq",)

    def __init__(self, setup: ModelSetup, options: Any = None):
        build = setup.build
        super().__init__(setup, options)
        self.embed = build.embedding("new.embed", 10, 4)
        self.fused = build.linear("new.mlp", 4, 10, bias=True, shard="column", parts={"gate": 6, "up": 4})
        self.inputs = build.attention_input("new.attn", 4, 4, 2, 2, names=("c_attn",), transposed=True, bias=True)
        self.head = build.head("head", 4, 10, tied=self.embed)
        self.finished = 0

    def forward(self, inputs, step):
        raise NotImplementedError

    def logits(self, hidden):
        return self.head(hidden)

    def finish_load(self):
        super().finish_load()
        self.finished += 1


def toy_tensors():
    torch.manual_seed(0)
    return {
        "old.embed.weight": torch.randn(10, 4),
        "old.mlp.gate.weight": torch.randn(6, 4),
        "old.mlp.up.weight": torch.randn(4, 4),
        "old.mlp.gate.bias": torch.randn(6),
        "old.mlp.up.bias": torch.randn(4),
        "old.attn.c_attn.weight": torch.randn(4, 16),
        "old.attn.c_attn.bias": torch.randn(16),
    }


def test_every_tensor_lands_in_its_place():
    tensors, model = toy_tensors(), Toy(ModelSetup(make_build()))
    num_bytes = load_weights(model, MemoryLoader({**tensors, "layer.inv_freq": torch.zeros(3)}))
    assert torch.equal(model.fused.weight, torch.cat((tensors["old.mlp.gate.weight"], tensors["old.mlp.up.weight"])))
    assert torch.equal(model.fused.bias, torch.cat((tensors["old.mlp.gate.bias"], tensors["old.mlp.up.bias"])))
    assert torch.equal(model.inputs.weight, tensors["old.attn.c_attn.weight"].T)
    assert torch.equal(model.inputs.bias, tensors["old.attn.c_attn.bias"])
    hidden = torch.randn(3, 4)
    assert torch.equal(model.logits(hidden), hidden @ tensors["old.embed.weight"].T)
    assert num_bytes == 4 * sum(tensor.numel() for tensor in tensors.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.finished == 1


def test_values_are_cast_to_the_parameters_type():
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in toy_tensors().items()}
    model = Toy(ModelSetup(make_build()))
    load_weights(model, MemoryLoader(tensors))
    assert torch.equal(model.embed.weight, tensors["old.embed.weight"].float())


def test_a_copy_of_a_tied_weight_is_not_read():
    model, loader = Toy(ModelSetup(make_build())), MemoryLoader({**toy_tensors(), "head.weight": torch.zeros(10, 4)})
    load_weights(model, loader)
    assert "head.weight" not in loader.reads
    assert torch.equal(model.head.table.weight, model.embed.weight)


def test_all_that_does_not_fit_is_named_before_anything_is_read():
    tensors = toy_tensors()
    del tensors["old.mlp.up.bias"]
    tensors["old.extra.weight"] = torch.zeros(1)
    tensors["old.embed.weight"] = torch.zeros(9, 4)
    loader = MemoryLoader(tensors)
    with pytest.raises(WeightError) as caught:
        load_weights(Toy(ModelSetup(make_build())), loader)
    assert str(caught.value) == (
        "the checkpoint does not fit Toy: tensors 1 missing: new.mlp.up.bias; 1 unexpected: old.extra.weight; "
        "1 of a wrong shape or type: old.embed.weight is [9, 4], expected [10, 4]"
    )
    assert loader.reads == []


def test_long_lists_are_cut_and_counted():
    with pytest.raises(WeightError, match=re.escape("7 missing: new.embed.weight, new.mlp.gate.weight, ")) as caught:
        load_weights(Toy(ModelSetup(make_build())), MemoryLoader({}))
    assert str(caught.value).endswith(", …")


def test_weights_can_be_updated_one_at_a_time():
    model = Toy(ModelSetup(make_build()))
    load_weights(model, MemoryLoader(toy_tensors()))
    before = model.fused.weight.clone()
    up = torch.randn(4, 4)
    assert model.load([("old.mlp.up.weight", up)]) == {"old.mlp.up.weight"}
    assert torch.equal(model.fused.weight, torch.cat((before[:6], up)))
    assert model.load([("head.weight", torch.randn(10, 4))]) == {"head.weight"}
    model.finish_load()
    assert model.finished == 2


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("old.mlp.down.weight", torch.zeros(1)), "1 unexpected: old.mlp.down.weight"),
        (("old.mlp.up.weight", torch.zeros(4, 5)), "old.mlp.up.weight is [4, 5], expected [4, 4]"),
    ],
)
def test_updates_that_do_not_fit_are_refused(pair, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Toy(ModelSetup(make_build())).load([pair])


def test_sinks_are_weights_of_the_attention_layer():
    layer = make_build().attention("a.attn", 4, 2, 8, scale=1.0, sinks=True, window=7)
    slot = layer.weight_slots()[0]
    slot.write(torch.arange(4.0))
    assert slot.name == "a.attn.sinks"
    assert torch.equal(layer.params.sinks, torch.arange(4.0))
    assert layer.kv_spec().window == 7


def test_an_unbound_attention_layer_says_so():
    layer = make_build().attention("a.attn", 4, 2, 8, scale=1.0)
    with pytest.raises(RuntimeError, match=r"layer 'a\.attn' has no backend"):
        layer(None, None, None, ForwardStep(plans=[], batches=[]))


def test_two_attention_layers_of_one_name_are_refused():
    build = make_build()
    build.attention("a", 4, 2, 8, scale=1.0)
    with pytest.raises(ValueError, match="two layers with a cache are called 'a'"):
        build.attention("a", 4, 2, 8, scale=1.0)


def test_parts_must_add_up():
    with pytest.raises(ValueError, match=r"m: the parts \{'a': 3\} do not add up to 4 outputs"):
        make_build().linear("m", 2, 4, parts={"a": 3})
