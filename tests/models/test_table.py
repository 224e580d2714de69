"""The table of families and the folder: each row has a class, and each file is a family's or told of."""

import ast
from pathlib import Path

import pytest

import frame.plugins.models
from frame.core.plugin_host.registry import Registry
from frame.plugins.models.families import CONFIGS, FAMILIES
from tests.models import native

FOLDER = Path(frame.plugins.models.__file__).parent
ROWS = {name: row for rows in FAMILIES.values() for name, row in rows.items()}


def test_no_architecture_has_two_rows():
    assert len(ROWS) == sum(map(len, FAMILIES.values()))
    assert CONFIGS.keys() <= ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_a_model_and_what_it_is(name):
    registry = Registry.load()
    provider = registry.choose("model", name)
    assert registry.resolve(provider).__module__ == f"frame.plugins.models.{ROWS[name][0].partition(':')[0]}"
    assert provider.summary


def test_every_file_is_a_family_or_told_of_in_the_package():
    families = {home.partition(":")[0] for home, _ in ROWS.values()}
    told = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text()))
    for path in FOLDER.glob("[a-z]*.py"):
        assert path.stem in families or f"`{path.name}`" in told, path.name
    for folder in FOLDER.glob("[a-z]*/__init__.py"):
        assert f"`{folder.parent.name}/`" in told, folder.parent.name


def test_what_the_docs_say_of_each_model_is_what_it_has():
    assert native.FILE.read_text(encoding="utf-8") == native.measured(), "run python -m tests.models.native"
