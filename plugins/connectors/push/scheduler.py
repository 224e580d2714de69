"""The scheduler side of the push connector: one engine computes prompts and sends their blocks, another one decodes.

A request tells by its parameters what it is: with `do_remote_decode` its blocks are sent, while it is computed, to the
engine at `remote_host` and `remote_port`; one with `do_remote_prefill` gets the blocks that come for its prompt.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frame.interfaces import ConnectorScheduler, ConnectorSetup, RequestView, StepPlan, TransferReport, decode, encode

from ..nixl.messages import machine
from .decode_side import Arrivals
from .door import Door
from .facts import Facts
from .messages import Hello, PushNote, PushStep
from .options import PushOptions, SendOptions
from .prefill_side import Pushes, Sends


class SendScheduler(ConnectorScheduler):
    """What is common to connectors whose prefill engines send blocks. `title` is the connector's name.

    Raises `ValueError` for layers that keep an encoder's tokens.
    """

    title: ClassVar[str]
    reads_hashes = False

    def __init__(self, setup: ConnectorSetup, options: SendOptions) -> None:
        super().__init__(setup, options)
        for group in self.layout.groups:
            if group.keeps_encoded:
                raise ValueError(f"the {self.title} connector cannot move what layer {group.layers[0]} keeps")
        self.logger = logging.getLogger(f"frame.connectors.{self.title}")
        self._options = options
        self._secret = options.secret()
        self.door: Door | None = None
        self.sends: Sends | None = None
        self.arrivals: Arrivals | None = None
        self._told = False  # whether the message before said something

    @abstractmethod
    def open_sends(self, secret: bytes, facts: Sequence[Facts]) -> Sends:
        """What is sent where; `facts` are those of this engine's workers."""

    def open_asks(self, secret: bytes, facts: Sequence[Facts]) -> None:
        """Called where blocks are taken."""

    @abstractmethod
    def answer(self, request: RequestView) -> dict[str, Any]:
        """The parameters of who takes the blocks of a request that ended."""

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        setup = self.setup
        workers = [decode(data, Hello) for _, data in sorted(handshakes.items())]
        if any(worker.machine != machine() for worker in workers):
            raise ValueError(f"the {self.title} connector serves engines whose workers are all on one machine")
        if self._secret is None:
            self.logger.warning(
                "the %s connector was given no secret_file, so this engine exchanges KV blocks with no other",
                self.title,
            )
            return
        facts = [Facts.of(self.layout, setup.mesh, worker.formats) for worker in workers]
        if setup.role != "consumer":
            self.sends = self.open_sends(self._secret, facts)
        if setup.role != "producer":
            self.arrivals = Arrivals(self.layout, setup.mesh.engine_size, self._options.wait_seconds)
            self.door = Door(
                setup.address,
                self._options.port + setup.data_rank if self._options.port else 0,
                secret=self._secret,
                facts=facts,
                ports=[worker.port for worker in workers],
                name=self.title,
            )
            self.logger.info("KV blocks of prompts are taken at %s:%d", setup.address, self.door.port)
            self.open_asks(self._secret, facts)

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        return (0, False) if self.arrivals is None else self.arrivals.match(request, num_computed)

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        if self.sends is not None:
            self.sends.allocated(request)
        if self.arrivals is not None:
            self.arrivals.allocated(request, block_ids, num_external)

    def build_message(self, plan: StepPlan) -> bytes:
        step = PushStep()
        if self.sends is not None:
            self.sends.fill(step, plan)
        if self.arrivals is not None:
            self.arrivals.fill(step)
        says = step != PushStep()
        if not says and not self._told:
            return b""
        self._told = says
        return encode(step)

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        if self.arrivals is not None:
            self.arrivals.finished(request)
        if self.sends is None or not self.sends.finished(request, block_ids):
            return False, None
        return True, self.answer(request)

    def update(self, report: TransferReport) -> list[str]:
        released: list[str] = []
        for rank, data in report.notes:
            note = decode(data, PushNote)
            if self.arrivals is not None:
                self.arrivals.told(rank, note.arrivals)
            if self.sends is not None:
                self.sends.unsent(note.unsent)
        if self.arrivals is not None:
            self.arrivals.received(report.received)
        if self.sends is not None:
            released = self.sends.released(report.sent)
            report.gauges[f"{self.title}_held_blocks"] = float(self.sends.num_held)
        return released

    def reset(self) -> bool:
        if self.sends is not None:
            self.sends.forget()
            if self.sends.busy:
                return False
        return self.arrivals is None or self.arrivals.reset()

    def close(self) -> None:
        if self.door is not None:
            self.door.close()
            self.door = None


class PushScheduler(SendScheduler):
    """See the module."""

    title = "push"

    def __init__(self, setup: ConnectorSetup, options: PushOptions) -> None:
        super().__init__(setup, options)
        self._pushes = lambda: Pushes(self.layout, options, setup.address)

    def open_sends(self, secret: bytes, facts: Sequence[Facts]) -> Sends:
        return self._pushes()

    def answer(self, request: RequestView) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.setup.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.setup.address,
            "remote_port": None if self.door is None else self.door.port,
            "tp_size": self.setup.mesh.tensor,
            "transfer_mode": "push",
        }
