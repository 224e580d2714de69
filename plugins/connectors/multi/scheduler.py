"""The scheduler side of the multi connector, which holds several: the first that has a prompt loads it, all save.

Each sees the engine as if it were the only one: its own messages, reports and ids. What one of them loads is there
before anything is computed from it, also where it could load within a step: the others would save what was computed
from blocks that did not arrive. One that raises costs its own help and nothing else.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from frame.interfaces import (
    ConnectorScheduler,
    ConnectorSetup,
    RequestView,
    StepPlan,
    TransferReport,
    decode,
    encode,
)
from frame.transfers.holds import Holds
from frame.transfers.merging import ReportMerge

from .messages import ChildNote, Ended, MultiOptions, MultiStep

logger = logging.getLogger("frame.connectors.multi")

T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """Load `number`, of request `owner`: the `blocks` (group, id) that it fills; `later`: its end is reported."""

    number: int
    owner: str
    blocks: list[tuple[int, int]]
    later: bool


@dataclass(eq=False)
class Part:
    """One of the connectors. `label` names it in messages and metrics, other than its twins."""

    connector: ConnectorScheduler
    name: str
    label: str
    merge: ReportMerge
    holds: Holds  # requests that ended and whose blocks it keeps
    silent: bool = False  # it raised where a later message could load into blocks that others hold by then
    left: set[str] = field(default_factory=set)  # unfinished requests about which it raised, of which it hears no more
    known: set[str] = field(default_factory=set)  # unfinished requests of which it was asked
    loading: set[str] = field(default_factory=set)  # requests whose blocks it fills
    new_loads: list[Load] = field(default_factory=list)  # that its next message begins

    def awaits(self, request_id: str) -> bool:
        """Whether blocks of a request wait for this connector's workers."""
        return request_id in self.holds or request_id in self.loading

    def fall_silent(self) -> None:
        """Called when it raised where it may have lost what its workers were to hear: they hear nothing more."""
        self.silent = True
        self.holds.fail()

    def metric(self, name: str) -> str:
        """The name of one of its counters or gauges beside those of the others."""
        prefix = f"{_plain(self.name)}_"
        return f"{self.label}_{name.removeprefix(prefix)}"


class MultiScheduler(ConnectorScheduler):
    """See the module."""

    def __init__(self, setup: ConnectorSetup, options: MultiOptions) -> None:
        super().__init__(setup, options)
        if setup.make is None:
            raise ValueError("its scheduler side needs a setup that makes connectors")
        made = list[ConnectorScheduler]()
        try:
            for child in options.connectors:
                own = replace(setup, role=child.kv_role or setup.role)
                made.append(setup.make("connector", child.kv_connector, own, child.options))
        except BaseException:
            _close(made)
            raise
        self._parts = _named(made)
        self.reads_hashes = any(one.reads_hashes for one in made)
        self._choice: dict[str, tuple[Part, bool]] = {}  # by request: who has its prompt, and whether it tells the end
        self._ended: dict[str, Ended] = {}  # by request: loads that no worker side tells of
        self._num_loads = 0

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        parts = {rank: decode(data, list[bytes]) for rank, data in handshakes.items()}
        for place, part in enumerate(self._parts):
            part.merge = ReportMerge(len(handshakes), part.awaits)
            try:
                part.connector.connect({rank: own[place] for rank, own in parts.items()})
            except ValueError as error:
                raise ValueError(f"connector {part.label}: {error}") from error

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        name, waits = request.request_id, False
        self._choice.pop(name, None)
        found: tuple[int, Part, bool] | None = None
        for part in self._parts:  # all are asked: those that are not chosen save
            if part.silent or name in part.left:
                continue
            part.known.add(name)
            nothing = (0, False)
            count, later = self._ask(part, "matched_tokens", request, nothing, num_computed)
            waits |= count is None
            if count and count > 0 and found is None:
                found = count, part, later
        if waits or found is None:
            return (None if waits else 0), False
        count, part, later = found
        self._choice[name] = part, later
        return count, True

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        name = request.request_id
        chosen, later = self._choice.pop(name, (None, False))
        load: Load | None = None
        if num_external:
            load = Load(self._num_loads, name, self._blocks(block_ids, num_external), later)
            self._num_loads += 1
        for part in self._parts:
            if part.silent or name in part.left:
                continue
            external = num_external if part is chosen else 0
            if self._ask(part, "allocated", request, False, block_ids, external) is False:
                part.fall_silent()
            if load is not None and part is chosen and not part.silent:
                part.new_loads.append(load)
                part.loading.add(name)
                load = None
        if load is not None:
            self._lose(load)

    def build_message(self, plan: StepPlan) -> bytes:
        messages = [self._message(part, plan) for part in self._parts]
        ended = list(self._ended.values())
        return encode(MultiStep(messages, ended)) if ended or any(messages) else b""

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        self._choice.pop(name, None)
        answers = dict[str, dict[str, Any]]()
        for part in self._parts:
            known = name in part.known
            part.known.discard(name)
            if part.silent and not known:
                continue  # it would keep blocks, and offer them to others, that no worker sends
            held, parameters = self._ask(part, "finished", request, (False, None), block_ids)
            part.left.discard(name)
            if held:
                part.holds.add(name)
            if parameters is not None:
                answers[part.label] = parameters
        if len(answers) > 1:
            logger.error(
                "connectors %s each give parameters for the answer of request %s, which gets none: let one of them be "
                "a consumer",
                " and ".join(answers),
                name,
            )
            answers = {}
        return any(name in part.holds for part in self._parts), next(iter(answers.values()), None)

    def update(self, report: TransferReport) -> Iterable[str]:
        rounds: list[dict[int, dict[int, TransferReport]]] = [{} for _ in self._parts]
        for rank, data in report.notes:
            note = decode(data, ChildNote)
            own = rounds[note.place]
            own.setdefault(sum(rank in one for one in own.values()), {})[rank] = note.report
        released = set[str]()
        for part, own in zip(self._parts, rounds, strict=True):
            for reports in list(own.values()) or [{}]:
                merged = part.merge.merge(reports)
                told = {*merged.received, *self._ended}
                merged.received += [name for name in report.received if name in part.loading and name not in told]
                released |= self._update(part, merged)
                for name, value in merged.counters.items():
                    report.counters[part.metric(name)] = report.counters.get(part.metric(name), 0.0) + value
                report.gauges.update({part.metric(name): value for name, value in merged.gauges.items()})
        for name in report.received:
            self._ended.pop(name, None)
            for part in self._parts:
                part.loading.discard(name)
        return [name for name in released if not any(name in part.holds for part in self._parts)]

    def reset(self) -> bool:
        answers = [_tried(part, part.connector.reset, otherwise=False) for part in self._parts]
        return all(answers)

    def close(self) -> None:
        _close([part.connector for part in self._parts])

    def _message(self, part: Part, plan: StepPlan) -> bytes:
        """The connector's own message; its loads that are not begun, or of whose end it tells nothing, end at once."""
        loads, part.new_loads = part.new_loads, []
        message = b""
        if not part.silent:
            answer = _tried(part, lambda: part.connector.build_message(plan), otherwise=None)
            if answer is None:
                part.fall_silent()
            message = answer or b""
        for load in loads:
            if part.silent:
                part.loading.discard(load.owner)
                self._lose(load)
            elif not load.later:
                self._ended[load.owner] = Ended(load.number, load.owner)
        return message

    def _update(self, part: Part, report: TransferReport) -> set[str]:
        """Passes a connector its report; returns the requests whose blocks it no longer holds."""
        given = _tried(part, lambda: list(part.connector.update(report) or ()), otherwise=None)
        if given is None:
            part.holds.fail()
        released = {name for name in (*report.sent, *(given or ())) if name in part.holds}
        for name in released:
            part.holds.discard(name)
        return released.union(part.holds.take_overdue())

    def _lose(self, load: Load) -> None:
        self._ended[load.owner] = Ended(load.number, load.owner, load.blocks)

    def _blocks(self, block_ids: Sequence[Sequence[int]], num_external: int) -> list[tuple[int, int]]:
        """(group, id) of the blocks that hold the last `num_external` tokens of those in `block_ids`."""
        found = list[tuple[int, int]]()
        for place, (group, table) in enumerate(zip(self.layout.groups, block_ids, strict=True)):
            count = -(-num_external // group.block_size)
            found += [(place, int(block)) for block in table[-count:] if block]
        return found

    def _ask(self, part: Part, method: str, request: RequestView, otherwise: Any, *arguments: Any) -> Any:
        """What a connector answers about a request; `otherwise` where it raises, and then it hears no more of it."""
        try:
            return getattr(part.connector, method)(request, *arguments)
        except Exception:
            name = request.request_id
            logger.exception("connector %s failed in %s; request %s goes on without it", part.label, method, name)
            part.left.add(name)
            return otherwise


def _named(connectors: Sequence[ConnectorScheduler]) -> list[Part]:
    """The connectors with their labels: the plugin's name, numbered where there are several of it."""
    names = [one.setup.plugin.rpartition(":")[2] for one in connectors]
    parts, counts = list[Part](), Counter[str]()
    for name, connector in zip(names, connectors, strict=True):
        label = f"{_plain(name)}_{counts[name]}" if names.count(name) > 1 else _plain(name)
        counts[name] += 1
        parts.append(Part(connector, name, label, ReportMerge(1), Holds(connector.setup.plugin)))
    return parts


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "_", name.lower())


def _tried(part: Part, call: Callable[[], T], otherwise: T) -> T:
    """What a connector answers; `otherwise` where it raises."""
    try:
        return call()
    except Exception:
        logger.exception("connector %s failed", part.label)
        return otherwise


def _close(connectors: Iterable[ConnectorScheduler]) -> None:
    """Closes all; raises the first error."""
    errors = list[Exception]()
    for connector in connectors:
        try:
            connector.close()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
