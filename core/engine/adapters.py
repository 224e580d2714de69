"""Which adapters there are, which of them are in host memory, and which of the device's slots each one has.

Workers read an adapter in a thread of theirs, under a number that this side gives it; requests that need one that is
not there wait, and no other does. What was loaded again under the same name is another adapter, with another number.
Slots change hands in plans only, so that no step meets another adapter than the one it was planned with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frame.quoting import quoted

from ..interfaces.adapters import AdapterLoad, AdapterSource
from ..interfaces.engine import EngineStats
from ..interfaces.step import StepPlan

if TYPE_CHECKING:
    from .request import Request
    from .schedule.batch import Batch

#: Seconds between two questions whether the workers have read an adapter.
_POLL_SECONDS = 0.02
#: So many requests with adapters may begin before one that waits for a slot; then those behind it wait, too.
MOST_PASSED = 16


def no_workers(method: str, arguments: dict[str, Any]) -> Any:
    """Stands for the workers where there are none to read adapters."""
    raise ValueError(f"there is no worker that could {method}")


@dataclass(eq=False)
class Adapter:
    """One content of a name. `digest` is empty until all workers have read it; `slot` 0 is none."""

    source: AdapterSource
    key: int
    replaced: str = ""
    digest: str = ""
    slot: int = 0
    on_host: bool = False
    reading: bool = False
    pinned: bool = False
    failed: str = ""
    num_added: int = 0

    @property
    def identity(self) -> str:
        """What decides, of the adapter, the content of a KV block."""
        return f"{self.source.name}\0{self.digest}"


class AdapterTable:
    """`call(method, arguments)` calls every worker; `used` gives the adapters of unfinished requests."""

    def __init__(
        self,
        max_slots: int,
        max_host: int,
        call: Callable[[str, dict[str, Any]], Any],
        used: Callable[[], Iterable[Adapter | None]],
    ) -> None:
        self._call, self._used, self._max_host = call, used, max_host
        self._slots: list[Adapter | None] = [None] * max_slots
        self._by_name: dict[str, Adapter] = {}
        self._fresh: dict[str, Adapter] = {}  # those that are loaded, until they can be used
        self._reading: set[Adapter] = set()
        self._failed: set[Adapter] = set()
        self._gone: set[str] = set()  # names that were unloaded: their requests do not bring them back
        self._recent: dict[Adapter, None] = {}  # those on the host, the least recently used first
        self._loads: dict[int, AdapterLoad] = {}  # by slot, for the next plan
        self._num_keys = 0
        self._asked = 0.0
        self._num_passed = 0
        self._held: Request | None = None  # the first of the queue that waits for a slot
        self._is_full: bool | None = None  # whether the host has room for no more, once a look at the queue asked

    @property
    def has_failed(self) -> bool:
        """Whether some could not be read again, so that their requests must end."""
        return bool(self._failed)

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is on its way to the host."""
        return bool(self._reading)

    def load(self, name: str, path: str, *, replace: str = "") -> bool:
        """Whether an adapter can be used from now on; False while it is read: call again.

        Raises `ValueError` for one that does not fit, and where another folder is loaded under the name, unless it is
        to be replaced: then `replace` is a text that each replacement has anew. A request that was added before keeps
        what it began with.
        """
        if not self._slots:
            raise ValueError("adapters are off: start with enable_lora")
        source, present, fresh = AdapterSource(name, path), self._by_name.get(name), self._fresh.get(name)
        if (taken := next((one for one in (fresh, present) if one), None)) and not replace and taken.source != source:
            raise ValueError(f"another folder is loaded as {name!r}: {taken.source.path}")
        if fresh is None and (present is None or (replace and present.replaced != replace)):
            self._num_keys += 1
            fresh = self._fresh[name] = Adapter(source, self._num_keys, replace)
            self._read(fresh)
        if fresh is not None:
            self._poll(fresh)
            if fresh.reading:
                return False
            del self._fresh[name]
            if fresh.failed:
                self._failed.discard(fresh)
                raise ValueError(fresh.failed)
            fresh.num_added = 0 if present is None else present.num_added
            self._by_name[name] = fresh
            self._gone.discard(name)
        return True

    def unload(self, name: str) -> None:
        """No further request gets the adapter; those that were added finish. Raises `ValueError` for an unknown one."""
        self._gone.add(name)  # also of an engine that was started again, which would have it read for a late request
        if self._by_name.pop(name, None) is None:
            raise ValueError(f"no adapter {quoted(name)} is loaded; there are: {', '.join(self._by_name) or 'none'}")
        self._make_room()

    def pin(self, name: str) -> None:
        """Keeps an adapter in host memory; raises `ValueError` for an unknown one, or where no other had room then."""
        found = self._by_name.get(name)
        if found is None:
            raise ValueError(f"no adapter {quoted(name)} is loaded; there are: {', '.join(self._by_name) or 'none'}")
        if not found.pinned and sum(one.pinned for one in self._by_name.values()) >= self._max_host - 1:
            raise ValueError(f"{quoted(name)} cannot be pinned: of max_cpu_loras {self._max_host} one must stay free")
        found.pinned = True

    def list(self) -> list[dict[str, Any]]:
        """The adapters that can be used: name, path, digest."""
        every = self._by_name.values()
        return [
            {"name": one.source.name, "path": one.source.path, "digest": one.digest, "pinned": one.pinned}
            for one in every
            if one.digest
        ]

    def of(self, source: AdapterSource | None) -> Adapter | None:
        """The adapter of a new request; one that this engine never knew is read first, while all wait.

        That happens where an engine was started again. Raises `ValueError` for one that is unloaded or does not fit.
        """
        if source is None:
            return None
        if source.name in self._gone:
            raise ValueError(
                f"no adapter {quoted(source.name)} is loaded; there are: {', '.join(self._by_name) or 'none'}"
            )
        while (known := self._by_name.get(source.name)) is None:
            try:
                is_read = self.load(source.name, source.path)
            except ValueError:
                self._gone.add(source.name)  # the next request for it is told so without a wait of all
                raise
            if not is_read:
                time.sleep(_POLL_SECONDS)
        known.num_added += 1
        return known

    def begin(self) -> None:
        """Called before the queue is looked through."""
        self._held = self._is_full = None

    def may_run(self, adapter: Adapter | None) -> bool:
        """Whether an adapter is in host memory; has it read otherwise."""
        if adapter is None or adapter.on_host or adapter.slot:
            return True
        if adapter.failed:
            return False
        if not adapter.reading:
            if self._full():
                return False
            self._read(adapter)
            self._is_full = None
        self._poll(adapter)
        return adapter.on_host

    def _full(self) -> bool:
        """Whether another adapter must wait, because the host has as many as it may, for requests or on their way.

        One more is read where all that are there have slots, of which one becomes free some time.
        """
        if self._is_full is None:
            used = set(self._used())
            idle = sum(one in used and not (one.slot or one.pinned) for one in self._recent)
            kept = sum(bool(one.slot or one.pinned) for one in self._recent)
            coming = len(self._reading)
            self._is_full = idle + kept + coming >= self._max_host and bool(idle or coming)
        return self._is_full

    def has_slot(self, request: Request, batch: Batch) -> bool:
        """Whether a waiting request may begin beside those that run, which are the `batch`."""
        adapter = request.adapter
        if adapter is None:
            return True
        if self._held is not None and (self._num_passed >= MOST_PASSED or not adapter.slot):
            return False  # the one that waits found no slot free, and none becomes free meanwhile
        if adapter.slot or self._free_slot(batch.requests) is not None:
            if self._held is not None:
                self._num_passed += 1
            return True
        if self._held is None:
            self._held = request
        return False

    def take(self, request: Request, batch: Batch) -> int:
        """The slot of a request that has just entered the batch, 0 without an adapter."""
        adapter = request.adapter
        if adapter is None:
            return 0
        if adapter in self._recent:
            self._recent[adapter] = self._recent.pop(adapter)
        if not adapter.slot:
            place = self._free_slot([one for one in batch.requests if one is not request])
            if place is None:
                raise RuntimeError(f"no slot is free for the adapter {quoted(adapter.source.name)}")
            before = self._slots[place]
            if before is not None:
                before.slot = 0
            self._slots[place], adapter.slot = adapter, place + 1
            self._loads[place + 1] = AdapterLoad(slot=place + 1, key=adapter.key)
            self._num_passed = 0
            self._make_room()
        return adapter.slot

    def attach(self, plan: StepPlan, rows: Iterable[Request | None]) -> None:
        """Has a plan load what slots were given to, and say whether rows have adapters."""
        if not self._slots:
            return
        plan.adapters, self._loads = list(self._loads.values()), {}
        plan.adapted = any(row is not None and row.adapter is not None for row in rows)

    def lose(self, plan: StepPlan | None = None) -> None:
        """The slots that a failed plan was to fill hold nothing that is known; without a plan no slot does."""
        for slot in range(1, len(self._slots) + 1) if plan is None else [one.slot for one in plan.adapters]:
            lost = self._slots[slot - 1]
            self._slots[slot - 1] = None
            if lost is not None and lost.slot == slot:
                lost.slot = 0

    def take_failed(self) -> dict[Adapter, str]:
        """The adapters that could not be read again, and why, each once."""
        failed, self._failed = {one: one.failed for one in self._failed}, set()
        for one in failed:
            if self._by_name.get(one.source.name) is one:
                del self._by_name[one.source.name]
                self._gone.add(one.source.name)
        return failed

    def fill(self, stats: EngineStats, requests: Mapping[str, Request]) -> None:
        """Adds the requests of each adapter to an engine's statistics."""
        stats.adapters_added = {name: one.num_added for name, one in self._by_name.items()}
        for request in requests.values() if stats.adapters_added else ():
            if request.adapter is not None:
                own = stats.adapters_waiting if request.batch is None else stats.adapters_running
                name = request.adapter.source.name
                own[name] = own.get(name, 0) + 1

    def _free_slot(self, running: Collection[Request]) -> int | None:
        """The slot that nobody runs with and whose adapter was used longest ago; empty ones first."""
        busy = {one.adapter for one in running}
        free = [place for place, one in enumerate(self._slots) if one is None or one not in busy]
        order = {one: number for number, one in enumerate(self._recent)}

        def age(place: int) -> int:
            own = self._slots[place]
            return -2 if own is None else order.get(own, -1)

        return min(free, key=age, default=None)

    def _read(self, adapter: Adapter) -> None:
        self._make_room(1)
        self._reading.add(adapter)
        adapter.reading, self._asked = True, 0.0

    def _poll(self, adapter: Adapter) -> None:
        """Asks the workers for an adapter that they read; all of them have it, or none keeps it."""
        now = time.monotonic()
        if not adapter.reading or now - self._asked < _POLL_SECONDS:
            return
        self._asked = now
        try:
            found = self._call("read_adapter", {"key": adapter.key, "path": adapter.source.path})
        except Exception as error:
            adapter.failed = " ".join(str(error).split()) or type(error).__name__
        else:
            if None in found:
                return
            if len({*found, adapter.digest or found[0]}) > 1:
                adapter.failed = f"the adapter in {adapter.source.path} changed while it was served; load it again"
        adapter.reading = False
        self._reading.discard(adapter)
        if adapter.failed:
            self._failed.add(adapter)
            self._call("drop_adapter", {"key": adapter.key})
            return
        adapter.digest, adapter.on_host = found[0], True
        self._recent[adapter] = None

    def _make_room(self, wanted: int = 0) -> None:
        """Drops from the host what was unloaded and nobody uses, and what was used longest ago beyond the limit.

        `wanted` more are to come. Those that have a slot stay, since a failed step has them loaded again, and those of
        requests go last.
        """
        used = set(self._used())
        for one in list(self._recent):
            if self._by_name.get(one.source.name) is not one and one not in used and not one.slot:
                self._drop(one)
        idle = sorted((one for one in self._recent if not (one.pinned or one.slot)), key=lambda one: one in used)
        for one in idle[: max(0, len(self._recent) + len(self._reading) + wanted - self._max_host)]:
            self._drop(one)

    def _drop(self, adapter: Adapter) -> None:
        del self._recent[adapter]
        adapter.on_host = False
        self._call("drop_adapter", {"key": adapter.key})
