"""Connectors for two engines, and ones that are wrong in what concerns several ranks or the end of something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from frame.interfaces import (
    CacheView,
    ConnectorSetup,
    ConnectorWorkerSetup,
    RequestView,
    TransferReport,
    encode,
)
from frame.plugins.connectors.disk.scheduler import DiskScheduler
from tests.contract.keeping import STORES, Keeper, Keeping, Late, Options, Store, store_of

#: By folder: loads that were made, and loads that are being made.
LOADS: Counter[str] = Counter()
READERS: Counter[str] = Counter()
#: Folders whose loads under way are to be forgotten.
FORGOTTEN: set[str] = set()


class DueKeeper(Keeper):
    """Right: loads when a load is due, and says which blocks did not come; its own blocks end with it."""

    def __init__(self, setup: ConnectorWorkerSetup, options: Options) -> None:
        super().__init__(setup, options)
        self.moves: dict[str, list[tuple[bytes, list[list[int]]]]] = {}
        self.own: set[bytes] = set()
        self.failed: list[tuple[int, int]] = []

    def begin_step(self, message: bytes) -> None:
        super().begin_step(message)
        for request_id, moves in self.message.loads:
            self.moves[request_id] = moves
        for due, request_id in self.waiting:
            if due <= self.step:
                for key, blocks in self.moves.pop(request_id):
                    if key in self.store:
                        super().load(key, blocks)
                    else:
                        self.failed += [(group, block) for group, some in enumerate(blocks) for block in some if block]

    def load(self, key: bytes, blocks: list[list[int]]) -> None:
        """Not before it is due."""

    def save(self, key: bytes, blocks: list[list[int]]) -> None:
        super().save(key, blocks)
        self.own.add(key)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        report = super().end_step(finished)
        report.failed_blocks, self.failed = self.failed, []
        return report

    def close(self) -> None:
        for key in self.own:
            self.store.pop(key, None)


class Believing(DueKeeper):
    """Wrong: takes a load for done although nothing came."""

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self.failed = []
        return super().end_step(finished)


class LendingKeeper(Keeper):
    """Right: holds until another engine has loaded something, or for twenty steps."""

    steps = 20

    def __init__(self, setup: ConnectorWorkerSetup, options: Options) -> None:
        super().__init__(setup, options)
        self.folder = str(options.folder)
        self.lent: dict[str, tuple[int, int]] = {}  # request id → (loads before, the last step)

    def begin_step(self, message: bytes) -> None:
        super().begin_step(message)
        LOADS[self.folder] += len(self.message.loads)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        for name in finished:
            self.lent[name] = LOADS[self.folder], self.step + self.steps
        report = super().end_step([])
        back = [name for name, lent in self.lent.items() if self.is_back(*lent)]
        for name in back:
            del self.lent[name]
        report.sent += back
        return report

    def is_back(self, before: int, last: int) -> bool:
        """Whether a loan has ended."""
        return LOADS[self.folder] > before or self.step >= last


class Patient(LendingKeeper):
    """Wrong: waits for ever for someone to come."""

    steps = 1 << 60


class Reserving(LendingKeeper):
    """Wrong: waits for ever for those that began to load."""

    def begin_step(self, message: bytes) -> None:
        super().begin_step(message)
        READERS[self.folder] += len(self.message.loads)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        report = super().end_step(finished)
        READERS[self.folder] -= len(report.received)
        return report

    def is_back(self, before: int, last: int) -> bool:
        return super().is_back(before, last) and not READERS[self.folder]


class LateLender(Late):
    holds = True


class Twice(Keeper):
    """Wrong: says for two steps that a request was sent."""

    last: Sequence[str] = ()

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        report = super().end_step(finished)
        last, self.last = self.last, list(report.sent)
        report.sent += last
        return report


class Dropping(Keeper):
    """Wrong: says nothing of the load of a request that ended meanwhile."""

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self.waiting = [pair for pair in self.waiting if pair[1] not in finished]
        return super().end_step(finished)


class Forgetting(Late):
    """Wrong: a reset forgets the loads that are under way."""

    def reset(self) -> bool:
        FORGOTTEN.add(str(self.options.folder))
        return super().reset()


class ForgettingKeeper(Keeper):
    """See above."""

    def begin_step(self, message: bytes) -> None:
        if str(self.options.folder) in FORGOTTEN:
            FORGOTTEN.discard(str(self.options.folder))
            self.waiting = []
        super().begin_step(message)


class Clinging(Keeper):
    """Wrong: keeps to the memory that it was given first."""

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if not hasattr(self, "caches"):
            super().register(caches)


class Lingering(Clinging):
    """Wrong: reads blocks two steps after the step that was to save them."""

    def __init__(self, setup: ConnectorWorkerSetup, options: Options) -> None:
        super().__init__(setup, options)
        self.later: list[tuple[int, bytes, list[list[int]]]] = []

    def begin_step(self, message: bytes) -> None:
        super().begin_step(message)
        self.later += [(self.step + 2, key, blocks) for key, blocks in self.message.saves]
        self.message.saves = []

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self.message.saves += [(key, blocks) for due, key, blocks in self.later if due <= self.step]
        self.later = [move for move in self.later if move[0] > self.step]
        return super().end_step(finished)


def of_the_first(setup: ConnectorSetup, options: Options, rank: int) -> Store:
    """One store for all ranks."""
    return store_of(setup, options, 0)


def of_the_model(setup: ConnectorSetup, options: Options, rank: int) -> Store:
    """One store for engines of all shapes."""
    return STORES.setdefault((str(options.folder), setup.layout.model.encode(), rank), {})


class Rankless(Keeping):
    """Wrong: all ranks keep their blocks under the same names."""

    store_of = staticmethod(of_the_first)


class RanklessKeeper(Keeper):
    """See above."""

    store_of = staticmethod(of_the_first)


class Shapeless(Keeping):
    """Wrong: does not heed how many ranks divide the model."""

    store_of = staticmethod(of_the_model)


class ShapelessKeeper(Keeper):
    """See above; copies what fits."""

    store_of = staticmethod(of_the_model)

    def load(self, key: bytes, blocks: list[list[int]]) -> None:
        for group, some in zip(self.layout.groups, blocks, strict=True):
            for layer in group.layers:
                for block, row in zip(some, self.store[key].get(layer, ()), strict=False):
                    size = min(row.numel(), self.caches[layer].shape[1])
                    if block:
                        self.caches[layer][block][:size] = row[:size]


class Tokenwise(Shapeless):
    """Wrong: names blocks by the tokens before their end, whatever a block is."""

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        return super().matched_tokens(named_by_tokens(request, self.layout.grain), num_computed)

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        super().allocated(named_by_tokens(request, self.layout.grain), block_ids, num_external)


def named_by_tokens(request: RequestView, grain: int) -> RequestView:
    """The request, with other hashes."""
    tokens = list(request.token_ids)
    ends = range(grain, len(request.block_hashes) * grain + 1, grain)
    hashes = [encode(tokens[:end]) for end in ends]
    return RequestView(request.request_id, request.token_ids, hashes, request.prompt_len)


class Hasty(DiskScheduler):
    """Wrong: has a step compute from what another rank may not have loaded."""

    def match(self, request: RequestView, first: int, last: int) -> tuple[int | None, bool]:
        return super().match(request, first, last)[0], False
