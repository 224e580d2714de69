"""Forwards a request to one server after another until one answers, and passes that answer on while it arrives.

Another server is asked only while the client has got nothing. A server's own refusals (400, 429, …) are answers.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from starlette.types import Receive, Scope, Send

from frame.core.interfaces.errors import RequestError
from frame.core.server.errors import error_event
from frame.core.server.event_stream import wire_of

from .bodies import ClientLeftError, Upload, announced, drop, is_upload, read_body, too_long
from .endings import Ending, StoppedError
from .policy import Route, RouteRequest, RouteServer
from .prefill import PARAMS, ParamsScan, check_params, decode_body, divides, prefill_body
from .upstream import Answer, LostError, UnreachableError, Upstream

if TYPE_CHECKING:
    from .asked_policy import AskedPolicy
    from .fleet import Fleet, FleetServer

logger = logging.getLogger("frame.route")

#: Routes below which a server keeps what it was told, so that one that does not know of it (404) is not the right one.
_KEPT = ("/v1/responses", "/v1/batches", "/v1/files")
#: Of these, routes that may not be asked twice, unless the server got nothing.
_ONCE = ("/v1/batches", "/v1/files")


@dataclass
class Forwarded:
    """A request on its way. Files are passed on piece by piece as they arrive, so that no second server gets them."""

    scope: Scope
    target: str
    request: RouteRequest
    headers: list[tuple[str, str]]
    body: bytes | Upload
    #: the answer of which the client has got the head
    begun: Answer | None = None
    #: what the client has got last of the answer's body
    last: bytes = b""
    #: servers that got it and have not answered
    num_lost: int = 0

    @property
    def may_repeat(self) -> bool:
        """Whether another server may get it when one that got it has not answered.

        Only once: a request by which servers die must not end all of them.
        """
        changes = self.scope["method"] not in ("GET", "HEAD", "OPTIONS")
        once = changes and self.request.path.startswith(_ONCE)
        return self.num_lost < 2 and not once and not isinstance(self.body, Upload)


@dataclass(frozen=True)
class Bounds:
    """Most bytes of a body and of a form with files, and most servers that a request is sent to.

    `clients_params`: clients may say themselves from where a server is to fetch KV.
    """

    body_bytes: int
    upload_bytes: int
    tries: int = 3
    clients_params: bool = False


class Forwarding:
    """Takes requests that have been admitted."""

    def __init__(self, fleet: Fleet, policy: AskedPolicy, upstream: Upstream, bounds: Bounds) -> None:
        self._fleet = fleet
        self._policy = policy
        self._upstream = upstream
        self._bounds = bounds
        self._endings: set[Ending] = set()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request to its end. Raises `RequestError` while the client has got nothing."""
        forwarded = None
        with contextlib.suppress(ClientLeftError):
            try:
                with Ending() as ending, self._under_way(ending):
                    forwarded = await self._read(scope, receive, ending)
                    if not isinstance(forwarded.body, Upload):
                        ending.watch(receive)
                    await self._forward(forwarded, send)
            except StoppedError:
                error = RequestError(503, "the front was stopped before the answer was complete")
                if forwarded is None or forwarded.begun is None:
                    raise error from None
                await _break_off(forwarded, error, send)

    @contextlib.contextmanager
    def _under_way(self, ending: Ending) -> Iterator[None]:
        self._endings.add(ending)
        try:
            yield
        finally:
            self._endings.discard(ending)

    @property
    def active(self) -> int:
        """Requests that have not been answered yet."""
        return len(self._endings)

    def stop(self) -> None:
        """Ends all requests: streams with an event that says why, others with an error or with their connection."""
        for ending in list(self._endings):
            ending.end(StoppedError())

    async def _read(self, scope: Scope, receive: Receive, ending: Ending) -> Forwarded:
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        if not raw.startswith(b"/"):
            raise RequestError(400, "the path of a request must begin with a slash")
        if ".." in scope["path"].replace("\\", "/").split("/"):  # it could lead out of the path of a server's address
            raise RequestError(400, "the path of a request may not hold '..' between slashes")
        query = scope["query_string"]
        target = (raw + b"?" + query if query else raw).decode("latin-1")
        try:
            headers = self._upstream.headers(scope["headers"])
        except UnicodeDecodeError:
            raise RequestError(400, "a header of the request is no UTF-8 text") from None
        checks = self._fleet.fetches_kv and not self._bounds.clients_params
        if not is_upload(scope):
            body = await read_body(scope, receive, self._bounds.body_bytes)
            request = RouteRequest(scope["path"], body)
            if checks:
                check_params(request)
            return Forwarded(scope, target, request, headers, body)
        if (length := announced(scope)) is not None:
            if length > self._bounds.upload_bytes:
                await drop(receive)
                raise too_long(self._bounds.upload_bytes)
            headers.append(("content-length", str(length)))
        check = ParamsScan() if checks else None
        upload = Upload(receive, self._bounds.upload_bytes, lambda: ending.watch(receive), check)
        return Forwarded(scope, target, RouteRequest(scope["path"]), headers, upload)

    async def _forward(self, forwarded: Forwarded, send: Send) -> None:
        server = await self._first(forwarded)
        tried: list[FleetServer] = []
        while not await self._try(forwarded, server, tried, send):
            tried.append(server)
            if len(tried) == self._bounds.tries:
                raise _unanswered()
            server = self._server(self._route(forwarded.request, tried))

    async def _first(self, forwarded: Forwarded) -> FleetServer:
        """The first server to ask, once the prompt was computed by another one where there are such servers."""
        request = forwarded.request
        tried: list[FleetServer] = []
        await self._prepare(forwarded)
        prefills = self._fleet.usable("prefill")
        if prefills and not (forwarded.scope["method"] == "POST" and divides(request)):
            prefills = []
        route = self._route(request, (), prefills)
        if route.prefill is not None:
            _name(forwarded)
        while route.prefill is not None:
            server, first = self._server(route), cast("FleetServer", route.prefill)
            with server.busy():  # so that others are not sent there, too
                if await self._prefilled(forwarded, first):
                    return server if server.usable else self._server(self._route(request, ()))
            tried.append(first)
            left = self._fleet.usable("prefill", tried) if len(tried) < self._bounds.tries else ()
            route = self._route(request, (), left)
        return self._server(route)

    async def _prepare(self, forwarded: Forwarded) -> None:
        """Has a policy that asks servers about requests do so, with the client's key."""
        request, servers = forwarded.request, self._fleet.usable("serve")
        if not (self._policy.prepares and request.body and servers and forwarded.scope["method"] == "POST"):
            return
        keys = [header for header in forwarded.headers if header[0] in ("authorization", "x-api-key")]
        headers = [*keys, ("content-type", "application/json"), ("accept-encoding", "identity")]

        async def ask(server: RouteServer, path: str, body: bytes) -> bytes | None:
            answer = None
            try:
                answer = await self._upstream.send(server.url + path, "POST", headers, body)
                return await answer.whole() if answer.status == 200 else None
            except (UnreachableError, LostError):
                return None
            finally:
                if answer is not None:
                    answer.close()

        await self._policy.prepare(request, servers, ask)

    def _route(
        self, request: RouteRequest, tried: Sequence[FleetServer], prefills: Sequence[FleetServer] = ()
    ) -> Route:
        """What the policy answers for the servers that have not been tried, or, where there is none, for all."""
        servers = self._fleet.usable("serve", tried) or self._fleet.usable("serve")
        if not servers:
            raise RequestError(503, self._fleet.why_not or "no server is ready")
        return self._policy.route(request, servers, prefills)

    def _server(self, route: Route) -> FleetServer:
        return cast("FleetServer", route.server)

    async def _prefilled(self, forwarded: Forwarded, server: FleetServer) -> bool:
        """Has a server compute the prompt, and puts where its KV is into the body; False when the server fails.

        A server that refuses the request leaves it to the one that answers, which says so in the form that was asked.
        """
        answer = None
        try:
            with server.busy():
                # the answer is read here
                headers = [header for header in forwarded.headers if header[0] != "accept-encoding"]
                body = prefill_body(forwarded.request)
                answer = await self._ask(forwarded, server, body, [*headers, ("accept-encoding", "identity")])
                content = await answer.whole()
        except (UnreachableError, LostError) as error:
            self._failed(server, error)
            forwarded.num_lost += isinstance(error, LostError)
            return False
        finally:
            if answer is not None:
                answer.close()
        if answer.status >= 500:
            server.failures += 1
            logger.warning("%s has not computed a prompt: status %d", server.url, answer.status)
            return False
        if answer.status == 200:
            server.prefills += 1
            told = decode_body(forwarded.request, content)
            if told is None:
                _without_kv(server)
            else:
                forwarded.body = told
        return True

    async def _try(self, forwarded: Forwarded, server: FleetServer, tried: Sequence[FleetServer], send: Send) -> bool:
        """Sends the request to a server, and its answer to the client; False when another one is to be asked."""
        more = len(tried) + 1 < self._bounds.tries and not isinstance(forwarded.body, Upload)
        others = more and self._fleet.usable("serve", [*tried, server])
        answer = None
        with server.busy():
            try:
                answer = await self._ask(forwarded, server, forwarded.body, forwarded.headers)
                if others and _another_may_know(forwarded, answer):
                    return False
                # the head waits for what follows it: a server that dies before has emitted nothing
                first = await answer.piece() if answer.is_stream else None
                await self._pass_on(forwarded, server, answer, first, send)
            except UnreachableError as error:
                self._failed(server, error)
                return False
            except LostError as error:
                if isinstance(forwarded.body, Upload) and forwarded.body.error is not None:
                    raise forwarded.body.error from None
                self._failed(server, error)
                forwarded.num_lost += 1
                if not forwarded.may_repeat:
                    raise _unanswered() from None
                return False
            finally:
                if answer is not None:
                    answer.close()
        return True

    async def _ask(
        self, forwarded: Forwarded, server: FleetServer, body: bytes | Upload, headers: list[tuple[str, str]]
    ) -> Answer:
        """The beginning of a server's answer."""
        began = time.perf_counter()
        answer = await self._upstream.send(server.url + forwarded.target, forwarded.scope["method"], headers, body)
        server.answered(answer.status, time.perf_counter() - began)
        return answer

    def _failed(self, server: FleetServer, error: UnreachableError | LostError) -> None:
        server.failures += 1
        if isinstance(error, UnreachableError):
            server.problem = str(error)  # until it is looked at again
        logger.warning("%s has not answered a request: %s", server.url, error)

    async def _pass_on(
        self, forwarded: Forwarded, server: FleetServer, answer: Answer, first: bytes | None, send: Send
    ) -> None:
        """Sends an answer to the client, each piece as soon as it is there. Never raises `LostError`."""
        forwarded.begun = answer
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        wire = wire_of(forwarded.scope, send)
        try:
            piece = await answer.piece() if first is None else first
            while piece:
                forwarded.last = piece
                if not wire.write(piece):
                    await wire.drain()
                piece = await answer.piece()
        except LostError as error:
            server.broken += 1
            logger.warning("%s broke off an answer: %s", server.url, error)
            await _break_off(forwarded, RequestError(502, "the server broke off its answer"), send)
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _break_off(forwarded: Forwarded, error: RequestError, send: Send) -> None:
    """Ends an answer that has begun: with an error event where it is a stream of events, else with the connection."""
    if forwarded.begun is not None and forwarded.begun.takes_events:
        event = error_event(forwarded.scope, error)
        if not forwarded.last.endswith((b"\n\n", b"\r\n\r\n")):
            event = b"\n\n" + event  # ends what was cut off
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _another_may_know(forwarded: Forwarded, answer: Answer) -> bool:
    """Whether this server serves nobody now, or does not know of a thing that one of them keeps."""
    return answer.status == 503 or (answer.status == 404 and forwarded.request.path.startswith(_KEPT))


def _without_kv(server: FleetServer) -> None:
    """Counts a prompt whose KV is not handed over, and says so where it is the first prompt of its server."""
    server.prefills_without_kv += 1
    if server.prefills == 1:
        logger.warning(
            "%s has computed a prompt and not said by %s where its KV is, so the server that answers computes it, too; "
            "it needs a --kv-connector that hands KV over, unless the prompt is shorter than a block",
            server.url,
            PARAMS,
        )


def _unanswered() -> RequestError:
    return RequestError(502, "no server has answered the request")


def _name(forwarded: Forwarded) -> None:
    """Gives a request that two servers get a name, unless it has one."""
    if not any(name == "x-request-id" for name, _ in forwarded.headers):
        forwarded.headers.append(("x-request-id", uuid.uuid4().hex))
