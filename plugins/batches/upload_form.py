"""Reads a multipart form with one file from a request into an open file. Knows no route and no purpose."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from fastapi import Request
from starlette.requests import ClientDisconnect

from frame.interfaces import RequestError

# the client learns what is wrong with its form; the library would also write a line to the log for each of them
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 1 << 16
#: Seconds that a whole upload may take, so that slow clients do not hold a place and room on the disk for long.
_SECONDS = 600.0


@dataclass
class UploadForm:
    """The text fields, and the client's name for the file named `file`; None when the form has none."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_form(request: Request, target: BinaryIO) -> UploadForm:
    """Writes the form's file to `target`, chunk by chunk in a thread. Raises `RequestError`."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise RequestError(400, "send a form: Content-Type: multipart/form-data; boundary=…")
    parts = _Parts(parse_options_header)
    try:
        parser = MultipartParser(options[b"boundary"], parts.callbacks())
        async with asyncio.timeout(_SECONDS):
            async for chunk in request.stream():
                parser.write(chunk)
                if parts.pending:
                    await asyncio.to_thread(target.write, bytes(parts.pending))
                    parts.pending.clear()
        parser.finalize()
        if not parts.ended:
            raise RequestError(400, "the form cannot be read: it ends too early")
    except FormParserError:
        raise RequestError(400, "the form cannot be read: it is not multipart/form-data") from None
    except TimeoutError:
        raise RequestError(408, f"the upload took more than {_SECONDS:g} seconds") from None
    except ClientDisconnect:
        raise RequestError(400, "the client disconnected during the upload") from None
    return parts.form


async def drop_rest(request: Request) -> None:
    """Reads the rest of a refused upload, because most clients read no answer before they have sent everything."""
    with suppress(RequestError, ClientDisconnect, TimeoutError, RuntimeError):  # RuntimeError: all of it was read
        async with asyncio.timeout(_SECONDS):
            async for _ in request.stream():
                pass


class _Parts:
    """Receives the parts of a form from the parser; `pending` are bytes of the file that are not yet written."""

    def __init__(self, parse_header: Any) -> None:
        self.form = UploadForm()
        self.pending = bytearray()
        self.ended = False
        self._parse_header = parse_header
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._name: str | None = None
        self._data = bytearray()
        self._in_file = False
        self._num_parts = 0

    def callbacks(self) -> Any:
        """The parser's callbacks, by name."""
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end")
        found = {f"on_{name}": getattr(self, f"_{name}") for name in names}
        return {**found, "on_headers_finished": self._headers_finished, "on_end": self._end}

    def _end(self) -> None:
        self.ended = True

    def _part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS:
            raise RequestError(400, f"the form cannot be read: it has more than {_MAX_FIELDS} fields")
        self._name, self._in_file, self._disposition = None, False, b""
        self._data.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._extend(self._header, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._extend(self._value, data[start:end])

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = self._parse_header(self._disposition)
        if b"name" not in options:
            raise RequestError(400, "the form cannot be read: a part has no name")
        self._name = options[b"name"].decode(errors="replace")
        if b"filename" in options:
            if self._name != "file" or self.form.filename is not None:
                raise RequestError(400, "file is missing, or not the form's only file", param="file")
            self._in_file, self.form.filename = True, options[b"filename"].decode(errors="replace")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.pending += data[start:end]
        else:
            self._extend(self._data, data[start:end])

    def _part_end(self) -> None:
        if not self._in_file and self._name is not None:
            self.form.fields[self._name] = self._data.decode(errors="replace")

    @staticmethod
    def _extend(buffer: bytearray, data: bytes) -> None:
        if len(buffer) + len(data) > _MAX_FIELD_BYTES:
            raise RequestError(400, f"the form cannot be read: a field exceeds {_MAX_FIELD_BYTES} bytes")
        buffer += data
