"""Faults at every message of the KV connectors that ship with frame, and engines that live through them.

A message is what passes between two parts that can fail apart: a step's message to a worker side and its answer, a
frame on a socket, a file, a copy beside the steps, a read of another engine's memory. What must hold whatever happens:
tokens are those of an engine without a connector, every request ends, and nothing is left: no block, hold, thread,
descriptor or file.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

from frame.core.interfaces.mesh import Placement
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import mesh_of
from frame.interfaces import ConnectorWorker
from frame.plugins.connectors.blocks import files as block_files, wire as peer_wire
from frame.plugins.connectors.multi.scheduler import MultiScheduler
from frame.plugins.connectors.nixl import agent as nixl_agent, pulls as nixl_pulls, wire as nixl_wire
from frame.plugins.connectors.offload import worker as offload_worker
from frame.plugins.connectors.peer import client as peer_client, server as peer_server
from frame.plugins.connectors.push import carrier as push_carrier
from frame.testing import ConnectorSuite
from frame.testing.connected_engine import ConnectedEngine
from frame.testing.engines import request
from frame.testing.fake_cache import expected_tokens, make_layout
from tests.connectors.fake_nixl import FakeNixl
from tests.connectors.late import LateStreams
from tests.connectors.mooncake_pairs import use_fake
from tests.connectors.nixl_pairs import ASKS, SECRET

#: Where faults happen → their kinds there.
KINDS = {
    "step": ("drop", "truncate", "kill", "slow"),
    "answer": ("kill", "slow"),
    "sample": ("drop",),
    "wire": ("drop", "delay", "duplicate", "truncate", "flip", "kill", "slow"),
    "blocks": ("drop", "delay", "duplicate", "truncate", "flip", "kill", "slow"),
    "file": ("drop", "delay", "duplicate", "truncate", "flip", "kill", "slow"),
    "copy": ("kill", "delay", "slow"),
    "read": ("drop", "delay", "duplicate", "truncate", "kill", "slow"),
    "write": ("drop", "delay", "duplicate", "truncate", "slow"),
    "call": ("kill",),
}
#: Connector → where its messages pass.
PLACES = {
    "disk": ("step", "answer", "sample", "file"),
    "peer": ("step", "answer", "sample", "wire", "blocks"),
    "offload": ("step", "answer", "sample", "copy"),
    "nixl": ("step", "answer", "sample", "wire", "read", "call"),
    "push": ("step", "answer", "sample", "wire", "blocks"),
    "mooncake": ("step", "answer", "sample", "wire", "write"),
    "multi": ("step", "answer", "sample", "file", "wire", "blocks", "copy", "read", "call"),
}
#: Those by which one engine has another compute a prompt for it.
HANDING = ("nixl", "push", "mooncake")
#: What `multi` holds, by the number of a case.
HELD = (("offload", "disk"), ("disk", "disk"), ("offload", "nixl"), ("peer", "disk"), ("nixl", "peer", "offload"))
_PAUSE_SECONDS = 0.002
_PATIENCE_SECONDS = 6.0
#: Of leases and answers here: short, as each lost message costs them.
_LEASE_SECONDS, _MARGIN_SECONDS, _ANSWER_SECONDS = 0.4, 0.05, 0.25


class FaultError(RuntimeError):
    """What a fault raises where a part fails."""


@dataclass(frozen=True)
class Fault:
    """What happens to message number `number`, counted from 0, at a place."""

    place: str
    number: int
    kind: str


@dataclass
class Faults:
    """Says of each message whether something happens to it. Any thread may ask."""

    planned: tuple[Fault, ...] = ()
    active: bool = True
    counts: Counter = field(default_factory=Counter)
    happened: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, place):
        """The kind of fault of the next message; None: it passes."""
        with self.lock:
            number = self.counts[place]
            self.counts[place] += 1
            found = [one for one in self.planned if (one.place, one.number) == (place, number)]
            if not (self.active and found):
                return None
            self.happened.append(found[0])
            return found[0].kind

    def any_at(self, *places):
        return any(one.place in places for one in self.happened)


class FaultyWorker(ConnectorWorker):
    """Between the engine and a worker side: steps that fail before, within and after it."""

    def __init__(self, inner, faults):
        super().__init__(inner.setup, inner.options)
        self.inner, self.faults = inner, faults

    def register(self, caches):
        self.inner.register(caches)
        self.hooks = self.inner.hooks

    def begin_step(self, message):
        kind = self.faults.at("step")
        if kind == "drop":
            raise FaultError("a step fails before the connector hears of it")
        if kind == "slow":
            time.sleep(_PAUSE_SECONDS)
        if kind == "truncate" and message:
            self.inner.begin_step(message[: len(message) // 2])
            raise AssertionError("half a message was taken for a whole one")
        self.inner.begin_step(message)
        if kind in ("kill", "truncate"):
            raise FaultError("a step fails in its forward pass")

    def end_step(self, finished):
        kind = self.faults.at("answer")
        if kind == "kill":
            raise FaultError("a step fails at its end")
        if kind == "slow":
            time.sleep(_PAUSE_SECONDS)
        return self.inner.end_step(finished)

    def pending_loads(self):
        return self.inner.pending_loads()

    def handshake(self):
        return self.inner.handshake()

    def close(self):
        self.inner.close()


def faulty_send(faults, send):
    """`peer_wire.send` over a connection that loses, changes, repeats and cuts frames."""

    def sends(connection, message, payload=b""):
        kind = faults.at("blocks" if payload else "wire")
        if kind in (None, "delay"):
            time.sleep(_PAUSE_SECONDS if kind else 0)
            return send(connection, message, payload)
        if kind == "drop":
            return None
        data = bytearray(peer_wire.encode(message))
        data[:0] = len(data).to_bytes(4, "little")
        data += payload
        if kind == "flip":
            data[len(data) * 2 // 3] ^= 0x10
        return _pass_on(connection, data, kind)

    return sends


def faulty_send_bytes(faults, send_bytes):
    """The same of the bytes of blocks that follow a frame of `push`."""

    def sends(connection, data, seconds):
        kind = faults.at("blocks")
        if kind in (None, "delay"):
            time.sleep(_PAUSE_SECONDS if kind else 0)
            return send_bytes(connection, data, seconds)
        if kind == "drop":
            return None
        data = bytearray(data)
        if kind == "flip":
            data[len(data) * 2 // 3] ^= 0x10
        return _pass_on(connection, data, kind)

    return sends


def _pass_on(connection, data, kind):
    parts = {"duplicate": [data, data], "truncate": [data[: len(data) // 2]], "kill": []}.get(kind, [data])
    if kind == "slow":
        parts = [data[start : start + 64] for start in range(0, len(data), 64)]
    try:
        for part in parts:
            connection.sendall(part)
            time.sleep(_PAUSE_SECONDS if kind == "slow" and len(parts) < 20 else 0)
        if kind in ("truncate", "kill"):
            connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        raise peer_wire.PeerError(f"the connection failed: {error}") from None


def faulty_write(faults, write):
    """Writes of Mooncake's engine that fail before, within or behind what they write, and some that take long."""

    def writes(engine, session, sources, targets, sizes):
        kind = faults.at("write")
        if kind in ("delay", "slow"):
            time.sleep(_PAUSE_SECONDS)
        count = {"drop": 0, "truncate": len(sizes) // 2}.get(kind, len(sizes))
        given = (sources[:count], targets[:count], sizes[:count])
        done = write(engine, session, *given)
        if kind == "duplicate":
            done = write(engine, session, *given)
        return -1 if kind in ("drop", "truncate") else done

    return writes


class FaultyFiles(block_files.BlockFiles):
    """Files that go, shrink, change, and cannot be read or written."""

    faults: Faults

    def read(self, space, key, out):
        kind, path = self.faults.at("file"), self._path(space, key)
        if kind in ("delay", "slow"):
            time.sleep(_PAUSE_SECONDS)
        with suppress(FileNotFoundError):
            if kind == "drop":
                os.unlink(path)
            elif kind == "truncate":
                os.truncate(path, os.path.getsize(path) // 2)
            elif kind == "flip":
                with open(path, "r+b") as file:
                    file.seek(os.path.getsize(path) * 2 // 3)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 0x10]))
            elif kind == "duplicate":
                self.twin = Path(path).read_bytes()
                Path(path).with_name("0" * 64 + ".kv").write_bytes(self.twin)
        if kind == "kill":
            return False  # the disk fails
        return super().read(space, key, out)

    def _write_whole(self, path, header, data):
        kind = self.faults.at("file")
        if kind in ("delay", "slow"):
            time.sleep(_PAUSE_SECONDS)
        super()._write_whole(path, header, data)
        if kind in ("kill", "drop"):
            raise OSError(28, "No space left on device")
        if kind == "truncate":  # the machine failed before all had reached the disk
            os.truncate(path, os.path.getsize(path) // 2)
        if kind == "flip":
            raw = bytearray(path.read_bytes())
            raw[len(raw) * 2 // 3] ^= 0x10
            path.write_bytes(raw)


def faulty_copy(faults, tried):
    """`OffloadWorker._tried`, of which some copies fail midway and some take long."""

    def tries(worker, copy, work):
        kind = faults.at("copy")

        def works(copy):
            if kind in ("delay", "slow"):
                time.sleep(_PAUSE_SECONDS)
            work(copy)
            if kind == "kill":
                raise FaultError("the device fails")

        tried(worker, copy, works if kind else work)

    return tries


class Suite(ConnectorSuite):
    """Makes the engines of a world. Its tests are run elsewhere."""

    __test__ = False
    patience_seconds = _PATIENCE_SECONDS

    def __init__(self, plugin, folder, options, faults, seed, late):
        self.plugin, self.folder, self.options, self.faults = plugin, folder, options, faults
        self.seed, self.late = seed, late

    @staticmethod
    @functools.cache
    def installed():
        """What is installed, read once for all lives."""
        return Registry.load()

    def registry(self):
        return self.installed()

    def worker_side(self, config, layout, rank=0):
        changes = {"streams": LateStreams(0.5, self.seed + rank)} if self.late else {}
        placement = Placement(rank=rank, local_rank=rank, mesh=mesh_of(config))
        inner = self.make(config=config, part="worker", layout=layout, placement=placement, **changes)
        return FaultyWorker(inner, self.faults)


@dataclass
class World:
    """Two engines on one storage, or that know each other; `options_of(place)` are those of the connector of each."""

    connector: str
    folder: Path
    faults: Faults
    ranks: int = 1
    held: tuple[str, ...] = ()
    late: bool = False
    policy: str = "recompute"
    shape: dict = field(default_factory=dict)
    engines: list = field(default_factory=list)
    killed: set = field(default_factory=set)
    aborted: set = field(default_factory=set)
    number: int = 0

    def __enter__(self):
        self.stack = ExitStack()
        enter = self.stack.enter_context
        self.threads, self.descriptors = set(threading.enumerate()), os.listdir("/proc/self/fd")
        enter(patch("frame.testing.setups._registry", Suite.installed))
        faulty = faulty_send(self.faults, peer_wire.send)
        for module in (peer_wire, peer_client, peer_server, nixl_wire):
            enter(patch.object(module, "send", faulty))
        files = type("Files", (FaultyFiles,), {"faults": self.faults})
        for name in ("disk.scheduler", "disk.worker"):
            enter(patch(f"frame.plugins.connectors.{name}.BlockFiles", files))
        worker = offload_worker.OffloadWorker
        enter(patch.object(worker, "_tried", faulty_copy(self.faults, worker._tried)))
        enter(patch.object(push_carrier, "send_bytes", faulty_send_bytes(self.faults, peer_wire.send_bytes)))
        enter(patch.dict(sys.modules, {"nixl": FakeNixl(self.faults.at)}))
        made = enter(pytest.MonkeyPatch.context())
        mooncake = use_fake(made)
        mooncake.batch_transfer_sync_write = faulty_write(self.faults, mooncake.batch_transfer_sync_write)
        for module in (nixl_agent, nixl_pulls):
            enter(patch.object(module, "MARGIN_SECONDS", _MARGIN_SECONDS))
        (self.folder / "secret").write_text(SECRET)
        for name in ("frame", "nixl"):
            logger = logging.getLogger(name)
            enter(patch.object(logger, "disabled", new=True))
        for child in [name for name in logging.root.manager.loggerDict if name.startswith("frame")]:
            enter(patch.object(logging.getLogger(child), "disabled", new=True))
        self.engines = [self.open(place) for place in (0, 1)]
        return self

    def __exit__(self, *error):
        self.faults.active = False
        try:
            for engine in self.engines:
                engine.close()
        finally:
            self.stack.close()
        if error[0] is None:
            self.check_nothing_is_left()

    def options_of(self, name, place, index=0):
        """Those of connector `name` in engine number `place`; twins in one engine differ by `index`."""
        unix = f"unix:{self.folder}/{index}-"
        return {
            "disk": lambda: {"folder": str(self.folder / f"disk-{index}")},
            "offload": lambda: {"size": 0.0001},
            "peer": lambda: {
                "listen": f"{unix}{place}",
                "peers": [f"{unix}{1 - place}"],
                "lookup_seconds": _ANSWER_SECONDS,
                "timeout_seconds": _ANSWER_SECONDS,
                "retry_seconds": 0.01,
            },
            "nixl": lambda: {
                "secret_file": str(self.folder / "secret"),
                "lookup_seconds": _ANSWER_SECONDS,
                "retry_seconds": 0.01,
            },
            "push": lambda: self.sending(),
            "mooncake": lambda: {**self.sending(), "trusted_network": True, "bootstrap_port": 0},
            "multi": lambda: {
                "connectors": [
                    {"kv_connector": one, "options": self.options_of(one, place, number)}
                    for number, one in enumerate(self.held)
                ]
            },
        }[name]()

    def sending(self):
        """Options of connectors that send."""
        return {
            "secret_file": str(self.folder / "secret"),
            "buffer_bytes": 1 << 18,
            "send_buffer_bytes": 1 << 18,
            "wait_seconds": _ANSWER_SECONDS,
            "expiry_seconds": 1,
            "timeout_seconds": _ANSWER_SECONDS,
            "retry_seconds": 0.01,
        }

    def open(self, place):
        """A new engine number `place`."""
        options = self.options_of(self.connector, place)
        suite = Suite(self.connector, self.folder, options, self.faults, self.number, self.late)
        layout = make_layout(ranks=self.ranks, **self.shape)
        settings = {"max_num_batched_tokens": 16, "kv_load_failure_policy": self.policy}
        engine = ConnectedEngine(suite, layout, (), ranks=self.ranks, **settings)
        for side in sides_of(engine.connector.inner):
            if type(side).__name__ == "NixlScheduler":
                side._holds._seconds = _LEASE_SECONDS
        for worker in engine.workers.made:
            worker.sample = self.faulty_sample(worker.sample)
        return engine

    def faulty_sample(self, sample):
        """A step that fails behind the connector's part in it."""

        def samples(masks=b""):
            handle = sample(masks)
            if self.faults.at("sample") is not None:
                raise FaultError("a step fails behind the connector")
            return handle

        return samples

    def add(self, place, prompt, count, params=None):
        """A new request; returns its name."""
        name, engine = f"r{self.number}", self.engines[place]
        self.number += 1
        one = request(name, prompt, count)
        one.kv_transfer = params
        engine.add(one)
        return name

    def step(self, count):
        """Steps of both engines, in turn."""
        for _ in range(count):
            for engine in self.engines:
                if engine.busy:
                    engine.step()

    def hand(self, place, prompt, count):
        """Has one engine compute a prompt for the other."""
        if self.connector in ("push", "mooncake"):
            self.hand_over(place, prompt, count)
            return
        name, engine = self.add(place, prompt, 1, dict(ASKS)), self.engines[place]
        self.until(lambda: engine.ended(name))
        self.add(1 - place, prompt, count, engine.outputs[name][-1].kv_transfer)

    def hand_over(self, place, prompt, count):
        """As `hand`, with engines that are asked at the same time."""
        there, here = (self.engines[one].connector.inner for one in (place, 1 - place))
        if self.connector == "push":
            asks, takes = {"remote_host": "127.0.0.1", "remote_port": here.door.port}, {}
        else:
            asks = {"transfer_id": f"transfer {self.number}"}
            takes = {
                **asks,
                "remote_bootstrap_addr": f"http://127.0.0.1:{there._bootstrap.port}",
                "remote_engine_id": "engine-under-test",
            }
        self.add(place, prompt, 1, {"do_remote_decode": True, **asks})
        self.add(1 - place, prompt, count, {"do_remote_prefill": True, **takes})

    def share(self, place, prompt, count):
        """Has one engine compute a prompt, and the other one, or itself when it has forgotten it, go on from there."""
        name = self.add(place, prompt, count)
        self.until(lambda: self.engines[place].ended(name))
        self.step(3)
        self.reset(place, connector=False)
        self.add(1 - place, prompt, count)
        self.add(place, prompt, count)

    def abort(self, place):
        """Aborts the newest request of an engine that has not ended."""
        engine = self.engines[place]
        living = [name for name in engine.requests if not engine.ended(name) and name not in self.aborted]
        if living:
            self.aborted.add(living[-1])
            engine.engine.abort([living[-1]])

    def reset(self, place, *, connector):
        """Has an engine forget its prompts, maybe those of its connector too, or refuse."""
        with suppress(RuntimeError):
            self.engines[place].engine.call("reset_prefix_cache", {"reset_connector": connector})

    def kill(self, place):
        """Ends an engine in the middle of what it does; another one takes its place."""
        self.engines[place].close()
        self.engines[place] = self.open(place)

    def until(self, done):
        """Steps until it is so."""
        latest = time.monotonic() + _PATIENCE_SECONDS
        count = 0
        while not done():
            assert time.monotonic() < latest, self.stuck()
            self.step(1)
            count += 1
            if count > 20:
                time.sleep(0.0002 if count < 200 else 0.002)

    def stuck(self):
        return "it does not come to rest: " + "; ".join(
            f"engine {place}: holds {one.held}, loads {one.loading}, "
            f"abandoned {list(one.engine.scheduler.lifecycle.abandoned)}, "
            f"runs {[name for name in one.requests if not one.ended(name)]}"
            for place, one in enumerate(self.engines)
        )

    def check(self):
        """Lets all requests end, ends all faults, lets everything come to rest, and looks at all tokens and blocks."""
        self.until(lambda: not any(engine.engine.scheduler.lifecycle.requests for engine in self.engines))
        self.faults.active = False
        self.until(lambda: not any(engine.busy for engine in self.engines))
        self.await_abandoned()
        may_fail = self.faults.any_at("step", "answer", "sample") or self.policy == "fail"
        for engine in self.engines:
            ends = {name: outputs[-1].finish_reason for name, outputs in engine.outputs.items() if outputs}
            failed = {name for name, reason in ends.items() if reason == "error"}
            assert may_fail or not failed, f"{sorted(failed)} ended with an error"
            gone = failed | self.aborted
            whole = [name for name in engine.requests if name not in gone]
            for name in whole:
                one = engine.requests[name]
                want = expected_tokens(one.prompt_ids.tolist(), one.max_tokens, one.seed)
                assert engine.tokens(name) == want, f"request {name} got other tokens than without a connector"
            assert engine.engine.stats().kv_usage == 0, "blocks are still in use although nothing runs"
            missing = set(engine.requests) - set(engine.connector.ended)
            assert not missing, f"frame's own fault: finished was not called for {sorted(missing)}"
            faults = [fault for side in engine.sides for fault in side.faults]
            assert not faults, faults

    def await_abandoned(self):
        """Waits for the loads of failed steps, of which the worker sides say that they ended, or never began."""
        latest = time.monotonic() + 4 * _ANSWER_SECONDS
        for place, engine in enumerate(self.engines):
            lifecycle = engine.engine.scheduler.lifecycle
            while lifecycle.abandoned:
                assert time.monotonic() < latest, f"loads of {list(lifecycle.abandoned)} never end"
                self.until(functools.partial(engine.ended, self.add(place, [1, 2], 1)))
                time.sleep(0.01)

    def check_nothing_is_left(self):
        """No thread, descriptor, socket or unfinished file."""
        latest = time.monotonic() + 5
        while True:
            threads = [one.name for one in set(threading.enumerate()) - self.threads]
            descriptors = len(os.listdir("/proc/self/fd")) - len(self.descriptors)
            if (not threads and descriptors <= 0) or time.monotonic() > latest:
                break
            gc.collect()
            time.sleep(0.005)
        assert not threads, f"threads are left: {threads}"
        assert descriptors <= 0, f"{descriptors} descriptors are left"
        left = [
            path
            for path in self.folder.rglob("*")
            # the marks of workers that are asked for their handshakes twice, as here
            if path.is_socket() or (path.parent.name == "incoming" and not path.name.startswith("mark-"))
        ]
        assert not left, f"files are left: {left}"


def sides_of(connector):
    """A scheduler side, or those that it holds."""
    return [part.connector for part in connector._parts] if isinstance(connector, MultiScheduler) else [connector]
