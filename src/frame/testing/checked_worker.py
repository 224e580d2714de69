"""Wraps a connector's worker side: passes every call on, and notes what breaks the contract or lets reports come late.

What a worker raises ends a step's requests, so faults are kept for the end of the test instead of raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from frame.core.interfaces.connector import CacheView, ConnectorWorker
from frame.core.interfaces.step import TransferReport


class CheckedWorker(ConnectorWorker):
    """`faults` says what this rank did wrong. `late` is by how many steps the ends of transfers are told late.

    `loads` counts the loads of each request that the scheduler side was told to make.
    """

    def __init__(self, inner: ConnectorWorker, loads: Mapping[str, int], late: int = 0) -> None:
        super().__init__(inner.setup, inner.options)
        self.inner = inner
        self.moves_states = inner.moves_states
        self.faults: list[str] = []
        self._late = late
        self._waiting: list[tuple[list[str], list[str]]] = [([], [])] * late  # (sent, received) of the last steps
        self._finished: set[str] = set()
        self._loads = loads
        self._told: dict[str, Counter[str]] = {"sent": Counter(), "received": Counter()}

    def register(self, caches: Mapping[str, CacheView]) -> None:
        self.inner.register(caches)
        self.hooks = self.inner.hooks

    def end_access(self) -> None:
        self.inner.end_access()

    def begin_step(self, message: bytes) -> None:
        self.inner.begin_step(message)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self._finished.update(finished)
        report: object = self.inner.end_step(finished)
        if not isinstance(report, TransferReport):
            self.faults.append(f"end_step must give a TransferReport, gave {report!r}")
            return TransferReport()
        if strange := sorted(set(report.sent) - self._finished):
            self.faults.append(f"{strange} were reported as sent before they were named as finished")
        for what, names in (("sent", report.sent), ("received", report.received)):
            told = self._told[what]
            told.update(names)
            most = self._loads if what == "received" else {}
            if often := sorted(name for name in set(names) if told[name] > max(1, most.get(name, 1))):
                self.faults.append(f"{often} were reported as {what} once more than they were")
        self._waiting.append((report.sent, report.received))
        sent, received = self._waiting.pop(0)
        return replace(report, sent=sent, received=received)

    def pending_loads(self) -> Iterable[str] | None:
        pending = self.inner.pending_loads()
        return None if pending is None else {*pending, *(name for _, received in self._waiting for name in received)}

    def handshake(self) -> bytes:
        return self.inner.handshake()

    def close(self) -> None:
        self.inner.close()
