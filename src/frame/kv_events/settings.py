"""Settings of KV events: where they are published, and in which form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from frame.core.config.section import Section, setting

from .addresses import problem


class KVEventsConfig(Section):
    """KV events: what each engine publishes of its prefix cache, for routers and for tools."""

    kv_events_endpoint: str | None = setting(
        None,
        "Address at which KV events are published over ZMQ, as tcp://127.0.0.1:5557 or ipc:///run/frame/events; data "
        "rank n takes the n-th port after it. Default: none are published.",
    )
    kv_events_connect: bool = setting(
        False, "Connect to a subscriber that listens at kv_events_endpoint, instead of listening there."
    )
    kv_events_replay_endpoint: str | None = setting(
        None, "Address at which subscribers ask for KV events that they missed; default: they cannot."
    )
    kv_events_curve_file: str | None = setting(
        None,
        "File with a secret CURVE key of 40 characters: KV events are encrypted, and only who knows its public key can "
        "listen or ask. Default: neither.",
    )
    kv_events_topic: str = setting("", "Topic of KV events, by which subscribers choose.", max_length=256)
    kv_events_format: Literal["array", "map"] = setting(
        "array", "Form of KV events: arrays, as up to vLLM 0.23, or maps, as later versions have them."
    )
    kv_events_hashes: Literal["int", "bytes"] = setting(
        "int", "How KV events name blocks: by the last 8 bytes of their hashes as a number, or by whole hashes."
    )
    kv_events_buffer_steps: int = setting(
        10_000, "Newest batches of KV events, one a step, that can be asked for again.", ge=1, le=1 << 20
    )
    kv_events_buffer_bytes: int = setting(
        256 << 20,
        "Most bytes of these batches together; the oldest are forgotten first.",
        ge=1 << 16,
        le=1 << 36,
    )
    kv_events_hwm: int = setting(
        100_000, "Batches of KV events that wait for a slow subscriber; it misses what is above.", ge=1, le=1 << 24
    )
    kv_events_max_queue_size: int = setting(
        100_000, "Batches of KV events that wait to be sent; what is above is dropped and counted.", ge=1, le=1 << 24
    )

    def contradictions(self) -> Iterator[str]:
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            if (address := getattr(self, name)) is not None and (sentence := problem(name, address)):
                yield sentence
        if self.kv_events_curve_file is not None and self.kv_events_connect:
            yield "kv_events_curve_file is for an engine that listens; kv_events_connect leaves that to the subscriber"
        for name in ("kv_events_connect", "kv_events_replay_endpoint", "kv_events_curve_file"):
            if getattr(self, name) and self.kv_events_endpoint is None:
                yield f"{name} needs kv_events_endpoint, without which no KV events are published"
