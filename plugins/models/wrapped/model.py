"""A model around a class of transformers: what the decoder and the encoders have in common."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, LazyTensor, Model, ModelInputs, ModelSetup
from frame.layers import WeightSlot

from .fusing import fuse_turns
from .leftovers import fill_parameters
from .library import NoClassError, base_of, find_class, generates, is_headless, make_config, make_model
from .names import Given, Names
from .parts import attend
from .replacing import Replacing
from .rope import fill_buffers, plain_ropes
from .trial import NAME, TRIAL, Record, UnfitError, forward_arguments, learn_calls

logger = logging.getLogger("frame.models")


class Wrapped(Model):
    """The class that a checkpoint's architecture names in transformers, its layers replaced by frame's."""

    #: whether this is the model of a class whose attention sees all tokens of a prompt
    sees_all: ClassVar[bool] = False
    #: what the log says of it
    message: ClassVar[str] = "model: %s of transformers, with frame's attention and layers"

    @classmethod
    def supports(cls, architecture: str, config: Mapping[str, Any]) -> str | None:
        found = examine(architecture, json.dumps(config, sort_keys=True, default=str))
        if isinstance(found, str):
            return found
        if found != cls.sees_all:
            return f"its tokens see {'all others' if found else 'those before them'}"
        return None

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options)
        config = deepcopy(getattr(build.config, "complete", build.config))
        architecture = config.architectures[0]
        self.kind = find_class(architecture, config.to_dict())
        self.headless = is_headless(architecture, self.kind)
        self.whole, record = self.make(config, build)
        self._names = Names(self.whole)
        self.replacing = Replacing(build, self.whole, record, self._names)
        self.make_parts(build)
        fill_buffers(self.whole, build.device, build.max_model_len)
        self._slots = fill_parameters(self.whole, build.device)
        self.base = base_module(self.whole)
        self.prepare()
        if build.device.type == "meta" and build.groups.tensor.size > 1:
            self.check_division(build.groups.tensor.size)
        logger.info(self.message, architecture)

    def make(self, config: Any, build: Build) -> tuple[Any, Record]:
        """The class, without memory, and what it calls."""
        whole = make_model(self.kind, config, build.dtype, TRIAL)
        kinds = [(one, one.rope_type) for one in whole.modules() if hasattr(one, "rope_type")]
        record = learn(whole, build.max_model_len)
        for one, kind in kinds:
            one.rope_type = kind
        return whole, record

    def make_parts(self, build: Build) -> None:
        """Replaces the parts of `self.whole`."""
        self.replacing.all()

    def prepare(self) -> None:
        """Called when everything is in its place."""
        from transformers import AttentionInterface
        from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

        AttentionInterface.register(NAME, attend)
        ExpertsInterface.register(NAME, grouped_mm_experts_forward)
        self.whole.config._attn_implementation = NAME
        self.whole.config._experts_implementation = NAME
        fuse_turns(self.replacing.build, self.base)
        self._first = first_position(self.base)
        self._arguments = {**forward_arguments(self.base, torch.zeros(1, 1)), "position_ids": None}

    def check_division(self, ranks: int) -> None:
        """Raises `ValueError` where the class cannot compute with a part of its heads; runs it without memory."""
        ids = torch.zeros(1, 7, dtype=torch.int64, device="meta")
        given = {**self._arguments, "position_ids": ids, "input_ids": ids}
        try:
            with torch.inference_mode():
                self.base(**given)
        except Exception as error:  # what a class does in its forward pass is its own
            why = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise ValueError(f"{self.kind.__name__} runs on 1 rank, not on {ranks}: {why}") from error

    def states(self, inputs: ModelInputs, step: ForwardStep, **more: Any) -> Tensor:
        """The hidden states [T, hidden_size] that the base model gives."""
        self.running.step = step
        for calls in self.replacing.calls:
            calls.begin()
        positions = inputs.positions[:1] + self._first if self._first else inputs.positions[:1]
        given: dict[str, Any] = {**self._arguments, "position_ids": positions, **more}
        if inputs.embeds is not None:
            embed: Any = self.base.get_input_embeddings
            given["inputs_embeds"] = inputs.embedded(embed())[None]
        elif inputs.ids is not None:
            given["input_ids"] = inputs.ids[None].long()
        out: Tensor = self.base(**given)[0]
        return out[0]

    def weight_slots(self) -> list[WeightSlot]:
        """What is left of the class's own parameters."""
        return self._slots

    def convert(self, tensors: Iterable[LazyTensor]) -> Iterable[LazyTensor]:
        return self._names.convert(tensors)

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        given = [Given(name, tensor) for name, tensor in pairs]
        super().load((one.name, one.read()) for one in self.convert(given))
        return {one.name for one in given}


def learn(model: Any, max_len: int) -> Record:
    """What the base of `model`, which is on the meta device, calls; raises `UnfitError`."""
    if getattr(model, "_is_stateful", False):
        raise UnfitError("it keeps a state from token to token")
    convolution = next((name for name, one in model.named_modules() if isinstance(one, nn.Conv1d)), None)
    if convolution:
        raise UnfitError(f"{convolution} is a convolution over tokens")
    plain_ropes(model)
    record = learn_calls(model, base_module(model), max_len)
    if len({call.sight.causal for call in record.calls}) > 1:
        raise UnfitError("its tokens see those after them in some layers only")
    return record


def base_module(model: nn.Module) -> nn.Module:
    """The part of `model` that gives hidden states: itself, where it has no head."""
    if getattr(model, "base_model", model) is model and not generates(type(model)):
        return model
    owner, name = base_of(model)
    return owner.get_submodule(name)


def first_position(base: nn.Module) -> int:
    """What position 0 is called: tables with a row for padding, as RoBERTa's, count from behind that row."""
    for name, module in base.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


@lru_cache(maxsize=8)
def examine(architecture: str, config: str) -> bool | str:
    """Whether tokens of the class see all others, or why frame's attention cannot serve it; `config` is JSON."""
    hf = json.loads(config)
    try:
        if isinstance(hf.get("text_config"), dict):
            raise NoClassError(f"{architecture} is more than a text model")
        kind = find_class(architecture, hf)
        made = make_config(hf)
        if getattr(made, "is_encoder_decoder", False) and not architecture.endswith("ForCausalLM"):
            raise NoClassError(f"{architecture} is an encoder with a decoder")
        model = make_model(kind, made, torch.float32, TRIAL)
        length = getattr(made, "max_position_embeddings", None) or 1 << 12
        return not learn(model, int(length)).calls[0].sight.causal
    except (NoClassError, UnfitError) as error:
        return str(error)
    except Exception as error:  # a class's own: a configuration that it cannot be made of
        return f"{architecture} cannot be made: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
