"""A NIXL whose agents live in one process: reads copy memory, and faults come when they are told to.

Takes the place of the module `nixl`. As there, a read that began goes on until it is done, has failed or is released.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace


class Read(SimpleNamespace):
    """`rows` are (to, from, bytes); `polls` is how many questions are answered with "PROC" before they are copied."""


class FakeNixl:
    """The module. `fault()` says what happens to the next read: None, or a kind of fault."""

    def __init__(self, fault):
        self.fault = fault
        self.agents = {}
        self.lock = threading.RLock()
        self.nixl_agent = lambda name, config: FakeAgent(self, name)
        self.nixl_agent_config = lambda **settings: settings


class FakeAgent:
    def __init__(self, module, name):
        self.module, self.name = module, name
        self.regions, self.notices, self.known = [], {}, set()
        self.alive = True
        self.reads = []

    def create_backend(self, name, settings):
        pass

    def register_memory(self, rows, memory):
        with self.module.lock:
            self.regions = [(address, address + size) for address, size, _, _ in rows]
            self.module.agents[self.name] = self
        return rows

    def deregister_memory(self, rows):
        with self.module.lock:
            assert not self.reads, "memory goes while it is written to"
            self.alive = False
            del self.module.agents[self.name]

    def get_agent_metadata(self):
        return self.name.encode()

    def add_remote_agent(self, metadata):
        self._fail("meet")
        with self.module.lock:
            self._living(metadata.decode())
            self.known.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name):
        self.known.remove(name)

    def get_xfer_descs(self, rows, memory):
        return [(int(address), int(size)) for address, size, _ in rows]

    def initialize_xfer(self, what, ours, theirs, name, notice):
        self._fail("prepare")
        assert what == "READ"
        assert name in self.known
        rows = [(to, source, size) for (to, size), (source, _) in zip(ours, theirs, strict=True)]
        return Read(rows=rows, peer=name, notice=notice, kind=None, polls=0, done=False)

    def send_notif(self, name, notice):
        with self.module.lock:
            self._living(name).notices.setdefault(self.name, []).append(notice)

    def transfer(self, read):
        self._fail("post")
        read.kind = self.module.fault("read")
        read.polls = {"delay": 3, "slow": 40}.get(read.kind, 1)
        self.reads.append(read)
        return "PROC"

    def check_xfer_state(self, read):
        if read.done:
            return "DONE"
        read.polls -= 1
        if read.polls > 0:
            return "PROC"
        with self.module.lock:
            peer = self._living(read.peer)
            rows = read.rows if read.kind not in ("kill", "truncate") else read.rows[: len(read.rows) // 2]
            for to, source, size in rows:
                assert self.has(to, size)
                assert peer.has(source, size)
                ctypes.memmove(to, source, size)
            if read.kind == "kill":
                raise RuntimeError("nixlRemoteDisconnectError")
            if read.kind == "truncate":
                return "ERR"
            if read.kind != "drop":  # the notice of a read that is done may still be lost with its sender
                peer.notices.setdefault(self.name, []).append(read.notice)
                if read.kind == "duplicate":
                    peer.notices[self.name].append(read.notice)
        read.done = True
        return "DONE"

    def release_xfer_handle(self, read):
        if read in self.reads:
            self.reads.remove(read)

    def get_new_notifs(self):
        with self.module.lock:
            found, self.notices = self.notices, {}
        return found

    def has(self, address, size):
        return any(first <= address and address + size <= last for first, last in self.regions)

    def _living(self, name):
        agent = self.module.agents.get(name)
        if agent is None:
            raise RuntimeError("nixlRemoteDisconnectError")
        return agent

    def _fail(self, where):
        if self.module.fault("call") is not None:
            raise RuntimeError(f"nixl fails to {where}")
