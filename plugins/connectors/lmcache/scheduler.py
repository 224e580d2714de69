"""The scheduler side of the lmcache connector: asks an LMCache server of this machine what it has of a prompt.

A request waits `lookup_seconds` for the answer and is computed by this engine without it. What the server has is
loaded while other requests run. A server that is gone, or not there yet, is met again later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from frame.interfaces import ConnectorSetup, RequestView, StepPlan, TransferReport, encode

from ..blocks.messages import BlockStep, Move
from ..blocks.scheduler import BlockScheduler
from .lookup import Lookup, Lookups, new_session
from .messages import Geometry, LMCacheStep, Prompt
from .options import LMCacheOptions
from .pool import object_bytes

#: The server hashes token ids as unsigned 32-bit numbers, and gives no answer where it cannot.
MAX_ID = (1 << 32) - 1


class LMCacheScheduler(BlockScheduler):
    """See the module. Raises `ValueError` for layers that keep a running state."""

    title = "lmcache"

    def __init__(self, setup: ConnectorSetup, options: LMCacheOptions) -> None:
        super().__init__(setup, options)
        for group in self.layout.groups:
            if group.keeps_states:
                raise ValueError(f"the lmcache connector cannot keep the running state of layer {group.layers[0]}")
        self._server = Lookups(options, setup.mesh.engine_size, self.layout.grain)
        self._block_bytes = 0  # of the rank that has most
        self._asked: dict[str, Lookup] = {}  # by request id, until the request gets its blocks
        self._used: dict[str, Lookup] = {}  # those of which blocks are being loaded
        self._known: dict[str, Prompt] = {}
        self._stored: dict[str, int] = {}  # how many units of a request's prompt the server had
        self._early: list[Move] = []  # grains that this step's new requests found in this engine's own cache

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        formats = {}
        for rank, handshake in handshakes.items():
            formats[rank], size = handshake.split()
            self._block_bytes = max(self._block_bytes, int(size))
        super().connect(formats)
        self._server.start(self._model)

    def match(self, request: RequestView, first: int, last: int) -> tuple[int | None, bool]:
        lookup = self._asked.get(request.request_id)
        if lookup is None:
            prompt = self._prompt(request)
            lookup = self._server.ask(prompt) if prompt is not None and first < last else None
            if lookup is None:
                return 0, False
            self._asked[request.request_id] = lookup
        if lookup.open:
            return None, False
        lookup.lapse()
        count = max(0, min(lookup.units * lookup.geometry.grains, last) - first)
        return count * self.layout.grain, count > 0

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        if not self.loads_any:
            self._prompt(request)
        return super().matched_tokens(request, num_computed)

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        begun = len(self._loads)
        super().allocated(request, block_ids, num_external)
        lookup, loads = self._asked.pop(request.request_id, None), self._loads[begun:]
        if lookup is None:
            return
        self._end(request.request_id)
        if lookup.chunks is not None:
            self._stored[request.request_id] = lookup.units
        grains, used = lookup.geometry.grains, range(0)
        if loads:
            used = range(loads[0].index // grains, loads[-1].index // grains + 1)
            self._used[request.request_id], self._known[request.request_id] = lookup, lookup.prompt
        self._server.settle(lookup, used)

    def message(self, step: BlockStep) -> LMCacheStep:
        prompts = {}
        for owner in {*step.entered, *(move.owner for move in step.loads)}:
            if owner in self._known:
                prompts[owner] = self._known[owner]
        early, self._early = self._early, []
        fields = {**msgspec.structs.asdict(step), "saves": [*early, *step.saves]}
        return LMCacheStep(**fields, geometry=self._server.geometry, prompts=prompts)

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        lookup = self._asked.pop(request.request_id, None)
        if lookup is not None:
            self._server.settle(lookup, range(0))
        self._known.pop(request.request_id, None)
        self._stored.pop(request.request_id, None)
        return super().finished(request, block_ids)

    def update(self, report: TransferReport) -> Iterable[str] | None:
        # also of requests that have ended: until now, workers could give back what they did not read
        for request_id in report.received:
            self._end(request_id)
        return super().update(report)

    def reset(self) -> bool:
        """False: this engine cannot drop what the server keeps for all."""
        return False

    def close(self) -> None:
        self._server.close()

    def _follow(self, plan: StepPlan) -> list[str]:
        """Also finds what the server lacks of new prompts that this engine has in its own cache.

        The server finds a chunk only behind all chunks before it, and stores chunks as a whole.
        """
        entered = super()._follow(plan)
        geometry = self._server.geometry
        for new in plan.added if geometry is not None else ():
            prompt, known = self._prompts.get(new.slot), self._known.get(new.request_id)
            if prompt is None or known is None or geometry is None or known.unit != geometry.unit:
                continue
            computed, grains = new.num_computed // self.layout.grain, geometry.grains
            stored = self._stored.get(new.request_id)
            first = computed // grains * grains if stored is None else min(stored * grains, computed)
            for index in range(first, computed):
                blocks = self.layout.grain_blocks(prompt.tables, index)
                if all(map(all, blocks)):
                    self._early.append(Move(new.request_id, prompt.hashes[index], blocks, index))
        return entered

    def _prompt(self, request: RequestView) -> Prompt | None:
        """What the server needs to know of the request's prompt; None when it can keep nothing of it."""
        self._server.seek()
        geometry = self._server.geometry
        if geometry is None:
            return None
        known, count = self._known.get(request.request_id), len(request.block_hashes) // geometry.grains
        if known is not None and known.unit == geometry.unit and len(known.units) == count:
            prompt = self._known[request.request_id] = msgspec.structs.replace(known, session=new_session())
            return prompt
        tokens = list(request.token_ids[: count * geometry.unit])
        if not count or min(tokens) < 0 or max(tokens) > MAX_ID:
            return None
        last = range(geometry.grains - 1, count * geometry.grains, geometry.grains)
        prompt = Prompt(
            session=new_session(),
            salt=request.content.hex(),
            unit=geometry.unit,
            tokens=encode(tokens),
            units=[request.block_hashes[index] for index in last],
        )
        self._known[request.request_id] = prompt
        return prompt

    def _end(self, request_id: str) -> None:
        lookup = self._used.pop(request_id, None)
        if lookup is not None:
            self._server.end(lookup)

    def _model(self, chunk: int) -> tuple[str, int]:
        """The name under which this engine's objects are stored, and their size; see `Geometry`."""
        geometry = Geometry(model="", chunk=chunk, grain=self.layout.grain, world=len(self.spaces), object_bytes=0)
        size = object_bytes(-(-geometry.grains * self._block_bytes // geometry.chunks))
        facts = [self.spaces, chunk, size]
        return f"frame-{hashlib.sha256(encode(facts)).hexdigest()[:32]}", size
