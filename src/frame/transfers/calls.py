"""The scheduler's calls of a KV connector, and what they do to requests. Knows no transport."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from frame.core.engine.cache.kv_cache import KVCache
from frame.core.engine.request import Request
from frame.core.interfaces.connector import ConnectorScheduler, NullConnectorScheduler, RequestView
from frame.core.interfaces.step import StepPlan, TransferReport
from frame.core.interfaces.wire import encode

from .holds import Holds
from .untold import LOST

logger = logging.getLogger("frame.engine")

_FAILED = object()
_METRIC = re.compile("[a-z][a-z0-9_]{0,63}")


class Transfers:
    """Calls one connector about requests. With the null connector everything here is a no-op.

    Where a connector raises, requests are computed without it. `counters` and `gauges` are its numbers for the metrics.
    """

    def __init__(self, connector: ConnectorScheduler, kv: KVCache) -> None:
        self.connector = connector
        self.active = not isinstance(connector, NullConnectorScheduler)
        self._name = connector.setup.plugin or type(connector).__name__
        self._kv = kv
        # it raised in `allocated` or `build_message`: a later message could load into blocks that others hold by then
        self._silent = False
        self._known = WeakSet[Request]()  # of which it was asked
        self._holds = Holds(self._name)
        self.counters: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self._logged: set[str] = set()
        self._refused = False  # a request asked for what no connector does, which was logged
        self._contents = WeakKeyDictionary[Request, bytes]()
        # steps that failed, of which some workers may have reported: the requests whose loads they were to begin
        self._lost: dict[int, list[str]] = {}
        self._asked: dict[int, set[int]] = {}  # by step: those that its plan asks about

    def match(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """As `ConnectorScheduler.matched_tokens`, cut to what may be loaded; (0, False): the connector is not asked."""
        if not self.active or self._silent or not request.transfer.asks:
            return 0, False
        grain, most = self._kv.layout.grain, request.num_tokens - 1 - num_computed
        self._known.add(request)
        count, later = self._ask("matched_tokens", (0, False), request, num_computed, check=_found)
        if count is None:
            return None, False
        if count != most or self._kv.checkpoints.pools:
            count = min(count, most) // grain * grain
        return (count, later) if count > 0 else (0, False)

    def allocated(self, request: Request, num_computed: int, num_external: int) -> bool:
        """Tells the connector of the blocks for `num_computed` tokens, the last `num_external` of which it must load.

        Only where it was asked for them: not of a request whose load has ended. Returns False when it failed: then
        these are not loaded.
        """
        asked = self.active and request.transfer.asks and not (self._silent or request.transfer.num_loaded)
        if not asked:
            return True
        tables = zip(request.cache.blocks, self._kv.layout.groups, strict=True)
        blocks = [table[: group.blocks_for(num_computed)] for table, group in tables]
        if self._ask("allocated", _FAILED, request, blocks, num_external) is _FAILED:
            self._fall_silent()
        return not self._silent

    def finished(self, request: Request, reason: str) -> tuple[bool, dict[str, Any] | None]:
        """Returns (whether the blocks must be held, parameters for the response); called once a request.

        Of requests that it does not know a connector hears nothing more, once its workers hear nothing: it would keep
        blocks, and offer them to others, that no worker sends.
        """
        if self._silent and request not in self._known:
            return False, None
        if not self.active:
            if request.source.kv_transfer and not self._refused:
                self._refused = True
                logger.warning("kv_transfer_params of requests have no effect: this engine has no --kv-connector")
            return False, None
        tables, states = list(request.cache.blocks), self._prompt_states(request)
        for group, block in states.items():
            tables[group] = [block]
        answer: tuple[bool, dict[str, Any] | None]
        answer = self._ask("finished", (False, None), request, tables, reason=reason, check=_ended)
        for group, block in states.items() if answer[0] else ():
            if block:
                self._kv.checkpoints.pools[group].share(block)
                request.cache.blocks[group].append(block)
        if answer[0]:
            self._holds.add(request.request_id)
        return answer

    def _prompt_states(self, request: Request) -> dict[int, int]:
        """By group the copies of its state behind the prompt's last grain before its last token; 0 where none is kept.

        The request's own block, which is overwritten in place, stands for more tokens by now.
        """
        layout, pools = self._kv.layout, self._kv.checkpoints.pools
        place = (request.prompt_len - 1) // layout.grain * layout.grain // layout.block_size
        known = self._kv.block_hashes(request, place)[place - 1] if place and pools else None
        return {
            group: 0 if known is None else pool.find(group, known)
            for group, pool in pools.items()
            if request.cache.blocks[group]
        }

    def attach(self, plan: StepPlan) -> bool:
        """Puts the connector's message into the plan; False: it has none to give, and nothing will be loaded.

        Nor what it agreed to load in this step, before it raised in `allocated`.
        """
        if self._lost:
            self._asked[plan.step] = set(self._lost)
            plan.extras = {**plan.extras, LOST: encode(sorted(self._lost.items()))}
        if not self.active:
            return True
        if self._silent:
            return False
        try:
            message = self.connector.build_message(plan)
            if not isinstance(message, bytes):
                raise TypeError(f"a message is bytes, not {message!r}")
        except Exception:
            logger.exception("KV connector %s failed in build_message", self._name)
            self._fall_silent()
            return False
        if message:
            plan.extras = {**plan.extras, "connector": message}
        return True

    @property
    def asks(self) -> bool:
        """Whether workers must be asked if loads ended that steps which failed were to begin."""
        return any(self._lost.values())

    def lose(self, plan: StepPlan, loads: Sequence[Request]) -> None:
        """A launched step failed on some worker: what the others reported of it, and of its `loads`, is asked for."""
        self._asked.pop(plan.step, None)
        if self.active:
            self._lost[plan.step] = [request.request_id for request in loads]

    def report(self, report: TransferReport, plan: StepPlan) -> list[str]:
        """Passes the report of a step to the connector, and adds the numbers that are in it then to the metrics.

        Returns the ids of ended requests whose blocks it gives back.
        """
        for step in self._asked.pop(plan.step, ()):
            self._lost.pop(step, None)
        released: list[str] = []
        try:
            released = _names(self.connector.update(report) or ())
        except Exception:
            logger.exception("KV connector %s failed in update", self._name)
            self._holds.fail()
        for name in (*report.sent, *released):
            self._holds.discard(name)
        released += self._holds.take_overdue()
        for name, value in self._shown(report.counters).items():
            self.counters[name] = self.counters.get(name, 0.0) + value
        self.gauges.update(self._shown(report.gauges))
        return released

    def failed_blocks(self, report: TransferReport) -> set[tuple[int, int]]:
        """Pairs (group, block) whose content did not arrive; pairs that are no block of the cache are logged."""
        layout = self._kv.layout
        found = set(report.failed_blocks)
        wrong = {
            (group, block)
            for group, block in found
            if not (0 <= group < len(layout.groups) and 0 < block < layout.pools[layout.groups[group].pool])
        }
        if wrong:
            logger.warning("the KV connector reported failed blocks that the cache does not have: %s", sorted(wrong))
        return found - wrong

    def _shown(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The numbers that metrics can show; each of the others is named in the log once."""
        shown = {
            name: value
            for name, value in numbers.items()
            if _METRIC.fullmatch(name) and isinstance(value, int | float) and math.isfinite(value)
        }
        for name in numbers.keys() - shown.keys() - self._logged:
            self._logged.add(name)
            logger.warning("the KV connector reported %r as %r, which no metric can show", name, numbers[name])
        return shown

    def _ask(
        self,
        method: str,
        otherwise: Any,
        request: Request,
        *arguments: Any,
        reason: str = "",
        check: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """What the connector answers; `otherwise` where it or `check` raises: then the request goes on without it."""
        try:
            return check(getattr(self.connector, method)(self._view(request, reason), *arguments))
        except Exception:
            name = request.request_id
            logger.exception("KV connector %s failed in %s; request %s goes on without it", self._name, method, name)
            request.transfer.give_up()
            return otherwise

    def _fall_silent(self) -> None:
        """Its workers hear nothing more: what it was to tell them is not known."""
        self._silent = True
        self._holds.fail()
        logger.error("nothing is loaded or saved by KV connector %s any more", self._name)

    def _view(self, request: Request, reason: str) -> RequestView:
        layout, hashes = self._kv.layout, list[bytes]()
        if self.connector.reads_hashes:
            step = layout.grain // layout.block_size
            full = request.prompt_len // layout.grain * step
            hashes = self._kv.block_hashes(request, full)[step - 1 : full : step]
        return RequestView(
            request_id=request.request_id,
            token_ids=request.token_ids[:],
            block_hashes=hashes,
            prompt_len=request.prompt_len,
            cache_salt=request.source.salt,
            params=request.source.kv_transfer or {},
            content=self._content(request),
            finish_reason=reason,
        )

    def _content(self, request: Request) -> bytes:
        """See `RequestView.content`; found once a request."""
        if (known := self._contents.get(request)) is not None:
            return known
        source, layout, embeds = request.source, self._kv.layout, request.source.embeds
        exact = self.connector.setup.deterministic or source.params.deterministic
        facts = [
            layout.numerics if exact else layout.model,
            exact,
            source.salt,
            None if request.adapter is None else request.adapter.identity,
            list(source.media_keys),
            None if source.encoder_ids is None else source.encoder_ids.astype("<i4").tobytes(),
            None if embeds is None else [embeds.places.astype("<i4").tobytes(), embeds.rows.astype("<f4").tobytes()],
        ]
        self._contents[request] = content = hashlib.sha256(encode(facts)).digest()
        return content


def _found(answer: Any) -> tuple[int | None, bool]:
    """What `matched_tokens` may answer; raises `TypeError` or `ValueError` for all else."""
    count, later = answer
    if not isinstance(count, int | None):
        raise TypeError(f"{count!r} is no number of tokens")
    return count, bool(later)


def _ended(answer: Any) -> tuple[bool, dict[str, Any] | None]:
    """What `finished` may answer; raises `TypeError` or `ValueError` for all else."""
    hold, parameters = answer
    if not isinstance(parameters, dict | None):
        raise TypeError(f"{parameters!r} are no parameters")
    return bool(hold), parameters


def _names(answer: Iterable[Any]) -> list[str]:
    """The ids that `update` may answer; raises `TypeError` for all else."""
    names = list(answer)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"{wrong[0]!r} is no id of a request")
    return names
