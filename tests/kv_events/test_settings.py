"""Settings of KV events, vLLM's names for them, and what an engine does with wrong ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.kv_events.addresses import clash, of_rank
from frame.kv_events.events import NO_EVENTS
from frame.kv_events.start import make_events
from tests.engine.simulation import make_layout
from tests.free_ports import free_ports

LAYOUT = make_layout(9)


@pytest.mark.parametrize(
    ("address", "rank", "own"),
    [
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", 3, "tcp://127.0.0.1:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///run/events", 2, "ipc:///run/events_dp2"),
        ("inproc://events", 1, "inproc://events_dp1"),
    ],
)
def test_ranks_have_ports_of_their_own(address: str, rank: int, own: str) -> None:
    assert of_rank(address, rank) == own


def test_ranks_of_two_addresses_that_meet() -> None:
    assert clash("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", 2)
    assert clash("tcp://127.0.0.1:5558", "tcp://0.0.0.0:5557", 2)
    assert not clash("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", 1)
    assert not clash("tcp://127.0.0.1:5557", "tcp://10.0.0.1:5557", 8)
    assert clash("ipc:///a", "ipc:///a", 1)
    assert not clash("ipc:///a", "tcp://127.0.0.1:5557", 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_events_endpoint": "tcp://*:5557"}, "would show the tokens of all prompts on every network"),
        ({"kv_events_endpoint": "5557"}, "kv_events_endpoint '5557' is no address; write tcp://HOST:PORT"),
        ({"kv_events_endpoint": "udp://127.0.0.1:1"}, "is no address"),
        ({"kv_events_endpoint": "tcp://127.0.0.1"}, "has no port from 1 to 65535"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:0"}, "has no port from 1 to 65535"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:70000"}, "has no port from 1 to 65535"),
        ({"kv_events_endpoint": "tcp://:5557"}, "is no address"),
        ({"kv_events_endpoint": "tcp://10.0.0.1:1;10.0.0.2:5557"}, "is no address"),
        ({"kv_events_endpoint": "ipc://relative"}, "is no address"),
        ({"kv_events_endpoint": "ipc:///" + "a" * 100}, "is longer than 90 bytes"),
        ({"kv_events_replay_endpoint": "tcp://127.0.0.1:1"}, "kv_events_replay_endpoint needs kv_events_endpoint"),
        ({"kv_events_curve_file": "/k"}, "kv_events_curve_file needs kv_events_endpoint"),
        (
            {"kv_events_endpoint": "tcp://a:1", "kv_events_connect": True, "kv_events_curve_file": "/k"},
            "kv_events_curve_file is for an engine that listens",
        ),
        ({"kv_events_connect": True}, "kv_events_connect needs kv_events_endpoint"),
        ({"kv_events_endpoint": "inproc://a", "kv_events_buffer_steps": 0}, "kv_events_buffer_steps"),
        (
            {"kv_events_endpoint": "inproc://a", "kv_events_replay_endpoint": "tcp://*:5558"},
            "kv_events_replay_endpoint tcp://*:5558 would show",
        ),
        ({"kv_events_config": {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}}, "tcp://0.0.0.0:5557"),
        ({"kv_events_config": {"publisher": "kafka"}}, "no kv_events_config.publisher 'kafka'; there are: zmq, null"),
        ({"kv_events_config": {"enabled": True}}, "kv_events_config has no enabled here; there are: enable_kv_cache"),
        ({"kv_events_config": {"enable_kv_cache_events": True, "endpoint": 5}}, "kv_events_endpoint"),
        ({"kv_events_config": {"enable_kv_cache_events": True, "hwm": "many"}}, "kv_events_hwm"),
        ({"kv_events_config": 5}, "kv_events_config must be a mapping"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        FrameConfig.from_flat(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "endpoint", "connect"),
    [
        ({}, None, False),
        ({"enable_kv_cache_events": False, "endpoint": "tcp://*:5557"}, None, False),
        ({"enable_kv_cache_events": True, "publisher": "null"}, None, False),
        ({"enable_kv_cache_events": True}, "tcp://127.0.0.1:5557", False),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://0.0.0.0:9"}, "tcp://0.0.0.0:9", False),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://[::]:9"}, "tcp://[::]:9", False),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://router:9"}, "tcp://router:9", True),
        ({"enable_kv_cache_events": True, "endpoint": "ipc:///run/e"}, "ipc:///run/e", False),
    ],
)
def test_vllms_names_listen_and_connect_as_in_vllm(given: dict[str, Any], endpoint: str | None, connect: bool) -> None:
    events = FrameConfig.from_flat(kv_events_config=given).kv_events
    assert (events.kv_events_endpoint, events.kv_events_connect) == (endpoint, connect)


def test_all_of_vllms_fields_arrive() -> None:
    given = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "inproc://a", "topic": "kv@a",
        "replay_endpoint": "tcp://127.0.0.1:5558", "buffer_steps": 3, "hwm": 4, "max_queue_size": 5,
    }  # fmt: skip
    events = FrameConfig.from_flat(kv_events_config=given).kv_events
    assert (events.kv_events_topic, events.kv_events_replay_endpoint) == ("kv@a", "tcp://127.0.0.1:5558")
    assert (events.kv_events_buffer_steps, events.kv_events_hwm, events.kv_events_max_queue_size) == (3, 4, 5)


def test_nothing_is_made_without_an_address() -> None:
    assert make_events(FrameConfig(), LAYOUT) is NO_EVENTS


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"kv_events_endpoint": "tcp://127.0.0.1:65535", "data_parallel_size": 2, "data_parallel_rank": 1},
            "tcp://127.0.0.1:65535 has no port from 1 to 65535 for data rank 1",
        ),
        (
            {
                "kv_events_endpoint": "tcp://127.0.0.1:5557", "kv_events_replay_endpoint": "tcp://127.0.0.1:5558",
                "data_parallel_size": 2, "data_parallel_rank": 0,
            },
            "have ports in common: each of 2 data ranks takes the next port of both",
        ),
        (
            {"kv_events_endpoint": "ipc:///nowhere/at/all"},
            "KV events cannot be published at ipc:///nowhere/at/all: No such file or directory; choose another "
            "--kv-events-endpoint",
        ),
        (
            {"kv_events_endpoint": "tcp://192.0.2.1:5557"},
            "KV events cannot be published at tcp://192.0.2.1:5557: Cannot assign requested address; choose another",
        ),
        (
            {"kv_events_endpoint": "inproc://here", "kv_events_replay_endpoint": "tcp://nowhere.invalid:5557"},
            "KV events cannot be published at tcp://nowhere.invalid:5557: its host is no address of this machine; "
            "choose another --kv-events-replay-endpoint",
        ),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_ends_its_start_in_one_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        make_events(FrameConfig.from_flat(**settings), LAYOUT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read: No such file"), (b"short", "must hold a secret CURVE key"), (b"\xff" * 40, "must hold a")],
)
def test_a_file_without_a_key_ends_the_start(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    config = FrameConfig.from_flat(kv_events_endpoint=f"ipc://{tmp_path}/events", kv_events_curve_file=str(file))
    with pytest.raises(ConfigError, match=f"kv_events_curve_file .* {said}"):
        make_events(config, LAYOUT)


def test_with_a_key_nobody_is_warned(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(zmq.curve_keypair()[1] + b"\n")
    where = f"tcp://0.0.0.0:{free_ports()}"
    make_events(FrameConfig.from_flat(kv_events_endpoint=where, kv_events_curve_file=f"{tmp_path}/key"), LAYOUT).close()
    assert "unencrypted" not in caplog.text


def test_a_port_in_use_is_named() -> None:
    where = f"tcp://127.0.0.1:{free_ports()}"
    config = FrameConfig.from_flat(kv_events_endpoint=where)
    events = make_events(config, LAYOUT)
    try:
        with pytest.raises(ConfigError, match=f"published at {re.escape(where)}: Address already in use"):
            make_events(config, LAYOUT)
    finally:
        events.close()


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=re.escape("needs pyzmq: pip install 'frame-llm[events]'")):
        make_events(FrameConfig.from_flat(kv_events_endpoint="inproc://a"), LAYOUT)


def test_events_beyond_the_machine_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="frame.events")
    make_events(FrameConfig.from_flat(kv_events_endpoint=f"tcp://127.0.0.1:{free_ports()}"), LAYOUT).close()
    assert "published at tcp://127.0.0.1" in caplog.text
    assert "unencrypted" not in caplog.text
    make_events(FrameConfig.from_flat(kv_events_endpoint=f"tcp://0.0.0.0:{free_ports()}"), LAYOUT).close()
    assert "go to 0.0.0.0 unencrypted" in caplog.text


def test_a_cache_that_is_off_is_warned_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    config = FrameConfig.from_flat(kv_events_endpoint=f"ipc://{tmp_path}/events", enable_prefix_caching=False)
    make_events(config, LAYOUT).close()
    assert "which enable_prefix_caching turns off" in caplog.text
