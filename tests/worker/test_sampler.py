"""The sampler by slot: each parameter, log-probabilities, and that nothing of a former request stays in a slot."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from frame.interfaces import SamplingParams, TokenMasks, encode
from tests.worker.sampling import EOS, VOCAB, add, draw, make_sampler, new_request, sample, some_logits

pytestmark = pytest.mark.product

GREEDY = {"temperature": 0.0}


def greedy_after(logits, *, prompt=(1, 2, 3), output=(), **params):
    """The greedy token of one row with these parameters."""
    sampler = make_sampler()
    add(sampler, new_request(0, prompt, output, **GREEDY, **params))
    return draw(sampler, logits, [0], [len(prompt) + len(output)])[0]


def ranked(*token_ids):
    """Logits [1, V] whose best tokens are these, best first, one apart; all are positive."""
    logits = torch.full((1, VOCAB), 1.0)
    for place, token in enumerate(token_ids):
        logits[0, token] = 10.0 - place
    return logits


def test_greedy_is_the_argmax_of_raw_logits():
    sampler = make_sampler()
    add(sampler, *(new_request(slot, **GREEDY) for slot in range(4)))
    logits = some_logits(4)
    arrays, logprobs = sample(sampler, logits, range(4), [3] * 4)
    assert arrays["token_ids"].tolist() == logits.argmax(-1).tolist()
    assert np.isfinite(arrays["drawn"]).all()
    assert not logprobs


def test_a_greedy_row_in_a_random_batch_is_the_argmax():
    sampler = make_sampler()
    add(sampler, new_request(0), new_request(1, **GREEDY), new_request(2, top_k=3))
    logits = some_logits(3)
    for length in range(3, 40):
        assert draw(sampler, logits, [0, 1, 2], [length] * 3)[1] == logits[1].argmax()


def test_seed_and_position_decide_and_nothing_else_does():
    logits = some_logits(1).expand(3, -1)
    one, other = make_sampler(), make_sampler()
    add(one, new_request(0, seed=5), new_request(1, seed=6), new_request(2, seed=5, top_p=0.9))
    add(other, new_request(6, seed=6), new_request(4, seed=5), new_request(1, temperature=0.3))
    a = [draw(one, logits, [0, 1, 2], [length] * 3) for length in range(60)]
    b = [draw(other, logits, [1, 4, 6], [length] * 3) for length in range(60)]
    assert [row[:2] for row in a] == [[row[1], row[2]] for row in b]
    assert [row[0] for row in a] != [row[1] for row in a]
    assert a[::-1] == [draw(one, logits, [0, 1, 2], [length] * 3) for length in range(59, -1, -1)]


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_any_64_bit_seed_is_taken(seed):
    sampler = make_sampler()
    add(sampler, new_request(0, seed=seed))
    assert 0 <= draw(sampler, some_logits(1), [0], [3])[0] < VOCAB


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 2}, {5, 6}), ({"top_p": 0.6}, {5}), ({"min_p": 0.3}, {5, 6}), ({"temperature": 0.01}, {5})],
)
def test_filters_keep_the_best(filters, kept):
    sampler = make_sampler()
    add(sampler, new_request(0, **filters))
    drawn = {draw(sampler, ranked(5, 6, 7), [0], [length])[0] for length in range(300)}
    assert drawn == kept


def test_top_k_beyond_the_vocabulary_is_off():
    sampler = make_sampler()
    add(sampler, new_request(0, top_k=VOCAB + 5), new_request(1, top_k=-1))
    first, second = draw(sampler, some_logits(1).expand(2, -1), [0, 1], [4, 4])
    assert first == second


def test_repetition_penalty_counts_prompt_and_output():
    assert greedy_after(ranked(1, 5, 6), prompt=(1,), output=(5,), repetition_penalty=2.0) == 6
    assert greedy_after(ranked(1, 5, 6), prompt=(2,), repetition_penalty=2.0) == 1


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_count_the_output_only(penalty):
    assert greedy_after(ranked(5, 6), prompt=(5,), **{penalty: 2.0}) == 5
    assert greedy_after(ranked(5, 6), output=(5,), **{penalty: 2.0}) == 6


def test_frequency_grows_with_the_count_and_presence_does_not():
    logits = ranked(5, 8)
    assert greedy_after(logits, output=(5, 5), frequency_penalty=0.4) == 5
    assert greedy_after(logits, output=(5, 5), frequency_penalty=0.6) == 8
    assert greedy_after(logits, output=(5, 5), presence_penalty=0.6) == 5


def test_drawn_tokens_are_counted_on_the_device():
    sampler = make_sampler()
    add(sampler, new_request(0, frequency_penalty=2.0, **GREEDY), new_request(1, **GREEDY))
    logits = ranked(5, 6, 7).expand(2, -1)
    rows = [draw(sampler, logits, [0, 1], [3 + step] * 2) for step in range(4)]
    assert [row[0] for row in rows] == [5, 6, 5, 7]
    assert [row[1] for row in rows] == [5] * 4


def test_logit_bias_moves_a_token():
    assert greedy_after(ranked(5, 6), logit_bias={6: 1.5}) == 6
    assert greedy_after(ranked(5, 6), logit_bias={5: -100.0, 0: 0.5}) == 6


def test_allowed_ids_restrict_the_vocabulary():
    assert greedy_after(ranked(5, 6), allowed_token_ids=[0, 30, 30]) == 0
    assert greedy_after(ranked(5, 6), allowed_token_ids=[0, 6], logit_bias={0: 2.0}) == 6


def test_min_tokens_blocks_eos_and_stop_ids_until_reached():
    sampler = make_sampler()
    add(sampler, new_request(0, min_tokens=2, stop_token_ids=[8], **GREEDY))
    logits = ranked(EOS, 8, 4)
    assert [draw(sampler, logits, [0], [length])[0] for length in (3, 4, 5, 6)] == [4, 4, EOS, EOS]
    assert greedy_after(logits, output=(4, 4), min_tokens=2) == EOS


def test_a_single_token_bad_word_never_appears():
    assert greedy_after(ranked(5, 6), bad_words_token_ids=[[5]]) == 6


def test_a_longer_bad_word_bans_its_last_token_only_after_the_rest():
    sampler = make_sampler()
    add(sampler, new_request(0, prompt=(4, 5), bad_words_token_ids=[[4, 5, 6], [7]], **GREEDY))
    script = [(4, 9), (5, 9), (6, 9), (4, 9), (6, 9), (7, 9)]
    drawn = [draw(sampler, ranked(*best), [0], [2 + step])[0] for step, best in enumerate(script)]
    assert drawn == [4, 5, 9, 4, 6, 9]


def test_a_bad_word_may_not_start_in_the_prompt():
    assert greedy_after(ranked(6, 9), prompt=(4, 5), bad_words_token_ids=[[4, 5, 6]]) == 6
    assert greedy_after(ranked(6, 9), output=(4, 5), bad_words_token_ids=[[4, 5, 6]]) == 9


def test_wider_bad_words_join_running_ones():
    sampler = make_sampler()
    add(sampler, new_request(0, output=(4,), bad_words_token_ids=[[4, 6]], **GREEDY))
    add(sampler, new_request(1, output=(1, 2, 3), bad_words_token_ids=[[1, 2, 3, 6]], **GREEDY))
    assert draw(sampler, ranked(6, 9).expand(2, -1), [0, 1], [4, 6]) == [9, 9]
    assert draw(sampler, ranked(6, 9).expand(2, -1), [0, 1], [5, 7]) == [6, 6]


def test_grammar_masks_reach_the_listed_slots():
    sampler = make_sampler()
    add(sampler, new_request(2, **GREEDY), new_request(5, **GREEDY))
    words = np.zeros((2, 2), np.int32)
    words[0, 0] = 1 << 6
    masks = TokenMasks(slots=np.array([5, 7], np.int32), words=words).packed()
    arrays, _ = sample(sampler, ranked(5, 6).expand(2, -1), [2, 5], [3, 3], masks)
    assert arrays["token_ids"].tolist() == [5, 6]


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words_token_ids", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(name):
    values = {
        "logit_bias": {VOCAB: 1.0},
        "allowed_token_ids": [1, VOCAB],
        "bad_words_token_ids": [[1, VOCAB]],
        "stop_token_ids": [VOCAB],
    }
    with pytest.raises(ValueError, match=f"token id {VOCAB} is outside the vocabulary of {VOCAB}"):
        make_sampler().add(new_request(0, min_tokens=1, **{name: values[name]}))


@pytest.mark.parametrize("params", [GREEDY, {}, {"top_k": 3}, {"top_p": 0.4}, {"frequency_penalty": 1.0}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(params, bad):
    logits = some_logits(3)
    expected = make_sampler()
    add(expected, *(new_request(slot, **params) for slot in range(3)))
    alone = draw(expected, logits, [0, 1, 2], [3] * 3)
    sampler = make_sampler()
    add(sampler, *(new_request(slot, **params) for slot in range(3)))
    logits[1] = bad
    arrays, _ = sample(sampler, logits, [0, 1, 2], [3] * 3)
    assert np.isfinite(arrays["drawn"]).tolist() == [True, False, True]
    assert arrays["token_ids"][[0, 2]].tolist() == [alone[0], alone[2]]
    assert 0 <= arrays["token_ids"][1] < VOCAB


def test_a_row_with_nothing_left_to_draw_fails():
    sampler = make_sampler()
    add(sampler, new_request(0, allowed_token_ids=[5], bad_words_token_ids=[[5]]))
    assert not np.isfinite(sample(sampler, some_logits(1), [0], [3])[0]["drawn"][0])


def test_logprobs_of_rows_that_ask_for_different_numbers():
    sampler = make_sampler()
    wanted = [None, 0, 3, -1, 35]
    add(sampler, *(new_request(slot, logprobs=k) for slot, k in enumerate(wanted)))
    logits = some_logits(5)
    expected = logits.log_softmax(-1)
    arrays, rows = sample(sampler, logits, range(5), [3] * 5)
    assert sorted(rows) == [1, 2, 3, 4]
    for row, k in ((1, 0), (2, 3), (3, VOCAB), (4, 35)):
        found, token = rows[row], arrays["token_ids"][row]
        assert found.token_ids.shape == found.logprobs.shape == (1, k + 1)
        assert found.token_ids[0, 0] == token
        np.testing.assert_array_equal(found.logprobs[0], expected[row, found.token_ids[0].astype(np.int64)].numpy())
        np.testing.assert_array_equal(found.logprobs[0, 1:], expected[row].sort(descending=True).values[:k].numpy())
        assert found.ranks[0] == (expected[row] > expected[row, int(token)]).sum() + 1


@pytest.mark.parametrize("params", [{"temperature": 0.5, "top_k": 4}, {"temperature": 0.0}], ids=str)
def test_logprobs_modes(params):
    logits = some_logits(1)
    biased = logits.clone()
    biased[0, 3] += 2.0
    processed = biased
    if params["temperature"]:
        processed = biased / 0.5
        processed = processed.masked_fill(processed < processed.topk(4).values[0, -1], -math.inf)
    expected = {
        "raw_logits": logits,
        "raw_logprobs": logits.log_softmax(-1),
        "processed_logits": processed,
        "processed_logprobs": processed.log_softmax(-1),
    }
    for mode, values in expected.items():
        sampler = make_sampler(logprobs_mode=mode)
        add(sampler, new_request(0, logprobs=-1, logit_bias={3: 2.0}, **params))
        _, rows = sample(sampler, logits, [0], [3])
        np.testing.assert_allclose(rows[0].logprobs[0], values[0, rows[0].token_ids[0].astype(np.int64)].numpy())


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "top_k": st.integers(0, 5),
        "top_p": st.sampled_from([0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, -1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "logprobs": st.sampled_from([None, 0, 2, -1]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-3.0, 3.0]), max_size=2),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=9),
        "bad_words_token_ids": st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3),
        "logits_processors": st.just([lambda output_ids, logits: logits.roll(len(output_ids))]),
    },
)
REQUESTS = st.tuples(PARAMS, st.lists(st.integers(0, 5), max_size=4), st.integers(0, 99))


@given(st.lists(st.tuples(st.integers(0, 2), REQUESTS, st.booleans()), max_size=6), REQUESTS, st.integers(0, 2))
@settings(deadline=None, max_examples=40)
def test_a_reused_slot_is_as_good_as_new(former, last, slot):
    used = make_sampler(max_slots=3)
    for step, (taken, (params, output, seed), leaves) in enumerate(former):
        add(used, new_request(taken, output=output, seed=seed, **params))
        draw(used, some_logits(1, seed=step), [taken], [3 + len(output)])
        if leaves:
            used.remove(taken)
    params, output, seed = last
    fresh = make_sampler(max_slots=3)
    runs = []
    for sampler in (used, fresh):
        sampler.remove(slot)
        add(sampler, new_request(slot, output=output, seed=seed, **params))
        steps = []
        for step in range(3):
            arrays, rows = sample(sampler, some_logits(1, seed=50 + step), [slot], [3 + len(output) + step])
            sampler.deliver(np.array([slot], np.int32), arrays["token_ids"])
            steps.append((arrays["token_ids"].tolist(), {row: encode(found) for row, found in rows.items()}))
        runs.append(steps)
    assert runs[0] == runs[1]


@given(REQUESTS, st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_a_resumed_request_goes_on_as_if_it_had_never_left(request_, after):
    params, output, seed = request_
    logits = [some_logits(1, seed=step) for step in range(8)]

    def run(start, tokens, sampler, count):
        for step in range(start, start + count):
            token = draw(sampler, logits[step], [0], [3 + len(tokens)])[0]
            sampler.deliver(np.zeros(1, np.int32), np.array([token], np.int32))
            tokens.append(token)

    whole = make_sampler()
    add(whole, new_request(0, output=output, seed=seed, **params))
    expected = list(output)
    run(0, expected, whole, 8)
    broken = make_sampler()
    add(broken, new_request(0, output=output, seed=seed, **params))
    tokens = list(output)
    run(0, tokens, broken, after)
    broken.remove(0)
    add(broken, new_request(0, output=tokens, seed=seed, **params))
    run(after, tokens, broken, 8 - after)
    assert tokens == expected


def test_a_steady_greedy_batch_builds_nothing():
    sampler = make_sampler()
    add(sampler, new_request(0, **GREEDY), new_request(1, **GREEDY))
    slots = np.array([0, 1], np.int32)
    first = sampler._slots.batch(slots)
    assert sampler._slots.batch(slots) is first
    sampler.remove(1)
    assert sampler._slots.batch(slots) is not first


def test_params_of_every_field_have_a_test_here_or_at_the_front():
    """A new field must be thought of: by the sampler (above), or by what ends and renders a request (the front)."""
    sampler = {
        "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
        "stop_token_ids", "min_tokens", "logprobs", "prompt_logprobs", "logits_processors", "logit_bias",
        "allowed_token_ids", "bad_words", "bad_words_token_ids", "extra_args",
    }  # fmt: skip
    elsewhere = {
        "n", "stop", "include_stop_str_in_output", "ignore_eos", "max_tokens", "flat_logprobs", "detokenize",
        "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "output_kind",
        "structured_outputs", "skip_clone", "deterministic", "kept_special_token_ids",
    }  # fmt: skip
    assert set(SamplingParams.__struct_fields__) == sampler | elsewhere


def test_logits_of_sixteen_bits_reach_the_host():
    sampler = make_sampler()
    add(sampler, new_request(0, **GREEDY), new_request(1, temperature=0.7))
    arrays, _ = sample(sampler, some_logits(2).bfloat16(), [0, 1], [3, 3])
    assert arrays["drawn"].dtype == np.float32
