"""The scheduler side of the mooncake connector: a decode engine says where the blocks of a prompt go, by its address.

The parameters are those of vLLM's connector of that name, and a proxy may ask both engines at once: with
`do_remote_decode` a prompt is computed and kept, with `do_remote_prefill` and `remote_bootstrap_addr` it is fetched.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from frame.interfaces import ConnectorSetup, RequestView
from frame.quoting import quoted

from ..blocks.askers import Askers
from ..blocks.remote import ParamsError
from ..blocks.wire import PeerError
from ..nixl.options import peers_words
from ..nixl.pulls import whole_grains
from ..push.decode_side import Wish
from ..push.facts import Facts
from ..push.prefill_side import Sends
from ..push.scheduler import SendScheduler
from .bootstrap import Bootstrap, Source, Want, ask
from .options import MooncakeOptions

#: Prompts for which decode engines have asked and that no request has computed yet.
_MAX_WANTS = 4096
#: Prompts that were computed and are not kept.
_MAX_LACKS = 1024


class WantedSends(Sends):
    """Blocks go to who asks for the prompt, before it is computed, meanwhile or later. Any thread may call `want`."""

    awaits: ClassVar[bool] = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._wants: OrderedDict[bytes, tuple[Want, float]] = OrderedDict()
        self._lacks: OrderedDict[bytes, float] = OrderedDict()  # until when who asks is told so
        self._lock = threading.Lock()

    def want(self, want: Want) -> bool:
        """Notes where a prompt goes; returns whether it may still be sent: one that is not kept is not waited for."""
        with self._lock:
            if self._clock() < self._lacks.get(want.digest, 0.0):
                return False
            self._wants.pop(want.digest, None)
            self._wants[want.digest] = (want, self._clock() + self._options.expiry_seconds)
            while len(self._wants) > _MAX_WANTS or next(iter(self._wants.values()))[1] < self._clock():
                self._wants.popitem(last=False)
            return True

    def lacks(self, shown: bytes) -> None:
        with self._lock:
            self._lacks[shown] = self._clock() + self._options.expiry_seconds
            self._lacks.move_to_end(shown)
            if len(self._lacks) > _MAX_LACKS:
                self._lacks.popitem(last=False)

    def place(self, request: RequestView, shown: bytes) -> tuple[str, int] | None:
        with self._lock:
            self._lacks.pop(shown, None)  # it is computed once more
        return self.found(shown)

    def found(self, shown: bytes) -> tuple[str, int] | None:
        want = self._wanted(shown)
        return (want.host, want.port) if want is not None and want.port else None

    def released(self, names: Sequence[str]) -> list[str]:
        for kept in self._kept.values():
            want = self._wanted(kept.digest)
            if want is not None and not want.port:
                kept.deadline = self._clock()
        return super().released(names)

    def _wanted(self, shown: bytes) -> Want | None:
        with self._lock:
            want, until = self._wants.get(shown, (None, 0.0))
        return want if self._clock() < until else None


@dataclass
class Asked:
    """What a request that wants its prompt has asked; `told` is the answer."""

    source: Source
    told: Future[bool]


class MooncakeScheduler(SendScheduler):
    """See the module. Raises `ValueError` where Mooncake would listen and the network is not said to be trusted."""

    title = "mooncake"

    def __init__(self, setup: ConnectorSetup, options: MooncakeOptions) -> None:
        super().__init__(setup, options)
        if self._secret is not None and not options.trusted_network:
            raise ValueError(
                "Mooncake listens on all addresses of this machine, and lets whoever connects read and write the "
                "memory for blocks: set trusted_network of the mooncake connector where only machines that you trust "
                "reach this one, or use nixl or push"
            )
        self._mooncake = options
        self._bootstrap: Bootstrap | None = None
        self._askers: Askers | None = None
        self._asked: dict[str, Asked | None] = {}  # by request id
        self._facts: Facts | None = None
        self._warned: set[str] = set()
        self._rests: dict[Source, float] = {}  # until when an engine that did not answer is not asked

    def open_sends(self, secret: bytes, facts: Sequence[Facts]) -> Sends:
        setup, port = self.setup, self._mooncake.bootstrap_port
        sends = WantedSends(self.layout, self._mooncake)
        self._bootstrap = Bootstrap(
            setup.address,
            port + setup.data_rank if port else 0,
            engine=setup.engine_id,
            secret=secret,
            facts=facts[0],
            want=sends.want,
        )
        self.logger.info("prompts may be asked for at http://%s:%d", setup.address, self._bootstrap.port)
        return sends

    def open_asks(self, secret: bytes, facts: Sequence[Facts]) -> None:
        self._facts = facts[0]
        self._askers = Askers("mooncake-ask")

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        wish = None if self.arrivals is None else self.arrivals.wish(request)
        if wish is not None and not wish.over and num_computed < whole_grains(wish.num_tokens, self.layout):
            asked = self._ask(request, wish)
            wish.over = asked is None or (asked.told.done() and not asked.told.result())
        return super().matched_tokens(request, num_computed)

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        wish = None if self.arrivals is None else self.arrivals.wish(request)
        if wish is not None and (self._asked.pop(request.request_id, None) is None or not wish.over):
            source = self._source(request.params)
            if source is not None:  # nobody has asked, or nobody waits any more
                self._submit(source, Want(wish.digest, self.setup.address, 0))
        return super().finished(request, block_ids)

    def answer(self, request: RequestView) -> dict[str, Any]:
        port = 0 if self._bootstrap is None else self._bootstrap.port
        host = self.setup.address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": request.params.get("transfer_id") or request.request_id,
            "remote_engine_id": self.setup.engine_id,
            "remote_bootstrap_addr": f"http://{f'[{host}]' if ':' in host else host}:{port}",
        }

    def close(self) -> None:
        super().close()
        if self._bootstrap is not None:
            self._bootstrap.close()
            self._bootstrap = None
        if self._askers is not None:
            self._askers.close()

    def _ask(self, request: RequestView, wish: Wish) -> Asked | None:
        """Asks for the prompt of a request, once; None where its parameters name nobody who may be asked."""
        name = request.request_id
        if name not in self._asked:
            source = self._source(request.params)
            port = 0 if self.door is None else self.door.port
            told = None if source is None else self._submit(source, Want(wish.digest, self.setup.address, port))
            self._asked[name] = None if source is None or told is None else Asked(source, told)
        return self._asked[name]

    def _source(self, params: Mapping[str, Any]) -> Source | None:
        try:
            source = Source.of(params)
        except ParamsError as error:
            self._warn(f"kv_transfer_params: {error}; such prompts are computed here", error.name)
            return None
        if not self._mooncake.allows(source.host, self.setup.address):
            allowed = peers_words("mooncake", self._mooncake.peers, self.setup.address)
            self._warn(
                f"kv_transfer_params: {quoted(source.host)} is none of {allowed}; such prompts are computed here"
            )
            return None
        return source

    def _submit(self, source: Source, want: Want) -> Future[bool] | None:
        """Has a thread tell it; None where that is of no use now, or no thread can be started."""
        resting = self._rests.get(source, 0.0) > time.monotonic()
        if self._askers is None or resting:
            return None
        try:
            return self._askers.submit((source.host, source.port), partial(self._tell, source, want))
        except RuntimeError as error:
            self._warn(f"a prefill engine is not asked: {error}")
            return None

    def _tell(self, source: Source, want: Want) -> bool:
        """Runs in a thread: whether the other engine may send it; one that did not answer is not asked for a while."""
        if self._secret is None or self._facts is None or self._rests.get(source, 0.0) > time.monotonic():
            return False
        try:
            found = ask(source, self._secret, self._facts, want, self._mooncake.timeout_seconds)
            self._heard(source, True)
            return found
        except PeerError as error:
            self._heard(source, False)
            if self._mooncake.retry_seconds:
                self._rests = {one: until for one, until in self._rests.items() if until > time.monotonic()}
                self._rests[source] = time.monotonic() + self._mooncake.retry_seconds
            self._warn(f"no KV blocks come from the engine at {source.host}:{source.port}: {error}")
            return False

    def _heard(self, source: Source, answers: bool) -> None:
        if self._askers is not None:
            self._askers.heard((source.host, source.port), answers)

    def _warn(self, text: str, about: str = "") -> None:
        if (about or text) not in self._warned and len(self._warned) < 64:
            self._warned.add(about or text)
            self.logger.warning("%s", text)
