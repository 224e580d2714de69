"""Passes requests of routes to the text side.

Times and reports them, ends them at their deadline, gives each API key cache salts of its own where that is configured,
and turns failures into `RequestError`s.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ..front.prompts import parse_prompt
from ..interfaces.client import EngineDeadError
from ..interfaces.engine import Fault
from ..interfaces.errors import RequestError
from ..interfaces.pooling_params import PoolingParams
from ..interfaces.sampling import SamplingParams
from ..interfaces.schema import SamplingFields
from .deadlines import until_deadline
from .ingress import OUTPUTS, OWNER, REQUEST, TOKENS
from .refusals import refusal, refusals
from .reports import Notes
from .request_timer import RequestTimer

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
    """`Generation` of a host."""

    def __init__(self, host: ServingHost) -> None:
        self._host = host
        self._salts = host.config.server.cache_salt_per_key

    def params(self, body: SamplingFields, **fields: Any) -> SamplingParams:
        """The sampling parameters of a body over the checkpoint's defaults; `fields` are what the route sets itself."""
        with refusals():
            return body.sampling(self._host.llm.get_default_sampling_params(), **fields)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """A stream of `RequestOutput` deltas; raises `RequestError` when the request fails."""
        prompt = self._salted(prompt)
        timer = RequestTimer(self._host.metrics, params)
        notes = self._host.reporter.begin(request_id, params)
        scope = REQUEST.get() or {}
        owner, limits = scope.get(OWNER, ""), scope.get(OUTPUTS)
        stream = self._host.llm.generate(prompt, params, request_id, owner=owner, **options)
        first = True
        try:
            with (
                self._failures(timer, notes),
                contextlib.nullcontext() if limits is None else limits.outputs(owner, params.n),
            ):
                async for output in until_deadline(stream, REQUEST.get()):
                    if first:
                        first = False
                        timer.prompt(len(output.prompt_token_ids or ()), output.num_cached_tokens or 0)
                    if notes is not None:
                        notes.see(output)
                    self._observe(timer, output)
                    yield output
        finally:
            timer.close()
            if (tokens := scope.get(TOKENS)) is not None:
                tokens.spend(owner, timer.num_tokens)
            if notes is not None:
                self._host.reporter.end(notes, timer)
            await stream.aclose()

    async def pool(self, prompt: Any, params: PoolingParams, request_id: str, **options: Any) -> Any:
        """The `PoolingRequestOutput` of one prompt; raises `RequestError` when the request fails."""
        prompt = self._salted(prompt)
        timer = RequestTimer(self._host.metrics, _POOLED)
        scope = REQUEST.get() or {}
        owner = scope.get(OWNER, "")
        stream = self._host.llm.encode(prompt, params, request_id, owner=owner, **options)
        try:
            with self._failures(timer):
                output = await anext(until_deadline(stream, REQUEST.get()))
                timer.prompt(len(output.prompt_token_ids), output.num_cached_tokens or 0)
                if output.outputs.error is not None:
                    raise self._failure(output.outputs.fault, output.outputs.error)
                timer.ends("stop")
                return output
        finally:
            timer.close()
            if (tokens := scope.get(TOKENS)) is not None:
                tokens.spend(owner, timer.num_tokens)
            await stream.aclose()

    def _salted(self, prompt: Any) -> Any:
        """The prompt with a cache salt of its API key, so that no key learns from timing what another has sent.

        Without `cache_salt_per_key`, the prompt as it is.
        """
        if not self._salts:
            return prompt
        with refusals():
            parsed = parse_prompt(prompt)
        owner = (REQUEST.get() or {}).get(OWNER, "")
        return msgspec.structs.replace(parsed, salt=key_salt(owner, parsed.salt))

    @contextlib.contextmanager
    def _failures(self, timer: RequestTimer, notes: Notes | None = None) -> Iterator[None]:
        """Records how a request failed, and raises it as a `RequestError`."""
        try:
            yield
        except (EngineDeadError, RequestError, ValueError) as error:
            timer.ends("error")
            if notes is not None:
                notes.error = str(error)
            if isinstance(error, EngineDeadError):
                raise RequestError(503, str(error)) from None
            raise (refusal(error) if isinstance(error, ValueError) else error) from None

    def _failure(self, fault: Fault, error: str | None) -> RequestError:
        """The error of a request that the engine ended."""
        return RequestError(_STATUS[fault] if self._host.end is None else 503, error or "the engine failed")

    def _observe(self, timer: RequestTimer, output: Any) -> None:
        count = longest = 0
        for completion in output.outputs:
            new = len(completion.token_ids)
            count += new
            if new > longest:
                longest = new
            if completion.finish_reason is None:
                continue
            if completion.finish_reason == "error":
                raise self._failure(completion.fault, completion.error)
            if output.finished:
                timer.ends(completion.finish_reason)
        if count:
            timer.tokens(count, longest, output.metrics)
