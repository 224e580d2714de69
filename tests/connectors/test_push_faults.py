"""What a network may do between two engines: bytes that are lost, changed, late, or never come give no wrong token."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from frame.plugins.connectors.push import worker as push_worker
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from tests.connectors.mapped_files import FileSharing
from tests.connectors.push_pairs import Pairs, port


class Wire:
    """Listens for one who calls `target`, and passes on what either says, with a fault in each connection at times."""

    def __init__(self, target, seed, faults):
        self.target, self.draw, self.faults = target, random.Random(seed), faults
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open, self.threads, self.closed = [], [], False
        self._start(self._accept)

    def _start(self, work, *arguments):
        self.threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self.threads[-1].start()

    def _accept(self):
        while not self.closed:
            with suppress(OSError):
                caller, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                self.open += [caller, there]
                fault = self.draw.choice(self.faults)
                place = self.draw.randrange(1, 30_000)
                self._start(self._pass, caller, there, fault, place)
                self._start(self._pass, there, caller, "none", 0)

    def _pass(self, source, sink, fault, place):
        passed = 0
        with suppress(OSError):
            while data := source.recv(4096):
                at = place - passed
                if fault != "none" and 0 <= at < len(data):
                    if fault == "flip":
                        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                    elif fault == "cut":
                        sink.sendall(data[:at])
                        break
                    elif fault == "lose":
                        data = data[:at] + data[at + 1 :]
                    elif fault == "twice":
                        data = data[:at] + data[max(at - 50, 0) :]
                    elif fault == "late":
                        time.sleep(0.4)
                passed += len(data)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.closed = True
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.threads[0].join()
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for one in (self.listener, *self.open):
            one.close()


@pytest.mark.parametrize(
    ("states", "seed", "direct"),
    [
        pytest.param(states, seed, direct, id=f"{name}-{seed}", marks=[] if seed < often else [pytest.mark.matrix])
        for name, states, direct, often in (("tokens", 0, False, 1), ("states", 4, False, 1), ("device", 0, True, 1))
        for seed in range(60)
    ],
)
def test_faults_on_the_way_cost_the_computation(tmp_path, monkeypatch, seed, states, direct):
    """The address of the worker, which the first connection tells, leads through the wire too.

    Where blocks are written to the other device it carries the words about them alone.
    """
    if direct:
        monkeypatch.setattr(push_worker, "sharing_of", lambda device: FileSharing(tmp_path))
    pairs = Pairs(tmp_path)
    faults = ["none", "flip", "cut", "lose", "twice", "late"]
    wires = []
    try:
        draw = random.Random(seed)
        windows, size = draw.choice([(0,), (0, 6)]), draw.choice([4, 1])
        if states:
            windows, size = (windows if seed % 3 else ()), 4
        layout = make_layout(120, windows=windows, block_size=size, states=states, checkpoints=2 * states)
        short = {"wait_seconds": 0.3, "expiry_seconds": 1, "timeout_seconds": 0.2}
        if direct:
            short |= {"device_bytes": 1 << draw.choice([16, 18])}
        here = pairs.engine(layout, options=short)
        worker = here.workers.made[0].transfer.inner
        wires.append(Wire(worker._inbox.port, seed, faults))
        here.connector.inner.door._ports = [wires[0].port]
        wires.append(Wire(port(here), seed + 1, ["none", "none", *faults]))
        there = pairs.engine(layout, max_num_batched_tokens=draw.choice([7, 64]), options=short)
        for number in range(12):
            prompt = pairs.prompt(draw.randrange(10, 44), seed=draw.randrange(8))
            pairs.add(there, f"p{number}", prompt, pairs.asks(here, remote_port=wires[1].port), 1)
            pairs.add(here, f"d{number}", prompt, {"do_remote_prefill": True}, 6)
            for _ in range(draw.randrange(8)):
                there.step()
                here.step()
        pairs.rest(there, here)
        for arena in (worker._inbox.arena, *([worker._inbox.buffer.arena] if direct else [])):
            pairs.until(partial(empty, pairs, here, arena))
    finally:
        pairs.close()
        for wire in wires:
            wire.close()


def empty(pairs, engine, arena):
    """Whether nothing lies in the memory for what came, once what expires has."""
    engine.run(request(f"later {time.monotonic()}", pairs.prompt(4), 1))
    return arena.used_bytes == 0
