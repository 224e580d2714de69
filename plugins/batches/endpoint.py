"""`/v1/files` and `/v1/batches`: OpenAI's batches, kept in a folder of the server; off unless a folder is named."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import StreamingResponse

from frame.interfaces import BoundedModel, Endpoint, EndpointSetup, Name, RequestError, Settings, few
from frame.quoting import quoted

from .files import FileRecord, FileStore
from .lines import batch_routes
from .store import BatchRecord, BatchStore
from .upload_form import drop_rest, read_form

_CHUNK_BYTES = 1 << 18
_MAX_PAGE = 10_000
_MAX_SECONDS = 30 * 24 * 3600


class BatchesOptions(BaseModel):
    """The folder of batches and its limits: `--plugin.batches.FIELD`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path | None = Field(None, description="Folder for files and batches; without one these routes answer 404.")
    max_files: int = Field(1000, ge=1, description="Files stored at most; an API key gets half of what others leave.")
    max_bytes: int = Field(
        10 << 30, ge=1, description="Bytes that all files take at most; an API key gets half of what others leave."
    )
    max_uploads: int = Field(8, ge=1, description="Uploads of one API key at once.")
    max_open: int = Field(16, ge=1, description="Batches of one API key that may wait or run.")
    max_lines: int = Field(50_000, ge=1, description="Lines that a batch may have.")


class BatchBody(BoundedModel):
    """`POST /v1/batches`."""

    input_file_id: Name
    endpoint: Annotated[str, Field(max_length=256, pattern=r"^/")]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=4096)]], Field(max_length=16), few(16)] | None = None
    output_expires_after: Settings | None = None


#: What a form of `POST /v1/files` holds.
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 1, "maximum": _MAX_SECONDS},
    },
}


class BatchesEndpoint(Endpoint):
    """Files and batches; only the owner of the API key that made one can see it."""

    uploads = ("/v1/files",)

    def __init__(self, setup: EndpointSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        bounds = options or BatchesOptions()
        self._files: FileStore | None = None
        self._batches: BatchStore | None = None
        if bounds.folder is None:
            return
        if importlib.util.find_spec("python_multipart") is None:
            raise ValueError("batches need python-multipart: pip install 'frame-llm[batch]'")
        try:
            self._files = FileStore(bounds.folder, bounds.max_files, bounds.max_bytes, bounds.max_uploads)
            self._batches = BatchStore(self.serving, self._files, bounds.folder, bounds.max_open, bounds.max_lines)
        except OSError as error:
            raise ValueError(f"the folder of batches, {bounds.folder}, cannot be used: {error.strerror}") from None
        with suppress(RuntimeError):  # without a running event loop the first request starts it
            self._batches.start()

    def router(self) -> APIRouter:
        """All routes; without a folder they answer 404."""
        router = APIRouter()
        schema = {"requestBody": {"content": {"application/json": {"schema": BatchBody.model_json_schema()}}}}
        form = {"requestBody": {"content": {"multipart/form-data": {"schema": _FORM}}}}
        router.add_api_route("/v1/files", self._upload, methods=["POST"], openapi_extra=form)
        router.add_api_route("/v1/batches", self._create, methods=["POST"], openapi_extra=schema)
        for path, handler, method in (
            ("/v1/files", self._list_files, "GET"),
            ("/v1/files/{name}", self._file, "GET"),
            ("/v1/files/{name}", self._delete_file, "DELETE"),
            ("/v1/files/{name}/content", self._content, "GET"),
            ("/v1/batches", self._list_batches, "GET"),
            ("/v1/batches/{name}", self._batch, "GET"),
            ("/v1/batches/{name}/cancel", self._cancel, "POST"),
        ):
            router.add_api_route(path, handler, methods=[method])
        return router

    def _stores(self) -> tuple[FileStore, BatchStore]:
        if self._files is None or self._batches is None:
            raise RequestError(404, "this server keeps no batches; start it with --plugin.batches.folder FOLDER")
        self._batches.start()
        return self._files, self._batches

    async def _upload(self, request: Request) -> Response:
        files, _ = self._stores()
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise RequestError(400, "send a form: Content-Type: multipart/form-data")
        announced = request.headers.get("content-length", "")
        size = int(announced) if announced.isascii() and announced.isdigit() else self.settings.max_upload_bytes
        with ExitStack() as stack:
            try:
                incoming = files.incoming(size, self.serving.http.owner(request))
                target = await asyncio.to_thread(stack.enter_context, incoming)
                form = await read_form(request, target)
            except RequestError:
                await drop_rest(request)
                raise
            if form.filename is None:
                raise RequestError(400, "file is missing", param="file")
            purpose = form.fields.get("purpose")
            if purpose != "batch":
                raise RequestError(400, f"purpose must be batch, got {quoted(purpose)}", param="purpose")
            seconds = _seconds(form.fields)
            target.truncate(target.tell())
            target.flush()
            name = (form.filename or "file")[:256]
            path = Path(target.name)
            record = await asyncio.to_thread(files.add, path, self.serving.http.owner(request), name, purpose, seconds)
        return _json(record.shown())

    async def _list_files(
        self, request: Request, after: str = "", limit: int = _MAX_PAGE, order: str = "desc", purpose: str = ""
    ) -> Response:
        files, _ = self._stores()
        own = await asyncio.to_thread(list[FileRecord], files.records(self.serving.http.owner(request)))
        found = [each for each in own if purpose in ("", each.purpose)]
        return _page(found if order == "asc" else found[::-1], after, limit)

    async def _file(self, request: Request, name: str) -> Response:
        files, _ = self._stores()
        return _json(files.get(name, self.serving.http.owner(request)).shown())

    async def _delete_file(self, request: Request, name: str) -> Response:
        files, _ = self._stores()
        files.delete(files.get(name, self.serving.http.owner(request)))
        return _json({"id": name, "object": "file", "deleted": True})

    async def _content(self, request: Request, name: str) -> Response:
        files, _ = self._stores()
        file = files.open(name, self.serving.http.owner(request))
        return StreamingResponse(_chunks(file), media_type="application/octet-stream")

    async def _create(self, request: Request) -> Response:
        _, batches = self._stores()
        body: BatchBody = self.serving.http.parse(request, BatchBody)
        paths = batch_routes(self.serving.batches)
        if body.endpoint not in paths:
            there = ", ".join(paths)
            raise RequestError(400, f"no route {quoted(body.endpoint)}; there are: {there}", param="endpoint")
        owner = self.serving.http.owner(request)
        record = batches.add(owner, body.endpoint, body.input_file_id, body.completion_window, body.metadata)
        return _json(record.shown())

    async def _list_batches(self, request: Request, after: str = "", limit: int = 20) -> Response:
        _, batches = self._stores()
        found = await asyncio.to_thread(list[BatchRecord], batches.records(self.serving.http.owner(request)))
        return _page(found[::-1], after, limit)

    async def _batch(self, request: Request, name: str) -> Response:
        _, batches = self._stores()
        return _json(batches.get(name, self.serving.http.owner(request)).shown())

    async def _cancel(self, request: Request, name: str) -> Response:
        _, batches = self._stores()
        return _json(batches.cancel(batches.get(name, self.serving.http.owner(request))).shown())


def _seconds(form: Mapping[str, str]) -> int | None:
    """`expires_after` of a form, whose fields have names like `expires_after[seconds]`."""
    value = form.get("expires_after[seconds]")
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,12}", value) or not 0 < int(value) <= _MAX_SECONDS:
        raise RequestError(
            400, f"expires_after must be 1 to {_MAX_SECONDS} seconds, got {quoted(value)}", param="expires_after"
        )
    return int(value)


async def _chunks(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    with file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk


def _page(records: Sequence[FileRecord | BatchRecord], after: str, limit: int) -> Response:
    if not 1 <= limit <= _MAX_PAGE:
        raise RequestError(400, f"limit must be from 1 to {_MAX_PAGE}, got {limit}", param="limit")
    ids = [record.id for record in records]
    start = ids.index(after) + 1 if after in ids else 0
    page = records[start : start + limit]
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": None, "last_id": None}
    has_more = start + limit < len(records)
    return _json({"object": "list", "data": [each.shown() for each in page], "has_more": has_more, **ends})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
