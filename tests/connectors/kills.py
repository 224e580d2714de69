"""Kills engines while one reads blocks of the other: `python -m tests.connectors.kills FOLDER COUNT SEED CONNECTOR…`

It prints JSON.

Each engine is a process, forked from this one, over fake workers whose cache tells what each block is of; sockets,
files and NIXL agents are real. Each of the two dies in turn, at a moment that is drawn. The other one must finish all
its requests with the right tokens and get its blocks back; then another engine takes the dead one's place.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

from frame.plugins.connectors.blocks import worker as block_worker
from frame.plugins.connectors.nixl import agent as nixl_agent, pulls as nixl_pulls
from frame.testing.engines import request
from frame.testing.fake_cache import VOCAB, expected_tokens, make_layout
from tests.connectors.faults import Faults, Suite, sides_of
from tests.connectors.nixl_pairs import ASKS, SECRET

_LENGTH, _SECONDS = 86, 60.0
_LEASE_SECONDS, _MARGIN_SECONDS = 1.5, 0.1


def options_of(name, folder, place):
    """Those of the connector of engine number `place`."""
    return {
        "disk": lambda: {"folder": str(folder / "disk")},
        "peer": lambda: {
            "listen": f"unix:{folder}/{place}",
            "peers": [f"unix:{folder}/{1 - place}"],
            "retry_seconds": 0.01,
        },
        "nixl": lambda: {"secret_file": str(folder / "secret"), "retry_seconds": 0.01, "lookup_seconds": 2},
        "multi": lambda: {
            "connectors": [
                {"kv_connector": one, "options": options_of(one, folder, place)} for one in ("nixl", "peer", "disk")
            ]
        },
    }[name]()


def serve(pipe, connector, folder, place):
    """The process of an engine: does what it is told, and tells what has happened."""
    faulthandler.enable()
    nixl_agent.MARGIN_SECONDS = nixl_pulls.MARGIN_SECONDS = _MARGIN_SECONDS
    block_worker.BATCH = 4  # many fetches, in whose midst it may happen
    suite = Suite(connector, folder, options_of(connector, folder, place), Faults(), 0, False)
    engine = suite.engine(make_layout(block_size=1, num_blocks=400), max_num_batched_tokens=96)
    for side in sides_of(engine.connector.inner):
        if type(side).__name__ == "NixlScheduler":
            side._holds._seconds = _LEASE_SECONDS
    told, loads = set(), False
    pipe.send({"ready": True})
    while True:
        if engine.busy:
            engine.step()
        if engine.loading and not loads:
            loads = True
            pipe.send({"loads": True})
        for name in [one for one in engine.requests if one not in told and engine.ended(one)]:
            told.add(name)
            one, last = engine.requests[name], engine.outputs[name][-1]
            right = engine.tokens(name) == expected_tokens(one.prompt_ids.tolist(), one.max_tokens, one.seed)
            pipe.send({"name": name, "right": right, "cached": engine.num_cached(name), "params": last.kv_transfer})
        if pipe.poll(0 if engine.busy else 0.001):
            what = pipe.recv()
            if what == "rest":
                engine.run()
                pipe.send({"usage": engine.engine.stats().kv_usage, "held": engine.held, "loading": engine.loading})
            elif what == "close":
                engine.close()
                os._exit(0)
            else:
                one = request(what["name"], what["prompt"], what["count"])
                one.kv_transfer = what["params"]
                loads = False
                engine.add(one)


class Process:
    """An engine, as this process knows it: it runs `target(pipe, *given)`."""

    def __init__(self, target, *given):
        context = multiprocessing.get_context("fork")
        self.target, self.given = target, given
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *given), daemon=True)
        self.process.start()
        theirs.close()
        self.until("ready")

    def until(self, *keys, name=None):
        """What it tells, up to something with one of these keys, or to the end of that request."""
        latest = time.monotonic() + _SECONDS
        while True:
            if not self.pipe.poll(max(0.0, latest - time.monotonic())):
                raise RuntimeError(f"an engine never told {keys or name!r}")
            try:
                told = self.pipe.recv()
            except EOFError:
                self.process.join()
                raise RuntimeError(f"an engine that nobody killed ended with {self.process.exitcode}") from None
            if not told.keys().isdisjoint(keys) or (name is not None and told.get("name") == name):
                return told

    def add(self, name, prompt, count, params=None):
        self.pipe.send({"name": name, "prompt": prompt, "count": count, "params": params})

    def rest(self):
        self.pipe.send("rest")
        return self.until("usage")

    def anew(self):
        """Another engine of its kind."""
        return Process(self.target, *self.given)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.join()
        self.pipe.close()

    def close(self):
        self.pipe.send("close")
        self.process.join(10)
        self.process.kill()


def kills(connector, folder, count, draw):
    """Kills `count` times; returns what went wrong, and how often the transfer was under way."""
    wrong, midway, duration = [], 0, 0.02
    engines = [Process(serve, connector, folder, place) for place in (0, 1)]
    for number in range(count):
        prompt = [draw.randrange(VOCAB) for _ in range(_LENGTH)]
        giver, taker = engines if number % 4 < 2 else engines[::-1]
        giver.add(f"p{number}", prompt, 1, dict(ASKS))
        given = giver.until(name=f"p{number}")
        taker.add(f"d{number}", prompt, 6, given["params"])
        start = time.monotonic()
        victim, other = (giver, taker) if number % 2 else (taker, giver)
        # on a busy machine it may give up to ask, and compute the prompt
        found = taker.until("loads", name=f"d{number}") if connector != "disk" else {}
        time.sleep(draw.random() * duration)
        ended = "name" in found or taker.pipe.poll(0)
        victim.kill()
        midway += not ended
        if victim is giver:
            found = found if "name" in found else taker.until(name=f"d{number}")
            duration = min(0.05, max(0.002, (time.monotonic() - start) / 2)) if ended else duration
            if not found["right"]:
                wrong.append([number, "tokens", found["cached"]])
        rest = other.rest()
        if rest["usage"] or rest["held"] or rest["loading"]:
            wrong.append([number, "blocks", rest])
        place = engines.index(victim)
        engines[place] = victim.anew()
        again = engines[1 - place]
        again.add(f"a{number}", prompt, 6)
        if not again.until(name=f"a{number}")["right"]:
            wrong.append([number, "tokens again"])
    for engine in engines:
        engine.close()
    return {"wrong": wrong, "midway": midway}


def main():
    folder, count, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    (folder / "secret").write_text(SECRET)
    print(json.dumps({name: kills(name, folder, count, draw) for name in sys.argv[4:]}), flush=True)


if __name__ == "__main__":
    main()
