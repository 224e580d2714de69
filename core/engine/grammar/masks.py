"""Filling the masks of grammars: quick ones while a step runs, slow ones ahead of the step that needs them.

A grammar is taken as slow until some fills in a row were quick. Requests of slow grammars are not planned before their
mask is there, so that nobody else waits for it. Knows no scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from ...interfaces.grammar import GrammarBackend, GrammarMatcher
from ...interfaces.step import TokenMasks
from ..request import Request
from .fair_threads import FairThreads

#: A mask that takes longer makes its grammar a slow one.
QUICK_SECONDS = 0.005
#: The longest that a step waits for masks of grammars that were quick so far, and how much more for each row.
PATIENCE_SECONDS = 0.05
_ROW_SECONDS = 0.002
#: Quick fills in a row after which a new grammar, and one that was slow, counts as quick.
_NEW_PROOF, _SLOW_PROOF = 2, 8
#: Rows that are filled without another thread where nothing else is to be done meanwhile.
_FEW_ROWS = 4
#: Masks that are filled ahead at a time: of grammars that were slow, and of new ones, which do not queue behind those.
#: Owners of requests take turns.
_NUM_AHEAD = 2


class Pace:
    """How long the masks of one grammar take; `slow` until it has proved otherwise."""

    def __init__(self) -> None:
        self.slow = True
        self.was_slow = False
        self._quick = 0
        self._proof = _NEW_PROOF

    def note(self, seconds: float) -> None:
        """Counts a mask that took so many seconds."""
        if seconds > QUICK_SECONDS:
            self.note_slow()
            return
        self._quick += 1
        if self._quick >= self._proof:
            self.slow = False

    def note_slow(self) -> None:
        """Counts a mask that took too long: the grammar is slow until several quick ones follow."""
        self.slow = self.was_slow = True
        self._quick, self._proof = 0, _SLOW_PROOF


class Ahead:
    """A mask int32 [ceil(vocab_size / 32)] that is filled before its step is planned."""

    def __init__(self, words: np.ndarray, filled: Future[None]) -> None:
        self.words = words
        self.filled = filled

    @property
    def done(self) -> bool:
        """Whether `words` may be used, or filling them failed."""
        return self.filled.done()


class MaskFill:
    """The masks of one step while they are filled: `requests` [n] by row of `words` [n, ceil(vocab_size / 32)].

    The first `num_filling` rows are being filled; the others were filled ahead, and `errors` has the outcome of each.
    """

    def __init__(
        self,
        requests: list[Request],
        slots: np.ndarray,
        words: np.ndarray,
        filled: Future[None],
        errors: list[BaseException | None],
    ) -> None:
        self.requests = requests
        self.words = words
        self.filled = filled
        self.errors = errors
        self.num_filling = len(requests) - len(errors)
        self._slots = slots

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until all rows are filled, at most `seconds`; returns whether they are."""
        return bool(wait([self.filled], seconds).done)

    def error(self, row: int) -> BaseException | None:
        """The error of filling a row; None without one."""
        return self.filled.exception() if row < self.num_filling else self.errors[row - self.num_filling]

    def encoded(self, rows: Sequence[int]) -> bytes:
        """The masks of these rows as a message."""
        if not rows:
            return b""
        whole = len(rows) == len(self.requests)
        slots, words = (self._slots, self.words) if whole else (self._slots[rows], self.words[rows])
        return TokenMasks(slots=slots, words=words).packed()


class MaskFiller:
    """The threads that fill masks. `news` is called when a mask that was filled ahead is there."""

    def __init__(self, news: Callable[[], None], max_slots: int) -> None:
        self._news = news
        self._max_slots = max_slots
        self._beside: ThreadPoolExecutor | None = None
        self._threads_ahead: dict[bool, FairThreads] = {}  # by whether a grammar was slow
        self._ahead: set[Future[None]] = set()
        self._words = np.zeros((0, 0), np.int32)

    @property
    def num_ahead(self) -> int:
        """Masks that are being filled ahead."""
        return len(self._ahead)

    def ahead(self, backend: GrammarBackend, matcher: GrammarMatcher, pace: Pace, owner: str = "") -> Ahead:
        """Begins to fill one mask, for a request of `owner`."""
        threads = self._threads_ahead.get(pace.was_slow)
        if threads is None:
            threads = self._threads_ahead[pace.was_slow] = FairThreads(_NUM_AHEAD, "masks_ahead")
        words = np.zeros((1, -(-backend.vocabulary.size // 32)), np.int32)

        def fill() -> None:
            start = time.perf_counter()
            backend.fill_masks([matcher], words)
            pace.note(time.perf_counter() - start)

        filled = threads.submit(owner, fill)
        self._ahead.add(filled)
        filled.add_done_callback(self._arrived)
        return Ahead(words[0], filled)

    def fill(
        self, backend: GrammarBackend, quick: list[tuple[Request, int]], ready: list[tuple[Request, int]], beside: bool
    ) -> MaskFill:
        """Fills the masks of a step's `quick` rows (request, slot), and takes those of `ready` ones.

        With `beside` another thread does it while the caller goes on.
        """
        rows = quick + ready
        words = self._rows(len(rows), backend.vocabulary.size)
        errors: list[BaseException | None] = []
        for row, (request, _) in enumerate(ready, len(quick)):
            ahead = request.grammar.ahead if request.grammar is not None else None
            errors.append(None if ahead is None else ahead.filled.exception())
            if ahead is not None:
                words[row] = ahead.words
        matchers = [request.grammar.matcher for request, _ in quick if request.grammar is not None]
        filled: Future[None] = Future()
        if not matchers:
            filled.set_result(None)
        elif beside or len(matchers) > _FEW_ROWS:
            if self._beside is None:
                self._beside = ThreadPoolExecutor(1, thread_name_prefix="masks")
            filled = self._beside.submit(backend.fill_masks, matchers, words[: len(matchers)])
        else:
            try:
                filled.set_result(backend.fill_masks(matchers, words[: len(matchers)]))
            except Exception as error:  # judged as that of another thread
                filled.set_exception(error)
        slots = np.array([slot for _, slot in rows], np.int32)
        return MaskFill([request for request, _ in rows], slots, words, filled, errors)

    def await_step(self, fill: MaskFill) -> bool:
        """Waits for the masks of a step; False when they take too long, and then its rows are filled ahead."""
        if fill.wait(PATIENCE_SECONDS + _ROW_SECONDS * fill.num_filling):
            return True
        if self._beside is not None:  # the next step needs another thread and another place
            self._beside.shutdown(wait=False)
            self._beside, self._words = None, np.zeros((0, 0), np.int32)
        self._ahead.add(fill.filled)
        fill.filled.add_done_callback(self._arrived)
        return False

    def close(self) -> None:
        """Ends the threads."""
        for threads in self._threads_ahead.values():
            threads.close()
        if self._beside is not None:
            self._beside.shutdown(cancel_futures=True)

    def _arrived(self, filled: Future[None]) -> None:
        self._ahead.discard(filled)
        self._news()

    def _rows(self, count: int, vocab_size: int) -> np.ndarray:
        """int32 [count, ceil(vocab_size / 32)], used again in the next step."""
        if not self._words.size:
            self._words = np.zeros((max(self._max_slots, count), -(-vocab_size // 32)), np.int32)
        return self._words[:count]
