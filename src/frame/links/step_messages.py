"""What workers are told of a step: the numbers of its plan in one run of bytes, and the rest only where there is any.

Most steps decode. Their plans are a dozen small arrays, and describing, placing and making each by itself takes longer
than everything else that is done to tell workers. Knows no transport.

The bytes, little-endian: `_HEAD`; a pair of uint32 for each append (its group and length) and each prefix (its tokens
and length); as int32 the removed slots, the rows' slots, scheduled tokens, computed tokens and drafts, of each append
slots, offsets and block ids, and each prefix's rows; last a byte for each row, which says whether it samples.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np

from frame.core.interfaces.adapters import AdapterLoad
from frame.core.interfaces.step import BlockAppend, BlockCopy, NewRequest, PrefixRows, StepPlan
from frame.core.interfaces.wire import Borrowed

#: The step, and how many there are of removed slots, rows, appends and prefixes.
_HEAD = struct.Struct("<q4I")
_INT32, _BOOL, _BYTE = np.dtype("<i4"), np.dtype(np.bool_), np.dtype(np.uint8)


class Sample(msgspec.Struct, tag=True, omit_defaults=True):
    """Engine to worker: sample the step executed last."""

    masks: Borrowed = Borrowed(b"")

    @classmethod
    def of(cls, masks: bytes) -> Sample:
        """The message of packed masks; without any it is nearly empty."""
        return cls(Borrowed(masks)) if masks else cls()


class Execute(msgspec.Struct, tag=True, omit_defaults=True):
    """Engine to worker: run a step's forward pass; answered with `Sampled` after `Sample`.

    The fields besides `numbers` are those of `StepPlan`.
    """

    numbers: bytearray
    added: list[NewRequest] = []
    finished_ids: list[str] = []
    deterministic: bool = False
    capture: bool = False
    copies: list[BlockCopy] = []
    extras: dict[str, bytes] = {}
    adapters: list[AdapterLoad] = []
    adapted: bool = False

    @classmethod
    def of(cls, plan: StepPlan) -> Execute:
        """The message of a plan; raises `ValueError` for arrays that do not fit together or hold other numbers."""
        rows = plan.slots.shape
        arrays: list[Any] = [plan.removed_slots, plan.slots, plan.num_scheduled, plan.num_computed, plan.num_drafts]
        fit = plan.samples.shape == plan.num_scheduled.shape == plan.num_computed.shape == plan.num_drafts.shape == rows
        pairs: list[int] = []
        for append in plan.appends:
            fit = fit and append.slots.shape == append.offsets.shape == append.block_ids.shape
            arrays += (append.slots, append.offsets, append.block_ids)
            pairs += (append.group, len(append.slots))
        for prefix in plan.prefixes:
            arrays.append(prefix.rows)
            pairs += (prefix.num_tokens, len(prefix.rows))
        if not fit:
            raise ValueError(
                f"the plan of step {plan.step} has arrays of different lengths for the same rows or blocks"
            )
        head = _HEAD.pack(plan.step, len(plan.removed_slots), len(plan.slots), len(plan.appends), len(plan.prefixes))
        try:
            head += struct.pack(f"<{len(pairs)}I", *pairs)
        except struct.error:
            raise ValueError(f"the plan of step {plan.step} has numbers below 0 of groups or of tokens") from None
        arrays = [array if array.dtype is _INT32 else _as(_INT32, array, plan) for array in arrays]
        samples: Any = plan.samples if plan.samples.dtype is _BOOL else _as(_BOOL, plan.samples, plan)
        try:
            numbers = bytearray().join((head, *arrays, samples))
        except TypeError:  # an array that is not contiguous
            numbers = bytearray().join((head, *(array.tobytes() for array in arrays), samples.tobytes()))
        rest = plan.copies, plan.extras, plan.adapters, plan.adapted
        return cls(numbers, plan.added, plan.finished_ids, plan.deterministic, plan.capture, *rest)

    def plan(self) -> StepPlan:
        """The plan, with arrays that lie in `numbers`; raises `ValueError` where `numbers` are not those of a plan."""
        data, size = self.numbers, len(self.numbers)
        step, removed, rows, num_appends, num_prefixes = _HEAD.unpack_from(data) if size >= _HEAD.size else (0,) * 5
        start, count = _HEAD.size, removed + 4 * rows
        pairs: tuple[int, ...] = ()
        if num_pairs := num_appends + num_prefixes:
            start += 8 * num_pairs
            if start <= size:
                pairs = struct.unpack_from(f"<{2 * num_pairs}I", data, _HEAD.size)
            count += 3 * sum(pairs[1 : 2 * num_appends : 2]) + sum(pairs[2 * num_appends + 1 :: 2])
        if size != start + 4 * count + rows:
            raise ValueError(f"{size} bytes are not the numbers of a plan of {rows} rows")
        numbers = np.frombuffer(data, _INT32, count, start)
        first = removed + rows
        second = first + rows
        third = second + rows
        end = third + rows
        plan = StepPlan(
            step=step,
            removed_slots=numbers[:removed],
            added=self.added,
            appends=[],
            slots=numbers[removed:first],
            num_scheduled=numbers[first:second],
            num_computed=numbers[second:third],
            samples=np.frombuffer(data, _BYTE, rows, start + 4 * count).astype(_BOOL),
            num_drafts=numbers[third:end],
            finished_ids=self.finished_ids,
            deterministic=self.deterministic,
            prefixes=[],
            capture=self.capture,
            copies=self.copies,
            extras=self.extras,
            adapters=self.adapters,
            adapted=self.adapted,
        )
        if pairs:
            _add_pairs(plan, numbers, end, pairs, num_appends)
        return plan


def _as(wanted: np.dtype, array: np.ndarray, plan: StepPlan) -> np.ndarray:
    same = array.astype(wanted)
    if not np.array_equal(same, array):
        raise ValueError(f"the plan of step {plan.step} has values that are not {wanted}: {array}")
    return same


def _add_pairs(plan: StepPlan, numbers: np.ndarray, start: int, pairs: tuple[int, ...], num_appends: int) -> None:
    """Adds appends and prefixes, whose arrays lie in `numbers` from `start` on."""
    for index in range(0, len(pairs), 2):
        length = pairs[index + 1]
        end = start + length
        first = numbers[start:end]
        if index < 2 * num_appends:
            start, end = end + length, end + 2 * length
            second = numbers[start - length : start]
            plan.appends.append(
                BlockAppend(group=pairs[index], slots=first, offsets=second, block_ids=numbers[start:end])
            )
        else:
            plan.prefixes.append(PrefixRows(rows=first, num_tokens=pairs[index]))
        start = end
