"""Outputs obey their grammars, however they are scheduled, and nobody else's output changes."""

from __future__ import annotations

import json
import math
import re

import pytest
from jsonschema import validate

from frame import LLM, SamplingParams, StructuredOutputsParams
from frame.interfaces import EngineRequest

pytestmark = pytest.mark.product

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
LARK = 'start: item ("," item)~0..3\nitem: /[a-f]{1,3}/ "=" NUMBER\nNUMBER: /[0-9]{1,2}/'
GBNF = 'root ::= "set " [a-c] " to " ("on" | "off") digit{2}\ndigit ::= [0-9]'
TAG = json.dumps({
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": SCHEMA},
               "end": "</call>"},
})  # fmt: skip


def is_object(text):
    value = json.loads(text)
    validate(value, SCHEMA)
    return True


CASES = {
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, is_object),
    "json text": ({"json": json.dumps(SCHEMA), "whitespace_pattern": " {0,2}"}, is_object),
    "regex": ({"regex": r"\d{3}-[a-z]{2,4}"}, re.compile(r"\d{3}-[a-z]{2,4}").fullmatch),
    "anchored": ({"regex": r"^(ab|cd)+x$|^y$"}, re.compile(r"(ab|cd)+x|y").fullmatch),
    "choice": ({"choice": ["yes", "no", 'it is "so"', "größer"]}, {"yes", "no", 'it is "so"', "größer"}.__contains__),
    "lark": ({"grammar": LARK}, re.compile(r"[a-f]{1,3}=\d{1,2}(,[a-f]{1,3}=\d{1,2}){0,3}").fullmatch),
    "gbnf": ({"grammar": GBNF}, re.compile(r"set [abc] to (on|off)\d\d").fullmatch),
    "tag": ({"structural_tag": TAG}, lambda text: is_object(re.fullmatch("<call>(.*)</call>", text, re.DOTALL)[1])),
}


def constrained(constraint, **params):
    given = {"max_tokens": 400, "temperature": 0.0, **params}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), **given)


def texts(outputs):
    return [completion.text for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("case", CASES)
def test_outputs_obey(llm, case, temperature):
    constraint, obeys = CASES[case]
    outputs = llm.generate(["a", "The sea"], constrained(constraint, temperature=temperature, seed=5), use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop", output.outputs[0].error
        assert obeys(output.outputs[0].text), output.outputs[0].text


def test_json_objects(llm):
    params = constrained({"json_object": True, "disable_any_whitespace": True}, temperature=1.0, max_tokens=500)
    outputs = llm.generate(["a"] * 8, params, use_tqdm=False)
    ended = [
        text for output, text in zip(outputs, texts(outputs), strict=True) if output.outputs[0].finish_reason == "stop"
    ]
    assert len(ended) >= 2
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_a_finished_grammar_ends_the_output(llm):
    """Whatever else says to go on: nothing could follow."""
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"ignore_eos": True, "min_tokens": 20}):
        (output,) = llm.generate(["a"], constrained({"choice": ["yes"]}, **more), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", "stop")
        assert output.outputs[0].stop_reason is None


def test_an_open_end_heeds_min_tokens_and_max_tokens(llm):
    (output,) = llm.generate(["a"], constrained({"regex": "[ab]+"}, min_tokens=30, max_tokens=40), use_tqdm=False)
    assert 30 <= len(output.outputs[0].token_ids) <= 40
    assert set(output.outputs[0].text) <= {"a", "b"}
    (output,) = llm.generate(["a"], constrained({"regex": "a{50}"}, max_tokens=7), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a" * 7, "length")


def test_stop_strings_and_stop_ids_end_it_too(llm):
    (output,) = llm.generate(["a"], constrained({"regex": "ab;cd"}, stop=[";"]), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", ";")
    semicolon = llm.get_tokenizer().encode(";")[0]
    (output,) = llm.generate(["a"], constrained({"regex": "ab;cd"}, stop_token_ids=[semicolon]), use_tqdm=False)
    assert output.outputs[0].stop_reason == semicolon


def test_several_outputs_of_a_prompt(llm):
    outputs = llm.generate(["a"], constrained(CASES["regex"][0], n=8, temperature=2.0, seed=1), use_tqdm=False)
    assert len(set(texts(outputs))) > 1
    assert all(CASES["regex"][1](text) for text in texts(outputs))


def test_raw_logprobs_are_those_of_the_model(llm):
    free = llm.generate(["a"], SamplingParams(max_tokens=1, temperature=0.0, logprobs=3), use_tqdm=False)[0].outputs[0]
    bound = llm.generate(["a"], constrained({"choice": ["yes"]}, logprobs=3), use_tqdm=False)[0].outputs[0]
    best = sorted(free.logprobs[0], key=lambda token: -free.logprobs[0][token].logprob)[:3]
    assert set(best) <= set(bound.logprobs[0])
    for token in best:
        assert bound.logprobs[0][token].logprob == pytest.approx(free.logprobs[0][token].logprob, abs=1e-4)
    assert -math.inf < bound.cumulative_logprob < 0


def test_a_request_whose_fields_exclude_each_other_fails_alone(llm):
    letters = [llm.get_tokenizer().encode(letter)[0] for letter in "xz"]
    wrong = constrained({"choice": ["yes"]}, allowed_token_ids=letters)
    good = constrained({"choice": ["yes"]})
    free = SamplingParams(max_tokens=3, temperature=0.0)
    outputs = llm.generate(["a", "a", "a"], [wrong, good, free], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "no token is left: grammar, allowed_token_ids" in outputs[0].outputs[0].error
    assert outputs[1].outputs[0].text == "yes"
    assert outputs[2].outputs[0].finish_reason == "length"


def test_bad_words_hold_inside_a_grammar(llm):
    (output,) = llm.generate(["a"], constrained({"choice": ["yes", "no"]}, bad_words=["y"]), use_tqdm=False)
    assert output.outputs[0].text == "no"


def test_the_grammar_may_begin_later(llm):
    """The seam for reasoning: free until the ids that end it, then by the grammar."""
    tokenizer = llm.get_tokenizer()
    params = constrained({"choice": ["yes"], "start_after": tokenizer.encode("\n")}, temperature=1.0, seed=3)
    params.max_tokens, params.logit_bias = 300, {tokenizer.encode("\n")[0]: 3.0, 2: -100.0}
    output = llm.generate(["a"], params, use_tqdm=False)[0].outputs[0]
    reasoning, newline, answer = output.text.partition("\n")
    assert (newline, answer) == ("\n", "yes")
    assert reasoning


def test_neighbours_are_not_touched(llm):
    free = SamplingParams(max_tokens=20, temperature=1.0, seed=9, logprobs=1)
    alone = llm.generate(["b"], free, use_tqdm=False)[0].outputs[0]
    mixed = llm.generate(["a", "b"], [constrained(CASES["json"][0]), free], use_tqdm=False)[1].outputs[0]
    assert mixed.token_ids == alone.token_ids


PROMPTS = ["The sea is " * 6, "b", "c" * 40, "d", "e" * 25, "f"]


def run(folder, **settings):
    llm = LLM(str(folder), **{"num_threads": 1, "kv_cache_memory_bytes": 1 << 25, "max_model_len": 512, **settings})
    params = [constrained(CASES[case][0], temperature=0.7, seed=number) for number, case in enumerate(CASES)][:6]
    params[5] = SamplingParams(max_tokens=90, ignore_eos=True, temperature=1.0, seed=11)
    try:
        for one in params:  # compiled before, all of them start together
            llm.generate(["x"], SamplingParams(max_tokens=1, structured_outputs=one.structured_outputs), use_tqdm=False)
        found = texts(llm.generate(PROMPTS, params, use_tqdm=False))
        return found, llm.llm_engine.stats()
    finally:
        llm.close()


@pytest.fixture(scope="module")
def expected(folder):
    found, _ = run(folder)
    for text, (_, obeys) in zip(found[:5], CASES.values(), strict=False):
        assert obeys(text), text
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"async_scheduling": False}, marks=pytest.mark.matrix),
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 4}, marks=pytest.mark.matrix),
        {"num_gpu_blocks_override": 12, "enable_prefix_caching": False},
        pytest.param({"executor": "process"}, marks=pytest.mark.matrix),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_scheduling_changes_nothing(folder, expected, settings):
    found, stats = run(folder, **settings)
    assert found == expected
    if "num_gpu_blocks_override" in settings:
        assert stats.preemptions


def test_a_replayed_request_goes_on_where_it_was(llm):
    """The matcher is rebuilt from the ids that were emitted before."""
    ids = llm.get_tokenizer().encode("12")
    (whole,) = llm.generate(["a"], constrained({"regex": "12[0-9]{2}-x"}), use_tqdm=False)
    front, core = llm.llm_engine.front, llm.llm_engine.core
    (request,) = front.submit("replayed", "a", constrained({"regex": "12[0-9]{2}-x"}))
    assert isinstance(request, EngineRequest)
    request.output_ids = ids
    core.add(request)
    tokens = list(ids)
    while core.has_unfinished():
        for output in core.step():
            tokens += output.token_ids
    front.abort(["replayed"])
    assert tokens == list(whole.outputs[0].token_ids)


@pytest.mark.parametrize("fault", ["advance", "fill_masks", "error"])
def test_a_fault_of_the_backend_costs_one_request(llm, monkeypatch, fault):
    from frame.plugins.grammars.guidance import GuidanceBackend, GuidanceMatcher

    def broken(*arguments):
        raise RuntimeError("no masks today")

    if fault == "advance":
        monkeypatch.setattr(GuidanceMatcher, "advance", lambda self, token_id: False)
    elif fault == "fill_masks":
        monkeypatch.setattr(GuidanceBackend, "fill_masks", broken)
    else:
        monkeypatch.setattr(GuidanceMatcher, "error", "the lexer has too many states")
    messages = {"advance": "does not continue the output", "fill_masks": "internal error", "error": "too many states"}
    free = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(["a", "b"], [constrained({"choice": ["fault"]}), free], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert messages[fault] in outputs[0].outputs[0].error
    assert outputs[1].outputs[0].finish_reason == "length"
    monkeypatch.undo()
    (output,) = llm.generate(["a"], constrained({"choice": ["fault"]}), use_tqdm=False)
    assert output.outputs[0].text == "fault"


def test_processed_logprobs_are_those_of_the_allowed(folder):
    llm = LLM(str(folder), num_threads=1, kv_cache_memory_bytes=1 << 24, max_model_len=128,
              logprobs_mode="processed_logprobs")  # fmt: skip
    try:
        (output,) = llm.generate(["a"], constrained({"choice": ["y"]}, logprobs=2), use_tqdm=False)
    finally:
        llm.close()
    (first,) = output.outputs[0].logprobs
    assert first[output.outputs[0].token_ids[0]].logprob == pytest.approx(0.0)
    assert sorted(entry.logprob for entry in first.values())[0] == -math.inf
