"""Extension points of the command line and of the HTTP server. Knows no engine: it is given a client."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import APIRouter


class Endpoint(ABC):
    """HTTP routes. Built as `Class(config=…, options=…, serving=…)` in each API process.

    `serving` offers the models, the front and the error shape (`frame.interfaces.Serving`). Every route is behind the
    API key and the body limits without doing anything for it.
    """

    def __init__(self, *, config: Any, options: Any = None, serving: Any) -> None:
        self.config = config
        self.options = options
        self.serving = serving

    @abstractmethod
    def router(self) -> APIRouter:
        """The routes, mounted at the root."""


class Command(ABC):
    """A subcommand of `frame`. Built as `Class(config=None, options=None)`; imports heavy things inside `run` only."""

    #: one line for `frame --help`
    help: str

    def __init__(self, *, config: Any = None, options: Any = None) -> None:
        self.config = config
        self.options = options

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares its arguments."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Does it; returns the exit status."""
