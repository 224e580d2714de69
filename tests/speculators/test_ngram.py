"""Prompt lookup against a search by hand, and its settings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.interfaces import DraftContext
from frame.testing import make_setup


def make(**options):
    given = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, **options}
    config = from_flat({"speculative_config": given})
    return Registry.load().make(
        "speculator", config.speculation.speculator, make_setup("speculator", config=config), config
    )


def propose(speculator, *rows):
    width = max(map(len, rows)) + 4
    table = torch.tensor([[*row, *[7] * (width - len(row))] for row in rows], dtype=torch.int32)
    slots = torch.arange(len(rows), dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    found = speculator.propose(DraftContext(table, slots, lengths, width - 4))
    return [tokens[:count] for tokens, count in zip(found.token_ids.tolist(), found.counts.tolist(), strict=True)]


def by_hand(row, least, most, wanted):
    """The longest match wins; then one that `wanted` tokens follow; then the newest of those, else the oldest."""
    best = None
    for place in range(1, len(row)):
        length = 0
        while length < min(most, place) and row[place - 1 - length] == row[len(row) - 1 - length]:
            length += 1
        full = place + wanted <= len(row)
        rank = (length, full, place if full else -place)
        if length >= least and (best is None or rank > best[0]):
            best = rank, place
    return [] if best is None else row[best[1] : best[1] + wanted]


def test_what_followed_the_longest_match_is_repeated():
    assert propose(make(), [1, 2, 3, 4, 9, 3, 5, 1, 2, 3]) == [[4, 9, 3]]


def test_the_newest_match_with_enough_behind_it_wins():
    assert propose(make(prompt_lookup_max=1), [1, 2, 3, 4, 1, 5, 6, 8, 1]) == [[5, 6, 8]]
    assert propose(make(prompt_lookup_max=1), [1, 2, 3, 4, 1, 5, 1]) == [[2, 3, 4]]
    assert propose(make(), [5, 5, 5, 5, 5, 5, 5]) == [[5, 5, 5]]


def test_shorter_matches_than_the_least_are_none():
    assert propose(make(prompt_lookup_min=2), [1, 2, 3, 1]) == [[]]
    assert propose(make(prompt_lookup_min=2), [1, 2, 3, 1, 2]) == [[3, 1, 2]]


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 5),
)
def test_as_by_hand(rows, least, more, wanted):
    speculator = make(prompt_lookup_min=least, prompt_lookup_max=least + more, num_speculative_tokens=wanted)
    assert propose(speculator, *rows) == [by_hand(row, least, least + more, wanted) for row in rows]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_max": None}, "option prompt_lookup_max of plugin 'ngram' is missing"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max of plugin 'ngram' must be greater than or equal to 1"),
        ({"prompt_lookup_min": 4}, "prompt_lookup_min 4 is above prompt_lookup_max 3"),
        ({"draft_model": "x"}, "plugin 'ngram' has no option 'draft_model'; there are: prompt_lookup_max"),
        ({"method": "eagle"}, "no speculator 'eagle'; there are: ngram"),
    ],
)
def test_wrong_settings_name_the_choices(options, message):
    with pytest.raises(PluginError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"num_speculative_tokens": 3}, "speculative_config needs a method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "disable_by_batch_size"),
        ("ngram", "speculative_config must be a mapping"),
    ],
)
def test_wrong_speculative_config(value, message):
    with pytest.raises(ConfigError, match=message):
        from_flat({"speculative_config": value})


def test_an_empty_speculative_config_is_none():
    assert from_flat({"speculative_config": {}}).speculation.speculator is None
    assert from_flat({"speculative_config": {"model": "[ngram]"}}).speculation.speculator == "ngram"
