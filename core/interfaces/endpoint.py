"""HTTP routes and subcommands of `frame`, as plugins add them. Endpoints reach the engine through `Serving`."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import ErrorShape, RequestError

if TYPE_CHECKING:
    from fastapi import APIRouter
    from starlette.types import ASGIApp

    from .serving import Serving
    from .setup import EndpointSetup, Setup

__all__ = ["KNOWN", "Command", "Endpoint", "ErrorShape", "RequestError"]

#: Key of the ASGI scope whose value says whether the request may be served: its API key was right, or the server has
#: none. False for health checks, which need no key.
KNOWN = "frame.known"


class Endpoint(ABC):
    """HTTP routes. Built as `Class(setup, options)` in each API process.

    `serving` gives it models, text, generation and engine. The server checks API keys and sizes of bodies before any
    route is called, and answers errors of its routes, the server's own included, in the form `errors`.
    """

    errors: ClassVar[ErrorShape] = ErrorShape()
    #: whether the routes are on the admin listener, which has its own address and keys, instead of the public one
    admin: ClassVar[bool] = False
    #: which servers have these routes: "tokens" is one under --tokens-only, without a tokenizer, "text" any other
    modes: ClassVar[frozenset[str]] = frozenset(("text",))
    #: exact paths that GET answers without a key: files that are equal for everybody and say nothing about this server
    public_paths: tuple[str, ...] = ()
    #: exact paths whose POST takes a form with files (multipart/form-data), of at most --max-upload-bytes
    uploads: tuple[str, ...] = ()

    def __init__(self, setup: EndpointSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.serving: Serving = setup.serving
        self.settings = setup.settings

    @abstractmethod
    def router(self) -> APIRouter:
        """Returns the routes, which the server mounts at the root. Called once."""

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Returns `app` or middleware around it; called once a process, with all routes of the public listener.

        The server has checked key, bounds and body of the requests that it sees; `scope[frame.interfaces.KNOWN]` says
        whether the key was checked.
        """
        return app


class Command(ABC):
    """A subcommand of `frame`. Built as `Class(setup, options)`, also for `frame --help`: `run` does slow imports."""

    #: one line for `frame --help`
    help: str
    #: command lines at the end of its own `--help`
    examples: tuple[str, ...] = ()

    def __init__(self, setup: Setup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds its arguments to `parser`."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the command with parsed arguments; returns the exit status."""
