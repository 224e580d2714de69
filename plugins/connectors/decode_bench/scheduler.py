"""The scheduler side of the decode-bench connector: claims every prompt, so that an engine does nothing but decode.

For load tests of decoding with contexts of any length: answers are made up. Sees no block's bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from frame.interfaces import ConnectorScheduler, ConnectorSetup, RequestView, StepPlan, encode

from .messages import DecodeBenchOptions, FillStep

logger = logging.getLogger("frame.connectors.decode_bench")


class DecodeBenchScheduler(ConnectorScheduler):
    """See the module. Raises `ValueError` for layers that keep a running state or an encoder's tokens."""

    def __init__(self, setup: ConnectorSetup, options: DecodeBenchOptions) -> None:
        super().__init__(setup, options)
        for group in self.layout.groups:
            if group.keeps_states or group.keeps_encoded:
                raise ValueError(f"the decode-bench connector cannot make up what layer {group.layers[0]} keeps")
        self._claims = setup.role != "producer"
        self._filled: set[str] = set()  # unfinished requests whose blocks were made up; preempted ones are computed
        self._blocks: list[list[int]] = [[] for _ in self.layout.groups]
        logger.warning("kv_connector decode-bench: prompts are not computed, so answers are made up")

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        if not self._claims or request.request_id in self._filled:
            return 0, False
        grain = self.layout.grain
        whole = (request.prompt_len - 1) // grain * grain  # its last token is computed, for its logits
        return max(0, whole - num_computed), False

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        if not num_external:
            return
        self._filled.add(request.request_id)
        for found, table, group in zip(self._blocks, block_ids, self.layout.groups, strict=True):
            found += [int(block) for block in table[-(num_external // group.block_size) :] if block]

    def build_message(self, plan: StepPlan) -> bytes:
        del plan
        blocks, self._blocks = self._blocks, [[] for _ in self.layout.groups]
        return encode(FillStep(blocks)) if any(blocks) else b""

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        self._filled.discard(request.request_id)
        return False, None
