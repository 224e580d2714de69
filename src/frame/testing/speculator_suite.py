"""The contract of speculators: guesses of the right shape, from known tokens alone, that change no output."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frame.core.config.flat import from_flat
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.speculator import DraftContext, Drafts, Speculator
from frame.core.interfaces.step import NewRequest

from .engines import SMALL, drain, prompts, request, running, tokens_of
from .plugin_suite import PluginSuite
from .tiny import write_tiny

_VOCAB = 32
_SLOTS, _WIDTH = 8, 48


class SpeculatorSuite(PluginSuite):
    """The contract of `frame.interfaces.Speculator`.

        class TestMine(SpeculatorSuite):
            plugin = "mine"                      # or target = "package.module:Class"
            options = {"field": 3}               # what it cannot do without

    The provider's tag "options" (JSON) says the same where nobody writes a subclass (`frame plugins check`).
    """

    kind = "speculator"

    def config(self, **settings: Any) -> FrameConfig:
        made = super().config(speculator=self.name, num_speculative_tokens=3, **settings)
        tag = self.provider().tags.get("options")
        if not tag or self.options:
            return made
        return made.model_copy(update={"plugin": {self.provider().name: json.loads(tag), **made.plugin}})

    def speculator(self) -> Speculator:
        """A new speculator."""
        made = self.make()
        assert isinstance(made, Speculator), f"{type(made).__name__} does not derive from Speculator"
        return made

    def table(self, seed: int = 0) -> Tensor:
        """Tokens of every slot, with repetitions of several lengths."""
        draw = random.Random(seed)
        rows = []
        for _ in range(_SLOTS):
            phrase = draw.choices(range(_VOCAB), k=draw.randrange(1, 12))
            rows.append(
                [draw.randrange(_VOCAB) if draw.random() < 0.1 else token for token in phrase * _WIDTH][:_WIDTH]
            )
        return torch.tensor(rows, dtype=torch.int32)

    def context(self, slots: tuple[int, ...] = (5, 0, 3, 7), lengths: tuple[int, ...] = (40, 1, 7, 24)) -> DraftContext:
        """Rows of several lengths."""
        rows, known = torch.tensor([slots, lengths], dtype=torch.int32)
        return DraftContext(self.table(), rows, known, max(lengths))

    def enter(self, speculator: Speculator, context: DraftContext) -> None:
        """The requests of a context take their slots."""
        for slot, length in zip(context.slots.tolist(), context.lengths.tolist(), strict=True):
            speculator.add(
                NewRequest(
                    slot=slot,
                    request_id=f"request-{slot}",
                    token_ids=context.token_ids[slot, :length].numpy().copy(),
                    prompt_len=max(1, length - 2),
                    num_computed=0,
                    block_ids=[],
                    params=SamplingParams(),
                    seed=slot,
                )
            )

    def propose(self, context: DraftContext, speculator: Speculator | None = None) -> Drafts:
        """What a speculator (a new one, if none is given) guesses for requests that just entered."""
        speculator = self.speculator() if speculator is None else speculator
        self.enter(speculator, context)
        return speculator.propose(context)

    def test_drafts_have_their_shape_and_lie_in_the_vocabulary(self) -> None:
        speculator, context = self.speculator(), self.context()
        drafts = self.propose(context, speculator)
        rows, most = len(context.slots), speculator.num_drafts
        assert 1 <= most <= 3, f"num_drafts is {most}, num_speculative_tokens 3"
        assert drafts.token_ids.dtype == drafts.counts.dtype == torch.int32, "drafts and counts must be int32"
        assert list(drafts.token_ids.shape) == [rows, most], f"drafts have shape {list(drafts.token_ids.shape)}"
        assert list(drafts.counts.shape) == [rows], f"counts have shape {list(drafts.counts.shape)}"
        assert bool(((drafts.counts >= 0) & (drafts.counts <= most)).all()), f"counts are {drafts.counts.tolist()}"
        for tokens, count in zip(drafts.token_ids.tolist(), drafts.counts.tolist(), strict=True):
            assert all(0 <= token < _VOCAB for token in tokens[:count]), f"drafts {tokens[:count]} leave the vocabulary"

    def test_looking_changes_nothing(self) -> None:
        context = self.context()
        before = [context.token_ids.clone(), context.slots.clone(), context.lengths.clone()]
        self.propose(context)
        for now, then in zip((context.token_ids, context.slots, context.lengths), before, strict=True):
            assert torch.equal(now, then), "propose changed the tensors that it was given"

    def test_what_lies_behind_the_known_tokens_is_not_read(self) -> None:
        context = self.context()
        other = context.token_ids.clone()
        for slot, length in zip(context.slots.tolist(), context.lengths.tolist(), strict=True):
            other[slot, length:] = (other[slot, length:] + 1) % _VOCAB
        found, wanted = self.propose(replace(context, token_ids=other)), self.propose(context)
        self.check_equal(found, wanted, "drafts depend on what lies behind the known tokens")

    def test_rows_do_not_depend_on_each_other(self) -> None:
        wanted = self.propose(self.context())
        backwards = self.propose(self.context((7, 3, 0, 5), (24, 7, 1, 40)))
        turned = Drafts(backwards.token_ids.flip(0), backwards.counts.flip(0))
        self.check_equal(turned, wanted, "drafts depend on the order of rows")
        alone = self.propose(self.context((3,), (7,)))
        one = Drafts(wanted.token_ids[2:3], wanted.counts[2:3])
        self.check_equal(alone, one, "drafts of a row depend on the others")

    def test_rows_that_fill_up_change_nothing(self) -> None:
        """Slot -1 stands where a platform pads rows."""
        speculator, context = self.speculator(), self.context()
        self.enter(speculator, context)
        slots, lengths = context.slots.tolist(), context.lengths.tolist()
        filled = torch.tensor([[*slots, -1, -1], [*lengths, 2, 2]], dtype=torch.int32)
        found = speculator.propose(replace(context, slots=filled[0], lengths=filled[1]))
        assert list(found.counts.shape) == [len(slots) + 2], "rows of slot -1 need drafts too, which are dropped"
        own = Drafts(found.token_ids[: len(slots)], found.counts[: len(slots)])
        self.check_equal(own, self.propose(context), "rows of slot -1 change the drafts of others")

    def test_a_reused_slot_starts_anew(self) -> None:
        speculator, context = self.speculator(), self.context()
        self.propose(replace(context, token_ids=self.table(1)), speculator)
        for slot in context.slots.tolist():
            speculator.remove(slot)
        speculator.remove(6)
        self.check_equal(
            self.propose(context, speculator), self.propose(context), "drafts remember who had the slot before"
        )

    @pytest.mark.parametrize("async_scheduling", [True, False])
    def test_it_changes_no_output(self, async_scheduling: bool) -> None:
        """Greedy and sampled, with repeating prompts, in chunks, on a cache that is too small for all."""
        folder = self.folder / "tiny"
        write_tiny(folder, "LlamaForCausalLM")
        settings: dict[str, Any] = {**SMALL, "model": str(folder), "async_scheduling": async_scheduling}
        settings |= {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 24, "block_size": 8, "max_model_len": 80}
        given = [prompt[:5] * 4 + prompt[:20] for prompt in prompts(250)]
        requests = [request(str(index), prompt, 16) for index, prompt in enumerate(given)]
        requests += [
            request(f"r{index}", prompt, 16, index, temperature=0.7, top_k=3) for index, prompt in enumerate(given)
        ]
        outputs = []
        for config in (self.config(**settings), from_flat({"num_threads": 1, **settings})):
            with running(config, self.registry()) as engine:
                found = drain(engine, requests)
                outputs.append({name: tokens_of(one) for name, one in found.items()})
        assert outputs[0] == outputs[1], "speculation changed what was generated"

    def check_equal(self, found: Drafts, wanted: Drafts, what: str) -> None:
        """Compares the drafts that count."""
        assert found.counts.tolist() == wanted.counts.tolist(), what
        kept = np.arange(found.token_ids.shape[1]) < wanted.counts.numpy()[:, None]
        assert np.array_equal(np.where(kept, found.token_ids, -1), np.where(kept, wanted.token_ids, -1)), what
