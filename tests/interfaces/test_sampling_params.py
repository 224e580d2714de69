import logging
import math

import pytest

from frame.core.interfaces.sampling import StructuredOutputsParams
from frame.interfaces import SamplingParams, decode, encode


def test_defaults_ask_for_nothing_special():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert params.stop == params.stop_token_ids == params.bad_words == []
    assert not params.greedy


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n must be an integer of at least 1, got 0"),
        ("n", 1.5, "n must be an integer"),
        ("presence_penalty", 2.1, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ("frequency_penalty", math.nan, "frequency_penalty must be a finite number, got nan"),
        ("repetition_penalty", 0.0, r"repetition_penalty must be in \[0.0001, 10000\], got 0"),
        ("repetition_penalty", 1e-40, "repetition_penalty must be in"),
        ("temperature", -0.1, "temperature must be in"),
        ("temperature", math.inf, "temperature must be a finite number, got inf"),
        ("temperature", True, "temperature must be a finite number"),
        ("top_p", 0, r"top_p must be in \[1e-30, 1\]"),
        ("top_p", 1e-320, "top_p must be in"),
        ("top_p", 1.01, "top_p must be in"),
        ("top_k", -2, "top_k must be an integer of at least 0 or -1, got -2"),
        ("min_p", 1.5, "min_p must be in"),
        ("temperature", 10**400, r"temperature must be in \[0, 10000\], got 10{79}…0{40} "),
        ("top_k", 2**31, "top_k must be at most 2147483647, got 2147483648"),
        ("n", 10**400, "n must be at most 2147483647, got 10{79}…0{40} "),
        ("seed", 2**64, "seed must be a 64-bit integer"),
        ("seed", 1.0, "seed must be a 64-bit integer"),
        ("max_tokens", 0, "max_tokens must be an integer of at least 1"),
        ("max_tokens", 10**400, "max_tokens must be at most 2147483647"),
        ("min_tokens", -1, "min_tokens must be an integer"),
        ("min_tokens", 17, "min_tokens must be at most max_tokens 16, got 17"),
        ("logprobs", -2, "logprobs must be an integer of at least 0 or -1"),
        ("prompt_logprobs", 0.5, "prompt_logprobs must be an integer"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens must be"),
        ("stop", [""], "stop must be a list of non-empty strings"),
        ("stop", [3], "stop must be a list of non-empty strings"),
        ("stop", 3, "stop must be a list, got 3"),
        ("stop_token_ids", [None], "stop_token_ids entry must be an integer of at least 0, got None"),
        ("stop_token_ids", 7, "stop_token_ids must be a list, got 7"),
        ("bad_words", [1], "bad_words must be a list of non-empty strings"),
        ("bad_words_token_ids", [[]], "bad_words_token_ids must hold no empty word"),
        ("bad_words_token_ids", [[-1]], "bad_words_token_ids entry must be an integer"),
        ("allowed_token_ids", [], "allowed_token_ids must name at least one token id"),
        ("allowed_token_ids", [-1], "allowed_token_ids entry must be"),
        ("logit_bias", {"x": 1}, r"logit_bias keys must be token ids, got \['x'\]"),
        ("logit_bias", [1], "logit_bias must map token ids to biases"),
        ("logit_bias", {3: math.inf}, r"logit_bias\[3\] must be a finite number"),
        ("logit_bias", {3: 101}, r"logit_bias\[3\] must be in \[-100, 100\]"),
        ("logit_bias", {-1: 1}, "logit_bias key must be an integer of at least 0"),
    ],
)
def test_values_out_of_range_are_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["seed", "min_tokens", "top_p"])
def test_numbers_that_python_cannot_write_out_are_refused_in_words(name):
    for value in (10**5000, -(10**5000)):
        with pytest.raises(ValueError, match=f"{name} must be .*, got a number of too many digits"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "hint"), [("temprature", r"\(did you mean temperature\?\)"), ("zzz", r"\(there are: n, presence_penalty")]
)
def test_an_unknown_field_is_refused_with_the_nearest_or_all_names(name, hint):
    with pytest.raises(ValueError, match=rf"SamplingParams has no field '{name}' {hint}"):
        SamplingParams(**{name: 1})


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="stop strings need detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_one_constraint_only():
    with pytest.raises(ValueError, match="takes one constraint, got 2: json, regex"):
        StructuredOutputsParams(json="{}", regex="a")


def test_what_means_the_same_is_made_the_same():
    params = SamplingParams(stop="a", bad_words="b", stop_token_ids=(1, 2), allowed_token_ids=(0,), logit_bias={"5": 1})
    assert (params.stop, params.bad_words, params.stop_token_ids) == (["a"], ["b"], [1, 2])
    assert (params.allowed_token_ids, params.logit_bias) == ([0], {5: 1})
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams.from_optional(temperature=None, top_k=5) == SamplingParams(top_k=5)


def test_tiny_temperatures_are_greedy_and_small_ones_are_raised(caplog):
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=1e-6).greedy
        assert "temperature" not in caplog.text
        assert SamplingParams(temperature=0.005).temperature == 0.01
    assert "temperature 0.005 is raised to 0.01" in caplog.text


def test_clones_are_independent_unless_told_not_to():
    params = SamplingParams(temperature=0.5)
    copy = params.clone()
    copy.temperature = 0.7
    assert params.temperature == 0.5
    shared = SamplingParams(skip_clone=True)
    assert shared.clone() is shared


def test_clones_share_no_list_and_are_put_in_order_without_being_checked():
    params = SamplingParams(stop="a", bad_words="b", stop_token_ids=[1], allowed_token_ids=[0], logit_bias={5: 1})
    params.seed, params.temperature = -1, 0.005
    copy = params.clone()
    assert (copy.seed, copy.temperature) == (None, 0.01)
    for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias"):
        assert getattr(copy, name) == getattr(params, name)
        assert getattr(copy, name) is not getattr(params, name)
    params.top_p = 7.0
    with pytest.raises(ValueError, match="top_p"):
        params.clone().verify()


def test_every_plain_field_survives_the_wire():
    params = SamplingParams(
        n=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        temperature=0.3,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        seed=-5,
        stop=["x"],
        stop_token_ids=[3],
        max_tokens=None,
        min_tokens=2,
        logprobs=-1,
        prompt_logprobs=0,
        logit_bias={0: -1.5},
        allowed_token_ids=[0, 7],
        bad_words=["b"],
        bad_words_token_ids=[[1, 2]],
        extra_args={"target": 0},
        truncate_prompt_tokens=-1,
    )
    assert decode(encode(params), SamplingParams) == params
