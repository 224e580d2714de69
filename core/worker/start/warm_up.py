"""Steps of made-up requests, run before the first real one, so that no kernel is compiled while requests wait.

They hold prompts and decodes, every sampling feature, every kind of pooling, ordinary and deterministic numerics, and
every shape that is captured. Knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...interfaces.platform_steps import StepShape
from ...interfaces.pooling_params import PoolingParams
from ...interfaces.sampling import SamplingParams
from ...interfaces.step import NewRequest, StepPlan, TokenMasks
from ..step.runner import Runner

#: The block that made-up requests read and write; no real request holds it yet.
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
#: Groups of features that select a kernel of the draw: alone, and together with edited logits; in short prompts.
_SHORT = (1,), (3,), (1, 3)
_SHORT_LENGTH = 12
#: The length of rows whose keys are not divided among programs.
_SHORT_DECODE = 64
#: How many features the first prompts have: their kernels take longest to compile, so they are run before all others,
#: in ordinary and in deterministic numerics.
_NUM_FIRST = 3


def warm_up(
    runner: Runner,
    max_slots: int,
    max_tokens: int,
    max_model_len: int,
    *,
    deterministic: bool = False,
    shares_prefixes: bool = False,
    thorough: bool = False,
) -> None:
    """Runs prompts of all features together and alone, decodes of them, and what will be captured.

    With `deterministic`, single requests may ask for deterministic steps: those are run as well; with `shares_prefixes`
    decodes that read a shared prefix once for several rows. `thorough` adds steps of every size for which
    launch code may choose another kernel.
    """
    kinds = runner.pooling.kinds()
    make = partial(_request, runner, kinds)
    modes = (False, True) if deterministic and not runner.device.deterministic else (False,)
    sizes = max_slots, max_tokens, max_model_len
    for numerics in modes:
        _serve(runner, _plans(make, not kinds, *sizes, begins=True), numerics)
    for numerics in modes:
        _serve(runner, _plans(make, not kinds, *sizes, begins=False), numerics)
        shapes = runner.device.shapes.every()
        if thorough:
            shapes += _decodes(min(max_slots, max_tokens), {(one.padded_rows, one.deterministic) for one in shapes})
        for shape in shapes if _takes_padding(runner, kinds) else ():
            if shape.deterministic == (numerics or runner.device.deterministic):
                runner.run_dummy(shape)
                if shares_prefixes and not shape.deterministic:
                    runner.run_dummy(replace(shape, shared=True))
                if runner.adapters.memory():
                    runner.run_dummy(replace(shape, adapted=True))
    more = (
        _more_decodes(min(max_slots, max_tokens), max_model_len) if thorough and _takes_padding(runner, kinds) else ()
    )
    for shape in more:
        runner.run_dummy(shape)
    if runner.adapters.memory():
        _serve(runner, _plans(make, not kinds, *sizes, begins=False), False, adapted=True)
    if not kinds:
        _draw_with_masks(runner, *sizes)
    for numerics in modes if thorough else ():
        _serve(runner, _sizes(make, not kinds, *sizes), numerics)
    runner.device.ops.invariant = runner.device.deterministic  # as the memory profile, which comes next, needs it


def _takes_padding(runner: Runner, kinds: Sequence[PoolingParams]) -> bool:
    """Whether the model decodes, and whether a decode of padding alone can run: only such models are captured."""
    model, planning = runner.model, any(planner.needs_python for planner in runner.planners)
    return not (kinds or planning or model.needs_python or model.segments)


def _decodes(most: int, met: set[tuple[int, bool]]) -> list[StepShape]:
    """Eager decodes of 1, 2, 4, … and `most` rows, without the (rows, deterministic) pairs in `met`."""
    counts = [*(1 << power for power in range(most.bit_length())), most]
    wanted = ((rows, deterministic) for rows in dict.fromkeys(counts) for deterministic in (False, True))
    return [
        StepShape(rows, rows, deterministic=deterministic)
        for rows, deterministic in wanted
        if rows and (rows, deterministic) not in met
    ]


def _more_decodes(most: int, max_model_len: int) -> list[StepShape]:
    """Eager decodes of long and of short rows, in numbers no further apart than launch code tells numbers apart."""
    counts = [rows for rows in range(1, most + 1) if rows == most or rows // (rows & -rows) in (1, 3, 5)]
    lengths = 0, min(max_model_len, _SHORT_DECODE)
    return [StepShape(rows, rows, max_seq_len=length) for rows in counts for length in lengths]


def _serve(runner: Runner, plans: Iterable[StepPlan], deterministic: bool, adapted: bool = False) -> None:
    for plan in plans:
        plan.deterministic, plan.adapted = deterministic, adapted
        runner.execute(plan)
        runner.sample().result()


def _plans(
    make: Callable[[int, int, int], NewRequest],
    decodes: bool,
    max_slots: int,
    max_tokens: int,
    max_model_len: int,
    *,
    begins: bool,
) -> Iterator[StepPlan]:
    """`make(slot, feature, length)` gives a request of `length` tokens; with `decodes` its prompt is not all of it.

    `begins`: the prompts whose kernels take longest to compile, else all others.
    """
    most = min(len(_FEATURES), max_slots, max_tokens)
    length = min(160, max_tokens // most, max_model_len - 4)
    if length < 1:
        return
    every = tuple(range(len(_FEATURES)))
    if begins:
        groups = [(every[:_NUM_FIRST], length, False)]
    else:
        groups = [(every, length, decodes), (every[:1], length, decodes)]
        groups += [(some, min(length, _SHORT_LENGTH), False) for some in _SHORT]
    parts = [(list(part), size, goes_on) for some, size, goes_on in groups for part in _batched(some, most)]
    for number, (features, size, goes_on) in enumerate(parts):
        step, slots = 4 * number, list(range(len(features)))
        added = [make(slot, feature, size) for slot, feature in enumerate(features)]
        yield _plan(step, added, slots, size, 0, samples=decodes)
        if goes_on:
            yield _plan(step + 1, [], slots, 1, size)
            yield _plan(step + 2, [], slots[:1], 1, size + 1)
        yield _plan(step + 3, [], [], 0, 0, removed=slots)


def _sizes(
    make: Callable[[int, int, int], NewRequest], decodes: bool, max_slots: int, max_tokens: int, max_model_len: int
) -> Iterator[StepPlan]:
    """Prompts of each power of two of tokens, in as few rows as hold them, and few tokens behind rows as long."""
    longest = max_model_len - 4
    for power in range(1, max_tokens.bit_length()):
        size = 1 << power
        rows = -(-size // longest) if longest > 0 else 0
        if not 0 < rows <= max_slots:
            break
        lengths = [size // rows + (slot < size % rows) for slot in range(rows)]
        added = [make(slot, 0, length) for slot, length in enumerate(lengths)]
        yield _plan(0, added, range(rows), lengths, 0, samples=decodes)
        yield _plan(1, [], [], 0, 0, removed=range(rows))
    for power in range(9, max_model_len.bit_length() if decodes else 0):
        size = min(1 << power, longest)
        yield _plan(2, [make(0, 0, size)], [0], 2, size - 3)
        yield _plan(2, [], [0], 1, size - 1)
        yield _plan(3, [], [], 0, 0, removed=[0])


def _draw_with_masks(runner: Runner, max_slots: int, max_tokens: int, max_model_len: int) -> None:
    """A prompt of one token, whose draw obeys a grammar."""
    if min(max_slots, max_tokens, max_model_len - 4) < 1:
        return
    words = np.full((1, -(-runner.sampler.vocab_size // 32)), -1, np.int32)
    runner.execute(_plan(0, [_request(runner, [], 0, 0, 1)], [0], 1, 0))
    runner.sample(TokenMasks(slots=np.zeros(1, np.int32), words=words).packed()).result()
    runner.execute(_plan(1, [], [], 0, 0, removed=[0]))
    runner.sample().result()


def _batched(values: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """As `itertools.batched`, which Python 3.11 lacks."""
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _request(runner: Runner, kinds: Sequence[PoolingParams], slot: int, feature: int, length: int) -> NewRequest:
    return NewRequest(
        slot=slot,
        request_id=f"warm-up-{slot}",
        token_ids=np.arange(length, dtype=np.int32) % 3,
        prompt_len=length,
        num_computed=0,
        block_ids=[np.full(group.blocks_for(length + 4), _BLOCK, np.int32) for group in runner.layout.groups],
        params=SamplingParams(max_tokens=16, **({} if kinds else _FEATURES[feature])),
        seed=1,
        pooling=kinds[feature % len(kinds)] if kinds else None,
        encoder_ids=np.arange(length, dtype=np.int32) % 3 if runner.encoder.given() is not None else None,
    )


def _plan(
    step: int,
    added: list[NewRequest],
    slots: Sequence[int],
    scheduled: int | Sequence[int],
    computed: int,
    *,
    removed: Sequence[int] = (),
    samples: bool = True,
) -> StepPlan:
    """A step of these slots, each with `scheduled` tokens, or with as many as that says for each."""
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
