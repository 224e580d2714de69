"""Follows the prefix cache of an engine by its KV events: python kv_events.py ENDPOINT REPLAY_ENDPOINT.

Needs pyzmq and msgspec. Prints the number of blocks that the engine holds whenever it changes.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

END = (-1).to_bytes(8, "big", signed=True)


class Subscriber:
    """`blocks` maps (data rank, KV group, hash) to the token ids of each block that can be found."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.blocks: dict[tuple[int, int, int | bytes], list[int]] = {}
        self._expected = 0  # the number of the next batch
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._events = self._context.socket(zmq.SUB)
        self._engine = self._events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._events.connect(endpoint)
        self._events.subscribe(topic)
        self._poller = zmq.Poller()
        self._poller.register(self._events, zmq.POLLIN)
        self._poller.register(self._engine, zmq.POLLIN)
        self._catch_up()  # what was published before

    def wait(self) -> None:
        """Returns when a batch has come, or the engine has gone."""
        ready = dict(self._poller.poll())
        if self._engine in ready:
            recv_monitor_message(self._engine)
            self._forget()  # the next engine begins with an empty cache, and numbers its batches from 0
        if self._events in ready:
            _topic, number, payload = self._events.recv_multipart()
            place = int.from_bytes(number, "big")
            if place < self._expected:
                return  # a replay has brought it already
            if place > self._expected:
                self._catch_up()
            if place > self._expected:
                self._forget()  # what is missing was dropped, or is too old
            if place >= self._expected:
                self._apply(payload)
                self._expected = place + 1

    def _forget(self) -> None:
        self.blocks.clear()
        self._expected = 0

    def _catch_up(self) -> None:
        """Asks for the batches from the expected one on; they end with the first that is missing."""
        replay = self._context.socket(zmq.DEALER)
        replay.setsockopt(zmq.RCVTIMEO, 2000)
        replay.setsockopt(zmq.RCVHWM, 0)
        replay.connect(self._replay_endpoint)
        replay.send_multipart((b"", self._expected.to_bytes(8, "big")))
        try:
            while (answer := replay.recv_multipart())[1] != END:
                if int.from_bytes(answer[1], "big") == self._expected:
                    self._apply(answer[2])
                    self._expected += 1
        except zmq.Again:
            pass  # nobody answers
        finally:
            replay.close(0)

    def _apply(self, payload: bytes) -> None:
        _seconds, events, *rest = msgspec.msgpack.decode(payload)
        rank = rest[0] if rest else 0
        for event in events:
            kind, fields = named(event)
            group = fields.get("group_idx") or 0
            if kind == "BlockStored":
                size, tokens = fields["block_size"], fields["token_ids"]
                for place, block in enumerate(fields["block_hashes"]):
                    self.blocks[rank, group, block] = tokens[place * size : (place + 1) * size]
            elif kind == "BlockRemoved":
                for block in fields["block_hashes"]:
                    self.blocks.pop((rank, group, block), None)
            elif kind == "AllBlocksCleared":
                self.blocks.clear()


def named(event: Any) -> tuple[str, dict[str, Any]]:
    """The kind and the fields of an event, which is an array or, with --kv-events-format map, a map."""
    if isinstance(event, dict):
        return event["type"], event
    names = {
        "BlockStored": ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
                        "lora_name", "extra_keys", "group_idx"],
        "BlockRemoved": ["block_hashes", "medium", "group_idx"],
    }.get(event[0], [])  # fmt: skip
    return event[0], dict(zip(names, event[1:], strict=False))


if __name__ == "__main__":
    subscriber = Subscriber(*sys.argv[1:3])
    before = -1
    while True:
        if len(subscriber.blocks) != before:
            before = len(subscriber.blocks)
            print(f"{before} blocks", flush=True)
        subscriber.wait()
