"""More plugins that are wrong in one way each: those that read and write text, pool, count, load and compute."""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter
from torch import Tensor

from frame.interfaces import (
    CallArguments,
    CallBegin,
    CallEnd,
    ChatOptions,
    Command,
    Content,
    DraftContext,
    Drafts,
    Endpoint,
    ForwardStep,
    Grammar,
    GrammarMatcher,
    LazyTensor,
    Mark,
    MetricsSink,
    ModelInputs,
    ModelSetup,
    ModelSource,
    OutputEvent,
    OutputReader,
    ParserRequest,
    Pieces as TokenPieces,
    PoolerRows,
    Reasoning,
    ReasoningParser,
    RequestReport,
    SchedulerPolicy,
    SideQueue,
    StepPlan,
    Streams,
    ToolParser,
)
from frame.ops import Ops
from frame.plugins.grammars.guidance import GuidanceBackend
from frame.plugins.loaders.safetensors import SafetensorsLoader
from frame.plugins.models.llama import LlamaForCausalLM
from frame.plugins.models.t5 import T5ForConditionalGeneration
from frame.plugins.platforms.cpu import CpuPlatform, HostStreams, SideThread
from frame.plugins.platforms.cpu_ops import CpuOps
from frame.plugins.poolers.sequence import KeptRowPooler, LastPooler
from frame.plugins.speculators.ngram import NgramSpeculator
from frame.plugins.speculators.ngram_options import NgramOptions
from frame.plugins.tokenizers.hf import HfTokenizer
from frame.testing import tokenizers
from frame.testing.fake_executor import FakeExecutor
from frame.testing.tiny import write_tiny

CALL = '<call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}</call>'
THOUGHT = "<why>The user is in Paris.</why>It rains."


def write_llama(folder: Path) -> None:
    """The checkpoint of the wrong models."""
    write_tiny(folder, "LlamaForCausalLM")


def write_t5(folder: Path) -> None:
    """The checkpoint of a wrong model with an encoder."""
    write_tiny(folder, "T5ForConditionalGeneration")


def write_words(folder: Path) -> None:
    """The files of a wrong tokenizer: tokens that begin with spaces."""
    tokenizers.save(tokenizers.byte_fallback(), folder)


class NewOps(CpuPlatform):
    """Gives other ops each time, so that what the runner says to one of them the layers never hear."""

    def ops(self) -> Ops:
        return CpuOps()


class _Passed(SideThread):
    def mark(self) -> Mark:
        mark = super().mark()
        mark.before_main = lambda: None  # type: ignore[method-assign]
        return mark


class _HastyStreams(HostStreams):
    def side_queue(self) -> SideQueue:
        return _Passed()


class Hasty(CpuPlatform):
    """Has marks that hold nothing back."""

    def streams(self) -> Streams:
        return _HastyStreams()


class _GatingInPlace(CpuOps):
    def silu_mul(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.nn.functional.silu(first, inplace=True) * second


class Mutating(CpuPlatform):
    """Has an op that spoils what it reads."""

    def ops(self) -> Ops:
        if not isinstance(self._ops, _GatingInPlace):
            self._ops = _GatingInPlace()
        return self._ops


class Breaking(SchedulerPolicy):
    """Breaks on an error of its own."""

    def key(self, request: Any) -> tuple[Any, ...]:
        nothing: Any = None
        return (nothing + 1, request.arrival)


class Partial(SchedulerPolicy):
    """Orders by sets, of which often none is before the other."""

    def key(self, request: Any) -> tuple[Any, ...]:
        return (frozenset((request.priority, request.request_id)),)


class _Read(LazyTensor):
    def __init__(self, inner: LazyTensor) -> None:
        self.name, self.shape, self.dtype, self._values = inner.name, inner.shape, inner.dtype, inner.read().clone()

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        return self._values[index]


class Eager(SafetensorsLoader):
    """Reads every tensor as soon as they are listed."""

    def tensors(self) -> Any:
        return iter([_Read(tensor) for tensor in super().tensors()])


class Scribbling(NgramSpeculator):
    """Writes its drafts into the token table itself."""

    def __init__(self, setup: Any, options: Any = None) -> None:
        super().__init__(setup, NgramOptions(prompt_lookup_max=2))

    def propose(self, context: DraftContext) -> Drafts:
        drafts = super().propose(context)
        context.token_ids[context.slots.long(), (context.lengths - 1).long()] = drafts.token_ids[:, 0].clamp(min=0)
        return drafts


class Forging(HfTokenizer):
    """Reads special tokens out of rendered chats, whoever wrote them."""

    def render_chat(self, messages: Sequence[Any], options: ChatOptions, check: Any) -> tuple[str, list[int]]:
        text, _ = super().render_chat(messages, options, check)
        return text, self.encode(text, add_special_tokens=False)


class Trusting(HfTokenizer):
    """Claims every folder."""

    @classmethod
    def supports(cls, folder: Path) -> str | None:
        return None


class Trimming(HfTokenizer):
    """Leaves the spaces before words out of their bytes."""

    @cached_property
    def pieces(self) -> TokenPieces | None:
        whole = super().pieces
        return None if whole is None else TokenPieces(lambda token: whole[token].strip())


class Swapping(FakeExecutor):
    """Gives the answers of two steps in flight to each other."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._last: Any = None

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)

    def sample(self, masks: bytes = b"") -> Any:
        handle, other = super().sample(masks), self._last
        if other is None:
            self._last = handle
        else:
            handle.outcome, other.outcome, self._last = other.outcome, handle.outcome, None
        return handle


class Loud(Command):
    """Has a help of two lines."""

    help = "Is heard.\nTwice."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, arguments: argparse.Namespace) -> int:
        return 0


class Failing(Endpoint):
    """Fails where it only should answer."""

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.get("/failing")
        async def failing() -> dict[str, str]:
            return {}["absent"]

        return router


class Blocking(MetricsSink):
    """Waits for whoever takes its reports."""

    def request(self, report: RequestReport) -> None:
        time.sleep(0.012)


class Strict(MetricsSink):
    """Believes that everything that clients send can be written as UTF-8."""

    def request(self, report: RequestReport) -> None:
        (report.prompt or "").encode()


class AnyEnd(LastPooler):
    """Takes the last hidden state of the step, whoever's it is."""

    def pool(self, hidden: Tensor, rows: PoolerRows) -> tuple[Tensor, list[int]]:
        count = int(rows.last.sum())
        return hidden[-1:].expand(count, -1), [1] * count


class Remembering(KeptRowPooler):
    """The largest of all hidden states, of earlier requests of the slot too."""

    def pool(self, hidden: Tensor, rows: PoolerRows) -> tuple[Tensor, list[int]]:
        for slot, start, count in zip(rows.slots, rows.starts, rows.counts, strict=True):
            self.kept[slot] = torch.maximum(self.kept[slot], hidden[start : start + count].float().amax(0))
        ended = self.stage(rows.slots[rows.last].astype(np.int64))
        return self.kept.index_select(0, ended), [1] * len(ended)


class Halved(LlamaForCausalLM):
    """Multiplies half of what it should."""

    def logits(self, hidden: Tensor) -> Tensor:
        halved = hidden.clone()
        halved[:, ::2] = 0
        return super().logits(halved)


class Undivided(LlamaForCausalLM):
    """Scales by the heads that a rank has, as if these were all."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._heads = setup.build.config.num_attention_heads / setup.build.groups.tensor.size

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self._heads


class Unread(T5ForConditionalGeneration):
    """Reads the first token of each step's encoder prompts in the place of all."""

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        ids = inputs.encoder_ids
        if ids is not None and len(ids):
            inputs = replace(inputs, encoder_ids=ids[:1].expand(len(ids)).contiguous())
        return super().forward(inputs, step)


class Neighbourly(LlamaForCausalLM):
    """Lets rows of a step have a part in each other."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden + hidden.mean(0))


class _Shared(Grammar):
    def __init__(self, inner: Grammar) -> None:
        self._inner, self._matcher = inner, inner.matcher()

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes

    def matcher(self) -> GrammarMatcher:
        return self._matcher


class OneMatcher(GuidanceBackend):
    """Has one matcher for all requests of a grammar."""

    def compile(self, text: str) -> Any:
        return _Shared(super().compile(text))


class Lax(GuidanceBackend):
    """Allows every token."""

    def fill_masks(self, matchers: Sequence[GrammarMatcher], words: np.ndarray) -> None:
        super().fill_masks(matchers, words)
        words[:, 0] = -1


class Pieces(OutputReader):
    """Finds a call between tags once the whole output is there."""

    def __init__(self) -> None:
        self.text, self.told = "", 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        self.text += text
        return []

    def finish(self) -> list[OutputEvent]:
        before, tag, rest = self.text.partition("<call>")
        body, end, after = rest.partition("</call>")
        try:
            call = json.loads(body) if tag and end else None
            name, arguments = (call["name"], json.dumps(call["arguments"])) if call else ("", "")
        except (ValueError, KeyError, TypeError):
            name = ""
        if not name or not isinstance(name, str):
            return [Content(self.text)] if self.text else []
        return [
            *self.said(before),
            CallBegin(0, "id", name),
            CallArguments(0, arguments),
            CallEnd(0),
            *self.said(after),
        ]

    def said(self, text: str) -> list[OutputEvent]:
        return [Content(text)] if text else []


class _Losing(Pieces):
    def said(self, text: str) -> list[OutputEvent]:
        return []


class Losing(ToolParser):
    """Loses what the model says beside a call."""

    def start(self, request: ParserRequest) -> OutputReader:
        return _Losing()


class _Piecewise(Pieces):
    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        if "<call>" in text or self.text:
            return super().feed(text)
        return self.said(text)


class Piecewise(ToolParser):
    """Looks for the tag in each piece alone."""

    def start(self, request: ParserRequest) -> OutputReader:
        return _Piecewise()


class _Tags(OutputReader):
    """Reasoning between two tags, found once the whole output is there; `closed` alone makes reasoning."""

    def __init__(self, keeps: bool) -> None:
        self.text, self.keeps = "", keeps

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        self.text += text
        return []

    def finish(self) -> list[OutputEvent]:
        _, begin, rest = self.text.partition("<why>")
        thought, end, said = rest.partition("</why>")
        if begin and end:
            return [Reasoning(thought), Content(said)]
        return [Content(self.text)] if self.keeps else [Content(self.text[:20])]


class Forgetting(ReasoningParser):
    """Keeps the beginning of an answer without reasoning only."""

    def start(self, request: ParserRequest) -> OutputReader:
        return _Tags(keeps=False)


class OneReader(ReasoningParser):
    """Has one reader for all outputs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._reader = _Tags(keeps=True)

    def start(self, request: ParserRequest) -> OutputReader:
        if not self._reader.text:
            return self._reader
        return copy.copy(self._reader)


class Raising(ModelSource):
    """Judges names by their parts, which not all have."""

    @classmethod
    def supports(cls, name: str) -> str | None:
        organisation, model = name.split("/")
        return None if organisation and model else "a part is empty"

    def fetch(self, name: str, revision: str | None, *, weights: bool) -> Path:
        raise NotImplementedError


class Inventing(ModelSource):
    """Makes a folder for whatever it is asked."""

    @classmethod
    def supports(cls, name: str) -> str | None:
        return None

    def fetch(self, name: str, revision: str | None, *, weights: bool) -> Path:
        folder = Path(str(self.setup.download_dir), "invented")
        folder.mkdir(exist_ok=True)
        return folder
