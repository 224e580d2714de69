"""Which adapters workers read and keep, without workers, and which names a folder of adapters has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frame.core.engine import adapters
from frame.core.engine.adapters import Adapter, AdapterTable
from frame.interfaces import AdapterResolverSetup, AdapterSource
from frame.plugins.adapters.folder import FolderResolver
from frame.plugins.adapters.folder_options import FolderOptions

NUM_ADAPTERS = 30


class Workers:
    """Reads an adapter in as many questions as `slowness`, and counts."""

    def __init__(self, slowness: int) -> None:
        self.slowness, self.reading, self.host = slowness, dict[int, int](), set[int]()
        self.num_reads = self.most = 0

    def __call__(self, method: str, arguments: dict[str, Any]) -> list[str | None]:
        key = arguments["key"]
        if method == "drop_adapter":
            self.host.discard(key)
            return [None]
        if key not in self.host:
            self.reading.setdefault(key, 0)
            self.reading[key] += 1
            self.most = max(self.most, len(self.host | self.reading.keys()))
            if self.reading[key] < self.slowness:
                return [None]
            del self.reading[key]
            self.host.add(key)
            self.num_reads += 1
        return [f"digest {key}"]


@pytest.mark.parametrize("slowness", [1, 4])
@pytest.mark.parametrize("max_host", [2, 5])
def test_a_queue_of_many_adapters_reads_each_once_and_no_more_than_the_limit(
    slowness: int, max_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_POLL_SECONDS", 0.0)
    workers, used = Workers(1), list[Adapter]()
    table = AdapterTable(2, max_host, workers, lambda: used)
    sources = [AdapterSource(str(place), f"/{place}") for place in range(NUM_ADAPTERS)]
    assert all(table.load(source.name, source.path) for source in sources)
    workers.slowness, workers.num_reads, workers.most = slowness, 0, 0
    queue: list[Any] = [SimpleNamespace(adapter=table.of(source)) for source in sources]
    used[:] = [request.adapter for request in queue]
    for _ in range(40 * NUM_ADAPTERS):
        table.begin()
        batch: Any = SimpleNamespace(requests=[])
        for request in list(queue):
            if table.may_run(request.adapter) and table.has_slot(request, batch) and len(batch.requests) < 2:
                batch.requests.append(request)
                table.take(request, batch)
                queue.remove(request)
                used.remove(request.adapter)
        if not queue:
            break
    assert not queue
    assert workers.num_reads <= NUM_ADAPTERS
    assert workers.most <= max_host + 1


def test_a_name_that_could_not_be_read_makes_nobody_wait_again() -> None:
    def call(method: str, arguments: dict[str, Any]) -> list[str | None]:
        calls.append(method)
        if method == "read_adapter":
            raise ValueError("it is broken")
        return [None]

    calls = list[str]()
    table = AdapterTable(1, 1, call, list)
    with pytest.raises(ValueError, match="it is broken"):
        table.of(AdapterSource("a", "/a"))
    calls.clear()
    with pytest.raises(ValueError, match="no adapter 'a' is loaded"):
        table.of(AdapterSource("a", "/a"))
    assert not calls


@pytest.mark.parametrize("name", ["./a", "a/", "a//", "a/.", "b/../a", "/a", "../a", ""])
def test_an_adapter_has_one_name(name: str, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").write_text("{}")
    resolver = FolderResolver(AdapterResolverSetup("frame-llm:folder"), FolderOptions(root=tmp_path))
    assert resolver.resolve("a") == tmp_path / "a"
    assert resolver.resolve(name) is None
