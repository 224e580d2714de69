"""The public names of `frame`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import frame


@pytest.mark.parametrize("name", frame.__all__)
def test_every_public_name_is_there(name):
    assert getattr(frame, name) is not None


@pytest.mark.parametrize("name", ["interfaces", "layers", "ops", "plugins", "testing"])
def test_modules_for_plugin_authors(name):
    subprocess.run([sys.executable, "-c", f"import frame\nframe.{name}\nimport frame.{name}"], check=True)


def test_the_contract_is_one_set_of_classes():
    from frame.core.interfaces.platform import Platform
    from frame.interfaces import Platform as Public

    assert Public is Platform


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'frame' has no attribute 'nonsense'"):
        frame.nonsense  # noqa: B018
    with pytest.raises(ImportError):
        from frame.interfaces import nonsense  # noqa: F401
