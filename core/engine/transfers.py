"""The scheduler's side of a KV connector: what it is asked, told, and reports. Knows no transport."""

from __future__ import annotations

from typing import Any

from ..interfaces.connector import ConnectorScheduler, NullConnectorScheduler, RequestView
from ..interfaces.step import StepPlan, TransferReport
from .kv_cache import KVCache
from .request import Request


class Transfers:
    """Speaks to one connector in terms of requests. With the null connector everything here is a no-op."""

    def __init__(self, connector: ConnectorScheduler, kv: KVCache) -> None:
        self.connector = connector
        self.active = not isinstance(connector, NullConnectorScheduler)
        self._kv = kv

    def match(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded past `num_computed`, whether later); None: ask again in a later step."""
        if not self.active or not request.use_connector or self._kv.holds_states:
            return 0, False
        size = self._kv.block_size
        count, later = self.connector.matched_tokens(self._view(request), num_computed)
        if count is None:
            return None, False
        count = min(count, (request.num_tokens - 1) // size * size - num_computed) // size * size
        return (count, later) if count > 0 else (0, False)

    def allocated(self, request: Request, num_computed: int, num_external: int) -> None:
        """The request has blocks for `num_computed` tokens, of which the last `num_external` are to be loaded."""
        if self.active and num_external:
            count = num_computed // self._kv.block_size
            self.connector.allocated(self._view(request), [table[:count] for table in request.blocks], num_external)

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(whether the blocks must be held, parameters for the response); called once a request."""
        if not self.active:
            return False, None
        return self.connector.finished(self._view(request), request.blocks)

    def attach(self, plan: StepPlan) -> None:
        """Puts the connector's message into the plan."""
        if self.active:
            message = self.connector.build_message(plan)
            if message:
                plan.extras = {**plan.extras, "connector": message}

    def report(self, report: TransferReport) -> None:
        """Passes on what the workers reported."""
        self.connector.update(report)

    def _view(self, request: Request) -> RequestView:
        full = request.prompt_len // self._kv.block_size
        return RequestView(
            request_id=request.request_id,
            token_ids=request.token_ids[:],
            block_hashes=self._kv.block_hashes(request, full)[:full],
            prompt_len=request.prompt_len,
            cache_salt=request.source.salt,
            params=request.source.kv_transfer or {},
        )
