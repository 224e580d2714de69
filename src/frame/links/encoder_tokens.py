"""What workers make of the encoder prompts that a step brings: the encoder's tokens, and where its keys and values lie.

These lie in the request's blocks of the KV groups that keep them, where the decoder's rows find them in later steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from frame.core.interfaces.adapters import Adapters
from frame.core.interfaces.attention import GroupBatch
from frame.core.interfaces.kv import KVGroup
from frame.core.interfaces.step import StepPlan
from frame.core.worker.device import Device
from frame.core.worker.step.encoder import ENCODER_TOKENS, NoEncoder
from frame.core.worker.step.request_state import RequestTables


class EncoderTokens(NoEncoder):
    """The encoder's tokens of one step, E of them, and by slot how many each request has."""

    def __init__(
        self,
        device: Device,
        tables: RequestTables,
        groups: Sequence[KVGroup],
        max_slots: int,
        adapters: Adapters | None = None,
    ) -> None:
        self._device, self._tables, self._adapters = device, tables, adapters
        self._adapted = device.streams.stage(np.zeros(0, np.int32))  # int32 [E]: the adapter of each token
        self._kept = {index: group.block_size for index, group in enumerate(groups) if group.keeps_encoded}
        self._lengths = np.zeros(max_slots, np.int32)
        self._read = np.zeros(0, np.int32)  # [B]: what each row of the step reads
        self._begun = np.zeros(0, np.int32)  # [new requests]: what each brings
        self._tokens = device.streams.stage(np.zeros((2, 0), np.int32))  # ids, positions
        self._slots: dict[int, Tensor] = {}  # of each group, int64 [E]

    def write(self, plan: StepPlan) -> None:
        stage = self._device.streams.stage
        new = [(one, one.encoder_ids) for one in plan.added if one.encoder_ids is not None]
        self._begun = np.array([len(ids) for _, ids in new], np.int32)
        self._lengths[[one.slot for one in plan.added]] = 0
        self._lengths[[one.slot for one, _ in new]] = self._begun
        self._read = self._lengths[plan.slots]
        tokens = [np.stack((ids, np.arange(len(ids), dtype=np.int32))) for _, ids in new]
        self._tokens = stage(np.concatenate([np.zeros((2, 0), np.int32), *tokens], 1))
        self._adapted = stage(np.repeat(np.array([one.adapter for one, _ in new], np.int32), self._begun))
        for index, size in self._kept.items():
            slots = [np.zeros(0, np.int64)]  # as `GroupBatch.slot_mapping`
            for (one, _), (_, places) in zip(new, tokens, strict=True):
                slots.append(one.block_ids[index].astype(np.int64)[places // size] * size + places % size)
            self._slots[index] = stage(np.concatenate(slots))

    def batches(self, plan_groups: Sequence[int], slots: Tensor, found: list[GroupBatch]) -> list[GroupBatch]:
        made = list[GroupBatch]()
        for group, batch in zip(plan_groups, found, strict=True):
            if group == ENCODER_TOKENS:
                made.append(self._own(batch))
            else:
                made.append(self._across(batch, group, slots) if group in self._kept else batch)
        return made

    def given(self) -> tuple[Tensor, Tensor] | None:
        if self._adapters is not None and self._adapters.active:
            self._adapters.prepare_read(self._adapted)
        ids, positions = self._tokens.unbind(0)
        return ids, positions.long()

    def _own(self, batch: GroupBatch) -> GroupBatch:
        """Each new request as a row of its encoder tokens."""
        stage, lens = self._device.streams.stage, self._begun
        most = int(lens.max(initial=0))
        return replace(
            batch,
            num_tokens=int(lens.sum()),
            query_start=stage(np.concatenate(([0], lens.cumsum())).astype(np.int32)),
            seq_lens=stage(lens),
            host_query_lens=lens,
            host_seq_lens=lens,
            max_query_len=most,
            max_seq_len=most,
            prefix=None,
        )

    def _across(self, batch: GroupBatch, group: int, slots: Tensor) -> GroupBatch:
        """The decoder's rows, each over the encoder tokens of its request; what is stored are those of new ones."""
        lens = np.zeros(len(batch.host_query_lens), np.int32)
        lens[: len(self._read)] = self._read
        return replace(
            batch,
            seq_lens=self._device.streams.stage(lens),
            block_table=self._tables.blocks[group].index_select(0, slots.long()),
            slot_mapping=self._slots[group],
            host_seq_lens=lens,
            max_seq_len=int(lens.max(initial=0)),
            prefix=None,
        )
