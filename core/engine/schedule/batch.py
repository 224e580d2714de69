"""The running requests and their counters, as arrays over slots, so that a decode step needs no loop over requests."""

from __future__ import annotations

import numpy as np

from ..cache.common_prefixes import SharedPrefixes
from ..request import Request, RequestState
from .slots import Slots


class Batch:
    """Requests that hold a slot, in the order in which they were admitted.

    Arrays are int32 [num_slots], by slot: `num_computed` tokens in the cache once all launched steps are done,
    `num_planned` tokens that exist then (known ones and sampled ones still in flight), `max_len` the most tokens,
    `covered` the tokens that the request's blocks have room for. The first two count `num_unsure` drafts in flight,
    which may be rejected; `num_drafts` are worth planning in the next step. `constrained`, `deterministic` and `pools`
    are the slots of requests that follow a grammar, ask for equal bits, or yield no token.
    """

    def __init__(self, num_slots: int, prefixes: SharedPrefixes | None = None) -> None:
        self.prefixes = prefixes or SharedPrefixes(num_slots)
        self.slots = Slots(num_slots)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_planned = np.zeros(num_slots, np.int32)
        self.max_len = np.zeros(num_slots, np.int32)
        self.covered = np.zeros(num_slots, np.int32)
        self.num_unsure = np.zeros(num_slots, np.int32)
        self.num_drafts = np.zeros(num_slots, np.int32)
        self.constrained: set[int] = set()
        self.deterministic: set[int] = set()
        self.pools: set[int] = set()
        self.embedded: set[int] = set()  # slots of requests that bring embeddings
        self.owners: list[Request | None] = [None] * num_slots
        self._order: dict[int, Request] = {}
        self._order_array: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def requests(self) -> list[Request]:
        """In order of admission."""
        return list(self._order.values())

    @property
    def order(self) -> np.ndarray:
        """Slots [len] in order of admission; not to be written to."""
        if self._order_array is None:
            self._order_array = np.fromiter(self._order, np.int32, len(self._order))
        return self._order_array

    def least_computed(self, slot: int) -> int:
        """Tokens in the cache once all launched steps are done, should all drafts be rejected."""
        return int(self.num_computed[slot] - self.num_unsure[slot])

    def share(self, decodes: np.ndarray, num_steps: int) -> np.ndarray:
        """Those of the slots `decodes` that belong into the next of `num_steps` steps, in their order.

        They are an even part of all running requests, those whose turn was longest ago.
        """
        return decodes if num_steps == 1 else self.slots.next_turn(decodes, -(-len(self) // num_steps))

    def enter(self, request: Request, num_computed: int, covered: int) -> int:
        """Gives the request a slot, all of whose fields are set anew; returns the slot."""
        slot = self.slots.take()
        self.num_computed[slot] = num_computed
        self.num_planned[slot] = request.num_tokens
        self.max_len[slot] = request.max_len
        self.covered[slot] = covered
        self.num_unsure[slot] = self.num_drafts[slot] = 0
        if request.grammar is not None:
            self.constrained.add(slot)
        if request.params.deterministic:
            self.deterministic.add(slot)
        if request.pools:
            self.pools.add(slot)
        if request.source.embeds is not None:
            self.embedded.add(slot)
        self.prefixes.enter(slot, [request.cache.blocks[group] for group in self.prefixes.groups])
        self.owners[slot] = request
        self._order[slot] = request
        self._order_array = None
        request.batch, request.slot, request.state = self, slot, RequestState.RUNNING
        request.share.num_running += 1
        return slot

    def leave(self, request: Request) -> bool:
        """Takes the request's slot back; returns whether no launched step names it any more.

        `num_unanswered` of the request becomes the number of those that do.
        """
        slot = request.slot
        request.num_unanswered = self.slots.unanswered(slot)
        del self._order[slot]
        self._order_array = None
        self.owners[slot] = None
        self.constrained.discard(slot)
        self.deterministic.discard(slot)
        self.pools.discard(slot)
        self.embedded.discard(slot)
        self.prefixes.leave(slot)
        request.batch, request.slot = None, -1
        request.share.num_running -= 1
        return self.slots.retire(slot)
