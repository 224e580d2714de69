"""The scheduler side of the nixl connector: one engine computes prompts, another one reads their blocks and decodes.

A request tells by its parameters what it is: with `do_remote_decode` its blocks are kept when it ends, and the answer
says where; a request that brings that answer, with `do_remote_prefill`, has the blocks read that this engine lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from frame.interfaces import ConnectorScheduler, ConnectorSetup, RequestView, StepPlan, TransferReport, decode, encode

from .holds import Holds
from .listener import NixlListener
from .messages import MAX_BLOCKS, Load, NixlNote, NixlStep, Notice, WorkerFacts, machine
from .options import NixlOptions
from .pulls import Pulls, whole_tokens
from .shapes import Facts

logger = logging.getLogger("frame.connectors.nixl")


class NixlScheduler(ConnectorScheduler):
    """See the module. Raises `ValueError` for layers that keep an encoder's tokens."""

    reads_hashes = False

    def __init__(self, setup: ConnectorSetup, options: NixlOptions) -> None:
        super().__init__(setup, options)
        for group in self.layout.groups:
            if group.keeps_encoded:
                raise ValueError(f"the nixl connector cannot move what layer {group.layers[0]} keeps")
        self._options = options
        self._secret = options.secret()
        self._most_held, *states = (int((count - 1) * options.max_held_share) for count in self.layout.pools)
        self._holds = Holds(self.layout, options.lease_seconds, self._most_held, max_states=sum(states))
        self._workers: list[WorkerFacts] = []
        self._listener: NixlListener | None = None
        self._pulls: Pulls | None = None
        self._failed: set[str] = set()  # whose loads failed at some rank
        self._loads: list[Load] = []  # that the next step begins
        self._given: dict[str, list[list[int]]] = {}  # what it copies to host memory for others
        self._told_holds = False
        self._warned = False

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        self._workers = [decode(data, WorkerFacts) for _, data in sorted(handshakes.items())]
        if any(worker.machine != machine() for worker in self._workers):
            raise ValueError("the nixl connector serves engines whose workers are all on one machine")
        setup, options = self.setup, self._options
        if self._secret is None:
            logger.warning(
                "the nixl connector was given no secret_file, so this engine exchanges KV blocks with no other"
            )
            return
        shapes = [worker.shape for worker in self._workers]
        facts = Facts.of(self.layout, shapes, exact=setup.deterministic)
        if setup.role != "producer":
            self._pulls = Pulls(self.layout, options, self._secret, setup.address, facts)
        if setup.role != "consumer":
            self._listener = NixlListener(
                setup.address,
                options.port + setup.data_rank if options.port else 0,
                secret=self._secret,
                engine=setup.engine_id,
                facts=facts,
                holds=self._holds,
                agents=lambda: [worker.agent for worker in self._workers],
            )
            logger.info(
                "nixl connector: KV blocks may be read from %s:%d; up to %d of %d are held for %g s",
                setup.address,
                self._listener.port,
                self._most_held,
                self.layout.pools[0] - 1,
                options.lease_seconds,
            )
        if self._pulls is not None:
            logger.info("nixl connector: KV blocks are read from %s", ", ".join(options.peers) or setup.address)

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        return (0, False) if self._pulls is None else self._pulls.match(request, num_computed)

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        if self._pulls is not None and (load := self._pulls.allocated(request, block_ids, num_external)) is not None:
            self._loads.append(load)

    def build_message(self, plan: StepPlan) -> bytes:
        del plan
        loads, self._loads = self._loads, []
        given, self._given = self._given, {}
        deadlines = {} if self._pulls is None else self._pulls.renew()
        step = NixlStep(loads=loads, given=given, deadlines=deadlines, holds=self._holds.num_blocks > 0)
        if not (step.loads or step.deadlines or step.holds or self._told_holds):
            return b""
        self._told_holds = step.holds
        return encode(step)

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        if self._pulls is not None:
            self._pulls.finished(request)
        asked = self._listener is not None and request.params.get("do_remote_decode") is True
        # of other ends it is not known whether the prompt was computed, or nobody waits for it
        if asked and request.finish_reason in ("stop", "length"):
            return self._hold(request, block_ids)
        return False, None

    def update(self, report: TransferReport) -> list[str]:
        for rank, data in report.notes:
            note = decode(data, NixlNote)
            self._failed.update(note.failed)
            for notice in filter(None, map(Notice.of, note.notices)):
                self._holds.read(notice)
            for name in note.given:
                self._holds.given(name, rank)
            if note.facts is not None:
                self._workers[rank] = note.facts
        for name in report.given_up:
            if self._pulls is not None:
                self._pulls.received(name, failed=True)
        for name in report.received:
            if self._pulls is not None:
                self._pulls.received(name, name in self._failed)
            self._failed.discard(name)
        released = self._holds.collect()
        if self._listener is not None:
            report.gauges["nixl_held_blocks"] = float(self._holds.num_blocks)
        return released

    def reset(self) -> bool:
        return self._holds.clear()

    def close(self) -> None:
        if self._pulls is not None:
            self._pulls.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _hold(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        # all but the last one: the other engine's blocks may be shorter
        num_tokens = request.prompt_len - 1 if whole_tokens(request, self.layout) else 0
        blocks = [
            list(table[: group.blocks_for(num_tokens)])
            for table, group in zip(block_ids, self.layout.groups, strict=True)
        ]
        if self._listener is None or num_tokens == 0 or sum(map(len, blocks)) > MAX_BLOCKS:
            return False, None
        states = [table for table, group in zip(blocks, self.layout.groups, strict=True) if group.keeps_states]
        if not all(map(all, states)):
            return False, None  # no copy of its state was kept, or not for long enough
        buffered = [rank for rank, worker in enumerate(self._workers) if worker.buffered]
        if not self._holds.add(request.request_id, request.content, request.token_ids[:num_tokens], blocks, buffered):
            if not self._warned:
                logger.warning("as much of the KV cache as max_held_share allows is kept; further blocks are not")
            self._warned = True
            return False, None
        if buffered:
            self._given[request.request_id] = blocks
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": blocks,
            "remote_engine_id": self.setup.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.setup.address,
            "remote_port": self._listener.port,
            "tp_size": self.setup.mesh.tensor,
            "transfer_mode": "pull",
        }
