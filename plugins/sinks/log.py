"""Structured request logs: one JSON object a line for each generation; prompts and outputs only with an option."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from frame.interfaces import MetricsSink, RequestReport, Setup

#: Parameters that are logged: numbers only, because texts such as stop strings may be private.
_PARAMS = (
    "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logprobs",
)  # fmt: skip
_SECONDS = ("queue", "prefill", "first_token", "decode", "total")


class LogOptions(BaseModel):
    """`--plugin.log.NAME VALUE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str | None = Field(None, description="File to append to; left out, lines go to stderr.")
    prompts: bool = Field(False, description="Log prompts.")
    outputs: bool = Field(False, description="Log outputs.")
    max_chars: int = Field(256, ge=0, description="Characters of a prompt or output that are logged.")


class RequestLog(MetricsSink):
    """Writes each line with one call, so that the lines of several API processes do not mix."""

    def __init__(self, setup: Setup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._options: LogOptions = options or LogOptions()
        self.wants_prompts = self._options.prompts
        self.wants_outputs = self._options.outputs
        self._encoder = msgspec.json.Encoder()
        self._file = -1
        if self._options.file is not None:
            try:
                self._file = os.open(self._options.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ValueError(f"the log file {self._options.file} cannot be written: {error.strerror}") from None

    def request(self, report: RequestReport) -> None:
        """Writes a line."""
        line = self.line(report)
        try:
            data = self._encoder.encode(line)
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape and UTF-8 cannot encode
            data = json.dumps(line).encode()
        self._write(data + b"\n")

    def _write(self, line: bytes) -> None:
        if self._file >= 0:
            os.write(self._file, line)
        else:
            sys.stderr.write(line.decode())
            sys.stderr.flush()

    def line(self, report: RequestReport) -> dict[str, Any]:
        """The fields that are logged of a request."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(report.arrival, UTC).isoformat(timespec="milliseconds"),
            "event": "request",
            "request_id": report.request_id,
            "path": report.path,
            "model": report.model,
            "finish_reasons": report.finish_reasons,
            "prompt_tokens": report.prompt_tokens,
            "cached_tokens": report.cached_tokens,
            "generated_tokens": report.generated_tokens,
            "seconds": self._seconds(report),
            "params": {name: getattr(report.params, name) for name in _PARAMS},
        }
        optional = {
            "key": report.owner,
            "client_id": report.client_id,
            "trace": report.headers.get("traceparent", "")[:64],
            "error": None if report.error is None else clip(report.error, self._options.max_chars),
        }
        line |= {name: value for name, value in optional.items() if value}
        if self._options.prompts and report.prompt is not None:
            line["prompt"] = clip(report.prompt, self._options.max_chars)
        if self._options.outputs:
            line["outputs"] = [clip(text, self._options.max_chars) for text in report.outputs or ()]
        return line

    @staticmethod
    def _seconds(report: RequestReport) -> dict[str, float]:
        values = {name: getattr(report, f"{name}_seconds") for name in _SECONDS}
        return {name: round(value, 6) for name, value in values.items() if value is not None}

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def clip(text: str, limit: int) -> str:
    """The first `limit` characters, and how many are left out."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"
