"""Engines over fake workers with the nixl connector, in one process: real agents, whose reads tell by wrong tokens."""

from __future__ import annotations

import time

import pytest

from frame.plugins.connectors.nixl import holds as nixl_holds
from frame.testing import ConnectorSuite
from frame.testing.engines import request

SECRET = "a secret of the tests"
#: Enough for what threads do on a busy machine.
SECONDS = 60.0
#: The time for which blocks are kept, unless a test says otherwise: it does not pass, so nothing may come of that.
NEVER = 600.0
#: What a proxy sends to the prefill engine.
ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def travelling(length, layout):
    """How many tokens of a prompt with so many the decode engine reads, where it has none of them."""
    whole = (length - 1) // layout.grain * layout.grain
    keeps_states = any(group.keeps_states for group in layout.groups)
    return length - 1 if whole and not keeps_states else whole


class Pairs(ConnectorSuite):
    """Makes engines, which it closes, and takes requests through them."""

    plugin = "nixl"

    def __init__(self, folder):
        self.folder, self.made = folder, []
        (folder / "secret").write_text(SECRET)
        self.options = {
            "secret_file": str(folder / "secret"),
            "lease_seconds": NEVER,
            "lookup_seconds": SECONDS,
            "stall_seconds": NEVER,
        }
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(nixl_holds, "_GIVEN_SECONDS", SECONDS)

    def engine(self, *args, options=None, **settings):
        kept = self.options
        self.options = {**kept, **(options or {})}
        try:
            made = super().engine(*args, **settings)
        finally:
            self.options = kept
        self.made.append(made)
        return made

    def close(self):
        for engine in self.made:
            engine.close()
        self.patch.undo()

    def add(self, engine, name, prompt, params, count=8, salt=None):
        one = request(name, prompt, count)
        one.kv_transfer, one.salt = params, salt
        engine.add(one)
        return one

    def finish(self, engine, name, seconds=SECONDS):
        """Steps until the request is done; returns what it says of its transfer."""
        self.until(lambda: engine.outputs[name] and engine.outputs[name][-1].finish_reason, engine, seconds=seconds)
        return engine.outputs[name][-1].kv_transfer

    def prefill(self, engine, name, prompt, salt=None):
        self.add(engine, name, prompt, dict(ASKS), 1, salt)
        return self.finish(engine, name)

    def decode(self, engine, name, prompt, params, salt=None):
        """Returns how many tokens of the prompt were not computed."""
        self.add(engine, name, prompt, params, 8, salt)
        self.finish(engine, name)
        return engine.num_cached(name)

    def until(self, done, *engines, seconds=SECONDS):
        """Steps engines until it is so."""
        latest = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < latest, "it does not come to that"
            for engine in engines:
                engine.step()
            time.sleep(0.0005)

    def rest(self, *engines, seconds=SECONDS):
        """Steps engines until nothing is held or read, and checks all tokens."""
        self.until(lambda: not any(engine.busy for engine in engines), *engines, seconds=seconds)
        for engine in engines:
            self.collect(engine, seconds)
            engine.check()

    def collect(self, engine, seconds=SECONDS):
        """Has blocks given back of reads that nobody waited for, which only an engine with requests does."""
        latest, abandoned = time.monotonic() + seconds, engine.engine.scheduler.lifecycle.abandoned
        while abandoned:
            assert time.monotonic() < latest, "blocks are still written to"
            self.add(engine, name := f"after-{len(engine.requests)}", self.prompt(5), None)
            self.finish(engine, name)


def counter(engine, name):
    return engine.engine.stats().connector_counters.get(f"nixl_{name}", 0)
