"""Steps that nobody asked for, run before the first request, so that nothing compiles or initialises later.

They hold prompts and decodes, every sampling feature, every kind of pooling, ordinary and deterministic numerics, and
every shape that is recorded. Knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ..interfaces.model import Model
from ..interfaces.platform import Forward, Graphs, StepShape
from ..interfaces.pooling_params import PoolingParams
from ..interfaces.sampling import SamplingParams
from ..interfaces.step import NewRequest, StepPlan
from .runner import Runner

#: Block that the requests read and write; it stays free, so what they leave in it is nobody's.
_BLOCK = 1
#: What requests may ask for, a request each: together they reach every kernel of the sampler.
_FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 5},
    {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 2, "presence_penalty": 0.1, "repetition_penalty": 1.1},
    {"temperature": 1.0, "logit_bias": {0: 0.5}, "min_tokens": 8, "bad_words_token_ids": [[0, 1], [2]]},
    {"temperature": 0.0, "allowed_token_ids": [0, 1, 2]},
)
#: These first, without the rest: among the kernels of their prompts are those that take longest to compile.
_NUM_FIRST = 3


class Unrecorded(Graphs):
    """Graphs of a platform that record nothing: every step runs as it is, padded as the platform pads it."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs

    def prepare(self, model: Model) -> Model:
        return model

    def shape(self, plan: StepPlan) -> StepShape:
        return replace(self._graphs.shape(plan), graph=None)

    def run(self, shape: StepShape, forward: Forward) -> Tensor:
        del shape
        return forward()

    def shapes(self) -> list[StepShape]:
        return self._graphs.shapes()


def warm_up(
    runner: Runner,
    max_slots: int,
    max_tokens: int,
    max_model_len: int,
    *,
    deterministic: bool = False,
    shares_prefixes: bool = False,
) -> None:
    """Runs prompts of all features together and alone, decodes of them, and what will be recorded.

    With `deterministic`, single requests may ask for deterministic steps: those are run as well; with `shares_prefixes`
    decodes that attend to a shared prefix apart.
    """
    also = deterministic and not runner.device.deterministic
    kinds = runner.pooling.kinds()
    for numerics in (False, True) if also else (False,):
        make = partial(_request, runner, kinds)
        for plan in _plans(make, not kinds, max_slots, max_tokens, max_model_len):
            plan.deterministic = numerics
            runner.execute(plan)
            runner.sample().result()
    for shape in runner.device.graphs.shapes():
        if also or shape.deterministic == runner.device.deterministic:
            runner.run_dummy(shape)
            if shares_prefixes and not shape.deterministic:
                runner.run_dummy(replace(shape, shared=True))
    runner.device.ops.invariant = runner.device.deterministic  # memory is profiled next, by what steps usually run


def _plans(
    make: Callable[[int, int], NewRequest], decodes: bool, max_slots: int, max_tokens: int, max_model_len: int
) -> Iterator[StepPlan]:
    """`make(slot, length)` gives a request of `length` tokens; with `decodes` its prompt is not the end of it."""
    count = min(len(_FEATURES), max_slots, max_tokens)
    length = min(160, max_tokens // count, max_model_len - 4)
    if length < 1:
        return
    step = 0
    groups = [(list(range(count)), decodes), ([0], decodes)] if count > 1 else [([0], decodes)]
    if count > _NUM_FIRST:
        groups.insert(0, (list(range(_NUM_FIRST)), False))
    for chosen, continued in groups:
        yield _plan(step, [make(slot, length) for slot in chosen], chosen, length, 0, samples=decodes)
        if continued:
            yield _plan(step + 1, [], chosen, 1, length)
            yield _plan(step + 2, [], chosen[:1], 1, length + 1)
        step += 4
        yield _plan(step - 1, [], [], 0, 0, removed=chosen)


def _request(runner: Runner, kinds: Sequence[PoolingParams], slot: int, length: int) -> NewRequest:
    layout = runner.layout
    blocks = np.full(-(-(length + 4) // layout.block_size), _BLOCK, np.int32)
    return NewRequest(
        slot=slot,
        request_id=f"warm-up-{slot}",
        token_ids=np.arange(length, dtype=np.int32) % 3,
        prompt_len=length,
        num_computed=0,
        block_ids=[blocks for _ in layout.groups],
        params=SamplingParams(max_tokens=16, **({} if kinds else _FEATURES[slot])),
        seed=1,
        pooling=kinds[slot % len(kinds)] if kinds else None,
    )


def _plan(
    step: int,
    added: list[NewRequest],
    slots: list[int],
    scheduled: int,
    computed: int,
    *,
    removed: Sequence[int] = (),
    samples: bool = True,
) -> StepPlan:
    rows = len(slots)
    return StepPlan(
        step=step,
        removed_slots=np.array(removed, np.int32),
        added=added,
        appends=[],
        slots=np.array(slots, np.int32),
        num_scheduled=np.full(rows, scheduled, np.int32),
        num_computed=np.full(rows, computed, np.int32),
        samples=np.full(rows, samples),
        num_drafts=np.zeros(rows, np.int32),
    )
