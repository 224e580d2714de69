"""A worker extension: methods that a package adds to every worker, for callers of `collective_rpc`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .setup import WorkerExtensionSetup


class WorkerExtension:
    """Its public methods can be called by name on all workers. Built as `Class(setup, options)` in each of them.

    Calls come between steps, in the worker's thread, to all workers at the same time: methods may use collectives of
    their own. Arguments come by name; they and the answers are plain data (numbers, texts, bytes, lists, mappings)
    unless the workers are in the caller's process. What a method raises, the caller gets, and the engine goes on.
    """

    def __init__(self, setup: WorkerExtensionSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    def close(self) -> None:
        """Called once, before the worker drops its model; nobody else can call it."""

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """What can be called, by name: the public methods that its class, or one between, defines."""
        names = {
            name
            for kind in type(self).__mro__
            if kind is not object and kind is not WorkerExtension
            for name, value in vars(kind).items()
            if callable(getattr(value, "__func__", value)) and not name.startswith("_")
        }
        return {name: getattr(self, name) for name in sorted(names - vars(WorkerExtension).keys())}
