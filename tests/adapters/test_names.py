"""What an API process remembers of names that requests give as their model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frame.core.config.adapters import AdapterConfig
from frame.core.interfaces.client import EngineDeadError
from frame.core.interfaces.errors import RequestError
from frame.core.interfaces.setup import AdapterResolverSetup
from frame.plugins.adapters.folder import FolderResolver
from frame.plugins.adapters.folder_options import FolderOptions
from frame.served.adapters import HostAdapters
from frame.served.modules import read_module


class Client:
    """An engine that loads all that it is asked to load, while it is there."""

    def __init__(self) -> None:
        self.there = True

    async def call(self, method: str, arguments: dict[str, Any]) -> Any:
        if not self.there:
            raise EngineDeadError("the engine is gone")
        return [] if method == "list_adapters" else True


def make(client: Client, resolve: Any) -> HostAdapters:
    config = SimpleNamespace(adapters=AdapterConfig(enable_lora=True))
    host: Any = SimpleNamespace(config=config, client=client, models=SimpleNamespace(names=["m"]))
    adapters = HostAdapters(host)
    adapters._resolver = SimpleNamespace(resolve=resolve)  # type: ignore[assignment]
    return adapters


async def test_names_of_any_length_take_little_memory() -> None:
    adapters = make(Client(), lambda name: None)
    for letter in "abc":
        await adapters.find(letter * 100_000)
        await adapters.find(letter)
    assert sum(map(len, adapters._unknown)) < 2000
    assert set("abc") <= set(adapters._unknown)


async def test_an_adapter_is_found_once_there_is_an_engine_again() -> None:
    client = Client()
    adapters = make(client, Path)
    client.there = False
    with pytest.raises(RequestError, match="the engine is gone"):
        await adapters.find("one")
    client.there = True
    await adapters.find("one")
    assert set(adapters.known) == {"one"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one", "lora_modules: 'one' is not NAME=FOLDER"),
        ('{"name": "one"', "is not JSON"),
        ('{"name": "one", "folder": "x"}', "no field 'folder'; there are: name, path, base_model_name"),
        ('{"name": "one"}', "needs a name and a path"),
        ('{"name": "one", "path": "x", "base_model_name": 5}', "base_model_name must be text, got 5"),
        ('{"name": ' + "[" * 100_000, "is not JSON"),
    ],
)
def test_wrong_entries_of_lora_modules_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_module(text)
    assert len(str(caught.value)) < 400


def test_a_name_that_is_a_link_out_of_the_root_is_refused_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "own", outside):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (root / "away").symlink_to(outside)
    (root / "same").symlink_to("own")
    resolver = FolderResolver(AdapterResolverSetup(base_model="m"), FolderOptions(root=root))
    assert resolver.resolve("own") == resolver.resolve("same") == root / "own"
    assert not caplog.messages
    assert resolver.resolve("away") is None
    assert caplog.messages == [f"the adapter {root}/away is not served: it is a link that leads out of {root}"]
    assert not any(map(resolver.resolve, ("../outside", str(outside), "nobody")))
    assert len(caplog.messages) == 1
