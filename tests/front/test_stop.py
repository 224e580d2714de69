from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from frame.core.front.stop import StopStrings

WORDS = st.text(alphabet="ab\n日", min_size=1, max_size=4)


def naive(text, stops, include):
    """The text up to the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=st.text(alphabet="ab\n日", max_size=30),
    stops=st.lists(WORDS, min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 6), max_size=30),
    include=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_chunking_gives_the_same_text(text, stops, sizes, include):
    watcher, shown, start = StopStrings(stops, include), "", 0
    expected, expected_stop = naive(text, stops, include)
    match = None
    for size in [*sizes, len(text)]:
        delta, match = watcher.push(text[start : start + size])
        start += size
        shown += delta
        assert expected.startswith(shown)
        if match is not None:
            break
    if match is None:
        shown += watcher.flush()
    assert (shown, match) == (expected, expected_stop)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["he", "l", "lo"], ["zz"], ["he", "l", "lo"]),
        (["he", "l", "lo"], ["lo"], ["he", "", "l"]),
        (["a\n", "x"], ["\n\n"], ["a", "\nx"]),
        (["abc"], ["abc", "b"], ["a"]),
    ],
)
def test_only_what_may_become_a_stop_string_is_held_back(pieces, stops, shown):
    watcher = StopStrings(stops)
    assert [watcher.push(piece)[0] for piece in pieces] == shown
