"""Filling the masks of grammars: quick ones while a step runs, slow ones ahead of the step that needs them.

A grammar is taken as slow until some fills in a row were quick. Requests of slow grammars are not planned before their
mask is there, so that nobody else waits for it. Knows no scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from ...interfaces.grammar import GrammarBackend, GrammarMatcher
from ...interfaces.step import TokenMasks
from ..request import Request
from .fair_threads import FairThreads
from .progress import Ahead, GrammarProgress, Pace

#: The longest that a step waits for masks of grammars that were quick so far, and how much more for each row.
PATIENCE_SECONDS = 0.05
_ROW_SECONDS = 0.002
#: Rows that are filled without another thread where nothing else is to be done meanwhile.
_FEW_ROWS = 4
#: Threads that fill masks ahead for grammars that were slow before, and as many for new grammars, whose masks therefore
#: never wait behind slow ones. Owners of requests take turns.
_NUM_AHEAD = 2


@dataclass
class MaskFill:
    """The masks of one step while they are filled: `requests` [n] by row of `words` [n, ceil(vocab_size / 32)].

    `filled` [n] are done with the rows, or fail with them. The first `num_filling` rows are filled for this step, the
    others were filled ahead.
    """

    requests: list[Request]
    slots: np.ndarray
    words: np.ndarray
    filled: list[Future[None]]
    num_filling: int

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until all rows are filled, at most `seconds`; returns whether they are."""
        return not wait(self.filled, seconds).not_done

    def encoded(self, rows: Sequence[int]) -> bytes:
        """The masks of these rows as a message."""
        if not rows:
            return b""
        whole = len(rows) == len(self.requests)
        slots, words = (self.slots, self.words) if whole else (self.slots[rows], self.words[rows])
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

    def fill(self, backend: GrammarBackend, rows: list[tuple[Request, GrammarProgress, int]], beside: bool) -> MaskFill:
        """Makes the masks of a step's `rows` (request, progress, slot), of which those that were filled ahead are last.

        With `beside` another thread does it while the caller goes on.
        """
        words = self._rows(len(rows), backend.vocabulary.size)
        matchers, ready = [], []
        for row, (_, progress, _) in enumerate(rows):
            if progress.ahead is None:
                matchers.append(progress.matcher)
            else:
                words[row] = progress.ahead.words
                ready.append(progress.ahead.filled)
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
        slots = np.array([slot for _, _, slot in rows], np.int32)
        futures = [filled] * len(matchers) + ready
        return MaskFill([request for request, _, _ in rows], slots, words, futures, len(matchers))

    def await_step(self, fill: MaskFill) -> bool:
        """Waits for the masks of a step; False when they take too long, and then its rows are filled ahead."""
        if fill.wait(PATIENCE_SECONDS + _ROW_SECONDS * fill.num_filling):
            return True
        if self._beside is not None:  # the next step needs another thread and another place
            self._beside.shutdown(wait=False)
            self._beside, self._words = None, np.zeros((0, 0), np.int32)
        self._ahead.add(fill.filled[0])
        fill.filled[0].add_done_callback(self._arrived)
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
