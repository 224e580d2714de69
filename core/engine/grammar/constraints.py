"""Requests whose output must obey a grammar: they wait for it, follow it token by token, and get masks for each step.

Only the engine's thread calls this; compiling and filling go on beside it. Knows no tensor.
"""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import Future
from weakref import WeakKeyDictionary

from ...interfaces.engine import EngineOutput
from ...interfaces.grammar import Grammar
from ...interfaces.sampling import StructuredOutputsParams
from ..lifecycle import Lifecycle
from ..request import Request, RequestState
from ..schedule.planned_step import LaunchedStep
from .compiler import GrammarCompiler
from .masks import MaskFill, MaskFiller
from .progress import Ahead, GrammarProgress, Pace

logger = logging.getLogger("frame.engine")

#: Bytes that the grammars of unfinished requests may take together, where grammar_cache_bytes is less.
IN_USE_BYTES = 256 << 20
#: Steps with masks from one check of these bytes to the next.
_FILLS_PER_LOOK = 16


class Constraints:
    """Follows the requests of one engine, at most `max_slots` of which run at a time."""

    def __init__(self, lifecycle: Lifecycle, compiler: GrammarCompiler, max_slots: int) -> None:
        self._lifecycle = lifecycle
        self._compiler = compiler
        self._compiling: dict[str, tuple[Request, Future[Grammar]]] = {}
        self._news = threading.Event()  # a grammar is compiled, or a mask filled ahead
        self._filler = MaskFiller(self._news.set, max_slots)
        self._paces: WeakKeyDictionary[Grammar, Pace] = WeakKeyDictionary()
        self._num_fills = 0

    def submit(self, request: Request, params: StructuredOutputsParams) -> None:
        """Begins to compile the constraint of a request, which `admit` queues afterwards.

        Raises `QueueFullError` when too many wait.
        """
        future = self._compiler.compile(params, owner=request.source.owner, bounded=not request.source.replayed)
        request.state = RequestState.COMPILING
        self._compiling[request.request_id] = request, future
        future.add_done_callback(lambda _: self._news.set())

    def admit(self) -> list[EngineOutput]:
        """Queues requests whose grammars are compiled; returns the last outputs of those whose are refused."""
        self._news.clear()
        if not self._compiling:
            return []
        outputs = []
        for request_id, (request, future) in list(self._compiling.items()):
            aborted = request.state is RequestState.FINISHED
            if aborted or future.done():
                del self._compiling[request_id]
            if future.done() and not aborted:
                outputs += self._admit(request, future)
        return outputs

    def wait(self, seconds: float) -> None:
        """Waits for a grammar that is compiled or a mask that is filled ahead, if there are any."""
        if self._compiling or self._filler.num_ahead:
            self._news.wait(seconds)

    def must_wait(self, request: Request) -> bool:
        """Whether a request must not be planned yet, because its grammar is slow and its next mask is not filled."""
        grammar = request.grammar
        if grammar is None or not grammar.begun:
            return False
        if request.num_unanswered:
            return True  # preempted a moment ago: its matcher is yet to take the token that is in flight
        if grammar.ahead is None and grammar.pace.slow:
            grammar.ahead = self._filler.ahead(
                self._compiler.backend(), grammar.matcher, grammar.pace, request.source.owner
            )
        return grammar.ahead is not None and not grammar.ahead.filled.done()

    def begin(self, step: LaunchedStep, beside: bool) -> MaskFill | None:
        """Fills the masks of a step's rows, all earlier tokens of which are known; None: nothing is masked.

        With `beside` another thread does it while the caller goes on.
        """
        rows: list[tuple[Request, GrammarProgress, int]] = []
        plan = step.plan
        for request, slot, samples in zip(step.requests, plan.slots.tolist(), plan.samples.tolist(), strict=True):
            if not samples or request is None or request.state is RequestState.FINISHED:
                continue
            if request.grammar is not None and request.grammar.begun:
                rows.append((request, request.grammar, slot))
        if not rows:
            return None
        rows.sort(key=lambda row: row[1].ahead is not None)
        return self._filler.fill(self._compiler.backend(), rows, beside)

    def finish(self, fill: MaskFill) -> tuple[bytes, list[EngineOutput]]:
        """The masks of a step as a message, and the last outputs of requests that no mask could be made for.

        Requests whose masks take too long leave the step.
        """
        first = 0 if self._filler.await_step(fill) else self._set_aside(fill)
        rows, outputs = [], []
        for row, request in enumerate(fill.requests[first:], first):
            if request.state is RequestState.FINISHED or request.grammar is None:
                continue
            error = fill.filled[row].exception()
            if error is not None:
                logger.error("grammar masks failed", exc_info=error)
                cause = "structured_outputs: an internal error; the engine's log has the cause"
                outputs.append(self._lifecycle.finish(request, "error", error=cause))
            elif (reason := request.grammar.matcher.error) is not None:
                outputs.append(self._refuse(request, reason))
            else:
                rows.append(row)
        return fill.encoded(rows), outputs + self._bound_memory()

    def _set_aside(self, fill: MaskFill) -> int:
        """Takes the rows that are still being filled out of the step; returns how many."""
        for row, request in enumerate(fill.requests[: fill.num_filling]):
            if request.grammar is not None and request.state is not RequestState.FINISHED:
                request.grammar.pace.note(math.inf)
                request.grammar.ahead = Ahead(fill.words[row], fill.filled[row])
                self._lifecycle.roll_back(request)
        return fill.num_filling

    def _bound_memory(self) -> list[EngineOutput]:
        """Ends the requests of the largest grammar in use while all take too much; looks every few fills."""
        self._num_fills += 1
        if self._num_fills % _FILLS_PER_LOOK:
            return []
        users: dict[Grammar, list[Request]] = {}
        for request in self._lifecycle.requests.values():
            if request.grammar is not None:
                users.setdefault(request.grammar.grammar, []).append(request)
        most = max(self._compiler.cache_bytes, IN_USE_BYTES)
        if sum(grammar.num_bytes for grammar in users) <= most:
            return []
        largest = max(users, key=lambda grammar: grammar.num_bytes)
        reason = (
            f"its grammar takes about {largest.num_bytes} bytes by now, more than any other in use, which may take "
            f"{most} together"
        )
        return [self._refuse(request, reason) for request in users[largest]]

    def _refuse(self, request: Request, reason: str) -> EngineOutput:
        output = self._lifecycle.finish(request, "error", error=f"structured_outputs: {reason}")
        output.fault = "request"
        return output

    def close(self) -> None:
        """Ends threads and child processes."""
        self._compiler.close()
        self._filler.close()

    def _admit(self, request: Request, future: Future[Grammar]) -> list[EngineOutput]:
        error = future.exception()
        if error is None:
            params = request.params.structured_outputs
            given = request.token_ids[request.prompt_len :]
            start_after = params.start_after if params is not None else []
            grammar = future.result()
            pace = self._paces.setdefault(grammar, Pace())
            request.grammar = GrammarProgress(grammar, pace, start_after, given)
            request.state = RequestState.WAITING
            self.must_wait(request)  # begins with its first mask
            self._lifecycle.waiting.add(request)
            return []
        if not isinstance(error, ValueError):
            logger.error("a grammar could not be compiled", exc_info=error)
        output = self._lifecycle.finish(request, "error", error=str(error))
        output.fault = "request" if isinstance(error, ValueError) else "engine"
        return [output]
