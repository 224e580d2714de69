"""The worker side of the multi connector: calls that of each connector, and keeps apart what they report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from frame.interfaces import (
    CacheView,
    ConnectorWorker,
    ConnectorWorkerSetup,
    GroupBatch,
    LayerHooks,
    TransferReport,
    decode,
    encode,
)

from .messages import ChildNote, Ended, MultiOptions, MultiStep


class SeveralHooks(LayerHooks):
    """Calls several hooks, in order; in steps of single tokens those alone that ask for these."""

    def __init__(self, hooks: Sequence[LayerHooks]) -> None:
        self._hooks = hooks

    def before(self, layer: str, batch: GroupBatch) -> None:
        for one in self._called(batch):
            one.before(layer, batch)

    def after(self, layer: str, batch: GroupBatch) -> None:
        for one in self._called(batch):
            one.after(layer, batch)

    def _called(self, batch: GroupBatch) -> Iterable[LayerHooks]:
        return self._hooks if batch.max_query_len > 1 else [one for one in self._hooks if one.decode_steps]


class SeveralStepHooks(SeveralHooks):
    """Where one of them asks for steps of single tokens."""

    decode_steps = True


class MultiWorker(ConnectorWorker):
    """See the module."""

    def __init__(self, setup: ConnectorWorkerSetup, options: MultiOptions) -> None:
        super().__init__(setup, options)
        if setup.make is None:
            raise ValueError("its worker side needs a setup that makes connectors")
        self._parts: list[ConnectorWorker] = []
        try:
            for child in options.connectors:
                own = replace(setup, role=child.kv_role or setup.role)
                self._parts.append(setup.make("connector", child.kv_connector, own, child.options, "worker"))
        except BaseException:
            self.close()
            raise
        self.moves_states = all(part.moves_states for part in self._parts)
        self._ended: list[Ended] = []  # what the scheduler side named, and this side has not told
        self._told: set[int] = set()  # numbers of loads that the scheduler side may name again
        self._untold: list[ChildNote] = []  # of a step in which another connector raised

    def register(self, caches: Mapping[str, CacheView]) -> None:
        _each([lambda part=part: part.register(caches) for part in self._parts])  # type: ignore[misc]
        hooks = [part.hooks for part in self._parts if type(part.hooks) is not LayerHooks]
        if len(hooks) > 1 and not isinstance(self.hooks, SeveralHooks):
            self.hooks = (SeveralStepHooks if any(one.decode_steps for one in hooks) else SeveralHooks)(hooks)
        elif len(hooks) == 1:
            self.hooks = hooks[0]

    def end_access(self) -> None:
        _each([part.end_access for part in self._parts])

    def handshake(self) -> bytes:
        return encode([part.handshake() for part in self._parts])

    def begin_step(self, message: bytes) -> None:
        step = decode(message, MultiStep) if message else MultiStep([b""] * len(self._parts))
        if message:
            self._told &= {one.number for one in step.ended}
            self._ended = [one for one in step.ended if one.number not in self._told]
        parts = zip(self._parts, step.messages, strict=True)
        _each([lambda part=part, own=own: part.begin_step(own) for part, own in parts])  # type: ignore[misc]

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        def end(place: int, part: ConnectorWorker) -> None:
            self._untold.append(ChildNote(place, part.end_step(finished)))

        parts = enumerate(self._parts)
        _each([lambda place=place, part=part: end(place, part) for place, part in parts])  # type: ignore[misc]
        told, self._untold = self._untold, []
        ended, self._ended = self._ended, []
        self._told.update(one.number for one in ended)
        received = [name for note in told for name in note.report.received]
        failed = [block for note in told for block in note.report.failed_blocks]
        nothing = TransferReport()
        return TransferReport(
            received=received + [one.owner for one in ended],
            given_up=[name for note in told for name in note.report.given_up],
            failed_blocks=failed + [block for one in ended for block in one.failed],
            notes=[(self.rank, encode(note)) for note in told if note.report != nothing],
        )

    def pending_loads(self) -> list[str] | None:
        named = [part.pending_loads() for part in self._parts]
        pending = [names for names in named if names is not None]
        return [name for names in pending for name in names] if len(pending) == len(named) else None

    def close(self) -> None:
        _each([part.close for part in self._parts])


def _each(calls: Iterable[Callable[[], None]]) -> None:
    """Makes all calls; raises the first error."""
    errors = list[Exception]()
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
