"""The contract of models: every tensor is loaded, and tokens do not depend on batches, chunks or caching."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from frame.core.config.checkpoint import Checkpoint, read_checkpoint
from frame.core.interfaces.attention import AttentionSpec, CacheBackend, GroupBatch
from frame.core.interfaces.collectives import Groups, ProcessGroup
from frame.core.interfaces.kv import CrossKV
from frame.core.interfaces.kv_layout import plan_layout, with_blocks
from frame.core.interfaces.latent import IndexSpec, LatentSpec
from frame.core.interfaces.loader import WeightLoader
from frame.core.interfaces.model import ForwardStep, Model, ModelInputs
from frame.core.interfaces.setup import BackendSetup
from frame.core.layers.build import Build
from frame.core.layers.weights import load_weights
from frame.core.ops import Ops
from frame.core.plugin_host.model_choice import read_model_config
from frame.core.plugin_host.offers import import_target
from frame.core.worker.start.kv_memory import KVMemory
from frame.core.worker.start.model_loading import choose_loader

from .attention_case import make_case
from .encoder_decoders import continued
from .engines import SMALL, drain, pooled, prompts, request, running, tokens_of
from .plugin_suite import PluginSuite
from .ranks import run_ranks
from .reference_attention import ReferenceAttention
from .reference_latent import ReferenceIndex, ReferenceLatent
from .tiny import write_tiny

_BLOCK = 16
#: Tokens that an encoder reads: fewer than the smallest step of the checks has.
_ENCODER_TOKENS = 9
#: For the block tables of a step, whatever its layers attend to.
_ANY_ATTENTION = AttentionSpec(1, 1, 1, 1.0, torch.float32, torch.float32, _BLOCK, "cpu")
#: What serves layers without a reference of their own here, by the spec that they ask with.
_REFERENCES: dict[type, type[CacheBackend]] = {LatentSpec: ReferenceLatent, IndexSpec: ReferenceIndex}


class ModelSuite(PluginSuite):
    """The contract of `frame.interfaces.Model`.

        class TestMine(ModelSuite):
            plugin = "MineForCausalLM"                     # the architecture, or target = "package.module:Class"

            def write_checkpoint(self, folder: Path):      # a tiny random checkpoint: config.json, safetensors
                ...

            def reference(self, folder, given, count):     # optional: what another implementation continues with
                ...

    Checkpoints of architectures that frame knows are made for you; the provider's tag "tiny" may name a function
    `write(folder)` ("package.module:function") instead of the method.
    """

    kind = "model"
    #: largest difference between logits computed whole and in parts, relative to the largest logit
    tolerance: ClassVar[float] = 1e-4
    num_tokens: ClassVar[int] = 12

    #: written once for the class
    checkpoint_folder: ClassVar[Path]

    def write_checkpoint(self, folder: Path) -> None:
        """Writes a tiny checkpoint of this model into `folder`, which exists and is empty."""
        tag = self.provider().tags.get("tiny")
        if tag:
            import_target(tag, f"tiny checkpoint of model {self.name!r}")(folder)
            return
        try:
            write_tiny(folder, self.bare_name)
        except ValueError:
            pytest.skip(
                f"no tiny checkpoint of {self.bare_name!r} is known: override write_checkpoint, or give the provider "
                'tags={"tiny": "module:function"}'
            )

    def reference(self, folder: Path, given: Sequence[Sequence[int]], count: int) -> list[list[int]] | None:
        """What each prompt is greedily continued with by another implementation; None when there is none.

        By default the transformers library, where it can read the folder. An encoder before the decoder reads
        `encoder_prompt` of the prompt.
        """
        from transformers import AutoModelForCausalLM

        if self.has_encoder():
            try:
                return [continued(folder, self.encoder_prompt(prompt), prompt, count) for prompt in given]
            except (ValueError, KeyError, OSError):
                return None
        if "text_config" in self.checkpoint().hf:
            return None  # the other parts of such a model are not in a tiny checkpoint
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        except (ValueError, KeyError, OSError):
            return None
        return [continue_greedily(model, prompt, count) for prompt in given]

    @pytest.fixture(autouse=True)
    def _checkpoint(self, _own_folder: None, tmp_path_factory: pytest.TempPathFactory) -> None:
        """One checkpoint a class: writing it takes longer than most tests."""
        if "checkpoint_folder" not in vars(type(self)):
            folder = tmp_path_factory.mktemp("checkpoint")
            self.write_checkpoint(folder)
            type(self).checkpoint_folder = folder

    def served(self, **settings: Any) -> Any:
        """A running engine that serves the checkpoint with the model under test."""
        return running(self.model_config(**settings), self.registry())

    def model_config(self, **settings: Any) -> Any:
        """The configuration of an engine for the checkpoint."""
        checkpoint = {"model": str(self.checkpoint_folder), "hf_overrides": {"architectures": [self.name]}}
        return self.config(**{**SMALL, **checkpoint, **settings})

    def checkpoint(self) -> Checkpoint:
        """The facts of the checkpoint."""
        return read_checkpoint(self.model_config())

    def build(self) -> Build:
        """A build of the model on the CPU in float32, for one rank."""
        return Build(
            config=read_model_config(self.checkpoint(), self.registry()),
            dtype=torch.float32,
            device=torch.device("cpu"),
            ops=Ops(),
            groups=Groups.single(),
            kv_dtype=torch.float32,
            device_type="cpu",
            max_model_len=128,
        )

    def model(self, build: Build | None = None) -> Model:
        """The model without weights."""
        made = self.make(build=build or self.build())
        assert isinstance(made, Model), f"{type(made).__name__} does not derive from Model"
        return made

    def loader(self) -> WeightLoader:
        """A loader of the checkpoint's weights."""
        loader: WeightLoader = choose_loader(self.model_config(), self.checkpoint(), self.registry())
        return loader

    def pairs(self) -> list[tuple[str, Tensor]]:
        """Every tensor of the checkpoint, by name."""
        return [(tensor.name, tensor.read().clone()) for tensor in self.loader().tensors()]

    def generating(self) -> type[Model]:
        """The class under test; skips when its model pools instead of generating."""
        found: type[Model] = self.found()
        if found.output != "tokens":
            pytest.skip(f"the model gives {found.output}, no tokens")
        return found

    def has_encoder(self) -> bool:
        """Whether an encoder reads a prompt of its own before the decoder begins."""
        build = self.build()
        self.model(build)
        return any(isinstance(layer.kv_spec(), CrossKV) for layer in build.caches.values())

    def encoder_prompt(self, prompt: Sequence[int]) -> list[int]:
        """What the encoder reads beside a prompt of the decoder: its first tokens in turned order."""
        return list(prompt[:_ENCODER_TOKENS])[::-1]

    def greedy(self, engine: Any, given: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The output tokens of each prompt, of a model with an encoder each beside its `encoder_prompt`."""
        requests = [request(str(index), prompt, count) for index, prompt in enumerate(given)]
        if self.has_encoder():
            for one, prompt in zip(requests, given, strict=True):
                one.encoder_ids = np.array(self.encoder_prompt(prompt), np.int32)
        outputs = drain(engine, requests)
        return [tokens_of(outputs[one.request_id]) for one in requests]

    def decoding(self) -> None:
        """Skips where nothing is generated, and for models with an encoder, which are computed by engines alone."""
        self.generating()
        if self.has_encoder():
            pytest.skip("its encoder reads first, which the checks of tokens try")

    def given(self) -> list[list[int]]:
        """Prompts of the model's vocabulary."""
        return prompts(self.checkpoint().vocab_size)

    def loaded(self, group: ProcessGroup | None = None) -> tuple[Model, Build]:
        """The model, or a rank's share, with its weights, bound to reference attention over memory of its own."""
        build = self.build()
        build = build if group is None else replace(build, groups=Groups.of(tensor=group))
        model = self.model(build)
        load_weights(model, self.loader())
        bind_reference(build)
        return model.eval(), build

    def test_parameters_are_there_once_it_is_built(self) -> None:
        build = self.build()
        model = self.model(build)
        parameters = dict(model.named_parameters())
        assert parameters, "the model has no parameters"
        for name, parameter in parameters.items():
            assert parameter.device == build.device, f"{name} is on {parameter.device}, build.device is {build.device}"
        for name, layer in build.caches.items():
            assert layer.name == name
            assert any(module is layer for module in model.modules()), f"layer {name} is not in the model"

    def test_every_tensor_of_the_checkpoint_finds_its_place(self) -> None:
        model = self.model()
        for parameter in model.parameters():
            parameter.data.fill_(float("nan")) if parameter.is_floating_point() else None
        num_bytes = load_weights(model, self.loader())
        assert num_bytes > 0
        for name, parameter in model.named_parameters():
            assert torch.isfinite(parameter).all(), f"{name} was not filled from the checkpoint"

    def test_weights_may_arrive_in_any_part_and_again(self) -> None:
        whole, parts = self.model(), self.model()
        load_weights(whole, self.loader())
        pairs = self.pairs()
        taken: set[str] = set()
        for chunk in (pairs[1::2], pairs[:1], pairs[::2], []):
            taken |= parts.load(chunk)
        parts.finish_load()
        assert taken <= {name for name, _ in pairs}, "load must return names of the checkpoint"
        self._assert_same(whole, parts, "loaded in parts")
        parts.load([(name, torch.zeros_like(tensor)) for name, tensor in pairs])
        parts.load(pairs)
        parts.finish_load()
        self._assert_same(whole, parts, "loaded again")

    def test_an_unknown_tensor_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"no\.such\.tensor"):
            self.model().load([("no.such.tensor", torch.zeros(3))])

    def test_a_tensor_of_a_wrong_shape_is_named(self) -> None:
        model = self.model()
        for name, tensor in self.pairs():
            if model.load([(name, tensor)]):
                with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                    model.load([(name, torch.zeros(*tensor.shape, 2))])
                return
        pytest.fail("load took no tensor of the checkpoint")

    def test_logits_are_finite_and_float32(self) -> None:
        self.decoding()
        model, build = self.loaded()
        ids = self.given()[0]
        hidden, logits = forward(model, build, ids, [len(ids)])
        vocab = self.checkpoint().vocab_size
        assert hidden.shape[0] == len(ids), f"forward gave {list(hidden.shape)} for {len(ids)} tokens"
        assert logits.shape == (len(ids), vocab), f"logits gave {list(logits.shape)}, expected [{len(ids)}, {vocab}]"
        assert logits.dtype == torch.float32, f"logits must be float32, are {logits.dtype}"
        assert torch.isfinite(logits).all(), "logits are not finite"

    def test_chunks_give_the_logits_of_the_whole(self) -> None:
        self.decoding()
        model, build = self.loaded()
        ids = self.given()[0]
        _, whole = forward(model, build, ids, [len(ids)])
        for chunks in ([33, len(ids) - 33], [len(ids) - 3, 1, 1, 1]):
            bind_reference(build)
            _, parts = forward(model, build, ids, chunks)
            gap = float((parts - whole).abs().max() / whole.abs().max())
            assert gap < self.tolerance, f"chunks {chunks} change the logits by {gap:.2g} of the largest"

    def test_two_ranks_give_the_logits_of_one(self) -> None:
        self.decoding()
        ids = self.given()[0]
        _, whole = forward(*self.loaded(), ids, [len(ids)])
        try:
            shares = run_ranks(2, lambda group: forward(*self.loaded(group), ids, [len(ids)])[1])
        except ValueError as error:
            pytest.skip(f"it is not divided over two ranks: {error}")
        for logits in shares:
            gap = float((logits - whole).abs().max() / whole.abs().max())
            assert gap < self.tolerance, f"two ranks change the logits by {gap:.2g} of the largest"

    def test_tokens_do_not_depend_on_the_batch(self) -> None:
        self.generating()
        given = self.given()
        with self.served() as engine:
            alone = [self.greedy(engine, [prompt], self.num_tokens)[0] for prompt in given]
            assert self.greedy(engine, given, self.num_tokens) == alone, (
                "a batch gives other tokens than each prompt alone"
            )
            again = self.greedy(engine, [given[0] + alone[0][:8]], self.num_tokens)[0]
            left = self.num_tokens - 8
            assert again[:left] == alone[0][8:], "tokens after a prefix from the cache differ"

    def test_tokens_do_not_depend_on_chunks_or_preemption(self) -> None:
        self.generating()
        given = self.given()
        with self.served() as engine:
            want = self.greedy(engine, given, self.num_tokens)
        with self.served(max_num_batched_tokens=13, enable_prefix_caching=False) as engine:
            assert self.greedy(engine, given, self.num_tokens) == want, "chunked prefill gives other tokens"
        tight = {"num_gpu_blocks_override": 24, "block_size": 8, "max_model_len": 80, "enable_prefix_caching": False}
        with self.served(**tight) as engine:
            order = [1, 3, 4] * 4 + list(range(len(given)))
            got = self.greedy(engine, [given[index] for index in order], self.num_tokens)
            assert got == [want[index] for index in order], "preemption changes tokens"

    def test_tokens_equal_the_reference(self) -> None:
        self.generating()
        given = self.given()
        want = self.reference(self.checkpoint_folder, given, self.num_tokens)
        if want is None:
            pytest.skip("there is no reference for this model: override reference()")
        with self.served() as engine:
            assert self.greedy(engine, given, self.num_tokens) == want, "greedy tokens differ from the reference"

    def test_rows_do_not_depend_on_the_batch(self) -> None:
        if self.found().output == "tokens":
            return
        given = self.given()
        with self.served(runner="pooling") as engine:
            alone = [pooled(engine, [prompt])[0] for prompt in given]
            together = pooled(engine, given)
        for one, other in zip(alone, together, strict=True):
            assert np.isfinite(one).all(), "pooled rows are not finite"
            gap = float(np.abs(one - other).max())
            assert gap < self.tolerance, f"a batch changes the pooled row of a prompt by {gap:.2g}"

    @staticmethod
    def _assert_same(first: Model, second: Model, how: str) -> None:
        for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
            assert torch.equal(one, other), f"{name} differs when {how}"


def bind_reference(build: Build, num_blocks: int = 40) -> None:
    """Gives every layer of a build an empty cache: those that ask for a backend reference attention, too.

    The first plan of a step is that of attention; each layer without a backend has one of its own, in their order.
    """
    alone = 0
    for name, layer in build.caches.items():
        spec, kept = layer.backend_spec, layer.kv_spec()
        assert kept is not None, f"layer {name} keeps nothing, but gives tokens"
        memory = KVMemory(with_blocks(plan_layout({name: kept}, _BLOCK), 0, num_blocks), build.device)
        if spec is None:
            alone += 1
            layer.bind(memory.layer_bytes()[name], None, alone, layer.planner(None))
            continue
        kind: type[CacheBackend] = _REFERENCES.get(type(spec), ReferenceAttention)
        backend = kind(BackendSetup(replace(spec, block_size=_BLOCK), build.ops))
        layer.bind(*memory.layer_block(name, kind, backend.spec), 0, layer.planner(backend))


@torch.inference_mode()
def forward(model: Model, build: Build, ids: Sequence[int], chunks: Iterable[int]) -> tuple[Tensor, Tensor]:
    """(hidden states [T, hidden_size], logits [T, vocab_size]) of one sequence, computed in steps of those sizes."""
    attends = any(layer.backend_spec is not None for layer in build.caches.values())
    alone = [layer for layer in build.caches.values() if layer.backend_spec is None]
    # one block table for all layers, so without a window that would let blocks go
    case = make_case(_ANY_ATTENTION, [(0, len(ids))]) if attends else None
    hidden, logits = [], []
    ends = [0, *itertools.accumulate(chunks)]
    for start, end in itertools.pairwise(ends):
        states = _state_batch(start, end, build.device)
        batches = [case.batch([(start, end)]) if case else states, *[states] * len(alone)]
        plans = [batches[0], *(layer.planner(None).plan(states) for layer in alone)]
        tokens = torch.tensor(ids[start:end], dtype=torch.int32, device=build.device)
        inputs = ModelInputs(torch.arange(start, end, device=build.device).expand(model.position_axes, -1), tokens)
        out = model(inputs, ForwardStep(plans=plans, batches=batches))
        hidden.append(out)
        logits.append(model.logits(out))
    return torch.cat(hidden), torch.cat(logits)


def _state_batch(start: int, end: int, device: torch.device) -> GroupBatch:
    """One row as layers see it that keep a state: its only block is that of the state."""
    lengths = np.array([end - start], np.int32), np.array([end], np.int32)
    return GroupBatch(
        num_tokens=end - start,
        query_start=torch.tensor([0, end - start], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
        block_table=torch.ones(1, 1, dtype=torch.int32, device=device),
        slot_mapping=torch.full((end - start,), -1, dtype=torch.int64, device=device),
        host_query_lens=lengths[0],
        host_seq_lens=lengths[1],
        max_query_len=end - start,
        max_seq_len=end,
    )


def continue_greedily(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What a transformers model greedily continues a prompt with."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
