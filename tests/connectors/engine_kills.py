"""Kills real engines while KV travels.

    python -m tests.connectors.engine_kills FOLDER CONNECTOR KILLS PAIRS [PLATFORM]

A prefill and a decode engine, each a process, on two GPUs where there are two, get eight prompts at once; at a moment
that is drawn one of them dies by SIGKILL, in turns. The other one must answer all that it was asked with the right
tokens and have no block in use afterwards; another engine takes the dead one's place, and all prompts travel once more.
PAIRS pairs do so side by side. It prints JSON: which tokens were wrong, requests lost and blocks left, and how often
prompts were under way at that moment.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from frame.testing.checkpoints import make_checkpoint
from tests.connectors.nixl_pairs import SECRET
from tests.connectors.nixl_prompts import Prefill

_PROMPTS, _LENGTH, _TOKENS = 8, 110, 8
#: Seconds for which blocks may stay in use for an engine that is gone, and for an answer.
_LEASE, _ANSWER = 3.0, 90.0
_OPTIONS = {
    "nixl": {"lease_seconds": _LEASE, "retry_seconds": 0},
    "push": {"wait_seconds": _LEASE, "expiry_seconds": _LEASE, "retry_seconds": 0},
}


class Engine(Prefill):
    """A process with an engine that answers questions in any order; `kill` may come at any moment."""

    def __init__(self, folder, connector, role, place, platform):
        self.port = _free_port()
        options = dict(_OPTIONS[connector])
        if connector == "push" and role == "consumer":
            options["port"] = self.port
        settings = {"kv_connector": connector, "kv_role": role, "options": options, "platform": platform}
        settings |= {
            "num_gpu_blocks_override": 600,
            "max_num_batched_tokens": 32,
            "enforce_eager": True,
            "dtype": "float32",
        }
        environment = {} if platform == "cpu" else {"CUDA_VISIBLE_DEVICES": str(place % torch.cuda.device_count())}
        super().__init__(folder / "model", folder / "secret", environment, **settings)
        self._given, self._news = {}, threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            with self._news:
                if line == "ready\n":
                    self._given["ready"] = True
                elif line.startswith("{"):
                    found = json.loads(line)
                    self._given[found.get("id", "call")] = found
                self._news.notify_all()
        with self._news:
            self._given["ended"] = True
            self._news.notify_all()

    def wait_ready(self):
        self.wait("ready")

    def wait(self, name, seconds=_ANSWER):
        """What it answered; raises RuntimeError where it ends or says nothing."""
        with self._news:
            if not self._news.wait_for(lambda: name in self._given or "ended" in self._given, seconds):
                raise RuntimeError(f"an engine did not answer {name!r} within {seconds} seconds")
            if name not in self._given:
                raise RuntimeError(f"an engine ended before it answered {name!r}")
            return self._given.pop(name)

    def has(self, name):
        """Whether it has answered."""
        with self._news:
            return name in self._given

    def ask(self, **question):
        self.begin(**question)
        return self.wait(question.get("id", "call"))

    def rest(self):
        """The share of its blocks that are in use once nothing is under way."""
        return self.ask(call="usage")["result"]


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Pair:
    """A prefill and a decode engine, and the next of each, which starts meanwhile."""

    def __init__(self, folder, connector, number, platform, seed):
        self._connector, self._draw = connector, random.Random(f"{seed} {number}")
        self._new = {
            role: lambda role=role, place=place: Engine(folder, connector, role, place, platform)
            for place, role in enumerate(("producer", "consumer"))
        }
        self.engines = {role: make() for role, make in self._new.items()}
        self._next = {role: make() for role, make in self._new.items()}
        self._prompts = []
        #: how long eight prompts take
        self._seconds = 0.05
        self.found = {"kills": 0, "midway": 0, "wrong": [], "lost": [], "left": []}

    def start(self):
        """Waits for the engines, and has the decode engine compute each prompt by itself."""
        for one in self.engines.values():
            one.wait_ready()
        for place in range(_PROMPTS):
            prompt = [self._draw.randrange(3, 400) for _ in range(_LENGTH - 7 * place)]
            alone = self.engines["consumer"].ask(id="alone", prompt=prompt, params=None, count=_TOKENS)
            self._prompts.append((prompt, alone["tokens"]))

    def _begin(self, name, prompt):
        """Has the prompt travel; the name of the decode engine's request."""
        giver, taker = self.engines["producer"], self.engines["consumer"]
        asks = {"do_remote_decode": True, "do_remote_prefill": False}
        if self._connector == "push":
            asks |= {"remote_host": "127.0.0.1", "remote_port": taker.port}
            giver.begin(id=f"p{name}", prompt=prompt, params=asks, count=1)
            taker.begin(id=f"d{name}", prompt=prompt, params={"do_remote_prefill": True}, count=_TOKENS)
        else:
            params = giver.ask(id=f"p{name}", prompt=prompt, params=asks, count=1)["kv_transfer"]
            taker.begin(id=f"d{name}", prompt=prompt, params=params, count=_TOKENS)
        return f"d{name}"

    def round(self, number, victim):
        """One death, of the engine of this role."""
        for one in self.engines.values():
            latest = time.monotonic() + 4 * _LEASE + 10
            while not one.ask(call="reset_prefix_cache")["result"]:
                assert time.monotonic() < latest, "blocks stay in use"
                time.sleep(0.05)
        names = [self._begin(f"{number}-{place}", prompt) for place, (prompt, _) in enumerate(self._prompts)]
        time.sleep(self._draw.random() * self._seconds)
        taker = self.engines["consumer"]
        midway = not all(taker.has(name) for name in names)
        self.engines[victim].close()
        self.found["kills"] += 1
        self.found["midway"] += midway
        if victim == "producer":
            self._check(names)
        if usage := self.engines["producer" if victim == "consumer" else "consumer"].rest():
            self.found["left"].append([number, victim, usage])
        self.engines[victim] = self._next[victim]
        self.engines[victim].wait_ready()
        self._next[victim] = self._new[victim]()
        again = time.monotonic()
        self._check([self._begin(f"{number}-{place} again", prompt) for place, (prompt, _) in enumerate(self._prompts)])
        if victim == "consumer":  # nothing hindered them
            self._seconds = 0.5 * self._seconds + 0.5 * (time.monotonic() - again)

    def _check(self, names):
        """The decode engine answers all of these, one for each prompt, with the right tokens."""
        for name, (_, expected) in zip(names, self._prompts, strict=True):
            try:
                if self.engines["consumer"].wait(name)["tokens"] != expected:
                    self.found["wrong"].append(name)
            except RuntimeError as error:
                self.found["lost"].append([name, str(error)])

    def close(self):
        for one in (*self.engines.values(), *self._next.values()):
            one.close()


def kills(folder, connector, count, pairs, platform, seed=0):
    """Kills `count` engines of `pairs` pairs; what came of it."""
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    make_checkpoint(folder / "model", "llama")

    def live(number):
        pair = Pair(folder, connector, number, platform, seed)
        try:
            pair.start()
            for turn in range(number, count, pairs):
                pair.round(turn, ("producer", "consumer")[turn // pairs % 2])
        finally:
            pair.close()
        return pair.found

    with ThreadPoolExecutor(pairs) as pool:
        found = list(pool.map(live, range(pairs)))
    return {key: sum((one[key] for one in found[1:]), found[0][key]) for key in found[0]}


def main():
    folder, connector, count, pairs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    platform = sys.argv[5] if len(sys.argv) > 5 else "cuda"
    print(json.dumps(kills(folder, connector, count, pairs, platform)), flush=True)


if __name__ == "__main__":
    main()
