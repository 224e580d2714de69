"""Which machines fit together, and how other weights are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings, strategies as st

from frame.links.versions import differences, fingerprints

_SETTINGS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2) | st.none())


@given(_SETTINGS, _SETTINGS)
def test_the_first_difference_is_named_with_both_values(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    here, there = ({"versions": {}, "settings": one} for one in (mine, theirs))
    found = differences(here, there, "x", "y", "machines")
    wrong = [name for name in "abcd" if mine.get(name) != theirs.get(name)]
    assert bool(found) == bool(wrong)
    if wrong:
        expected = f"x was given {wrong[0]} {theirs.get(wrong[0])}, y {mine.get(wrong[0])}; all machines need the same"
        assert found == expected


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 40_000))
def test_training_and_length_change_fingerprints(tmp_path_factory: Any, size: int) -> None:
    folder: Path = tmp_path_factory.mktemp("model")
    file = folder / "model.safetensors"
    seen = []
    for data in (bytes(size), bytes(size), bytes([1]) * size, bytes(size + 1)):
        file.write_bytes(data)
        seen.append(fingerprints(folder)["the file model.safetensors"])
    assert seen[0] == seen[1]
    assert len({*seen}) == (3 if size else 2)


def test_files_that_engines_do_not_read_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a")
    (tmp_path / "config.json").write_text("{}")
    assert list(fingerprints(tmp_path)) == ["the file config.json"]
