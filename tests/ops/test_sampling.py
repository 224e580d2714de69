"""Draws: their distribution by chi-squared, what is kept by a plain reimplementation, and what a row may depend on."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare

from frame.core.ops import sampling
from frame.core.ops.random import stream_keys
from frame.core.ops.sampling import draw, greedy, keep_threshold

pytestmark = pytest.mark.product

VOCAB = 24


def params(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None):
    return (
        torch.full((rows,), float(temperature)),
        (torch.arange(rows) if seeds is None else seeds) * 0x9E3779B97F4A7C1,
        torch.full((rows,), 11) if positions is None else positions,
        torch.full((rows,), top_k, dtype=torch.int32) if top_k else None,
        torch.full((rows,), float(top_p)) if top_p < 1 else None,
        torch.full((rows,), float(min_p)) if min_p else None,
    )


def kept_by_definition(logits, temperature, top_k, top_p, min_p):
    """Probabilities after min-p, top-k and top-p one after the other, ties at a threshold kept."""
    weights = np.exp((logits - logits.max()) / temperature)
    weights[weights < min_p] = 0
    if 0 < top_k < len(weights):
        weights[weights < np.sort(weights)[-top_k]] = 0
    if top_p < 1:
        ranked = np.sort(weights)[::-1] / weights.sum()
        before = np.cumsum(ranked) - ranked
        weights[weights / weights.sum() < ranked[before < top_p][-1]] = 0
    return weights / weights.sum()


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("given_filters", FILTERS, ids=str)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(given_filters, vary):
    settings_ = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given_filters
    logits = np.random.default_rng(3).normal(0, 1.5, VOCAB)
    rows = 40_000
    count = torch.arange(rows)
    fixed = torch.full((rows,), 5)
    streams = {"seeds": count, "positions": fixed} if vary == "seed" else {"seeds": fixed, "positions": count}
    tokens = draw(torch.tensor(logits).float().expand(rows, -1), *params(rows, **settings_, **streams))
    expected = kept_by_definition(logits, **settings_) * rows
    observed = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    assert chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-4


def test_a_large_flat_vocabulary_is_drawn_evenly():
    vocab, rows = 60_000, 600
    tokens = draw(torch.zeros(1, vocab).expand(rows, -1), *params(rows)).numpy()
    observed = np.histogram(tokens, bins=20, range=(0, vocab))[0]
    assert chisquare(observed).pvalue > 1e-4


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.3, 3),
    st.integers(0, VOCAB + 3),
    st.floats(0.05, 1),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_kept_ids_are_those_of_the_definition(seed, temperature, top_k, top_p, min_p):
    # Halves make ties frequent; a hair of slack keeps rounding out of the comparison of sums with p.
    logits = np.round(np.random.default_rng(seed).normal(0, 2, VOCAB) * 2) / 2
    expected = kept_by_definition(logits, temperature, top_k, top_p, min_p)
    slack = [kept_by_definition(logits, temperature, top_k, p, min_p) > 0 for p in (top_p - 1e-5, top_p + 1e-5)]
    if not np.array_equal(*slack):
        return
    scores = torch.tensor(logits, dtype=torch.float32)[None] / temperature
    threshold = keep_threshold(scores, *params(1, temperature, top_k, top_p, min_p)[3:])
    assert (scores[0] >= threshold[0] - 1e-5).tolist() == (expected > 0).tolist()


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999])
def test_top_p_of_a_large_vocabulary_is_that_of_a_full_sort(spread, top_p):
    scores = torch.randn(6, 5000, generator=torch.Generator().manual_seed(2)) * spread
    ranked = scores.double().sort(-1, descending=True).values
    shares = ranked.softmax(-1)
    count = (shares.cumsum(-1) - shares < top_p).sum(-1)
    kept = (scores >= keep_threshold(scores, top_p=torch.full((6,), top_p))[:, None]).sum(-1)
    assert (kept - count).abs().max() <= 1
    # the same through the other way, which starts from few candidates
    most = torch.full((6,), 4999, dtype=torch.int32)
    few = keep_threshold(scores, top_k=most, top_p=torch.full((6,), top_p))
    assert ((scores >= few[:, None]).sum(-1) - count).abs().max() <= 1


def test_greedy_takes_the_lowest_of_equal_ids_and_ignores_the_seed():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    token_ids, best = greedy(logits)
    assert token_ids.tolist() == [1, 0]
    assert token_ids.dtype == torch.int32
    assert best.tolist() == [3.0, 2.0]
    assert draw(logits, *params(2, temperature=0.0)).tolist() == [1, 0]


def test_rows_do_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(0)
    rows, vocab = 40, 2000
    logits = torch.randn(rows, vocab, generator=generator) * 3
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(10)
    top_k = torch.tensor([0, 0, 7, 50, 3000], dtype=torch.int32).repeat(8)
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0, 0.999, 1.0, 1.0]).repeat(5)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0]).repeat(8)
    seeds, positions = torch.arange(rows) * 77, torch.arange(rows) + 3
    given = (logits, temperature, seeds, positions, top_k, top_p, min_p)
    together = draw(*given)
    alone = torch.cat([draw(*(value[row : row + 1] for value in given)) for row in range(rows)])
    assert torch.equal(together, alone)
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(draw(*(value[order] for value in given)), together[order])


def test_blocks_of_rows_change_nothing(monkeypatch):
    logits = torch.randn(30, 300, generator=torch.Generator().manual_seed(4)) * 2
    for filters in ({}, {"top_p": 0.8}, {"top_k": 9}):
        whole = draw(logits, *params(30, **filters))
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "CHUNK", 1000)
            assert torch.equal(draw(logits, *params(30, **filters)), whole)


def test_filtered_rows_draw_what_full_noise_would():
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(4)) * 2
    temperature, seeds, positions, top_k, top_p, min_p = params(64, temperature=0.8, top_k=20, top_p=0.95)
    scores = logits / 0.8
    threshold = keep_threshold(scores, top_k, top_p, min_p)
    noisy = scores.masked_fill(scores < threshold[:, None], -math.inf)
    sampling.add_gumbel_noise(noisy, stream_keys(seeds, positions))
    assert torch.equal(draw(logits, temperature, seeds, positions, top_k, top_p, min_p), noisy.argmax(-1).int())


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_show_it_and_leave_others_alone(filters, bad):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    expected = draw(logits.clone(), *params(3, **filters))
    logits[1, :] = bad
    tokens = draw(logits, *params(3, **filters))
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= tokens[1] < 50
    assert not logits[1, tokens[1]].isfinite()


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.5}], ids=str
)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_batch_without_any_finite_row_shows_it(filters, rows, bad):
    logits = torch.full((rows, 50), bad)
    tokens = draw(logits, *params(rows, **filters))
    assert tokens.tolist() == [tokens[0]] * rows
    assert 0 <= tokens[0] < 50


def test_one_nan_among_finite_logits_shows():
    logits = torch.zeros(2, 50)
    logits[1, 31] = math.nan
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}):
        assert draw(logits, *params(2, **filters))[1] == 31
    assert greedy(logits)[0][1] == 31


@pytest.mark.parametrize("filters", [{}, {"top_k": 30}, {"top_p": 0.9999}, {"min_p": 1e-6}], ids=str)
def test_forbidden_ids_are_never_drawn(filters):
    logits = torch.full((500, 40), -math.inf)
    logits[:, [3, 17]] = 0.0
    assert set(draw(logits, *params(500, **filters)).tolist()) == {3, 17}


def test_a_share_of_nothing_keeps_the_best():
    logits = torch.randn(3, 50)
    none, ones = torch.zeros(3), torch.ones(3)
    streams, positions = torch.arange(3), torch.arange(3)
    tokens = sampling.draw(logits.clone(), ones, streams, positions, top_p=none)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    top_k = torch.tensor([5, 0, 1], dtype=torch.int32)
    assert sampling.draw(logits.clone(), ones, streams, positions, top_k, none).tolist() == logits.argmax(-1).tolist()
