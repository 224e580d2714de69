"""Blocks that the requests of sessions leave to those that follow them, until blocks are short. Knows no queue."""

from __future__ import annotations

from copy import copy

from ..request import CachedBlocks, Request, TransferState
from .kv_cache import KVCache


class KeptBlocks:
    """What sessions hold while they wait for input: ended requests with their blocks by id, the oldest first.

    States may stand for a token too many, and a connector knows blocks by their request: with either nothing is kept.
    """

    def __init__(self, kv: KVCache, *, connected: bool) -> None:
        self._kv = kv
        self._active = not connected and not any(group.keeps_states for group in kv.layout.groups)
        self._requests: dict[str, Request] = {}
        #: whether waiting requests may hold blocks that they were given here
        self.used = False

    def keep(self, request: Request) -> None:
        """Takes the blocks of a running request of a session that ends: all its tokens but the last are computed.

        Not where steps behind its end, which were on their way, gave back blocks that the next request needs.
        """
        known = request.num_tokens - 1
        if self._active and request.source.follows is not None and self._kv.has_windows(request, known):
            self.drop(request.request_id)  # of an earlier session of that name, whose end nobody told
            self._requests[request.request_id] = owner = copy(request)
            owner.transfer = TransferState(asks=False)
            request.cache = CachedBlocks.none(len(request.cache.blocks), request.cache.root)

    def hand_over(self, request: Request) -> None:
        """Gives a new request the blocks of the one that it follows, if they are here and hold what it begins with.

        Not to one that waits for its grammar first: the queue, from which blocks are taken back, does not have it.
        """
        before = self._requests.pop(request.source.follows or "", None)
        if before is None:
            return
        known, cache = before.token_ids[:-1], before.cache
        alike = cache.root == request.cache.root and request.token_ids[: len(known)] == known
        if alike and len(known) < request.num_tokens and request.params.structured_outputs is None:
            request.cache, self.used = cache, True
            request.transfer.hold_loaded(len(known))
        else:
            self._kv.free(before)

    def drop(self, request_id: str | None = None) -> bool:
        """Frees what that request left, else what has been kept longest; False where there is nothing."""
        before = self._requests.pop(request_id or next(iter(self._requests), ""), None)
        if before is not None:
            self._kv.free(before)
        return before is not None
