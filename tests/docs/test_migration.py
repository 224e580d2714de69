"""The tables for people who come from vLLM, and that of metrics: each line is tried."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from frame.core.cli.serve import ServeCommand
from frame.core.config.flag_parser import FlagParser
from frame.core.config.flags import config_from_arguments
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.client import EngineInfo
from frame.core.interfaces.engine import EngineStats
from frame.core.plugin_host.registry import Registry
from frame.core.server.metrics import ServerMetrics
from frame.interfaces import Setup
from frame.plugins.endpoints.exposition import Exposition
from frame.transfers.measures import COUNTERS, GAUGES
from tests.server.running import FAKE, Running, server

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, title: str) -> list[list[str]]:
    section = (DOCS / page).read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def config(line: str) -> FrameConfig:
    words = shlex.split(line.strip("`"))
    assert words[0] == "serve"
    parser = FlagParser(prog="frame serve")
    ServeCommand(Setup()).add_arguments(parser)
    return config_from_arguments(parser.parse_args(words[1:]))


@pytest.mark.parametrize("row", rows("coming-from-vllm.md", "Command lines"), ids=lambda row: row[0])
def test_both_columns_mean_the_same(row: list[str]) -> None:
    theirs, ours = row
    first, second = config(theirs), config(ours)
    assert first.model_copy(update={"plugin": {}}) == second.model_copy(update={"plugin": {}})
    assert typed(first) == typed(second)


def typed(config: FrameConfig) -> dict[str, object]:
    """The options of each plugin that is set, as the plugin will get them."""
    registry = Registry.load()
    kinds = {name: "connector" if name == config.transfer.kv_connector else "sink" for name in config.plugin}
    return {name: registry.options(registry.choose(kind, name), config) for name, kind in kinds.items()}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(FAKE, "--plugin.fake.vocab_size", "2048", "--scheduling-policy", "priority") as running:
        yield running


@pytest.mark.parametrize("row", rows("coming-from-vllm.md", "Requests"), ids=lambda row: row[1])
def test_requests_are_answered_as_listed(running: Running, row: list[str]) -> None:
    path, fields, here = row
    body = json.loads(fields.strip("`"))
    if path.startswith("`/v1"):
        body.setdefault("max_tokens", 2)
    answer = httpx.post(running.url + path.strip("`"), json=body, timeout=60)
    assert answer.status_code == (200 if here == "answered" else 400), answer.text


def test_routes_of_operators_answer(running: Running) -> None:
    for path in ("/health", "/ping", "/version", "/metrics", "/load", "/v1/models"):
        assert httpx.get(running.url + path).status_code == 200


def test_the_list_of_metrics_of_tiers_is_whole() -> None:
    numbers = EngineStats(
        connector_counters={f"disk_{name}": 1.0 for name in COUNTERS},
        connector_gauges={f"disk_{name}": 1.0 for name in GAUGES},
    )
    text = Exposition("m", ServerMetrics().counts(), numbers).encoded().decode()
    there = set(re.findall(r"^# TYPE (frame_kv_tier_\w+)", text, re.MULTILINE))
    for page, section in (("operating.md", "Metrics"), ("plugins/hooks.md", "KV connectors")):
        listed = [name for row in rows(page, section) for name in re.findall(r"`(frame_kv_tier_\w+)`", " ".join(row))]
        assert set(listed) == there, page
    endings = {name for row in rows("plugins/hooks.md", "KV connectors") for name in re.findall(r"`(\w+)`", row[0])}
    assert endings >= COUNTERS.keys() | GAUGES.keys()


def test_the_list_of_metrics_is_whole() -> None:
    info = EngineInfo(max_model_len=1, vocab_size=1, num_blocks=1, block_size=1, platform="", attention=[], dtype="")
    text = Exposition("m", ServerMetrics().counts(), EngineStats(), info).encoded().decode()
    there = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    listed = re.findall(r"`(frame_\w+)`", " ".join(row[0] for row in rows("operating.md", "Metrics")))
    listed = [name for name in listed if not name.startswith("frame_kv_tier_")]
    assert len(listed) == len(set(listed))
    assert set(listed) == there
