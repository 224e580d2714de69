"""The Grafana dashboard: each expression asked of a real Prometheus that collects from a real server."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from frame.core.interfaces.client import EngineInfo
from frame.core.interfaces.engine import EngineStats
from frame.core.server.metrics import ServerMetrics
from frame.plugins.endpoints.exposition import Exposition
from tests.free_ports import free_ports
from tests.server.running import REAL, Running, server, until

FOLDER = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana" / "frame.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
INFO = EngineInfo(max_model_len=1, vocab_size=1, num_blocks=1, block_size=1, platform="", attention=[], dtype="")
KEY = "key-of-the-test"


def names(expression: str) -> set[str]:
    return set(re.findall(r"\bframe_\w+", expression))


def test_it_asks_for_metrics_that_there_are() -> None:
    text = Exposition("m", ServerMetrics().counts(), EngineStats(), INFO).encoded().decode()
    there = {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    for title, expression in EXPRESSIONS:
        assert names(expression), title
        assert names(expression) <= there, title


def test_its_parts_do_not_overlap_and_say_what_they_show() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [(x, y) for place in places for x in range(place["x"], place["x"] + place["w"])
             for y in range(place["y"], place["y"] + place["h"])]  # fmt: skip
    assert len(cells) == len(set(cells))
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert all(panel["description"] for panel in PANELS)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


class Prometheus:
    def __init__(self, running: Running, folder: Path) -> None:
        settings = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
        settings["global"]["scrape_interval"] = "1s"
        (job,) = settings["scrape_configs"]
        (folder / "key").write_text(KEY)
        job["authorization"]["credentials_file"] = str(folder / "key")
        job["static_configs"] = [{"targets": [running.url.removeprefix("http://")]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        self.url = f"http://127.0.0.1:{(port := free_ports())}"
        command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(self, expression: str) -> list[float]:
        """The values of an expression as Grafana would ask it, without those that are no number."""
        query = expression.replace("$__rate_interval", "20s").replace("$model", ".*")
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=10).json()
        assert answer["status"] == "success", answer
        values = [float(one["value"][1]) for one in answer["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def scrapes(self) -> float:
        try:
            return sum(self.ask('count_over_time(up{job="frame"}[5m])'))
        except (httpx.HTTPError, ValueError):  # not there yet, or there and not yet ready
            return 0


def load(running: Running, seconds: float) -> None:
    client = httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    deadline = time.monotonic() + seconds
    number = 0
    while time.monotonic() < deadline:
        number += 1
        body = {
            "prompt": f"Once upon a time there was a cat and {'a dog ' * (number % 7)}",
            "max_tokens": 8 + number % 5,
        }
        client.post(f"{running.url}/v1/completions", json=body).raise_for_status()
        client.get(f"{running.url}/v1/models/nothing")
    client.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with server(REAL, "--api-key", KEY, "--num-threads", "1", "--disable-access-log") as running:
        prometheus = Prometheus(running, tmp_path_factory.mktemp("prometheus"))
        try:
            until(lambda: prometheus.scrapes() >= 2, 120)
            load(running, 6)
            yield prometheus
        finally:
            prometheus.process.terminate()
            prometheus.process.wait(20)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no Prometheus (apt-get install prometheus)")
@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_every_expression_has_an_answer(prometheus: Prometheus, title: str, expression: str) -> None:
    values = prometheus.ask(expression)
    assert values, f"{title}: {expression}"
    assert all(value >= 0 for value in values)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (apt-get install prometheus)")
def test_prometheus_finds_no_fault_with_names_and_settings(tmp_path: Path) -> None:
    text = Exposition("m", ServerMetrics().counts(), EngineStats(), INFO, vllm_names=True).encoded()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert b"error while linting" not in done.stderr, done.stderr.decode()
    settings = (FOLDER / "prometheus.yaml").read_text().replace("/run/secrets/frame_key", str(tmp_path / "key"))
    (tmp_path / "key").write_text("k")
    (tmp_path / "prometheus.yaml").write_text(settings)
    subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yaml")], check=True, capture_output=True)
