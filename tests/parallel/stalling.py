"""A worker extension that has one rank stop in the middle of its next step, and the registry that offers it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from frame.core.plugin_host.offers import HERE, Offer
from frame.core.plugin_host.registry import Registry
from frame.interfaces import API_VERSION, Provider, WorkerExtension
from frame.plugins.models.decoder import DecoderLayer

STALLS = {"worker_extension": "stall"}
_SECONDS = 3600.0


class Stall(WorkerExtension):
    """Its rank runs on, and never comes to the collective for which the others then wait."""

    def stall(self, rank: int) -> None:
        """Has worker `rank` sleep in the last of its layers from now on."""
        if self.setup.placement.rank == rank:
            *_, last = (module for module in self.setup.model.modules() if isinstance(module, DecoderLayer))
            last.mlp.forward = lambda *args: time.sleep(_SECONDS)


class FailsOnOne(WorkerExtension):
    """Cannot be made on the last of two ranks."""

    def __init__(self, setup: object, options: object = None) -> None:
        super().__init__(setup, options)
        if self.setup.placement.rank == 1:
            raise ValueError("this rank has no luck")


def offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers the extensions as a package would, also to processes that are started from now on."""
    load, root = Registry.load, str(Path(__file__).parents[2])

    def loaded(only: object = None) -> Registry:
        registry = load(only)
        for name, kind in (("stall", Stall), ("fails-on-one", FailsOnOne)):
            provider = Provider(name, f"{__name__}:{kind.__name__}", api=f"=={API_VERSION}")
            registry.offers.append(Offer("extension", provider, HERE, ""))
        return registry

    monkeypatch.setattr(Registry, "load", loaded)
    monkeypatch.setenv("PYTHONPATH", root, prepend=os.pathsep)
