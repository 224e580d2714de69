"""The scheduler side of the push connector: one engine computes prompts and sends their blocks, another one decodes.

A request tells by its parameters what it is: with `do_remote_decode` its blocks are sent, while it is computed, to the
engine at `remote_host` and `remote_port`; one with `do_remote_prefill` gets the blocks that come for its prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from frame.interfaces import ConnectorScheduler, ConnectorSetup, RequestView, StepPlan, TransferReport, decode, encode

from .nixl_messages import Facts, machine
from .push_door import Door
from .push_in import Arrivals
from .push_messages import Hello, PushNote, PushStep
from .push_options import PushOptions
from .push_out import Pushes

logger = logging.getLogger("frame.connectors.push")


class PushScheduler(ConnectorScheduler):
    """See the module. Raises `ValueError` for layers that keep a running state or an encoder's tokens."""

    def __init__(self, setup: ConnectorSetup, options: PushOptions) -> None:
        super().__init__(setup, options)
        for group in self.layout.groups:
            if group.keeps_states or group.keeps_encoded:
                raise ValueError(f"the push connector cannot move what layer {group.layers[0]} keeps")
        self._options = options
        self._secret = options.secret()
        self._door: Door | None = None
        self._pushes: Pushes | None = None
        self._arrivals: Arrivals | None = None
        self._told = False  # whether the message before named requests that wait

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        setup, options = self.setup, self._options
        workers = [decode(data, Hello) for _, data in sorted(handshakes.items())]
        if any(worker.machine != machine() for worker in workers):
            raise ValueError("the push connector serves engines whose workers are all on one machine")
        if self._secret is None:
            logger.warning(
                "the push connector was given no secret_file, so this engine exchanges KV blocks with no other"
            )
            return
        if setup.role != "consumer":
            self._pushes = Pushes(self.layout, options, setup.address)
        if setup.role != "producer":
            self._arrivals = Arrivals(self.layout, setup.mesh.size, options.wait_seconds)
            self._door = Door(
                setup.address,
                options.port + setup.data_rank if options.port else 0,
                secret=self._secret,
                facts=[Facts.of(self.layout, setup.mesh, [worker.formats]) for worker in workers],
                ports=[worker.port for worker in workers],
            )
            logger.info("KV blocks of prompts are taken at %s:%d", setup.address, self._door.port)

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        return (0, False) if self._arrivals is None else self._arrivals.match(request, num_computed)

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        if self._pushes is not None:
            self._pushes.allocated(request)
        if self._arrivals is not None:
            self._arrivals.allocated(request, block_ids, num_external)

    def build_message(self, plan: StepPlan) -> bytes:
        step = PushStep()
        if self._pushes is not None:
            self._pushes.fill(step, plan)
        if self._arrivals is not None:
            self._arrivals.fill(step)
        if step == PushStep() and not self._told:
            return b""
        self._told = step != PushStep()
        return encode(step)

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        if self._arrivals is not None:
            self._arrivals.finished(request)
        if self._pushes is None or not self._pushes.finished(request, block_ids):
            return False, None
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.setup.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.setup.address,
            "remote_port": None if self._door is None else self._door.port,
            "tp_size": self.setup.mesh.tensor,
            "transfer_mode": "push",
        }

    def update(self, report: TransferReport) -> None:
        for rank, data in report.notes:
            note = decode(data, PushNote)
            if self._arrivals is not None:
                self._arrivals.told(rank, note.arrivals)
            if self._pushes is not None:
                self._pushes.unsent(note.unsent)
        if self._arrivals is not None:
            self._arrivals.received(report.received)
        if self._pushes is not None:
            self._pushes.released(report.sent)
            report.gauges["push_held_blocks"] = float(self._pushes.num_held)

    def reset(self) -> bool:
        if self._pushes is not None and self._pushes.busy:
            return False
        return self._arrivals is None or self._arrivals.reset()

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None
