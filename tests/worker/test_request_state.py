"""Slots and block tables against a plain model of them, and how often the host writes to the device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import BlockAppend, NewRequest
from frame.core.ops import Ops
from frame.core.worker.device import Device
from frame.core.worker.step.request_state import RequestTables
from frame.plugins.platforms.cpu import HostStreams
from frame.plugins.platforms.cpu_ops import CpuOps

SLOTS, LENGTH, BLOCKS, GROUPS = 6, 40, 12, 2


class CountedStreams(HostStreams):
    """Counts the transfers to the device."""

    def __init__(self) -> None:
        self.staged = 0

    def stage(self, array: np.ndarray) -> Tensor:
        self.staged += 1
        return super().stage(array)


def new_request(draw: random.Random, slot: int, name: str) -> NewRequest:
    length = draw.randint(1, LENGTH)
    blocks = [np.array(draw.sample(range(99), draw.randint(1, BLOCKS - 2)), np.int32) for _ in range(GROUPS)]
    ids = np.array([draw.randint(0, 500) for _ in range(length)], np.int32)
    return NewRequest(
        slot=slot,
        request_id=name,
        token_ids=ids,
        prompt_len=draw.randint(1, length),
        num_computed=0,
        block_ids=blocks,
        params=SamplingParams(),
        seed=0,
    )


@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["reference", "cpu"])
def test_random_steps_leave_what_a_plain_model_holds(ops: Ops) -> None:
    draw, streams = random.Random(7), CountedStreams()
    tables = RequestTables(Device(ops, streams, torch.device("cpu")), SLOTS, LENGTH, [BLOCKS] * GROUPS)
    held: dict[int, tuple[NewRequest, list[list[int]]]] = {}
    for step in range(600):
        for slot in draw.sample(range(SLOTS), draw.randint(0, 2)):
            held.pop(slot, None)
        for slot in draw.sample(range(SLOTS), draw.randint(0, 2)):
            # what is there already gives way, as a finished request does to a new one of the same step
            request = new_request(draw, slot, f"{step}-{slot}")
            held[slot] = request, [blocks.tolist() for blocks in request.block_ids]
            tables.add(request)
        tables.append(appends(draw, held))
        streams.staged = 0
        tables.apply_staged_writes()
        assert streams.staged <= 1 + GROUPS
        for slot, (request, blocks) in held.items():
            assert tables.token_ids[slot, : len(request.token_ids)].tolist() == request.token_ids.tolist()
            for table, own in zip(tables.blocks, blocks, strict=True):
                assert table[slot, : len(own)].tolist() == own


def appends(draw: random.Random, held: dict[int, tuple[NewRequest, list[list[int]]]]) -> list[BlockAppend]:
    """One more block for some of the requests that have room, noted in `held`."""
    found = []
    for group in range(GROUPS):
        rows = [slot for slot, (_, blocks) in held.items() if len(blocks[group]) < BLOCKS and draw.random() < 0.5]
        new = [draw.randint(100, 999) for _ in rows]
        offsets = [len(held[slot][1][group]) for slot in rows]
        for slot, block in zip(rows, new, strict=True):
            held[slot][1][group].append(block)
        arrays = (np.array(part, np.int32) for part in (rows, offsets, new))
        found.append(BlockAppend(group=group, slots=next(arrays), offsets=next(arrays), block_ids=next(arrays)))
    return found


def test_a_run_that_does_not_fit_is_named() -> None:
    tables = RequestTables(Device(Ops(), HostStreams(), torch.device("cpu")), 2, 4, [4])
    with pytest.raises(ValueError, match=r"slot 1: columns 0\.\.5 of 4"):
        tables.add(
            NewRequest(
                slot=1,
                request_id="a",
                token_ids=np.zeros(5, np.int32),
                prompt_len=5,
                num_computed=0,
                block_ids=[],
                params=SamplingParams(),
                seed=0,
            )
        )
