"""Whose turn it is when owners take turns by tokens: start-time fair queueing (Goyal, Vin and Cheng, 1996).

Each request gets a `turn`: the tokens that its owner had asked for before it, but at least the turn of the request that
was admitted last, so that an owner gains nothing by being idle. Admitting requests in the order of their turns gives
every owner an equal share of tokens, however much one of them asks for.
Policies decide whether that order is used. Knows no queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..request import Request


class Share:
    """What one owner uses: `last` is the turn of its newest request, `end` the turn after all tokens that it asked for.

    `num_running` of its `num_unfinished` requests hold a slot.
    """

    def __init__(self, owner: str, now: float) -> None:
        self.owner = owner
        self.end = now
        self.last = now
        self.num_running = 0
        self.num_unfinished = 0


class Turns:
    """The shares of owners that have unfinished requests."""

    def __init__(self) -> None:
        self._now = 0.0
        self._shares: dict[str, Share] = {}

    @property
    def num_waiting(self) -> int:
        """Owners with a request that is unfinished and does not run."""
        return sum(share.num_unfinished > share.num_running for share in self._shares.values())

    def has_its_share(self, owner: str, places: int) -> bool:
        """Whether `owner` has as many waiting requests as its equal share of `places` in the queue allows."""
        share = self._shares.get(owner)
        if share is None:
            return False
        return (share.num_unfinished - share.num_running) * len(self._shares) >= places

    def enter(self, request: Request) -> None:
        """Gives a request that arrived the share of its owner, and a turn."""
        owner = request.source.owner
        share = self._shares.get(owner)
        if share is None:
            share = self._shares[owner] = Share(owner, self._now)
        request.share = share
        share.num_unfinished += 1
        request.turn = share.last = max(self._now, share.end, share.last)
        share.end = request.turn + request.max_len

    def admit(self, request: Request) -> None:
        """Notes that a request was admitted: no request that arrives later gets an earlier turn."""
        self._now = max(self._now, request.turn)

    def put_behind(self, request: Request, other: Request) -> None:
        """Gives a preempted request a turn after that of the request which takes its slot."""
        request.turn = max(request.turn, other.turn + 1)

    def end(self, request: Request) -> None:
        """Takes back from the owner of a request that ended the tokens which it was allowed and did not have."""
        share = request.share
        share.end -= request.max_len - request.num_tokens
        share.num_unfinished -= 1
        if not share.num_unfinished:
            del self._shares[share.owner]
