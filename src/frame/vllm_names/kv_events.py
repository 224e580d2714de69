"""vLLM's `kv_events_config` in frame's settings."""

from __future__ import annotations

from typing import Any

from frame.core.config.errors import ConfigError
from frame.kv_events.addresses import host_of, is_open
from frame.quoting import quoted

#: The fields that are taken.
KV_EVENTS_FIELDS = (
    "enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size",
    "topic",
)  # fmt: skip
#: In place of vLLM's own, which is every network of the machine.
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"


def kv_events_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the known fields out of `given`; none are set unless events are enabled, and published by ZMQ.

    As in vLLM a tcp address is connected to, unless its host is * or stands for every network. Raises `ConfigError`.
    """
    found = {name: given.pop(name) for name in KV_EVENTS_FIELDS if name in given}
    publisher = found.pop("publisher", "zmq")
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"no kv_events_config.publisher {quoted(publisher)}; there are: zmq, null")
    if not found.pop("enable_kv_cache_events", False) or publisher == "null":
        return {}
    endpoint = found.pop("endpoint", None)
    settings = {f"kv_events_{name}": value for name, value in found.items()}
    settings["kv_events_endpoint"] = DEFAULT_ENDPOINT if endpoint is None else endpoint
    host = host_of(endpoint) if isinstance(endpoint, str) else ""
    if host and host != "*" and not is_open(host):
        settings["kv_events_connect"] = True
    return settings
