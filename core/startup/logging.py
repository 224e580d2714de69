"""Logging: one tree, `frame`, one line a record, on stderr. A program that embeds frame configures its own instead."""

from __future__ import annotations

import logging
import sys


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A class of its own, by which a second call finds the handler; writes to what `sys.stderr` is at each record."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(level: str = "info") -> None:
    """Sends frame's records of at least `level` (debug, info, warning, error) to stderr. May be called again."""
    logger = logging.getLogger("frame")
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
