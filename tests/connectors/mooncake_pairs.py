"""Engines over fake workers with the mooncake connector, and a transfer engine of this process for them."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import sys
import types

from tests.connectors.push_pairs import Pairs


def lacks():
    """Why the real transfer engine cannot be used; None where it can."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        return f"Mooncake's transfer engine is not here: {error}"
    return None


class FakeTransferEngine:
    """Writes to the registered memory of engines of this process; `broken` ones cannot be written to."""

    engines: dict = {}  # noqa: RUF012
    ports = itertools.count(20_000)
    writes: list = []  # noqa: RUF012
    broken = False

    def initialize(self, host, metadata, protocol, device):
        assert (metadata, protocol) == ("P2PHANDSHAKE", "tcp")
        self.port, self.memory = next(self.ports), {}
        self.engines[f"{host}:{self.port}"] = self
        return 0

    def get_rpc_port(self):
        return self.port

    def register_memory(self, address, size):
        self.memory[address] = size
        return 0

    def unregister_memory(self, address):
        del self.memory[address]
        return 0

    def batch_transfer_sync_write(self, session, sources, targets, sizes):
        there = self.engines.get(session)
        if there is None or self.broken:
            return -1
        for source, target, size in zip(sources, targets, sizes, strict=True):
            for engine, address in ((self, source), (there, target)):
                assert any(
                    start <= address and address + size <= start + length for start, length in engine.memory.items()
                )
            ctypes.memmove(target, source, size)
            self.writes.append((session, target, size))
        return 0


def use_fake(monkeypatch):
    """Lets the connector find an engine of this process; returns its class."""
    made = type("TransferEngine", (FakeTransferEngine,), {"engines": {}, "writes": []})
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", types.SimpleNamespace(TransferEngine=made))
    return made


class MooncakePairs(Pairs):
    plugin = "mooncake"

    def __init__(self, folder):
        super().__init__(folder)
        self.options |= {"trusted_network": True, "bootstrap_port": 0}

    def asks(self, here, **changes):
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1", **changes}

    def takes(self, there, **changes):
        """What a proxy sends to the decode engine, of the prefill engine `there`."""
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": "xfer-1",
            "remote_bootstrap_addr": f"http://127.0.0.1:{bootstrap(there)}",
            "remote_engine_id": "engine-under-test",
            **changes,
        }


def bootstrap(engine):
    return engine.connector.inner._bootstrap.port
