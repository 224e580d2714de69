"""The plugin contract changes only on purpose."""

from __future__ import annotations

from tests.snapshots.describe import contract, differences, read

HOW = """
The plugin contract differs from tests/snapshots/interfaces.json:
{found}

If that is meant: `make snapshots` writes the new one. Before 1.0 an addition needs nothing more; what was removed or
changed breaks plugins, so raise the minor of API_VERSION (core/interfaces/provider.py) once per release, extend the
range of our own providers, and say in CHANGELOG.md what plugin authors must do.
From 1.0 on additions raise the minor, and removals the major after one release of deprecation.
"""


def test_the_contract_is_what_it_was():
    found = differences(read(), contract())
    listed = "\n".join(f"  {sort:<8}{where}" for sort, where in found)
    assert not found, HOW.format(found=listed)


def test_differences_are_told_by_their_sort():
    old = {"a": {"x": "1", "y": "2"}, "names": ["p", "q"], "gone": "z"}
    new = {"a": {"x": "1", "y": "3"}, "names": ["q", "r"], "new": "w"}
    assert differences(old, new) == [
        ("changed", "a.y:\n      was 2\n      is  3"),
        ("removed", "gone"),
        ("removed", "names: p"),
        ("added", "names: r"),
        ("added", "new"),
    ]


def test_every_interface_has_at_most_about_eight_methods_to_write():
    for name, about in contract()["frame.interfaces"].items():
        if isinstance(about, str) or about["is"] == "enum":
            continue
        members = about.get("members", {})
        abstract = [member for member, text in members.items() if text.startswith("abstract ")]
        limit = 10 if name == "Build" else 8  # Build is ours to implement, not a plugin's
        assert len(abstract) <= limit, (name, abstract)
