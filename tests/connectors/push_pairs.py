"""Engines over fake workers with the push connector, in one process: what arrives wrong tells by wrong tokens."""

from __future__ import annotations

import itertools
import time

import pytest

from frame.plugins.connectors.push import decode_side
from frame.testing import ConnectorSuite
from frame.testing.engines import request

SECRET = "a secret of the tests"
#: Enough for what threads do on a busy machine.
SECONDS = 60.0
#: The times for which engines wait, unless a test says otherwise: none of them passes, so nothing may come of that.
NEVER = 600.0


class Pairs(ConnectorSuite):
    """Makes engines, which it closes, and takes requests through them."""

    plugin = "push"

    def __init__(self, folder):
        self.folder, self.made = folder, []
        (folder / "secret").write_text(SECRET)
        small = {"buffer_bytes": 1 << 18, "send_buffer_bytes": 1 << 18, "retry_seconds": 0}
        times = {"expiry_seconds": NEVER, "wait_seconds": NEVER, "timeout_seconds": SECONDS}
        self.options = {"secret_file": str(folder / "secret"), **times, **small}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(decode_side, "ANSWERED_SECONDS", NEVER)

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
        self.patch.undo()
        for engine in self.made:
            engine.close()

    def asks(self, here, **changes):
        """What a proxy sends to the prefill engine, of the decode engine `here`."""
        return {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": port(here), **changes}

    def add(self, engine, name, prompt, params, count=8, salt=None):
        one = request(name, prompt, count)
        one.kv_transfer, one.salt = params, salt
        engine.add(one)
        return one

    def finish(self, engine, name, seconds=SECONDS):
        """Steps all engines until the request is done; returns what it says of its transfer."""
        done = lambda: engine.outputs[name] and engine.outputs[name][-1].finish_reason  # noqa: E731
        self.until(done, *self.made, seconds=seconds)
        return engine.outputs[name][-1].kv_transfer

    def prefill(self, there, here, name, prompt, salt=None, **changes):
        self.add(there, name, prompt, self.asks(here, **changes), 1, salt)
        return self.finish(there, name)

    def decode(self, engine, name, prompt, params=None, salt=None):
        """Returns how many tokens of the prompt were not computed."""
        self.add(engine, name, prompt, params or {"do_remote_prefill": True}, 8, salt)
        self.finish(engine, name)
        return engine.num_cached(name)

    def until(self, done, *engines, seconds=SECONDS):
        """Steps engines until it is so."""
        latest = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < latest, "it does not come to that"
            for engine in engines:
                if engine.busy:
                    engine.step()
            time.sleep(0.0005)

    def told(self, engine, name):
        """A counter of an engine: one that is idle hears in a later step what its threads have done since."""
        self.wake(engine)
        return counter(engine, name, self.plugin)

    def wake(self, engine):
        """Has an engine that is idle make some steps."""
        engine.run(request(f"wakes {time.monotonic()}", self.prompt(3, seed=999), 1))

    def unsent(self, engine, seconds=SECONDS):
        """How many prompts could not be sent, once it is at least one: an idle engine hears of that in a later step."""
        latest = time.monotonic() + seconds
        while not (found := self.told(engine, "unsent_prompts")):
            assert time.monotonic() < latest, "all prompts were sent"
        return found

    def arrived(self, engine, *engines, rank=0):
        """Steps other engines until a prompt is there that no request of this one has claimed."""
        self.until(lambda: self.has_arrived(engine, rank), *engines)

    def has_arrived(self, engine, rank=0):
        """Whether a prompt is there that no request of this engine has claimed."""
        return any(prompt.arrived for prompt in [*inbox(engine, rank)._prompts.values()])

    def given_back(self, engine, arena):
        """Has what nobody claims expire, and waits until nothing lies in an engine's memory for what came."""
        clock, looks = inbox(engine)._clock, itertools.count(1)

        def empty():
            passed = next(looks) * (NEVER + 1)
            inbox(engine)._clock = lambda: clock() + passed
            self.wake(engine)
            return arena.used_bytes == 0

        self.until(empty)
        inbox(engine)._clock = clock

    def rest(self, *engines, seconds=SECONDS):
        """Steps engines until nothing is held or read, and checks all tokens."""
        self.until(lambda: not any(engine.busy for engine in engines), *engines, seconds=seconds)
        for engine in engines:
            engine.check()
            for side in engine.sides:
                assert_empty(side.inner, seconds)

    def random_life(self, draw, layout, sizes):
        """Prompts through prefill engines with steps of these sizes and a small decode engine, which is returned."""
        sources = [
            self.engine(layout, max_num_batched_tokens=size, broken_steps=[draw.randrange(60)]) for size in sizes
        ]
        options = {"wait_seconds": 0.3, "buffer_bytes": 1 << 16, "expiry_seconds": 5}
        here = self.engine(layout, broken_steps=[25], max_num_batched_tokens=16, options=options)
        gone = set()
        for number in range(30):
            prompt = self.prompt(draw.randrange(1, 44), seed=draw.randrange(4))
            source = draw.choice(sources)
            legs = [(source, f"p{number}", self.asks(here)), (here, f"d{number}", {"do_remote_prefill": True})]
            if draw.random() < 0.3:
                legs.reverse()
            for engine, name, params in legs:
                self.add(engine, name, prompt, params, 1 if engine is source else draw.randrange(1, 14))
                for _ in range(draw.randrange(6)):
                    source.step()
                    here.step()
            if draw.random() < 0.2:
                engine, name, _ = draw.choice(legs)
                engine.engine.abort([name])
                gone.add(name)
        self.until(lambda: not any(one.busy for one in (*sources, here)), *sources, here)
        for engine in (*sources, here):
            failed = {name for name, outputs in engine.outputs.items() if outputs[-1].finish_reason == "error"}
            engine.check(*(set(engine.requests) - gone - failed))
        return here


def assert_empty(worker, seconds=SECONDS):
    """All memory for what is sent is given back."""
    latest = time.monotonic() + seconds
    while worker._lanes is not None and worker._sendings._arena.used_bytes:
        assert time.monotonic() < latest, "memory for what is sent is not given back"
        time.sleep(0.001)


def moved(layout, length):
    """How many tokens of a prompt the decode engine need not compute."""
    whole = (length - 1) // layout.grain * layout.grain
    return length - 1 if whole and not any(group.keeps_states for group in layout.groups) else whole


def port(engine):
    return engine.connector.inner.door.port


def counter(engine, name, connector="push"):
    return engine.engine.stats().connector_counters.get(f"{connector}_{name}", 0)


def inbox(engine, rank=0):
    return engine.workers.made[rank].transfer.inner._inbox
