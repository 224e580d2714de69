"""Passes requests of routes to the text side.

Times and reports them, ends them at their deadline, gives each API key cache salts of its own where that is configured,
and turns failures into `RequestError`s.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Scope

from frame.links.prompt_embeds import check_accepted
from frame.served.adapters import ADAPTER

from ..front.prompts import about_tokens, parse_prompt
from ..interfaces.client import EngineDeadError
from ..interfaces.errors import RequestError
from ..interfaces.pooling_params import PoolingParams
from ..interfaces.sampling import SamplingParams
from ..interfaces.schema import SamplingFields
from .deadlines import until_deadline
from .errors import refusal, refusals
from .ingress import OUTPUTS, OWNER, REQUEST, TOKENS
from .reports import RequestTally

if TYPE_CHECKING:
    from .serving import ServingHost

#: The sampling parameters that metrics see for a request that generates nothing.
_POOLED = SamplingParams(max_tokens=1)
#: A prefix that makes cache salts differ from all other digests of keys.
_SALT_PURPOSE = "frame cache salt"
#: Fault of an error -> HTTP status.
_STATUS = {"request": 400, "load": 429, "engine": 500}


def key_salt(owner: str, given: str | None) -> str:
    """The salt of a request of the key with the digest `owner` that asks for the salt `given`.

    Equal in all processes and after a restart, so that blocks on disk are found again; it says nothing about the key.
    """
    return hashlib.sha256(msgspec.msgpack.encode([_SALT_PURPOSE, owner, given])).hexdigest()


class TimedGeneration:
    """Implements `frame.interfaces.Generation` for a host."""

    def __init__(self, host: ServingHost) -> None:
        self._host = host
        self._salts = host.config.server.cache_salt_per_key

    def params(self, body: SamplingFields, **fields: Any) -> SamplingParams:
        with refusals():
            return body.sampling(self._host.llm.front.default_sampling_params.clone(), **fields)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        scope = REQUEST.get() or {}
        owner, limits = scope.get(OWNER, ""), scope.get(OUTPUTS)
        record = RequestTally(self._host.metrics, params, self._host.reporter.wants_outputs)
        stream = self._host.llm.stream(
            self._salted(prompt), params, request_id, owner=owner, adapter=scope.get(ADAPTER), **options
        )
        try:
            async with self._recorded(scope, record, stream, prompt):
                with contextlib.nullcontext() if limits is None else limits.outputs(owner, params.n):
                    async for output in until_deadline(stream, scope):
                        if (failed := record.see(output)) is not None:
                            raise self._failure(failed)
                        yield output
        finally:
            self._host.reporter.end(request_id, record)

    async def pool(self, prompt: Any, params: PoolingParams, request_id: str, **options: Any) -> Any:
        scope = REQUEST.get() or {}
        record = RequestTally(self._host.metrics, _POOLED)
        owner = scope.get(OWNER, "")
        stream = self._host.llm.stream(
            self._salted(prompt), params, request_id, owner=owner, adapter=scope.get(ADAPTER), **options
        )
        async with self._recorded(scope, record, stream, prompt):
            output = await anext(until_deadline(stream, scope))
            record.begin(output)
            if output.outputs.error is not None:
                raise self._failure(output.outputs)
            record.reason = "stop"
            return output

    @contextlib.asynccontextmanager
    async def _recorded(
        self, scope: Scope, record: RequestTally, stream: AsyncGenerator[Any, None], prompt: Any
    ) -> AsyncGenerator[None, None]:
        """Closes `stream` and `record` at the end, and takes the tokens of the request from the bucket of its key.

        A client that leaves before the first output pays for the prompt as estimated. Notes in the record how the
        request failed, and raises the failure as a `RequestError`.
        """
        try:
            yield
        except (EngineDeadError, RequestError, ValueError) as error:
            record.reason, record.error = "error", str(error)
            if isinstance(error, EngineDeadError):
                raise RequestError(503, str(error)) from None
            raise (refusal(error) if isinstance(error, ValueError) else error) from None
        finally:
            record.close()
            if (tokens := scope.get(TOKENS)) is not None:
                left = record.reason == "abort" and not record.num_tokens
                tokens.spend(scope.get(OWNER, ""), about_tokens(prompt) if left else record.num_tokens)
            await stream.aclose()

    def _failure(self, ended: Any) -> RequestError:
        """The error of a request or output that the engine ended with `fault` and `error`."""
        status = _STATUS[ended.fault] if self._host.client.end is None else 503
        return RequestError(status, ended.error or "the engine failed")

    def _salted(self, prompt: Any) -> Any:
        """The prompt with a cache salt of its API key, so that no key learns from timing what another has sent.

        Without `cache_salt_per_key`, the prompt as it is.
        """
        if not self._salts:
            return prompt
        with refusals():
            check_accepted(prompt, self._host.llm.front.info.embed_size)
            parsed = parse_prompt(prompt)
        owner = (REQUEST.get() or {}).get(OWNER, "")
        return msgspec.structs.replace(parsed, salt=key_salt(owner, parsed.salt))
