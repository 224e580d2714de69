"""The worker side of the lmcache connector: gathers blocks to units, stores those, and loads units.

One thread stores and one fetches, beside the steps; a step only copies between KV memory and host memory. Units that
wait to be whole or to be stored have `max_bytes` of host memory; those beyond are not stored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from frame.interfaces import ConnectorWorkerSetup, TransferReport

from ..blocks.loading_worker import LoadingWorker
from ..blocks.messages import BlockStep, Move
from ..blocks.worker import BATCH
from .messages import Geometry, LMCacheStep, Prompt
from .options import LMCacheOptions
from .transfers import Transfers

logger = logging.getLogger("frame.connectors.lmcache")


@dataclass
class Unit:
    """A unit that is gathered: unit number `index` of `owner`'s prompt, uint8 [grains, block_bytes]."""

    owner: str
    prompt: Prompt
    index: int
    data: np.ndarray
    missing: set[int] = field(default_factory=set)


class LMCacheWorker(LoadingWorker):
    """See the module."""

    title = "lmcache"
    message = LMCacheStep

    def __init__(self, setup: ConnectorWorkerSetup, options: LMCacheOptions) -> None:
        super().__init__(setup, options, 1)
        self._max_bytes = options.max_bytes
        self._loader = Transfers(options, self.rank)
        self._storer = Transfers(options, self.rank)
        self._store_thread = ThreadPoolExecutor(1, thread_name_prefix="lmcache-store")
        self._geometry: Geometry | None = None
        self._prompts: dict[str, Prompt] = {}
        self._units: dict[bytes, Unit] = {}  # by the hash of the last grain
        self._places: dict[bytes, list[tuple[bytes, int]]] = {}  # where this step's blocks belong: unit, grain of it
        self._lock = threading.Lock()
        #: bytes of whole units, by the number of their storing, until they are stored
        self._waiting: dict[int, int] = {}
        self._num_stores = 0
        self._stored = [0, 0]  # units that the server took, and those that it did not, since the last step

    def handshake(self) -> bytes:
        return b"%s %d" % (super().handshake(), self.tokens.num_bytes)

    def load(self, step: BlockStep) -> None:
        self._places = {}
        if isinstance(step, LMCacheStep):  # else it has nothing to say
            if step.geometry != self._geometry:
                self._geometry = step.geometry
                self._units.clear()
            self._prompts.update(step.prompts)
        for move in step.saves:
            self._expect(move)
        by_owner: dict[str, list[Move]] = {}
        for move in step.loads:
            by_owner.setdefault(move.owner, []).append(move)
        for owner, moves in by_owner.items():
            self._begin(owner, moves)
        self.take_arrived()

    def keeps(self, key: bytes) -> bool:
        return key not in self._places

    def keep(self, key: bytes, data: np.ndarray) -> bool:
        kept = False
        for name, place in self._places[key]:
            unit = self._units.get(name)
            if unit is not None:
                unit.data[place] = data
                unit.missing.discard(place)
                kept = True
        return kept

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        report = super().end_step(finished)
        self._places = {}
        self._store_whole()
        for owner in finished:
            self._prompts.pop(owner, None)
        ended = set(finished)
        for name in [name for name, unit in self._units.items() if unit.owner in ended]:
            del self._units[name]
        return report

    def loaded(self) -> list[str]:
        with self._lock:
            stored, self._stored = self._stored, [0, 0]
        self.count("stored_units", stored[0])
        self.count("unstored_units", stored[1])
        return super().loaded()

    def close(self) -> None:
        self.stop_loads()
        self.end_loads()
        self._store_thread.shutdown(wait=True)
        self._loader.close()
        self._storer.close()

    def _expect(self, move: Move) -> None:
        """Has room for a block that this step saves; without, or when it belongs to no unit, it is not saved."""
        geometry, prompt = self._geometry, self._prompts.get(move.owner)
        if geometry is None or prompt is None or prompt.unit != geometry.unit or move.owner not in self._sound:
            return
        index, place = divmod(move.index, geometry.grains)
        if index >= len(prompt.units):
            return
        name = prompt.units[index]
        unit = self._units.get(name)
        if unit is None:
            if place:  # its beginning was not saved, so that it will never be whole
                return
            if self._num_bytes + geometry.grains * self.tokens.num_bytes > self._max_bytes:
                self.count("unstored_units", 1)
                return
            data = np.empty((geometry.grains, self.tokens.num_bytes), np.uint8)
            unit = self._units[name] = Unit(move.owner, prompt, index, data, set(range(geometry.grains)))
        if place in unit.missing:
            self._places.setdefault(move.key, []).append((name, place))

    @property
    def _num_bytes(self) -> int:
        with self._lock:
            waiting = sum(self._waiting.values())
        return waiting + sum(unit.data.nbytes for unit in self._units.values())

    def _store_whole(self) -> None:
        """Has the thread store the units that are whole, those that follow each other in a prompt together."""
        geometry, runs = self._geometry, list[list[Unit]]()
        if geometry is None:
            return
        for name in [name for name, unit in self._units.items() if not unit.missing]:
            unit = self._units.pop(name)
            if runs and runs[-1][-1].prompt is unit.prompt and runs[-1][-1].index + 1 == unit.index:
                runs[-1].append(unit)
            else:
                runs.append([unit])
        for run in runs:
            self._num_stores += 1
            with self._lock:
                self._waiting[self._num_stores] = sum(unit.data.nbytes for unit in run)
            try:
                self._store_thread.submit(self._store, run, geometry, self._num_stores)
            except RuntimeError as error:  # no thread can be started; one that runs may find it in the queue
                logger.warning("blocks of request %s are not stored: %s", run[0].owner, error)
                with self._lock:
                    if self._waiting.pop(self._num_stores, None) is not None:
                        self._stored[1] += len(run)

    def _store(self, run: Sequence[Unit], geometry: Geometry, number: int) -> None:
        with self._lock:
            if number not in self._waiting:
                return  # it was given up
        taken = False
        try:
            if not self._storer.resting:
                data = [unit.data.reshape(-1) for unit in run]
                taken = self._storer.store(run[0].prompt, geometry, run[0].index, data)
        finally:
            with self._lock:
                if self._waiting.pop(number, None) is not None:
                    self._stored[not taken] += len(run)

    def _begin(self, owner: str, moves: Sequence[Move]) -> None:
        geometry, prompt = self._geometry, self._prompts.get(owner)
        if geometry is None or prompt is None or prompt.unit != geometry.unit:
            self.begin_load(owner, [moves], lambda moves, data: [])
            return

        def fetch(moves: Sequence[Move], data: np.ndarray) -> list[int]:
            first, count = _span(moves, geometry)
            units = np.empty((count, geometry.grains, data.shape[1]), np.uint8)
            sound = self._loader.fetch(prompt, geometry, first, [unit.reshape(-1) for unit in units])
            rows = []
            for row, move in enumerate(moves):
                unit, place = divmod(move.index - first * geometry.grains, geometry.grains)
                if sound[unit]:
                    data[row] = units[unit, place]
                    rows.append(row)
            return rows

        def skip(moves: Sequence[Move]) -> None:
            self._loader.skip(prompt, geometry, *_span(moves, geometry))

        self.begin_load(owner, _parts(moves, geometry), fetch, skip)


def _span(moves: Sequence[Move], geometry: Geometry) -> tuple[int, int]:
    """The number of the first unit of consecutive grains, and how many there are."""
    first = moves[0].index // geometry.grains
    return first, moves[-1].index // geometry.grains + 1 - first


def _parts(moves: Sequence[Move], geometry: Geometry) -> Iterator[Sequence[Move]]:
    """`moves` of consecutive grains in parts of whole units that are fetched together."""
    most = max(1, BATCH // geometry.grains) * geometry.grains
    start = 0
    while start < len(moves):
        end = start + most - moves[start].index % most
        yield moves[start:end]
        start = end
