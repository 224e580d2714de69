"""Makes what publishes the KV events of an engine, or the null object."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from frame.core.config.errors import ConfigError

from .addresses import clash, host_of, is_local, of_rank, problem
from .events import NO_EVENTS, CacheEvents, RecordedEvents
from .wire import BatchEncoder

if TYPE_CHECKING:
    from frame.core.config.tree import FrameConfig
    from frame.core.interfaces.kv import KVLayout

    from .publisher import Publisher

logger = logging.getLogger("frame.events")


class PublishedEvents(RecordedEvents):
    """Recorded events that a publisher sends."""

    def __init__(self, layout: KVLayout, publisher: Publisher, *, deterministic: bool) -> None:
        super().__init__(layout, publisher.publish, deterministic=deterministic)
        self._publisher = publisher

    def counts(self) -> tuple[int, int]:
        return self._publisher.num_events, self._publisher.num_dropped

    def close(self) -> None:
        self.flush()
        self._publisher.close()


def make_events(config: FrameConfig, layout: KVLayout) -> CacheEvents:
    """For the engine of one data rank; raises `ConfigError` where its events cannot be published as they should."""
    events, parallel = config.kv_events, config.data_parallel
    if events.kv_events_endpoint is None:
        return NO_EVENTS
    if not config.cache.enable_prefix_caching:
        logger.warning("KV events tell of the prefix cache, which enable_prefix_caching turns off: there will be none")
    try:
        import_module("zmq")

        from .publisher import AddressError, Publisher, Sockets
    except ImportError:
        raise ConfigError("kv_events_endpoint needs pyzmq: pip install 'frame-llm[events]'") from None
    rank, found = parallel.first_rank, dict[str, str | None]()
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        address = getattr(events, name)
        if address is not None and (sentence := problem(name, address, rank)):
            raise ConfigError(sentence)
        found[name] = None if address is None else of_rank(address, rank)
    replay = events.kv_events_replay_endpoint
    if (
        replay
        and not events.kv_events_connect
        and clash(events.kv_events_endpoint, replay, parallel.data_parallel_size)
    ):
        raise ConfigError(
            f"kv_events_endpoint {events.kv_events_endpoint} and kv_events_replay_endpoint {replay} have ports in "
            f"common: each of {parallel.data_parallel_size} data ranks takes the next port of both"
        )
    endpoint, again = str(found["kv_events_endpoint"]), found["kv_events_replay_endpoint"]
    encoder = BatchEncoder(layout, rank, form=events.kv_events_format, hashes=events.kv_events_hashes)
    sockets = Sockets(
        endpoint=endpoint,
        connect=events.kv_events_connect,
        replay_endpoint=again,
        curve_key=None if events.kv_events_curve_file is None else _curve_key(events.kv_events_curve_file),
        topic=events.kv_events_topic,
        buffer_steps=events.kv_events_buffer_steps,
        buffer_bytes=events.kv_events_buffer_bytes,
        hwm=events.kv_events_hwm,
        max_queue_size=events.kv_events_max_queue_size,
    )
    try:
        publisher = Publisher(sockets, encoder.encode)
    except AddressError as error:
        flag = "--kv-events-endpoint" if error.address == endpoint else "--kv-events-replay-endpoint"
        raise ConfigError(f"KV events cannot be published at {error.address}: {error}; choose another {flag}") from None
    logger.info("KV events: %s %s", "sent to" if sockets.connect else "published at", endpoint)
    for one in (endpoint, again):
        if one is not None and sockets.curve_key is None and not is_local(one):
            logger.warning("KV events hold the tokens of all prompts and go to %s unencrypted", host_of(one))
    return PublishedEvents(layout, publisher, deterministic=config.model.deterministic)


def _curve_key(path: str) -> bytes:
    """The secret key in a file; raises `ConfigError` where there is none."""
    import zmq

    try:
        with Path(path).expanduser().open("rb") as file:
            key = file.read(256).strip()
        zmq.curve_public(key)
    except OSError as error:
        raise ConfigError(f"kv_events_curve_file {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, zmq.ZMQError):
        raise ConfigError(f"kv_events_curve_file {path} must hold a secret CURVE key of 40 characters") from None
    return key
