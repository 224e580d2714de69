"""Requests whose output must obey a grammar: they wait for it, follow it token by token, and get masks for each step.

Only the engine's thread calls this; compiling and filling go on beside it. Knows no tensor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ...interfaces.engine import EngineOutput
from ...interfaces.grammar import Grammar, GrammarMatcher
from ...interfaces.step import TokenMasks
from ..lifecycle import Lifecycle
from ..request import Request, RequestState
from ..schedule.planned_step import LaunchedStep
from .compiler import GrammarCompiler
from .progress import GrammarProgress

logger = logging.getLogger("frame.engine")


class MaskFill:
    """Masks of one step on their way: `requests` [n] by row of `words` [n, ceil(vocab_size / 32)]."""

    def __init__(self, requests: list[Request], slots: np.ndarray, words: np.ndarray, filled: Future[None]) -> None:
        self.requests = requests
        self._slots = slots
        self._words = words
        self._filled = filled

    def wait(self) -> BaseException | None:
        """Waits for the end; returns what went wrong."""
        return self._filled.exception()

    def encoded(self, rows: Sequence[int]) -> bytes:
        """The masks of these rows as a message."""
        if not rows:
            return b""
        whole = len(rows) == len(self.requests)
        slots, words = (self._slots, self._words) if whole else (self._slots[rows], self._words[rows])
        return TokenMasks(slots=slots, words=words).packed()


class Constraints:
    """`compiler` None, with the reason in `against`: every request that asks is refused."""

    def __init__(
        self, lifecycle: Lifecycle, compiler: GrammarCompiler | None, against: str = "", max_slots: int = 0
    ) -> None:
        self._lifecycle = lifecycle
        self._compiler = compiler
        self._against = against
        self._max_slots = max_slots
        self._compiling: dict[str, tuple[Request, Future[Grammar]]] = {}
        self._compiled = threading.Event()
        self._filler: ThreadPoolExecutor | None = None
        self._words = np.zeros((0, 0), np.int32)

    def submit(self, request: Request) -> None:
        """Begins to compile what the request asks for; `admit` queues it afterwards.

        Raises `ValueError` when there are no grammars here, `QueueFullError` when too many wait.
        """
        params = request.params.structured_outputs
        if params is None:
            raise ValueError(f"request {request.request_id!r} has no constraint")
        if self._compiler is None:
            raise ValueError(f"structured_outputs cannot be served: {self._against}")
        future = self._compiler.compile(params, bounded=not request.source.replayed)
        request.state = RequestState.COMPILING
        self._compiling[request.request_id] = request, future
        future.add_done_callback(lambda _: self._compiled.set())

    def admit(self) -> list[EngineOutput]:
        """Queues the requests whose grammars are there; returns the last outputs of those whose are refused."""
        if not self._compiling:
            return []
        self._compiled.clear()
        outputs = []
        for request_id, (request, future) in list(self._compiling.items()):
            if request.state is RequestState.FINISHED:  # aborted meanwhile
                del self._compiling[request_id]
            elif future.done():
                del self._compiling[request_id]
                outputs += self._admit(request, future)
        return outputs

    def wait(self, seconds: float) -> None:
        """Waits for a grammar, if any is being compiled."""
        if self._compiling:
            self._compiled.wait(seconds)

    def begin(self, step: LaunchedStep, beside: bool) -> MaskFill | None:
        """Fills the masks of a step's rows, all earlier tokens of which are known; None: nothing is masked.

        With `beside` another thread does it while the caller goes on.
        """
        requests, slots = [], []
        for request, slot, samples in zip(
            step.requests, step.plan.slots.tolist(), step.plan.samples.tolist(), strict=True
        ):
            if not samples or request is None or request.state is RequestState.FINISHED:
                continue
            if request.grammar is not None and request.grammar.begun:
                requests.append(request)
                slots.append(slot)
        if not requests or self._compiler is None:
            return None
        backend = self._compiler.backend()
        matchers = [request.grammar.matcher for request in requests if request.grammar is not None]
        words = self._rows(len(requests), backend.vocabulary.size)
        filled: Future[None] = Future()
        if beside:
            if self._filler is None:
                self._filler = ThreadPoolExecutor(1, thread_name_prefix="masks")
            filled = self._filler.submit(backend.fill_masks, matchers, words)
        else:
            try:
                filled.set_result(backend.fill_masks(matchers, words))
            except Exception as error:  # `finish` judges it, as that of another thread
                filled.set_exception(error)
        return MaskFill(requests, np.array(slots, np.int32), words, filled)

    def finish(self, fill: MaskFill) -> tuple[bytes, list[EngineOutput]]:
        """The masks of a step as a message, and the last outputs of requests that no mask could be made for."""
        error = fill.wait()
        if error is not None:
            logger.error("grammar masks failed", exc_info=error)
        rows, outputs = [], []
        for row, request in enumerate(fill.requests):
            matcher: GrammarMatcher | None = request.grammar.matcher if request.grammar is not None else None
            if request.state is RequestState.FINISHED or matcher is None:
                continue
            reason = "an internal error; the engine's log has the cause" if error is not None else matcher.error
            if reason is None:
                rows.append(row)
            else:
                outputs.append(self._lifecycle.finish(request, "error", error=f"structured_outputs: {reason}"))
        return fill.encoded(rows), outputs

    def close(self) -> None:
        """Ends threads and child processes."""
        if self._compiler is not None:
            self._compiler.close()
        if self._filler is not None:
            self._filler.shutdown()

    def _admit(self, request: Request, future: Future[Grammar]) -> list[EngineOutput]:
        error = future.exception()
        if error is None:
            params = request.params.structured_outputs
            given = request.token_ids[request.prompt_len :]
            start_after = params.start_after if params is not None else []
            request.grammar = GrammarProgress(future.result().matcher(), start_after, given)
            request.state = RequestState.WAITING
            self._lifecycle.waiting.add(request)
            return []
        if not isinstance(error, ValueError):
            logger.error("a grammar could not be compiled", exc_info=error)
        output = self._lifecycle.finish(request, "error", error=str(error))
        output.fault = "request" if isinstance(error, ValueError) else "engine"
        return [output]

    def _rows(self, count: int, vocab_size: int) -> np.ndarray:
        """int32 [count, ceil(vocab_size / 32)], used again in the next step."""
        if not self._words.size:
            self._words = np.zeros((max(self._max_slots, count), -(-vocab_size // 32)), np.int32)
        return self._words[:count]
