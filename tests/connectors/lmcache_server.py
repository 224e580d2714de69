"""A server that speaks LMCache's protocol, with objects in shared memory; and how to start the real one."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import zmq

from tests.free_ports import free_ports

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode

OPERATIONS = {
    8: "lookup",
    9: "query_prefetch_status",
    12: "free_lookup_locks",
    13: "end_session",
    14: "register",
    15: "unregister",
    16: "prepare_store",
    17: "commit_store",
    18: "prepare_retrieve",
    19: "commit_retrieve",
    21: "get_chunk_size",
}
ALIGN = 4096


class FakeServer:
    """As LMCache's server in its mode `engine_driven`, of one pool of shared memory.

    `answers[operation]` is called with the answer that the server would give, and returns what it gives instead: any
    value, bytes that are sent as they are, a list of frames, or `SILENCE`. Without `apart` it takes a model or a salt
    for another one.
    """

    SILENCE = object()

    def __init__(self, chunk=8, size=1 << 22, port=0, apart=True):
        self.chunk, self.size, self.apart = chunk, size, apart
        self.name = f"lmcache_l1_pool_test_{secrets.token_hex(6)}"
        self.path = Path("/dev/shm") / self.name
        self.memory = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.memory, size)
        self.answers, self.calls, self.sessions = {}, [], {}
        self.layouts, self.instances = {}, {}
        self.objects, self.writing, self.locks, self.jobs, self.reading = {}, {}, {}, {}, {}
        self.free = 0
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = port or free_ports()
        self.socket.bind(f"tcp://127.0.0.1:{self.port}")
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    @property
    def address(self):
        return f"tcp:127.0.0.1:{self.port}"

    def close(self):
        self.ends.set()
        self.thread.join(10)
        self.path.unlink(missing_ok=True)
        if self.memory >= 0:
            os.close(self.memory)
        self.memory = -1

    def serve(self):
        while not self.ends.is_set():
            if not self.socket.poll(10):
                continue
            caller, number, operation, *arguments = self.socket.recv_multipart()
            name = OPERATIONS[decode(operation)]
            try:
                found = getattr(self, name)(*map(decode, arguments))
            except (KeyError, AssertionError):  # as the real one, whose handler raised
                self.calls.append((name, "failed"))
                continue
            self.calls.append((name, found))
            if name in self.answers:
                found = self.answers[name](found)
            if found is self.SILENCE:
                continue
            if isinstance(found, list):
                frames = found
            else:
                frames = [number, operation]
                if found is not None:
                    frames.append(found if isinstance(found, bytes) else encode(found))
            self.socket.send_multipart([caller, *frames])
        self.socket.close()

    def keys(self, key, workers=None):
        """The objects of a key, chunk by chunk, of the worker or of all."""
        tokens, hashes, above = key["token_ids"], [], b""
        assert key["start"] % self.chunk == key["end"] % self.chunk == 0
        assert key["end"] <= len(tokens)
        session = self.sessions.setdefault(key["request_id"], [])
        for place in range(key["end"] // self.chunk):
            if place == len(session):  # the server hashes the tokens of a session once
                ids = tokens[place * self.chunk : (place + 1) * self.chunk]
                session.append(hashlib.sha256(above + b"".join(one.to_bytes(4, "big") for one in ids)).digest())
            above = session[place]
            hashes.append(above)
        apart = (key["model_name"], key["cache_salt"], key["world_size"])
        if workers is None:
            workers = range(key["world_size"]) if key["worker_id"] is None else [key["worker_id"]]
        return [
            [(one, *(apart if self.apart else ()), worker) for worker in workers]
            for one in hashes[key["start"] // self.chunk :]
        ]

    def slot(self, name):
        offset, length = self.objects[name] if name in self.objects else self.writing[name]
        return {"offset": offset, "length": length, "shape": [1, 1, length], "dtype": "uint8"}

    def get_chunk_size(self):
        return self.chunk

    def register(self, payload):
        assert payload["use_mla"]
        assert payload["dtype_str"] == "uint8"
        length = payload["num_layers"] * payload["num_physical_slots"] * payload["hidden_dim_size"]
        self.instances.setdefault(payload["instance_id"], length)
        self.layouts[payload["model_name"], payload["world_size"]] = length
        return {"shm_name": self.name, "pool_size": self.size}

    def unregister(self, instance):
        self.instances.pop(instance)

    def lookup(self, key, _):
        found = 0
        if (key["model_name"], key["world_size"]) in self.layouts:
            assert key["num_kv_readers"] == 1
            for names in self.keys(key):
                if not all(name in self.objects for name in names):
                    break
                for name in names:
                    self.locks[name] = self.locks.get(name, 0) + 1
                found += 1
        self.jobs[key["request_id"]] = found
        self.sessions.setdefault(key["request_id"], [])

    def query_prefetch_status(self, session):
        return self.jobs.pop(session, 0)

    def unlock(self, names):
        for name in names:
            self.locks[name] -= 1
            assert self.locks[name] >= 0, "given back twice"

    def free_lookup_locks(self, key, _):
        self.unlock([name for names in self.keys(key) for name in names])

    def end_session(self, session):
        self.sessions.pop(session, None)

    def prepare_store(self, key, instance):
        length, slots, indices = self.instances[instance], [], []
        for index, (name,) in enumerate(self.keys(key)):
            if name in self.objects or name in self.writing or self.free + length > self.size:
                continue
            self.writing[name] = (self.free, length)
            self.free += -(-length // ALIGN) * ALIGN
            slots.append(self.slot(name))
            indices.append(index)
        return {"context": {"slots": slots, "chunk_indices": indices}}

    def commit_store(self, key, instance, data):
        assert data == b""
        for (name,) in self.keys(key):
            if name in self.writing:
                self.objects[name] = self.writing.pop(name)
        return True

    def prepare_retrieve(self, key, instance):
        names = [name for (name,) in self.keys(key)]
        if not all(self.locks.get(name) for name in names):
            return {"success": False, "data": b"", "context": {}}
        self.reading[instance, key["start"], key["end"]] = names
        return {"success": True, "data": b"", "context": {"slots": [self.slot(name) for name in names]}}

    def commit_retrieve(self, key, instance):
        self.unlock(self.reading.pop((instance, key["start"], key["end"])))
        return True

    def damage(self, name):
        """Changes the last byte of an object."""
        offset, length = self.objects[name]
        last = os.pread(self.memory, 1, offset + length - 1)
        os.pwrite(self.memory, bytes([last[0] ^ 1]), offset + length - 1)


class RealServer:
    """LMCache's own server, from the virtual environment `folder`; its output goes to `log`."""

    def __init__(self, folder, chunk, log, size_gb=0.03125, port=0):
        self.name = f"lmcache_l1_pool_test_{secrets.token_hex(6)}"
        self.port = port or free_ports()
        self.log = log
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                [
                    Path(folder) / "bin/python", "-m", "lmcache.v1.multiprocess.server",
                    "--host", "127.0.0.1", "--port", str(self.port), "--chunk-size", str(chunk),
                    "--supported-transfer-mode", "engine_driven", "--shm-name", self.name, "--no-l1-use-lazy",
                    "--l1-size-gb", str(size_gb), "--eviction-policy", "LRU", "--disable-observability",
                ],
                stdout=out, stderr=out, cwd=folder,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": ""},
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                assert self.process.poll() is None, Path(log).read_text()
                assert time.monotonic() < deadline, Path(log).read_text()
                time.sleep(0.1)

    @property
    def address(self):
        return f"tcp:127.0.0.1:{self.port}"

    def clear(self):
        """Has it forget all objects."""
        with zmq.Context.instance().socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(f"tcp://127.0.0.1:{self.port}")
            asking.send_multipart([encode(1), encode(20), encode(True)])
            assert asking.poll(60_000)

    def close(self):
        self.process.kill()
        self.process.wait()
        (Path("/dev/shm") / self.name).unlink(missing_ok=True)
