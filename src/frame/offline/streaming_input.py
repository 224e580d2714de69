"""Streaming input: a prompt that grows while its request runs. Each piece of it is a request that follows the last.

With a piece the model reads all that came before it: the pieces, and of each answer all tokens but the last. The engine
keeps what it has computed of that from one piece to the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Container, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from frame.core.front.async_front import AsyncFront
from frame.core.front.outputs import CompletionOutput, RequestOutput
from frame.core.front.prompts import InvalidRequest, ParsedPrompt, parse_prompt
from frame.core.interfaces.client import EngineClient, EngineDeadError
from frame.core.interfaces.sampling import RequestOutputKind, SamplingParams
from frame.links.encoder_prompts import NO_ENCODER
from frame.quoting import quoted

#: pieces that are read ahead of the one that the model answers
_MAX_AHEAD = 16


@dataclass
class StreamingInput:
    """A piece of a prompt, of any form but embeddings; `sampling_params` None: those of the request."""

    prompt: Any
    sampling_params: SamplingParams | None = None


class _Piece(NamedTuple):
    ids: list[int]
    params: SamplingParams


class _Pieces:
    """The checked pieces of one prompt, some of them read ahead; `read` is run by a task."""

    def __init__(self, front: AsyncFront, given: AsyncIterable[Any], params: SamplingParams) -> None:
        self._front, self._given, self._params = front, given, params
        self._ahead: deque[_Piece] = deque()
        self._room = asyncio.Semaphore(_MAX_AHEAD)
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._closed = False  # nothing more is read
        self._dropped = False  # and what was read is not wanted
        self._num_read = 0
        self.salt: str | None = None

    @property
    def ended(self) -> bool:
        """Whether it is known by now that there are no more."""
        return self._dropped or (self._closed and not self._ahead and self._error is None)

    def close(self) -> None:
        """Ends them here: what is still read, or raised, is dropped."""
        self._closed = self._dropped = True
        self._news.set()

    async def next(self) -> _Piece | None:
        """The next piece, None at their end; raises what reading them raised once those before are taken."""
        while not (self._ahead or self._closed):
            self._news.clear()
            await self._news.wait()
        if self._dropped:
            return None
        if self._ahead:
            self._room.release()
            return self._ahead.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def read(self) -> None:
        """Reads on until the end or an error, never too far ahead."""
        try:
            await self._room.acquire()
            async for given in self._given:
                self._ahead.append(await self._checked(given))
                self._news.set()
                await self._room.acquire()
            if not self._num_read:
                raise InvalidRequest("the prompt ended without a piece; give at least one", "prompt")
        except Exception as error:
            self._error = error
        finally:
            self._closed = True
            self._news.set()
            if isinstance(self._given, AsyncGenerator):
                await self._given.aclose()

    async def _checked(self, given: Any) -> _Piece:
        piece = given if isinstance(given, StreamingInput) else StreamingInput(given)
        params = self._params if piece.sampling_params is None else check_params(piece.sampling_params)
        parsed, name = parse_prompt(piece.prompt), f"piece {self._num_read} of the prompt"
        if params.output_kind != self._params.output_kind:
            raise InvalidRequest(f"{name} has another output_kind than the request; all have one", "output_kind")
        if parsed.embeds is not None:
            raise InvalidRequest(f"{name} has prompt_embeds; a prompt in pieces is of texts or token ids", "prompt")
        if parsed.encoder is not None:
            raise InvalidRequest(f"{name}: {NO_ENCODER}", "prompt")
        if not self._num_read:
            self.salt = parsed.salt
        elif parsed.salt not in (None, self.salt):
            raise InvalidRequest(f"{name} has another cache_salt than the first; all have one", "cache_salt")
        ids = parsed.ids
        if parsed.token_ids is None:
            ids = await self._front.tokenize(parsed.text or "", add_special_tokens=not self._num_read)
        if not ids:
            raise InvalidRequest(f"{name} is empty; give at least one token", "prompt")
        self._num_read += 1
        return _Piece(ids, params)


class Session:
    """One request whose prompt comes in pieces; `options` are those of `AsyncFront.stream`.

    Raises `InvalidRequest` for what a prompt in pieces cannot have.
    """

    def __init__(
        self,
        front: AsyncFront,
        client: EngineClient,
        pieces: AsyncIterable[Any],
        params: Any,
        request_id: str,
        options: Mapping[str, Any],
    ) -> None:
        if options.get("kv_transfer"):
            raise InvalidRequest("kv_transfer is not for a prompt in pieces; leave it out", "kv_transfer")
        if front.front.info.encodes:  # whose decoder does not go on with what the encoder reads
            raise InvalidRequest(
                "a prompt in pieces is not for a model with an encoder and a decoder: give the whole prompt", "prompt"
            )
        self._front, self._client, self._options = front, client, options
        self._request_id = request_id
        self._cumulative = check_params(params).output_kind != RequestOutputKind.DELTA
        self._pieces = _Pieces(front, pieces, params)
        self._context: list[int] = []  # what the model reads before the next piece
        self._told: CompletionOutput | None = None  # the answers to earlier pieces
        self._num_begun = 0
        self._follows = ""  # the request before the newest, until the engine is known to have taken that
        self._aborted = False

    @property
    def piece_id(self) -> str:
        """The request that answers, or answered, the newest piece."""
        return f"{self._request_id}/{self._num_begun}"

    def abort(self) -> None:
        """Has `outputs` end with finish_reason "abort", once the request of `piece_id` is aborted too."""
        self._aborted = True
        self._pieces.close()

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one piece after the other; the last of all is `finished`.

        Raises what the pieces raise, once those before are answered.
        """
        reader = asyncio.create_task(self._pieces.read())
        output: RequestOutput | None = None
        try:
            while output is None or not output.finished:
                piece = await self._pieces.next()
                if piece is None:
                    yield self._last(output)
                    return
                async with aclosing(self._answers(piece)) as answers:
                    async for output in answers:
                        yield output
        finally:  # in a task of its own, which goes on where this one is cancelled once more
            await asyncio.shield(asyncio.create_task(self._end(reader)))

    async def _end(self, reader: asyncio.Task[None]) -> None:
        """Has the engine free what it keeps, then waits for the end of the pieces."""
        reader.cancel()
        for name in (self._follows, self.piece_id if self._num_begun else ""):
            if name:
                with suppress(EngineDeadError):
                    await self._client.call("end_session", {"request_id": name})
        await asyncio.gather(reader, return_exceptions=True)

    async def _answers(self, piece: _Piece) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one piece, as those of the whole request."""
        ids = [*self._context, *piece.ids]
        prompt = ParsedPrompt(token_ids=np.array(ids, np.int64), salt=self._pieces.salt, listed=ids)
        self._follows = follows = self.piece_id if self._num_begun else ""
        self._num_begun += 1
        answer: list[int] = []
        stream = self._front.stream(prompt, piece.params, self.piece_id, follows=follows, **self._options)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                if completion.finish_reason != "error":
                    self._follows = ""
                answer = completion.token_ids if self._cumulative else [*answer, *completion.token_ids]
                told = completion if self._told is None else _joined(self._told, completion)
                if self._cumulative:
                    output.outputs[0] = told
                if output.finished:
                    self._context, self._told = [*ids, *answer[:-1]], told if self._cumulative else None
                    output.finished = completion.finish_reason not in ("stop", "length") or self._pieces.ended
                output.request_id = self._request_id
                yield output

    def _last(self, output: RequestOutput | None) -> RequestOutput:
        """What is told when the pieces end, or the request is aborted, after the last answer."""
        reason = output.outputs[0].finish_reason if output is not None and not self._aborted else "abort"
        told = replace(self._told or CompletionOutput(0, "", []), finish_reason=reason)
        if output is None:
            return RequestOutput(self._request_id, None, self._context, None, [told], finished=True)
        return replace(output, outputs=[told], finished=True)


class Sessions:
    """The requests of a front whose prompts come in pieces, by id; those that nobody reads yet do not count.

    `client` is that of the front.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._sessions: dict[str, Session] = {}

    def check_unused(self, request_id: str, others: Container[str] = ()) -> None:
        """Raises `InvalidRequest` for the id of one of them, or of `others`."""
        if request_id in self._sessions or request_id in others:
            raise InvalidRequest(f"request id {quoted(request_id)} is in use by an unfinished request", "request_id")

    async def stream(
        self, front: AsyncFront, pieces: AsyncIterable[Any], params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams the outputs of a request, as `Session.outputs` does; `options` are those of `AsyncFront.stream`."""
        self.check_unused(request_id)
        session = Session(front, self._client, pieces, params, request_id, options)
        self._sessions[request_id] = session
        try:
            async with aclosing(session.outputs()) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._sessions[request_id]

    def end(self, names: Iterable[str]) -> list[str]:
        """Has those called `names` end; returns the requests to abort for all of `names`."""
        found = []
        for name in names:
            session = self._sessions.get(name)
            if session is not None:
                session.abort()
            found.append(name if session is None else session.piece_id)
        return found

    def end_all(self) -> None:
        """Has all end."""
        self.end(self._sessions)


def check_params(params: Any) -> SamplingParams:
    """Raises `InvalidRequest` for what the parameters of a prompt in pieces cannot ask for."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"a prompt in pieces needs SamplingParams, got {type(params).__name__}", "sampling_params")
    if params.n != 1:
        raise InvalidRequest(f"a prompt in pieces has one output, but n is {params.n}", "n")
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(params, name) is not None:
            raise InvalidRequest(f"{name} is not for a prompt in pieces; leave it out", name)
    return params


def _joined(before: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    """An answer behind those to earlier pieces."""
    logprobs = later.logprobs if before.logprobs is None else before.logprobs[:]
    if before.logprobs is not None and later.logprobs is not None:
        logprobs.extend(later.logprobs)  # type: ignore[union-attr, arg-type]
    sums = [one.cumulative_logprob for one in (before, later) if one.cumulative_logprob is not None]
    return replace(
        later,
        text=before.text + later.text,
        token_ids=[*before.token_ids, *later.token_ids],
        logprobs=logprobs,
        cumulative_logprob=sum(sums) if sums else None,
    )
