"""What endpoints ask about HTTP requests: bodies, owners, disconnects, forwarding."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ..interfaces.errors import RequestError
from ..interfaces.schema import BoundedModel
from ..interfaces.serving import RequestCounts
from .bodies import JSON_BODY
from .client_disconnect import event_stream, race
from .ingress import OWNER
from .refusals import field_error

if TYPE_CHECKING:
    from .serving import ServingHost

T = TypeVar("T")
M = TypeVar("M", bound=BoundedModel)


class ServedRequests:
    """`HttpRequests` of a host."""

    def __init__(self, host: ServingHost) -> None:
        self._host = host

    def parse(self, request: Request, kind: type[M]) -> M:
        """The JSON body as a bounded model; raises `RequestError` 400 naming the field."""
        body = request.scope.get(JSON_BODY)
        if not isinstance(body, dict):
            raise RequestError(400, "the body must be a JSON object")
        try:
            return kind.model_validate(body, context={"limits": self._host.limits})
        except ValidationError as error:
            raise field_error(error, {*kind.model_fields, *kind.not_served}) from None

    def owner(self, request: Request) -> str:
        """The owner of what a request stores: a digest of its API key, "" on a server without keys."""
        owner: str = request.scope.get(OWNER, "")
        return owner

    async def race(self, request: Request, work: Awaitable[T]) -> T:
        """Awaits `work`, and cancels it when the client disconnects."""
        return await race(request.receive, work)

    def events(self, frames: AsyncIterator[bytes]) -> Response:
        """A response of server-sent events from encoded frames."""
        return event_stream(frames)

    def forward(self, path: str) -> Response:
        """The answer of the POST route `path` to this request, which is not checked again."""
        return self._host.batches.forward(path)

    @property
    def load(self) -> int:
        """HTTP requests that are being answered, in all API processes."""
        return self._host.metrics.in_flight

    def counts(self) -> RequestCounts:
        """What all API processes have counted since the server started."""
        return self._host.metrics.counts()
