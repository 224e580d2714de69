"""A decode engine's side of the nixl connector: requests whose prompt another engine computed, and its leases.

Threads ask the other engine, so that the engine's loop goes on. Sees no block's bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from frame.interfaces import KVLayout, RequestView
from frame.quoting import quoted
from frame.transfers import news

from ..blocks.askers import Askers
from ..blocks.remote import ParamsError
from ..blocks.wire import PeerError
from .holds import MAX_RENEWALS
from .links import Acquaintance, Links, Source
from .messages import MARGIN_SECONDS, AgentFacts, Load, digest
from .options import NixlOptions, peers_words
from .shapes import Facts
from .wire import Done, Granted, Lease, Question, Release, Renew, Renewed

logger = logging.getLogger("frame.connectors.nixl")

T = TypeVar("T")

_CLOSE_SECONDS = 2.0
#: Leases are renewed when this part of them is left.
_RENEW_AT = 0.5
#: How long no lease is renewed once no thread could be had for that.
_REST_SECONDS = 1.0


@dataclass
class Grant:
    """What a prefill engine granted, of which `met` is known.

    `deadline` is by this machine's clock, counted from before it was asked.
    """

    ticket: bytes
    blocks: list[list[int]]
    agents: list[AgentFacts]
    met: Acquaintance
    deadline: float
    seconds: float


@dataclass
class Pull:
    """A request whose prompt another engine computed: the first `num_tokens` of it may be read there, or whole grains.

    `digest` shows that this engine knows the first `num_shown` of them.
    """

    source: Source
    num_tokens: int
    num_shown: int
    digest: bytes
    asked: Future[Grant | None] | None = None
    patience: float = 0.0
    grant: Grant | None = None
    renewal: Future[float | None] | None = None
    renewals: int = 0
    rests_until: float = 0.0  # when its renewal may be tried again
    load: int = 0  # the number of what the workers read
    over: bool = False  # its blocks are being read, were read, or are needed no more


class Pulls:
    """See the module. `address` is this machine's, `facts` are this engine's."""

    def __init__(self, layout: KVLayout, options: NixlOptions, secret: bytes, address: str, facts: Facts) -> None:
        self._layout = layout
        self._options = options
        self._address = address
        self._groups = facts.groups
        self._links = Links(secret, facts, timeout=options.lookup_seconds, retry=options.retry_seconds)
        self._askers = Askers("nixl-ask")
        self._pulls: dict[str, Pull | None] = {}  # by request id; None: it brings no blocks
        self._granted: dict[str, Pull] = {}  # whose blocks may be read, before that begins
        self._loading: dict[str, Pull] = {}  # whose blocks are being read, also of ended requests
        self._num_loads = 0
        self._told: set[Future[None]] = set()  # what other engines are being told
        self._warned: set[str] = set()

    def match(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        """As `ConnectorScheduler.matched_tokens`."""
        pull = self._pull(request)
        if pull is None or pull.over or num_computed >= whole_grains(pull.num_tokens, self._layout):
            return 0, False
        if pull.asked is None:
            if self._is_pulled(pull.source):
                return None, False  # by another request with the same parameters, after which it may be here
            pull.patience = time.monotonic() + self._options.lookup_seconds
            pull.asked = self._submit(pull.source, lambda: self._ask(pull))
            if pull.asked is None:
                return 0, False
            pull.asked.add_done_callback(lambda _: news.tell())
        if not pull.asked.done():
            return (None, False) if time.monotonic() < pull.patience else (0, False)
        if pull.grant is None and (grant := pull.asked.result()) is not None:
            pull.grant = grant
        stop = self._stop(pull, request)
        if pull.grant is None or not self._covers(pull.grant, pull.num_tokens, stop):
            self._granted.pop(request.request_id, None)
            return 0, False
        self._granted[request.request_id] = pull
        return (0, False) if time.monotonic() > pull.grant.deadline - MARGIN_SECONDS else (stop - num_computed, True)

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> Load | None:
        """As `ConnectorScheduler.allocated`; what the workers shall read. Of the rest the other engine is told."""
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.over:
            return None
        pull.over = True
        self._granted.pop(request.request_id, None)
        grant = pull.grant
        if grant is None or not num_external:
            self._release(pull)
            return None
        stop = self._stop(pull, request)
        start = stop - num_external
        ours, theirs = (
            [_at(group.places(start, stop), blocks) for blocks, group in zip(tables, groups, strict=True)]
            for tables, groups in ((block_ids, self._groups), (grant.blocks, grant.met.theirs.groups))
        )
        self._loading[request.request_id] = pull
        self._num_loads += 1
        pull.load = self._num_loads
        return Load(
            pull.load,
            request.request_id,
            grant.agents,
            grant.met.fit,
            grant.ticket,
            start,
            stop,
            ours,
            theirs,
            grant.deadline,
        )

    def renew(self) -> dict[int, float]:
        """Asks for more time where reads take long; returns the ends of leases that are known since the last call."""
        later, now = dict[int, float](), time.monotonic()
        for name, pull in [*self._granted.items(), *self._loading.items()]:
            grant = pull.grant
            if grant is None:
                continue
            if pull.renewal is not None and pull.renewal.done():
                deadline, pull.renewal = pull.renewal.result(), None
                if deadline is not None:
                    grant.deadline = deadline
                    if name in self._loading:
                        later[pull.load] = deadline
            elif name in self._loading and now > grant.deadline + 2 * grant.seconds:
                del self._loading[name]  # it never began: the step that was to begin it failed
            elif (
                pull.renewal is None
                and pull.renewals < MAX_RENEWALS
                and now >= pull.rests_until
                and grant.deadline - MARGIN_SECONDS > now > grant.deadline - grant.seconds * _RENEW_AT
            ):
                pull.renewals += 1
                pull.renewal = self._submit(pull.source, partial(self._ask_more, pull.source, grant.ticket))
                pull.rests_until = now + _REST_SECONDS if pull.renewal is None else 0.0
        return later

    def finished(self, request: RequestView) -> None:
        """Called once a request: of blocks that nobody read the other engine is told."""
        pull = self._pull(request)
        del self._pulls[request.request_id]
        self._granted.pop(request.request_id, None)
        if pull is not None and not pull.over:
            pull.over = True
            self._release(pull)

    def received(self, request_id: str, failed: bool) -> None:
        """Called when all workers have ended a request's read; a worker that has all tells the other engine itself."""
        pull = self._loading.pop(request_id, None)
        if pull is not None and failed:
            self._release(pull)

    def close(self) -> None:
        """Gives back what was leased, for a second or two where the other side says nothing; ends all threads."""
        waiting = [pull for pull in self._pulls.values() if pull is not None and not pull.over]
        for pull in [*waiting, *self._loading.values()]:
            pull.over = True
            self._release(pull)
        wait(self._told.copy(), _CLOSE_SECONDS)
        self._links.close()
        self._askers.close()

    def _pull(self, request: RequestView) -> Pull | None:
        """What the request's parameters say of its prompt; read once."""
        name = request.request_id
        if name not in self._pulls:
            self._pulls[name] = self._read(request)
        return self._pulls[name]

    def _read(self, request: RequestView) -> Pull | None:
        if request.params.get("do_remote_prefill") is not True:
            return None
        num_tokens = whole_tokens(request, self._layout)
        if num_tokens and not any(group.keeps_states for group in self._layout.groups):
            num_tokens = request.prompt_len - 1
        try:
            source = Source.of(request.params)
        except ParamsError as error:
            self._warn(f"params {error.name}", f"kv_transfer_params: {error}; such prompts are computed here")
            return None
        if not self._options.allows(source.host, self._address):
            allowed = peers_words("nixl", self._options.peers, self._address)
            text = f"kv_transfer_params: remote_host {quoted(source.host)} is none of {allowed}"
            self._warn(f"host {source.host}", f"{text}; such prompts are computed here")
            return None
        # it needs no whole block, and must show that it knows the prompt all the same, to have the others given back
        shown = num_tokens or request.prompt_len - 1
        return Pull(source, num_tokens, shown, digest(request.content, request.token_ids[:shown]))

    def _stop(self, pull: Pull, request: RequestView) -> int:
        """The end of the tokens that are read: all but the request's last one, so that the first step decodes.

        Whole grains where the request has more tokens, or a state, which stands for whole grains.
        """
        ends = pull.num_tokens == len(request.token_ids) - 1
        return pull.num_tokens if ends else whole_grains(pull.num_tokens, self._layout)

    def _is_pulled(self, source: Source) -> bool:
        asked = (pull for pull in self._pulls.values() if pull is not None and pull.asked is not None and not pull.over)
        return any(pull.source == source for pull in (*asked, *self._loading.values()))

    def _covers(self, grant: Grant, num_tokens: int, stop: int) -> bool:
        """Whether those blocks of the first `num_tokens` tokens are there that tokens from `stop` on read.

        Whole ones of this engine's: what one holds can be found by its hash, whichever part of it was needed now.
        """
        groups = grant.met.theirs.groups
        for blocks, group in zip(grant.blocks, groups, strict=True):
            if len(blocks) != len(group.places(0, num_tokens)):
                return False
        for here, there in grant.met.groups:
            ours = self._layout.groups[here]
            first = ours.specs[0].first_needed(stop) // ours.block_size * ours.block_size
            if not all(grant.blocks[there][first // groups[there].block_size :]):
                return False
        return True

    def _ask(self, pull: Pull) -> Grant | None:
        """Runs in a thread."""
        start = time.monotonic()
        link = self._links.to(pull.source)
        try:
            found = self._question(pull.source, Lease(pull.source.request, pull.num_tokens, pull.digest), Granted)
        except PeerError as error:
            logger.debug("no blocks of request %s: %s", pull.source.request, error)
            return None
        met = link.met
        if met is None or len(found.blocks) != len(met.theirs.groups) or len(found.agents) != len(met.theirs.ranks):
            return None
        return Grant(found.ticket, found.blocks, found.agents, met, start + found.seconds, found.seconds)

    def _ask_more(self, source: Source, ticket: bytes) -> float | None:
        """Runs in a thread: the end of the lease."""
        start = time.monotonic()
        try:
            return start + self._question(source, Renew(ticket), Renewed).seconds
        except PeerError:
            return None

    def _release(self, pull: Pull) -> None:
        """Tells the other engine, in a thread, that nothing, or nothing more, is read."""
        if pull.asked is not None and pull.asked.cancel():
            pull.asked = None
        told = self._submit(pull.source, lambda: self._tell(pull))
        if told is not None:
            self._told.add(told)
            told.add_done_callback(self._told.discard)

    def _submit(self, source: Source, work: Callable[[], T]) -> Future[T] | None:
        """Has a thread do it; None where none can be started, and then it is done later or never."""
        try:
            return self._askers.submit((source.host, source.port), work)
        except RuntimeError as error:
            self._warn("threads", f"a prefill engine is not asked, or not told: {error}")
            return None

    def _tell(self, pull: Pull) -> None:
        grant = None if pull.asked is None else pull.asked.result()  # it was begun before this
        ticket = b"" if grant is None else grant.ticket
        try:
            self._question(pull.source, Release(pull.source.request, pull.num_shown, pull.digest, ticket), Done)
        except PeerError as error:
            logger.debug("request %s was not released: %s", pull.source.request, error)

    def _question(self, source: Source, question: Question, kind: type[T]) -> T:
        """Asks what `source` names; raises `PeerError`."""
        link = self._links.to(source)
        try:
            return link.ask(question, kind)
        finally:
            self._askers.heard((source.host, source.port), link.is_open)

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned and len(self._warned) < 64:
            self._warned.add(about)
            logger.warning("%s", text)


def _at(places: range, blocks: Sequence[int]) -> list[int]:
    """The blocks at these places, all of which there must be."""
    if places.stop > len(blocks):
        raise ValueError(f"{len(blocks)} blocks have no place {places.stop - 1}")
    return list(blocks[places.start : places.stop])


def whole_tokens(request: RequestView, layout: KVLayout) -> int:
    """The whole grains of a prompt before its last token, which the decode engine computes."""
    return whole_grains(request.prompt_len - 1, layout)


def whole_grains(num_tokens: int, layout: KVLayout) -> int:
    """The tokens among the first `num_tokens` that are in whole grains."""
    return num_tokens // layout.grain * layout.grain
