"""Wraps a connector's scheduler side: passes every call on and checks the rules of the contract."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from frame.core.interfaces.connector import ConnectorScheduler, RequestView
from frame.core.interfaces.step import StepPlan, TransferReport
from frame.core.interfaces.wire import encode

_METRIC = re.compile("[a-z][a-z0-9_]{0,63}")


class CheckedConnector(ConnectorScheduler):
    """Raises `AssertionError` at the call that breaks a rule. `matched`, `ended` and `resets` hold what was answered.

    `loads` counts the loads of each request. `faults` has what calls raised, which an engine only logs.
    """

    def __init__(self, inner: ConnectorScheduler) -> None:
        super().__init__(inner.setup, inner.options)
        self.inner = inner
        self.reads_hashes = inner.reads_hashes
        self.matched: dict[str, int] = {}
        self.ended: dict[str, bool] = {}
        self.sent: set[str] = set()
        self.resets: list[bool] = []
        self.loads: Counter[str] = Counter()
        self.faults: list[str] = []

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        self.inner.connect(handshakes)

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        with self._noted("matched_tokens"):
            return self._matched_tokens(request, num_computed)

    def _matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        answer: Any = self.inner.matched_tokens(request, num_computed)
        assert isinstance(answer, tuple), f"matched_tokens must give (n, later), gave {answer!r}"
        assert len(answer) == 2, f"matched_tokens must give (n, later), gave {answer!r}"
        count, later = answer
        assert isinstance(later, bool), f"later must be a bool, is {later!r}"
        if count is None:
            return answer
        assert isinstance(count, int), f"n must be an int or None, is {count!r}"
        assert count >= 0, f"n must not be negative, is {count}"
        size = self.layout.grain
        but_one = len(request.token_ids) - 1 - num_computed
        whole = count % size == 0 or (count == but_one and not any(group.keeps_states for group in self.layout.groups))
        assert whole, f"n must be a multiple of the layout's grain {size}, or all tokens but one, is {count}"
        assert count or not later, "later must be False when n is 0"
        assert count <= max(0, but_one), f"{count} tokens past {num_computed} leave none of the prompt to compute"
        again = self.inner.matched_tokens(request, num_computed)
        # another process may have added or removed blocks meanwhile, so a miss may follow a hit, but not an error
        assert again[0] in (None, but_one) or again[0] % size == 0, f"asked again, n is {again[0]}"
        self.matched[request.request_id] = count
        return again

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        with self._noted("allocated"):
            self._allocated(request, block_ids, num_external)

    def _allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        assert request.request_id not in self.ended, "frame's own fault: blocks for a request that ended"
        self.loads[request.request_id] += num_external > 0
        self.inner.allocated(request, block_ids, num_external)

    def build_message(self, plan: StepPlan) -> bytes:
        with self._noted("build_message"):
            return self._build_message(plan)

    def _build_message(self, plan: StepPlan) -> bytes:
        before = encode(plan)
        message = self.inner.build_message(plan)
        assert encode(plan) == before, "build_message must not change the plan"
        assert isinstance(message, bytes), f"the message must be bytes, is {type(message).__name__}"
        return message

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        with self._noted("finished"):
            return self._finished(request, block_ids)

    def _finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        assert request.request_id not in self.ended, "frame's own fault: finished came twice"
        answer: Any = self.inner.finished(request, block_ids)
        assert isinstance(answer, tuple), f"finished must give (hold, parameters), gave {answer!r}"
        hold, parameters = answer
        assert isinstance(hold, bool), f"hold must be a bool, is {hold!r}"
        assert parameters is None or isinstance(parameters, dict), f"parameters must be a dict or None: {parameters!r}"
        if parameters is not None:
            encode(parameters)  # it travels to the caller
        self.ended[request.request_id] = hold
        return hold, parameters

    def update(self, report: TransferReport) -> list[str]:
        twice = self.sent & set(report.sent)
        assert not twice, f"{sorted(twice)} were reported as sent twice"
        self.sent |= set(report.sent)
        for group, block in report.failed_blocks:
            assert 0 <= group < len(self.layout.groups), f"failed_blocks names KV group {group}, which is not there"
            most = self.layout.pools[self.layout.groups[group].pool]
            assert 0 < block < most, f"failed_blocks names block {block}, which no request has"
        for name, value in (*report.counters.items(), *report.gauges.items()):
            assert _METRIC.fullmatch(name), f"{name!r} cannot name a metric; write lower-case letters, digits and '_'"
            assert math.isfinite(value), f"{name} is {value}, which no metric can show"
        assert all(value >= 0 for value in report.counters.values()), f"counters never fall: {report.counters}"
        both = report.counters.keys() & report.gauges.keys()
        assert not both, f"{sorted(both)} are counters and gauges"
        ranks = {rank for rank, _ in report.notes}
        known = set(range(self.setup.mesh.engine_size))
        assert ranks <= known, f"notes of ranks {sorted(ranks)}, which are not all there"
        released = list(self.inner.update(report) or ())
        strange = [name for name in released if not self.ended.get(name)]
        assert not strange, f"update returned {strange}, whose blocks are not held"
        return released

    def reset(self) -> bool:
        done = self.inner.reset()
        assert isinstance(done, bool), f"reset must say whether it could, gave {done!r}"
        self.resets.append(done)
        return done

    def close(self) -> None:
        self.inner.close()

    @contextmanager
    def _noted(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.faults.append(f"{method}: {error or type(error).__name__}")
            raise
