"""Lines of a batch file: `{"custom_id", "method", "url", "body"}` in, `{"id", "custom_id", "response", "error"}` out.

A line may call any POST route that takes JSON, except those of files and batches. Knows no file.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from frame.interfaces import Batches, RequestError
from frame.quoting import quoted

#: Routes that a line may not call.
_NOT_BATCHED = frozenset(("/v1/batches", "/v1/files"))
_MAX_NAME = 512
#: Wrong lines that are reported before the check of a file ends.
_MAX_PROBLEMS = 50
#: Statuses after which a line is tried again: too many requests, no engine at the moment.
LATER = (429, 503)
#: Seconds between attempts of a line that could not be served; an engine that died has restarted within their sum.
_WAITS_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: Most seconds between two looks whether the owner has tokens again, or the batch was stopped.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class LineResult:
    """The result line; `unserved`: the line failed only because the server could not serve it at the moment."""

    line: bytes
    succeeded: bool
    unserved: bool = False


def line_id(number: int, line: bytes) -> str:
    """The id of a line's result: equal for an equal line with the same number, so that a run can be resumed."""
    return f"batch_req_{number:08d}_{hashlib.sha256(line.strip()).hexdigest()[:16]}"


def line_number(name: str) -> int:
    """The number of the line in an id from `line_id`."""
    return int(name.split("_")[2])


def batch_routes(calls: Batches) -> list[str]:
    """Paths that lines may call."""
    return [path for path in calls.paths if path not in _NOT_BATCHED]


class BatchLines:
    """Runs lines, `width` at a time, which may change while they run.

    `url` is the only route that lines may call; None: every route.
    """

    def __init__(
        self, calls: Batches, *, width: Callable[[], int] = lambda: 64, owner: str = "", url: str | None = None
    ) -> None:
        self._calls = calls
        self._urls = [path for path in batch_routes(calls) if url in (None, path)]
        self._width = width
        self._owner = owner

    async def run(
        self, lines: Iterable[bytes], done: Collection[str] = (), stopped: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[LineResult, None]:
        """The results as lines end. Blank lines and those whose id is in `done` are left out.

        A line starts when fewer than `width` run and the owner may use tokens; none starts once `stopped`.
        """
        running: set[asyncio.Task[LineResult]] = set()
        try:
            for number, line in enumerate(lines, 1):
                name = line_id(number, line)
                if name in done or not line.strip():
                    await asyncio.sleep(0)  # lets other tasks run between thousands of skipped lines
                    continue
                while not stopped() and ((delay := self._calls.delay(self._owner)) or len(running) >= self._width()):
                    if not running:
                        await asyncio.sleep(min(delay, _LOOK_SECONDS))
                        continue
                    limit = min(delay, _LOOK_SECONDS) if delay else None
                    ended, running = await asyncio.wait(running, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                    for task in ended:
                        yield task.result()
                if stopped():
                    break
                call = await self._read(name, line)
                if isinstance(call, LineResult):
                    yield call
                    continue
                running.add(asyncio.create_task(self._answer(name, *call)))
                await asyncio.sleep(0)  # it begins, so the next delay counts the tokens that it may use
            while running:
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def check(self, lines: BinaryIO, max_lines: int) -> tuple[int, list[dict[str, Any]]]:
        """How many lines are not blank, and what is wrong with them, in OpenAI's form; stops at a fatal problem.

        Blank lines count towards `max_lines`, so that a file of blank lines is cheap to check.
        """
        num_lines, names, problems = 0, set[str](), list[dict[str, Any]]()

        def complain(number: int | None, code: str, message: str) -> None:
            problems.append({"code": code, "line": number, "message": message, "param": None})

        number = 0
        while len(problems) < _MAX_PROBLEMS and (line := lines.readline(self._calls.max_body_bytes + 1)):
            number += 1
            if number > max_lines:
                complain(None, "too_many_lines", f"a batch may have {max_lines} lines")
                break
            if not line.strip():
                continue
            num_lines += 1
            try:
                value = _object(self._calls.parse(line))
                name = _name(value)
                self._target(value)
            except RequestError as refusal:
                complain(number, "invalid_line", refusal.message)
                if not line.endswith(b"\n"):
                    break  # the rest of a line that is too long is not a line of its own
                continue
            if name in names:
                complain(number, "duplicate_custom_id", f"custom_id {quoted(name)} is used by an earlier line")
            names.add(name)
        if not num_lines and not problems:
            complain(None, "empty_file", "the file has no line that is not blank")
        return num_lines, problems

    async def _read(self, name: str, line: bytes) -> tuple[str, str, dict[str, Any]] | LineResult:
        """The id, route and body of a line, or its result when it is wrong."""
        custom_id: str | None = None
        try:
            value = _object(await self._calls.read(line))
            custom_id = _name(value)
            return custom_id, *self._target(value)
        except RequestError as refusal:
            return _result(name, custom_id, None, {"code": "invalid_line", "message": refusal.message})

    async def _answer(self, name: str, custom_id: str, url: str, body: dict[str, Any]) -> LineResult:
        answer = await self._calls.post(url, body, self._owner)
        for seconds in _WAITS_SECONDS:
            if answer.status not in LATER:
                break
            await asyncio.sleep(seconds)
            answer = await self._calls.post(url, body, self._owner)
        response = {"status_code": answer.status, "request_id": uuid.uuid4().hex, "body": answer.body}
        error = None if answer.status < 400 else _error(answer.status, answer.body)
        return _result(name, custom_id, response, error)

    def _target(self, value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        method, url, body = value.get("method", "POST"), value.get("url"), value.get("body")
        if method != "POST":
            raise RequestError(400, f"method must be POST, got {quoted(method)}")
        if url not in self._urls:
            raise RequestError(400, f"no route {quoted(url)} in this batch; there are: {', '.join(self._urls)}")
        if not isinstance(body, dict):
            raise RequestError(400, "body must be an object")
        if body.get("stream") or body.get("background"):
            raise RequestError(400, "stream and background are not allowed in a batch")
        return url, body


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(400, "the line must be a JSON object")
    return value


def _name(value: dict[str, Any]) -> str:
    name = value.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise RequestError(400, f"custom_id must be text of 1 to {_MAX_NAME} characters, got {quoted(name)}")
    return name


def _error(status: int, body: Any) -> dict[str, str]:
    """Code and message of an error body, whatever its API."""
    found = body.get("error") if isinstance(body, dict) else None
    found = found if isinstance(found, dict) else {}
    return {"code": str(found.get("type", status)), "message": str(found.get("message", "the request failed"))}


def _result(name: str, custom_id: str | None, response: Any, error: Any) -> LineResult:
    line = msgspec.json.encode({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
    return LineResult(line, error is None, response is not None and response["status_code"] in LATER)
