"""Kills and stops engines while one writes to the other's device.

`python -m tests.connectors.push_kills FOLDER COUNT SEED` prints JSON.

One engine takes prompts from two that compute them; each is a process over fake workers whose cache tells what each
block is of. Sockets are real, and files that all of them map stand in for memory of devices, into which copies take so
long that most deaths come in their midst. A sender that is stopped for longer than its prompt is waited for goes on
when others have had their prompts put beside it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from frame.plugins.connectors.push import worker as push_worker
from frame.testing.engines import request
from frame.testing.fake_cache import VOCAB, expected_tokens, make_layout
from tests.connectors.kills import Process
from tests.connectors.mapped_files import FileSharing
from tests.connectors.push_pairs import SECRET, Pairs
from tests.free_ports import free_ports

_LENGTH = 86
_EXPIRY_SECONDS = 1.0
#: Enough for what expires on a busy machine.
_SECONDS = 60.0
ASKS = {"do_remote_decode": True}


class SlowFiles(FileSharing):
    """Copies to other workers' memory take a while, and half of one is there before the rest."""

    def launch(self, table):
        halves = table[:, 2] // 2
        for start, size in ((0 * halves, halves), (halves, table[:, 2] - halves)):
            time.sleep(0.001)
            for (source, target), begin, count in zip(
                table[:, :2].tolist(), start.tolist(), size.tolist(), strict=True
            ):
                ctypes.memmove(target + begin, source + begin, count)
        return lambda: 0.002


def serve(pipe, folder, port, role, decode):
    """The process of an engine: does what it is told, and tells what has happened."""
    faulthandler.enable()
    push_worker.sharing_of = lambda device: SlowFiles(folder)
    pairs = Pairs(folder)
    options = {"port": port, "decode": decode, "retry_seconds": 0.01, "wait_seconds": 1.5, "buffer_bytes": 1 << 18}
    options |= {"expiry_seconds": _EXPIRY_SECONDS, "device_bytes": 5 << 15}
    layout = make_layout(block_size=1, num_blocks=400)
    engine = pairs.engine(layout, options=options, max_num_batched_tokens=16, kv_role=role)
    told = set()
    pipe.send({"ready": True})
    while True:
        if engine.busy:
            engine.step()
        for name in [one for one in engine.requests if one not in told and engine.ended(one)]:
            told.add(name)
            one = engine.requests[name]
            right = engine.tokens(name) == expected_tokens(one.prompt_ids.tolist(), one.max_tokens, one.seed)
            pipe.send({"name": name, "right": right, "cached": engine.num_cached(name)})
        if pipe.poll(0 if engine.busy else 0.001):
            what = pipe.recv()
            if what == "rest":
                engine.run()
                engine.run(request(f"later {time.monotonic()}", [1, 2, 3], 1))
                told.update(engine.requests)
                inbox = engine.workers.made[0].transfer.inner._inbox
                used = 0 if inbox is None else inbox.buffer.arena.used_bytes
                counters = engine.engine.stats().connector_counters
                held = {"usage": engine.engine.stats().kv_usage, "held": engine.held, "loading": engine.loading}
                pipe.send({**held, "used": used, "written": counters.get("push_direct_bytes", 0)})
            elif what == "close":
                engine.close()
                os._exit(0)
            else:
                one = request(what["name"], what["prompt"], what["count"])
                one.kv_transfer = what["params"]
                engine.add(one)


class Life:
    """Two engines that compute prompts, and one that takes them; what went `wrong`, and how often one died `midway`."""

    def __init__(self, folder, draw):
        port = free_ports()
        self.draw, self.wrong, self.midway, self.written = draw, [], 0, 0
        self.taker = Process(serve, folder, port, "consumer", None)
        self.givers = [Process(serve, folder, 0, "producer", f"127.0.0.1:{port}") for _ in range(2)]
        self.duration = 0.1

    def prompt(self):
        return [self.draw.randrange(VOCAB) for _ in range(_LENGTH)]

    def send(self, giver, name, prompt):
        """Has a prompt computed, and all of it sent that is."""
        giver.add(name, prompt, 1, dict(ASKS))
        giver.until(name=name)

    def check(self, engine, name):
        found = engine.until(name=name)
        if not found["right"]:
            self.wrong.append([name, "tokens", found["cached"]])
        return found["cached"]

    def kill(self, number):
        """One of the two sides dies while a prompt is written."""
        prompt, giver = self.prompt(), self.givers[0]
        victim, other = (giver, self.taker) if number % 2 else (self.taker, giver)
        giver.add(f"p{number}", prompt, 1, dict(ASKS))
        self.taker.add(f"d{number}", prompt, 6, {"do_remote_prefill": True})
        time.sleep(self.draw.random() * self.duration)
        ended = self.taker.pipe.poll(0)
        self.midway += not ended
        victim.kill()
        self.check(other, f"d{number}" if other is self.taker else f"p{number}")
        self.rest(other, number)
        again = victim.anew()
        if victim is giver:
            self.givers[0] = again
        else:
            self.taker = again

    def stop(self, number):
        """A sender is stopped in mid-write until its prompt has expired and others have filled the buffer."""
        slow, quick = self.givers
        prompt, others = self.prompt(), [self.prompt() for _ in range(3)]
        slow.add(f"p{number}", prompt, 1, dict(ASKS))
        time.sleep(self.draw.random() * self.duration)
        slow.signal(signal.SIGSTOP)
        self.taker.add(f"d{number}", prompt, 6, {"do_remote_prefill": True})
        self.check(self.taker, f"d{number}")
        for place, other in enumerate(others):
            self.send(quick, f"q{number}-{place}", other)
        slow.signal(signal.SIGCONT)
        slow.until(name=f"p{number}")
        for place, other in enumerate(others):
            self.taker.add(f"o{number}-{place}", other, 6, {"do_remote_prefill": True})
            self.check(self.taker, f"o{number}-{place}")
        for engine in (slow, quick, self.taker):
            self.rest(engine, number)

    def rest(self, engine, number):
        found = engine.rest()
        if found["usage"] or found["held"] or found["loading"]:
            self.wrong.append([number, "blocks", found])
        return found

    def travels(self, giver, name):
        prompt = self.prompt()
        self.send(giver, f"p {name}", prompt)
        self.taker.add(f"d {name}", prompt, 6, {"do_remote_prefill": True})
        return self.check(self.taker, f"d {name}")

    def end(self):
        """All engines still work, and nothing of the buffer is lost."""
        for place, giver in enumerate(self.givers):
            # on a busy machine one may be waited for in vain
            if not any(self.travels(giver, f"end {place} {attempt}") for attempt in range(20)):
                self.wrong.append([place, "computed"])
            self.written += self.rest(giver, "end")["written"]
        latest = time.monotonic() + _SECONDS
        while used := self.rest(self.taker, "end")["used"]:
            if time.monotonic() > latest:
                self.wrong.append(["end", "buffer", used])
                break
            time.sleep(0.1)
        for engine in (*self.givers, self.taker):
            engine.close()


def main():
    folder, count, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    (folder / "secret").write_text(SECRET)
    life = Life(folder, draw)
    for number in range(count):
        if number % 3 == 2:
            life.stop(number)
        else:
            life.kill(number)
    life.end()
    print(json.dumps({"wrong": life.wrong, "midway": life.midway, "written": life.written}), flush=True)


if __name__ == "__main__":
    main()
