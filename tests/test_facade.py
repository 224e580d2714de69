"""The public names of `frame`."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import frame


@pytest.mark.parametrize("name", frame.__all__)
def test_every_public_name_is_there(name):
    assert getattr(frame, name) is not None


#: For each name in a process that knows nothing of frame yet, but has torch.
FIRST = """
import importlib, os, sys
import torch
for name in sys.argv[1:]:
    if not os.fork():
        import frame
        getattr(frame, name)
        importlib.import_module(f"frame.{name}")
        sys.exit()
    if os.wait()[1]:
        sys.exit(f"frame.{name} is not there")
"""


def test_modules_for_plugin_authors():
    names = ["interfaces", "layers", "ops", "plugins", "settings", "testing"]
    subprocess.run([sys.executable, "-c", FIRST, *names], check=True)


def test_the_contract_is_one_set_of_classes():
    from frame.core.interfaces.platform import Platform
    from frame.interfaces import Platform as Public

    assert Public is Platform


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'frame' has no attribute 'nonsense'"):
        frame.nonsense  # noqa: B018
    with pytest.raises(ImportError):
        from frame.interfaces import nonsense  # noqa: F401


@pytest.mark.parametrize("name", ["frame", "frame.interfaces", "frame.layers", "frame.ops", "frame.settings"])
def test_type_checkers_see_the_names_that_are_there(name):
    module = importlib.import_module(name)
    tree = ast.parse(Path(module.__file__).read_text())
    blocks = [one for one in tree.body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"]
    seen = {}
    for one in (one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom)):
        home = importlib.import_module("." * one.level + one.module, "frame") if one.level else one.module
        home = home if one.level else importlib.import_module(home)
        seen |= {alias.asname: getattr(home, alias.name) for alias in one.names}
    assert sorted(seen) == sorted({*module.__all__} - {"__version__"})
    assert all(getattr(module, own) is value for own, value in seen.items())
