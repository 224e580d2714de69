"""Extension points of the command line and of the HTTP server. Knows no engine: it is given a client."""

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

#: In the ASGI scope of a request: whether its key was checked, or the server has none; False at health checks.
KNOWN = "frame.known"


class Endpoint(ABC):
    """HTTP routes. Built as `Class(setup, options)` in each API process.

    `serving` offers the models, the front and the error shape (`frame.interfaces.Serving`). Every route is behind the
    API key and the body limits without doing anything for it, and its errors, the host's own too, have the shape
    `errors`.
    """

    errors: ClassVar[ErrorShape] = ErrorShape()
    #: True: these routes are on the admin listener, which has its own address and keys, and not on the public one
    admin: ClassVar[bool] = False
    #: which servers have these routes: "text" is a usual one, "tokens" one under --tokens-only, without a tokenizer
    modes: ClassVar[frozenset[str]] = frozenset(("text",))
    #: exact paths that GET answers without a key: files that are the same for everybody and tell nothing of this server
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
        """The routes, mounted at the root."""

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """`app` or middleware around it, once a process: all routes of the public listener, below the ingress.

        Requests have passed key, bounds and body by then; `scope[frame.interfaces.KNOWN]` says whether a key was there.
        """
        return app


class Command(ABC):
    """A subcommand of `frame`. Built as `Class(setup, options)`; imports heavy things inside `run` only."""

    #: one line for `frame --help`
    help: str
    #: command lines that its own `--help` ends with
    examples: tuple[str, ...] = ()

    def __init__(self, setup: Setup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares its arguments."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Does it; returns the exit status."""
