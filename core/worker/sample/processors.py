"""Logits processors: those that requests bring, those that plugins offer, and the rows on which each one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...config.tree import FrameConfig
from ...interfaces.logits import LogitsProcessor, RequestLogitsProcessor, bind
from ...interfaces.sampling import SamplingParams
from ...interfaces.setup import ProcessorSetup
from ...interfaces.step import NewRequest
from ...plugin_host.isolation import run_or_leave_out
from ...plugin_host.logits_processors import FoundProcessor, processor_classes
from ...plugin_host.registry import Registry
from .need import Need


def load_processors(config: FrameConfig, registry: Registry, device: torch.device) -> list[LogitsProcessor]:
    """Builds the processors of a worker: all that packages offer, in order of preference, then the configured ones.

    Raises `PluginError` when one cannot be imported and `ValueError` when it is no logits processor.
    """
    setup = ProcessorSetup(device, config.scheduler.max_num_seqs)
    processors = []
    for found in processor_classes(config, registry):
        build = partial(_build, found, setup)
        if found.provider is None:
            processors.append(build())
        elif one := run_or_leave_out(registry, found.provider, build, named=found.named):
            processors.append(one)
    return processors


def _build(found: FoundProcessor, setup: ProcessorSetup) -> LogitsProcessor:
    kind, setup = found.kind, replace(setup, plugin=found.name)
    made: LogitsProcessor = kind(setup, found.options) if issubclass(kind, LogitsProcessor) else kind.adapted(setup)
    return made


class RequestProcessors(LogitsProcessor):
    """Runs the callables that `choose` returns for a request, in order, on the request's row alone."""

    needs_output_ids = True

    def __init__(
        self,
        choose: Callable[[SamplingParams], Sequence[RequestLogitsProcessor]],
        setup: ProcessorSetup,
        *,
        argmax_invariant: bool = False,
    ) -> None:
        super().__init__(setup)
        self.argmax_invariant = argmax_invariant
        self._choose = choose
        self._calls: dict[int, list[Callable[[Tensor], Tensor]]] = {}

    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        self.remove(slot)
        chosen = self._choose(params)
        if chosen:
            self._calls[slot] = [bind(processor, list(prompt_ids), output_ids) for processor in chosen]
        return bool(chosen)

    def remove(self, slot: int) -> None:
        self._calls.pop(slot, None)

    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        for row, slot in enumerate(slots):
            changed = logits[row]
            for call in self._calls[slot]:
                changed = call(changed)
            logits[row] = changed
        return logits


class ProcessorSlots:
    """The processors of one worker and the slots that opted in to each.

    Before those that were loaded come the callables that requests bring themselves.
    """

    def __init__(self, max_slots: int, processors: Sequence[LogitsProcessor], device: torch.device) -> None:
        brought = RequestProcessors(lambda params: params.logits_processors or (), ProcessorSetup(device, max_slots))
        self._loaded = bool(processors)
        self._processors: list[LogitsProcessor] = [brought, *processors]
        self._opted = np.zeros((len(self._processors), max_slots + 1), bool)  # the last, -1, is of padding rows
        self._reads = np.zeros(max_slots, bool)
        self._outputs: dict[int, list[int]] = {}

    def add(self, request: NewRequest) -> Need:
        """Offers a request to every processor; says what its rows need."""
        slot, needs = request.slot, Need(0)
        self.remove(slot)
        if not (self._loaded or request.params.logits_processors):
            return needs
        prompt = request.token_ids[: request.prompt_len]
        prompt_ids: list[int] = prompt[prompt >= 0].tolist()  # those that are not given by embeddings
        output_ids: list[int] = request.token_ids[request.prompt_len :].tolist()
        self._outputs[slot] = output_ids
        for index, processor in enumerate(self._processors):
            opted = bool(processor.add(slot, request.params, prompt_ids, output_ids))
            self._opted[index, slot] = opted
            if opted:
                needs |= Need.INVARIANT_PROCESSORS if processor.argmax_invariant else Need.PROCESSORS
                self._reads[slot] |= processor.needs_output_ids
        return needs

    def remove(self, slot: int) -> None:
        """Tells every processor that a request left; an empty slot is fine."""
        if self._outputs.pop(slot, None) is None:
            return
        self._opted[:, slot] = False
        self._reads[slot] = False
        for processor in self._processors:
            processor.remove(slot)

    @property
    def active(self) -> bool:
        """Whether a running request was offered to processors."""
        return bool(self._outputs)

    def needs_output_ids(self, slots: np.ndarray) -> bool:
        """Whether one of these slots is read by a processor that wants its output ids."""
        return bool(self._outputs) and bool(self._reads[slots].any())

    def deliver(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Appends tokens to the live lists that the processors were given."""
        if self._outputs:
            for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if self._reads[slot]:
                    self._outputs[slot].append(token)

    def apply(self, logits: Tensor, slots: np.ndarray, *, invariant: bool, rows: np.ndarray | None = None) -> Tensor:
        """Runs the processors that are (or are not) argmax-invariant, each on the rows that opted in to it.

        `rows` bool [N] limits that further. Raises `RuntimeError` when a processor returns another shape.
        """
        for index, processor in enumerate(self._processors):
            if processor.argmax_invariant != invariant:
                continue
            chosen = self._opted[index, slots]
            if rows is not None:
                chosen = chosen & rows
            if chosen.all():
                logits = _checked(processor, processor.apply(logits, slots.tolist()), logits)
            elif chosen.any():
                places = torch.from_numpy(np.flatnonzero(chosen)).to(logits.device)
                part = logits.index_select(0, places)
                logits[places] = _checked(processor, processor.apply(part, slots[chosen].tolist()), part)
        return logits


def _checked(processor: LogitsProcessor, result: Tensor, given: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != given.shape:
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise RuntimeError(
            f"logits processor {type(processor).__name__} returned {shape} for logits of {list(given.shape)}"
        )
    return result.float()
