"""Where the lines of the HTTP server go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from frame.core.config.server import ServerConfig
from frame.core.config.tree import FrameConfig
from frame.core.server.http import make_server


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def handler() -> Iterator[Kept]:
    made = Kept()
    yield made
    for name in ("frame", "uvicorn"):
        logging.getLogger(name).removeHandler(made)


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers nothing."""


def test_they_go_where_ours_go_and_come_once(handler: Kept, caplog: pytest.LogCaptureFixture) -> None:
    make_server(application, ServerConfig())
    logging.getLogger("frame").addHandler(handler)  # also one that comes later
    logging.getLogger("uvicorn.error").error("broken")
    logging.getLogger("frame.server").error("ours")
    for heard in (handler.lines, [record.getMessage() for record in caplog.records]):
        assert [line for line in heard if line in ("broken", "ours")] == ["broken", "ours"]


def test_what_others_attach_to_it_hears_nothing_of_ours(handler: Kept) -> None:
    """pytest does so to every logger that does not propagate, and would tell each of our lines twice."""
    make_server(application, ServerConfig())
    logging.getLogger("uvicorn").addHandler(handler)
    logging.getLogger("frame.server").error("ours")
    assert "ours" not in handler.lines


@pytest.mark.parametrize(("level", "wanted"), [("error", logging.ERROR), ("info", logging.INFO), ("trace", 5)])
def test_they_have_a_level_of_their_own(level: str, wanted: int) -> None:
    config = FrameConfig.from_flat(uvicorn_log_level=level, log_level="warning").server
    before = logging.getLogger("frame").level
    try:
        make_server(application, config)
        assert {logging.getLogger(f"uvicorn.{name}").level for name in ("error", "access")} == {wanted}
        assert (config.log_level, logging.getLogger("frame").level) == ("warning", before)
    finally:
        make_server(application, ServerConfig())


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/health", 200, False),
        ("/health", 503, False),  # the engine is loading
        ("/ready?verbose=1", 503, False),
        ("/metrics", 401, True),
        ("/load", 500, True),
        ("/v1/models", 200, True),
        ("/v1/completions", 503, True),
    ],
)
def test_what_is_polled_has_a_line_only_when_it_fails(handler: Kept, path: str, status: int, told: bool) -> None:
    make_server(application, ServerConfig())
    logging.getLogger("frame").addHandler(handler)
    arguments = ("127.0.0.1:5000", "GET", path, "1.1", status)
    logging.getLogger("uvicorn.access").error('%s - "%s %s HTTP/%s" %d', *arguments)
    assert [path in line for line in handler.lines] == [True] * told


def test_what_a_query_holds_is_not_written(handler: Kept) -> None:
    make_server(application, ServerConfig())
    logging.getLogger("frame").addHandler(handler)
    arguments = ("127.0.0.1:5000", "GET", "/v1/models?key=secret", "1.1", 200)
    logging.getLogger("uvicorn.access").error('%s - "%s %s HTTP/%s" %d', *arguments)
    assert handler.lines == ['127.0.0.1:5000 - "GET /v1/models HTTP/1.1" 200']
