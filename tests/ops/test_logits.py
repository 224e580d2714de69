import math

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from frame.core.ops import logits as ops

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=15)


def naive_penalties(row, prompt, output, repetition, frequency, presence):
    row = row.copy()
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= frequency * output.count(token) + presence
    return row


@given(TOKENS, TOKENS, st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 999))
@settings(deadline=None)
def test_penalties_equal_a_loop_over_tokens(prompt, output, repetition, frequency, presence, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (3, VOCAB)).astype(np.float32))
    before = logits.clone()
    in_prompt = torch.zeros(1, VOCAB, dtype=torch.bool)
    in_prompt[0, prompt] = True
    counts = torch.zeros(1, VOCAB, dtype=torch.int32)
    ops.count_tokens(counts, torch.zeros(len(output), dtype=torch.int64), torch.tensor(output, dtype=torch.int32))
    factors = (torch.tensor([value], dtype=torch.float32) for value in (repetition, frequency, presence))
    ops.penalize(logits, torch.tensor([1]), in_prompt, counts, *factors)
    expected = naive_penalties(before[1].double().numpy(), prompt, output, repetition, frequency, presence)
    np.testing.assert_allclose(logits[1].numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_biases_add_up_and_forbid():
    logits = torch.zeros(2, 5)
    ops.add_bias(logits, torch.tensor([0, 0, 1]), torch.tensor([2, 2, 4]), torch.tensor([1.0, 0.5, -math.inf]))
    assert logits.tolist() == [[0, 0, 1.5, 0, 0], [0, 0, 0, 0, -math.inf]]


def test_only_the_allowed_stay():
    logits = torch.arange(8.0).view(2, 4)
    ops.keep_only(logits, torch.tensor([1]), torch.tensor([1, 1]), torch.tensor([0, 3]))
    assert logits.tolist() == [[0, 1, 2, 3], [4, -math.inf, -math.inf, 7]]


@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_bitmasks_touch_their_rows_only(vocab, seed):
    rng = np.random.default_rng(seed)
    allowed = rng.random((2, vocab)) < 0.5
    padded = np.zeros((2, -(-vocab // 32) * 32), bool)
    padded[:, :vocab] = allowed
    words = np.packbits(padded, axis=1, bitorder="little").view("<u4").view(np.int32)
    logits = torch.zeros(3, vocab)
    ops.apply_bitmask(logits, torch.tensor([2, 0]), torch.from_numpy(words.copy()))
    assert logits[1].eq(0).all()
    assert logits[2].eq(0).tolist() == allowed[0].tolist()
    assert logits[0].eq(0).tolist() == allowed[1].tolist()


def test_tails_match_behind_wildcards():
    tails = torch.tensor([[-2, 4, 5], [4, 4, 5], [-2, -2, 5]])
    patterns = torch.tensor([[-1, 4, 5], [5, 4, 5], [-1, 4, 5]])
    assert ops.match_tails(tails, patterns).tolist() == [True, False, False]


def test_logprobs_are_the_log_softmax_and_ranks_count_from_one():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    expected = logits.log_softmax(-1)
    order = expected.argsort(-1, descending=True)
    tokens = order[torch.arange(6), torch.tensor([0, 1, 5, 39, 2, 0])].int()
    ids, values, ranks = ops.top_logprobs(logits, tokens, 4, True)
    assert ranks.tolist() == [1, 2, 6, 40, 3, 1]
    assert torch.equal(ids[:, 0], tokens)
    assert torch.equal(ids[:, 1:].long(), order[:, :4])
    assert torch.equal(values, expected.gather(-1, ids.long()))
    ids, values, ranks = ops.top_logprobs(logits, tokens, 0, False)
    assert ids.shape == (6, 1)
    assert torch.equal(values[:, 0], logits[torch.arange(6), tokens.long()])
