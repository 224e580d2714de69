"""A decode engine's side of the push connector: what came of which prompt, and which request gets it. Sees no byte."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from frame.interfaces import KVLayout, RequestView

from ..nixl.messages import digest
from ..nixl.pulls import whole_grains
from .messages import Load, PushStep, State, moved_tokens

#: A prompt that was sent before its request came has begun to come: who waits longer was named by mistake.
ANSWERED_SECONDS = 2.0
#: Prompts of which it is kept that nothing comes any more.
_MAX_PAST = 1024
#: Prompts of which something is known to come or to have come.
_MAX_STATES = 8192


@dataclass
class Wish:
    """A request whose prompt another engine sends; it waits `patience` seconds, `since` it first did, unless `over`."""

    digest: bytes
    num_tokens: int
    patience: float
    since: float | None = None
    over: bool = False


class Arrivals:
    """See the module. `num_ranks` workers take a prompt's blocks, each its own; a request waits `patience` seconds."""

    def __init__(
        self, layout: KVLayout, num_ranks: int, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout = layout
        self._num_ranks = num_ranks
        self._patience = patience
        self._clock = clock
        self._wishes: dict[str, Wish | None] = {}  # by request id; None: it has none
        self._states: OrderedDict[bytes, dict[int, State]] = OrderedDict()  # by digest and rank
        self._past: OrderedDict[bytes, float] = OrderedDict()  # when they went or were loaded
        self._loading: dict[str, bytes] = {}  # digests by request id, also of ended requests
        self._loads: list[Load] = []
        self._forget: list[bytes] = []
        self._clear = False

    @property
    def busy(self) -> bool:
        """Whether something is being loaded."""
        return bool(self._loading)

    def match(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        """As `ConnectorScheduler.matched_tokens`."""
        wish = self.wish(request)
        if wish is None or wish.over or num_computed >= whole_grains(wish.num_tokens, self._layout):
            return 0, False
        if wish.digest in self._loading.values():
            return None, False  # by another request, after which it may be here
        states = self._states.get(wish.digest, {})
        if len(states) == self._num_ranks and all(state == "arrived" for state in states.values()):
            return self._stop(wish, request) - num_computed, True
        now = self._clock()
        if states:
            # workers tell when no more comes; what one of them lacks is of no use to the others
            return (0, False) if "gone" in states.values() else (None, False)
        if wish.since is None:
            wish.since = now
        # a prompt that went is not waited for, though it may be sent once more
        late = now > wish.since + wish.patience or now < self._past.get(wish.digest, -1e9) + self._patience
        return (0, False) if late else (None, False)

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """As `ConnectorScheduler.allocated`."""
        wish = self._wishes.get(request.request_id)
        if wish is None or wish.over:
            return
        wish.over = True
        if not num_external:
            self._leave(wish)
            return
        places, blocks, stop = [], [], self._stop(wish, request)
        for table, group in zip(block_ids, self._layout.groups, strict=True):
            first, last = 0, 1  # of a state, which is loaded whole
            if not group.keeps_states:
                first, last = (stop - num_external) // group.block_size, -(-stop // group.block_size)
            needed = [place for place in range(first, last) if table[place]]
            places.append(needed)
            blocks.append([int(table[place]) for place in needed])
        self._loads.append(Load(request.request_id, wish.digest, places, blocks))
        self._loading[request.request_id] = wish.digest

    def fill(self, step: PushStep) -> None:
        """Adds to a step's message what is loaded and dropped."""
        step.loads, self._loads = self._loads, []
        step.forget, self._forget = self._forget, []
        step.clear, self._clear = self._clear, False
        loaded = {load.owner for load in step.loads}
        step.loading = [name for name in self._loading if name not in loaded]

    def finished(self, request: RequestView) -> None:
        """Called once a request."""
        wish = self.wish(request)
        del self._wishes[request.request_id]
        if wish is not None and not wish.over:
            self._leave(wish)

    def told(self, rank: int, arrivals: dict[bytes, State]) -> None:
        """Called with what became of prompts at a worker."""
        for name, state in arrivals.items():
            states = self._states.setdefault(name, {})
            states[rank] = state
            if state == "gone":
                self._note_past(name)
            else:
                self._past.pop(name, None)
            if len(states) == self._num_ranks and set(states.values()) == {"gone"}:
                del self._states[name]
        while len(self._states) > _MAX_STATES:
            self._states.popitem(last=False)

    def received(self, request_ids: Sequence[str]) -> None:
        """Called with requests whose loads all workers have ended."""
        for name in [self._loading.pop(one) for one in request_ids if one in self._loading]:
            self._states.pop(name, None)
            self._note_past(name)

    def reset(self) -> bool:
        """Has all be dropped that came; False where some of it is being loaded."""
        if self._loading:
            return False
        self._states.clear()
        self._clear = True
        return True

    def wish(self, request: RequestView) -> Wish | None:
        """What the request's parameters say of its prompt; read once."""
        name = request.request_id
        if name not in self._wishes:
            num_tokens = moved_tokens(request, self._layout)
            asks = request.params.get("do_remote_prefill") is True and num_tokens > 0
            shown = digest(request.content, request.token_ids[:num_tokens]) if asks else b""
            sent = request.params.get("transfer_mode") == "push"
            patience = min(self._patience, ANSWERED_SECONDS) if sent else self._patience
            self._wishes[name] = Wish(shown, num_tokens, patience) if asks else None
        return self._wishes[name]

    def _stop(self, wish: Wish, request: RequestView) -> int:
        """The end of the tokens that are loaded: all but the request's last one; whole grains where it has more."""
        ends = wish.num_tokens == len(request.token_ids) - 1
        return wish.num_tokens if ends else whole_grains(wish.num_tokens, self._layout)

    def _leave(self, wish: Wish) -> None:
        """A request needs no blocks of the prompt; nobody else does who waits now."""
        others = (one for one in self._wishes.values() if one is not None and one is not wish and not one.over)
        if wish.digest not in self._loading.values() and all(one.digest != wish.digest for one in others):
            self._states.pop(wish.digest, None)
            self._forget.append(wish.digest)

    def _note_past(self, name: bytes) -> None:
        self._past[name] = self._clock()
        self._past.move_to_end(name)
        if len(self._past) > _MAX_PAST:
            self._past.popitem(last=False)
