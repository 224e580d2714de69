from __future__ import annotations

import msgspec
import numpy as np
import pytest

from frame.core.config.flat import from_flat
from frame.core.front.input_processor import InputProcessor, default_sampling_params, derive_seed
from frame.core.front.prompts import InvalidRequest, parse_prompt
from frame.interfaces import SamplingParams, StructuredOutputsParams
from frame.offline.prompts import as_prompts

from .engines import INFO
from .test_front import checkpoint


def make_admission(source, validators=(), config=None, **facts):
    """The admission of a model of 32 tokens; `facts` change its checkpoint."""
    info = msgspec.structs.replace(INFO, max_model_len=32)
    return InputProcessor(
        from_flat({"max_logprobs": 5, **(config or {})}), checkpoint(**facts), info, source, validators
    )


@pytest.fixture
def admit(source):
    def admit(prompt=(1, 2, 3), facts=None, **params):
        admission = make_admission(source, [refuse], **(facts or {}))
        return admission.admit("r", parse_prompt(prompt), SamplingParams(**params))

    return admit


def refuse(params):
    if params.extra_args:
        raise ValueError("extra_args['target'] must be an integer")


@pytest.mark.parametrize(
    ("prompt", "params", "message", "param"),
    [
        ("", {}, "the prompt is empty; give at least one token", "prompt"),
        ([], {}, "the prompt is empty; give at least one token", "prompt"),
        ([1] * 32, {}, "the prompt has 32 tokens, but the model takes 32 with at least one for the output", "prompt"),
        ("x" * 10_000_000, {}, "the prompt has 10000000 characters; with a model of 32 tokens at most", "prompt"),
        ([1, 400], {}, "prompt token 1 is 400, but ids go from 0 to 399", "prompt"),
        ([-1], {}, "prompt token 0 is -1, but ids go from 0 to 399", "prompt"),
        ([1, 2**70], {}, "prompt token ids must be", "prompt"),
        ([1, 2.5], {}, "flat list of 64-bit integers, got 2.5", "prompt"),
        ([True, 1], {}, "must be integers, got True at 0", "prompt"),
        ([1, 2, True], {}, "must be integers, got True at 2", "prompt"),
        ((1, 2, np.False_), {}, "must be integers, got np.False_ at 2", "prompt"),
        ([5, 2**63], {}, "64-bit integers, got 9223372036854775808 at 1", "prompt"),
        pytest.param(
            [1, 10**5000], {}, "64-bit integers, got a number of too many digits at 1", "prompt", id="too many digits"
        ),
        ([1, [2]], {}, r"64-bit integers, got \[2\] at 1", "prompt"),
        (np.array(5), {}, "flat array of integers, got int64 of 0 dimensions", "prompt"),
        (bytearray(b"ab"), {}, "token ids or a dict of either, got bytearray", "prompt"),
        ([1, "a"], {}, "flat list of 64-bit integers, got 'a'", "prompt"),
        ([[1], [2, 3]], {}, "prompt token ids must be a flat list", "prompt"),
        ({"prompt_embeds": [1.0]}, {}, "prompt_embeds must be a tensor, .* got float", "prompt_embeds"),
        ({"prompt_embeds": np.ones((2, 3), np.float32)}, {}, "not accepted; start the engine with", "prompt_embeds"),
        ({"promt": "a"}, {}, "no prompt field 'promt'; there are: prompt, prompt_token_ids, prompt_embeds", "prompt"),
        ({"cache_salt": "a"}, {}, "needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'", "prompt"),
        ({"prompt": "a", "cache_salt": ""}, {}, "'cache_salt' must be a non-empty string", "cache_salt"),
        (7, {}, "a prompt must be text, token ids or a dict of either, got int", "prompt"),
        ("a\ud800", {}, "lone surrogate", "prompt"),
        ([1], {"logprobs": 6}, r"logprobs must be at most 5 \(max_logprobs\), got 6", "logprobs"),
        (
            [1],
            {"prompt_logprobs": -1},
            "prompt_logprobs must be at most 5 .*, got -1",
            "prompt_logprobs",
        ),
        ([1], {"stop_token_ids": [400]}, "stop_token_ids holds 400, but token ids go from 0 to 399", "stop_token_ids"),
        ([1], {"allowed_token_ids": [4000]}, "allowed_token_ids holds 4000", "allowed_token_ids"),
        ([1], {"logit_bias": {500: 1.0}}, "logit_bias holds 500", "logit_bias"),
        ([1], {"bad_words_token_ids": [[3], [4, 400]]}, "bad_words_token_ids holds 400", "bad_words_token_ids"),
        ("x" * 10_000_000, {"truncate_prompt_tokens": 4}, "the prompt has 10000000 characters; with a model", "prompt"),
        ([1], {"n": 20000}, "n must be at most 16384, got 20000", "n"),
        ([1], {"truncate_prompt_tokens": 32}, "truncate_prompt_tokens must be below the model's 32", None),
        ([1], {"extra_args": {"target": "x"}}, r"extra_args\['target'\] must be an integer", None),
        (
            [1],
            {"structured_outputs": StructuredOutputsParams(regex="a" * 300000)},
            r"structured_outputs.regex has 3000\d\d characters, but at most 262144 are taken \(max_grammar_length\)",
            "structured_outputs",
        ),
        (
            [1],
            {"structured_outputs": StructuredOutputsParams(json={"const": {1j}})},
            "structured_outputs.json is not plain JSON",
            "structured_outputs",
        ),
        (
            [1],
            {"structured_outputs": StructuredOutputsParams(regex="a", start_after=[400])},
            "structured_outputs.start_after holds 400",
            "structured_outputs.start_after",
        ),
    ],
)
def test_bad_input_gets_one_sentence(admit, prompt, params, message, param):
    with pytest.raises(InvalidRequest, match=message) as caught:
        admit(prompt, **params)
    assert param is None or caught.value.param == param
    assert "\n" not in str(caught.value)


def test_fields_set_after_construction_are_checked(source):
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(InvalidRequest, match="top_p"):
        make_admission(source).admit("r", parse_prompt([1]), params)
    with pytest.raises(InvalidRequest, match="must be SamplingParams, got dict"):
        make_admission(source).admit("r", parse_prompt([1]), {})


def test_the_engine_keeps_nothing_that_the_caller_may_change(source):
    params, ids = SamplingParams(stop_token_ids=[7]), [1, 2]
    admitted = make_admission(source).admit("r", parse_prompt(ids), params)
    params.stop_token_ids.append(8)
    ids.append(3)
    assert admitted.requests[0].params.stop_token_ids == [7]
    assert admitted.prompt_ids == admitted.requests[0].prompt_ids.tolist() == [1, 2]


@pytest.mark.parametrize("ids", [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2], np.int32), [3, np.int64(1), 2], range(1, 4)])
def test_ids_of_every_kind_are_plain_afterwards(admit, ids):
    for keep in (None, 2):
        admitted = admit(ids, truncate_prompt_tokens=keep)
        assert (
            admitted.prompt_ids == admitted.requests[0].prompt_ids.tolist() == [int(one) for one in ids][-(keep or 3) :]
        )
        assert set(map(type, admitted.prompt_ids)) == {int}


def test_the_tokenizer_is_asked_for_its_end_once(source, monkeypatch):
    admission = make_admission(source)
    admission.admit("r", parse_prompt([1]), SamplingParams())
    monkeypatch.setattr(source.get(), "eos_token_id", None)
    assert admission.admit("r", parse_prompt([1]), SamplingParams()).requests[0].eos_token_ids


@pytest.mark.parametrize(
    ("length", "params", "cap", "expected"),
    [(3, {"max_tokens": None}, None, 29), (3, {}, None, 16), (20, {}, None, 12), (3, {"max_tokens": None}, 9, 9)],
)
def test_max_tokens_is_final(admit, length, params, cap, expected):
    facts = {"generation": {"max_new_tokens": cap}}
    assert admit([1] * length, facts, **params).requests[0].max_tokens == expected


@pytest.mark.parametrize(("keep", "expected"), [(2, [48, 49]), (-1, list(range(19, 50))), (None, None)])
def test_truncation_keeps_the_end(admit, keep, expected):
    ids = list(range(50))
    if expected is None:
        with pytest.raises(InvalidRequest, match="50 tokens"):
            admit(ids)
        return
    admitted = admit(ids, truncate_prompt_tokens=keep)
    assert admitted.prompt_ids == expected
    assert admitted.requests[0].prompt_ids.dtype == np.int32


def test_allowed_ids_are_kept_once(admit):
    assert admit(allowed_token_ids=[7, 3] * 500_000).requests[0].params.allowed_token_ids == [7, 3]


def test_seeds_repeat_with_the_configured_seed(source):
    def seeds(seed):
        admission = make_admission(source, config={"seed": seed})
        return [admission.admit("r", parse_prompt([1]), SamplingParams()).requests[0].seed for _ in range(3)]

    assert seeds(0) == seeds(0) != seeds(1)
    assert len(set(seeds(0))) == 3


def test_children_draw_differently_and_only_the_first_scores_the_prompt(admit):
    admitted = admit(n=3, seed=-5, prompt_logprobs=1)
    assert [request.request_id for request in admitted.requests] == ["0_r", "1_r", "2_r"]
    assert [request.seed for request in admitted.requests] == [derive_seed(2**64 - 5, i) for i in range(3)]
    assert [request.params.prompt_logprobs for request in admitted.requests] == [1, None, None]
    assert [request.params.n for request in admitted.requests] == [1, 1, 1]
    assert admit(seed=-5).requests[0].seed == 2**64 - 5


def test_derived_seeds_are_fixed():
    assert derive_seed(0, 0) == 1041621211125469266
    assert derive_seed(2**64 - 1, 3) == 5105297033963182606


def test_bad_words_in_every_spelling(admit, tokenizer):
    ids = admit(bad_words=["fox", " the"]).requests[0].params.bad_words_token_ids
    texts = [tokenizer.decode(spelling) for spelling in ids]
    assert {text.strip() for text in texts} == {"fox", "the"}
    assert "fox" in texts
    assert "the" in texts


def test_end_tokens_come_from_checkpoint_and_tokenizer(admit, tokenizer):
    assert admit(facts={"eos_token_ids": [9]}).requests[0].eos_token_ids == [9, tokenizer.eos_token_id]


def test_inputs_are_not_changed(admit):
    prompt = {"prompt_token_ids": [1, 2], "prompt": "x", "multi_modal_data": None}
    params = SamplingParams(n=2, bad_words=["fox"], stop="a")
    before = (dict(prompt), repr(params))
    admitted = admit(prompt)
    assert admitted.text == "x"
    assert (prompt, repr(params)) == before


def test_defaults_from_the_generation_config():
    params = default_sampling_params({"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "do_sample": True})
    assert (params.temperature, params.top_k, params.max_tokens, params.top_p) == (0.6, 20, 7, 1.0)
    with pytest.raises(ValueError, match=r"generation_config: top_p must be in"):
        default_sampling_params({"top_p": 3})


def test_one_prompt_or_many():
    assert as_prompts("a") == ["a"]
    assert as_prompts(["a", [1]]) == ["a", [1]]
    assert as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts({"prompt": "a"}) == [{"prompt": "a"}]
    assert as_prompts([]) == []
