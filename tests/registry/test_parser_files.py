"""Parsers from a Python file: `--tool-parser-plugin` and `--reasoning-parser-plugin`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.registry import PluginError, Registry
from frame.interfaces import ParserSetup

CODE = """
from frame import Provider, hookimpl
from frame.interfaces import Content, OutputReader, ToolParser


class Reader(OutputReader):
    def feed(self, text, token_ids=()):
        return [Content(text.upper())]

    def finish(self):
        return []


class Loud(ToolParser):
    def start(self, request):
        return Reader()


@hookimpl
def frame_tool_parsers():
    return [Provider({name!r}, "{module}:Loud", api=">=0.2.dev1,<0.3")]
"""


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., str]]:
    modules = set(sys.modules)

    def write_file(module: str, name: str = "loud", code: str = CODE) -> str:
        path = tmp_path / f"{module}.py"
        path.write_text(code.format(name=name, module=module) if code is CODE else code)
        return str(path)

    yield write_file
    for module in set(sys.modules) - modules:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]


def test_a_file_offers_a_parser(write: Callable[..., str]) -> None:
    config = FrameConfig.from_flat(tool_parser_plugin=write("loud_parser_of_a_test"), tool_call_parser="loud")
    registry = Registry.load()
    registry.check(config)
    registry.check(config)  # a second time adds nothing
    parser = registry.make("tool-parser", "loud", ParserSetup(), config)
    assert parser.start(None).feed("hi")[0].text == "HI"
    again = Registry.load()
    again.add_files(config)
    assert again.choose("tool-parser", "loud").name == "loud"


def test_a_file_beats_a_package(write: Callable[..., str]) -> None:
    config = FrameConfig.from_flat(tool_parser_plugin=write("loud_hermes", "hermes"), tool_call_parser="hermes")
    registry = Registry.load()
    registry.check(config)
    assert registry.choose("tool-parser", "hermes").target == "loud_hermes:Loud"


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("json", CODE, "has the name of an installed module"),
        ("wave", CODE, "has the name of an installed module"),
        ("broken_parser", "1 / 0", "cannot be imported: ZeroDivisionError"),
        ("idle_parser", "x = 1", "offers nothing; it needs a hook such as frame_tool_parsers"),
        ("not-a-name", CODE, "must be an existing Python file"),
    ],
)
def test_a_wrong_file_is_one_sentence(write: Callable[..., str], module: str, code: str, message: str) -> None:
    path = write(module, code=code)
    with pytest.raises(PluginError, match=message) as caught:
        Registry.load().check(FrameConfig.from_flat(tool_parser_plugin=path))
    assert path in str(caught.value)


def test_missing_names_and_files() -> None:
    with pytest.raises(PluginError, match="must be an existing Python file"):
        Registry.load().check(FrameConfig.from_flat(reasoning_parser_plugin="/nowhere/parser.py"))
    with pytest.raises(PluginError, match=r"no tool parser 'hermess'; .*hermes"):
        Registry.load().check(FrameConfig.from_flat(tool_call_parser="hermess"))
    with pytest.raises(PluginError, match=r"no reasoning parser 'x'; there are: .*qwen3"):
        Registry.load().check(FrameConfig.from_flat(reasoning_parser="x"))
    for choice in ("auto", "none"):
        Registry.load().check(FrameConfig.from_flat(tool_call_parser=choice))
