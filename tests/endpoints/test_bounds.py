"""Every field of every request body has a bound, and the bound holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from frame.core.interfaces.schema import BoundedModel, Limits
from frame.plugins.batches.endpoint import BatchBody
from frame.plugins.endpoints.admin import PauseBody, ResetBody, SleepBody, WakeBody
from frame.plugins.endpoints.anthropic_bodies import ConversationBody, MessagesBody
from frame.plugins.endpoints.generate import GenerateBody
from frame.plugins.endpoints.invocations import InvocationBody
from frame.plugins.endpoints.openai_bodies import ChatBody, CompletionBody, Message
from frame.plugins.endpoints.pooling_bodies import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from frame.plugins.endpoints.responses_bodies import InputBody, ResponsesBody
from frame.plugins.endpoints.tokens import DetokenizeBody, TokenizeBody
from frame.plugins.endpoints.weights import WeightsBody
from frame.plugins.endpoints.workers import RpcBody

pytestmark = pytest.mark.product

BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, ConversationBody, MessagesBody, InputBody,
          ResponsesBody, EmbeddingBody, ClassifyBody, PoolingBody, ScoreBody, RerankBody, BatchBody, InvocationBody,
          GenerateBody,
          PauseBody, ResetBody, SleepBody, WakeBody, WeightsBody, RpcBody)  # fmt: skip
#: Free-form JSON by nature: bounded by the body's bytes and depth, handed to the chat template only; or a constraint,
#: bounded by max_grammar_length and the time and memory that a grammar may take.
FREE = {"tools", "tool_choice", "documents", "tool_calls", "content", "chat_template_kwargs", "Message"}
FREE |= {"schema", "json", "structural_tag", "structures", "format"}
FREE |= {
    "system",
    "cache_control",
    "context_management",
    "diagnostics",
    "input_schema",
    "input_examples",
    "prediction",
    "input",
    "tool_choice",
}
LIMITS = Limits(
    max_model_len=128, vocab_size=1000, max_logprobs=5, max_n=4, max_prompts=3, max_messages=6, max_stop=2,
    max_stop_length=10,
)  # fmt: skip


def unbounded(schema: dict[str, Any], name: str, definitions: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        target = schema["$ref"].rpartition("/")[2]
        yield from unbounded(definitions[target], target, definitions)
        return
    for branch in schema.get("anyOf", ()):
        yield from unbounded(branch, name, definitions)
    kind = schema.get("type")
    if kind == "string" and not {"maxLength", "enum", "const", "pattern"} & set(schema):
        yield f"{name}: text"
    if kind in ("integer", "number") and not (
        {"minimum", "exclusiveMinimum"} & set(schema) and {"maximum", "exclusiveMaximum"} & set(schema)
    ):
        yield f"{name}: {kind}"
    if kind == "array":
        if "maxItems" not in schema:
            yield f"{name}: array"
        yield from unbounded(schema["items"], name, definitions)
    for field, value in schema.get("properties", {}).items():
        yield from unbounded(value, field, definitions)
    if kind == "object" and "properties" not in schema and name not in FREE and "maxProperties" not in schema:
        yield f"{name}: object"
    if kind is None and "anyOf" not in schema and name not in FREE:
        yield f"{name}: anything"


@pytest.mark.parametrize("body", BODIES)
def test_no_field_is_unbounded(body: type[BoundedModel]) -> None:
    schema = body.model_json_schema()
    assert list(unbounded(schema, body.__name__, schema.get("$defs", {}))) == []


def test_the_walk_finds_what_is_unbounded() -> None:
    class Loose(BoundedModel):
        text: str
        number: int
        words: list[str]
        table: dict[str, int]

    schema = Loose.model_json_schema()
    assert len(list(unbounded(schema, "Loose", {}))) == 5


def check(body: type[BoundedModel], limits: Limits = LIMITS, **fields: Any) -> BoundedModel:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if body is ChatBody else {"prompt": "x"}
    return body.model_validate({**base, **fields}, context={"limits": limits})


NUMBERS = [
    ("n", 1, 4, 0, 5), ("temperature", 0, 1e4, -0.01, 1.1e4), ("top_p", 1e-30, 1, 0.0, 1.001),
    ("top_k", -1, 1000, -2, 2**31), ("min_p", 0, 1, -0.1, 1.1), ("presence_penalty", -2, 2, -2.1, 2.1),
    ("frequency_penalty", -2, 2, -2.1, 2.1), ("repetition_penalty", 1e-4, 1e4, 1e-40, 1.1e4),
    ("seed", -(2**63), 2**64 - 1, -(2**63) - 1, 2**64), ("max_tokens", 1, 2**31 - 1, -1, 2**31),
    ("min_tokens", 0, 2**31 - 1, -1, 2**31), ("prompt_logprobs", 0, 5, -1, 6), ("priority", -5, 5, -(2**31), 2**31),
    ("truncate_prompt_tokens", -1, 100, -2, 2**31),
]  # fmt: skip


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
@pytest.mark.parametrize(("name", "low", "high", "below", "above"), NUMBERS, ids=[row[0] for row in NUMBERS])
def test_numbers(body: type[BoundedModel], name: str, low: Any, high: Any, below: Any, above: Any) -> None:
    check(body, **{name: low})
    check(body, **{name: high})
    for wrong in (below, above, float("nan"), float("inf"), -float("inf"), "1", [], {}, True, 10**400):
        with pytest.raises(ValidationError):
            check(body, **{name: wrong})


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("stop", ["a", "b"], ["a", "b", "c"]),
        ("stop", "x" * 10, "x" * 11),
        ("bad_words", ["x" * 10], ["x" * 11]),
        ("stop_token_ids", [0, 5], [0] * 4097),
        ("logit_bias", {"5": 100}, {"5": 100.1}),
        ("logit_bias", {"5": 1}, {"-5": 1}),
        ("extra_args", {"a": 1, "b": [True, "x", None]}, {"a": {"b": 1}}),
        ("user", "x" * 256, "x" * 257),
        ("request_id", "abc-1", "a\nb"),
        ("cache_salt", "x" * 256, "x" * 257),
        ("allowed_token_ids", [1], [-1]),
    ],
)
def test_lists_and_texts(body: type[BoundedModel], name: str, inside: Any, outside: Any) -> None:
    check(body, **{name: inside})
    with pytest.raises(ValidationError):
        check(body, **{name: outside})


@pytest.mark.parametrize("prompt", [[-1], [[5], [-1]], [[5], [1.5]], [[None]], [[True]], [2**31]], ids=str)
def test_wrong_token_ids_are_named(prompt: Any) -> None:
    with pytest.raises(ValidationError, match="must hold token ids from 0 to 2147483647, got"):
        check(CompletionBody, prompt=prompt)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (CompletionBody, {"prompt": [-1] * 1_000_000}),
        (CompletionBody, {"allowed_token_ids": [-1] * 1_000_000}),
        (DetokenizeBody, {"tokens": [-1] * 1_000_000}),
        (CompletionBody, {"logit_bias": {f"-{number}": 1 for number in range(300_000)}}),
        (CompletionBody, {"stop_token_ids": [-1] * 4000}),
        (ChatBody, {"metadata": {str(number): 1 for number in range(300_000)}}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 1000, "tool_calls": [1] * 500}] * 6}),
        (ChatBody, {"messages": [{"role": 1}] * 6}),
        (TokenizeBody, {"messages": [{"role": 1}] * 60_000}),
    ],
)
def test_many_wrong_values_are_few_errors(body: type[BoundedModel], fields: dict[str, Any]) -> None:
    base = {"prompt": "x"} if body is CompletionBody else {}
    base = {"messages": [{"role": "user"}]} if body is ChatBody else base
    start = time.thread_time()
    with pytest.raises(ValidationError) as caught:
        body.model_validate({**base, **fields}, context={"limits": LIMITS})
    assert caught.value.error_count() < 5
    assert time.thread_time() - start < 1.0


def test_counts_of_prompts_and_messages() -> None:
    check(CompletionBody, prompt=["x"] * 3)
    check(ChatBody, messages=[{"role": "user", "content": "x"}] * 6)
    with pytest.raises(ValidationError, match="at most 3 prompts"):
        check(CompletionBody, prompt=["x"] * 4)
    with pytest.raises(ValidationError, match=r"at most 6 messages \(--max-messages\), got 7"):
        check(ChatBody, messages=[{"role": "user", "content": "x"}] * 7)


def test_outputs_of_all_prompts_together() -> None:
    limits = replace(LIMITS, max_outputs=8)
    check(CompletionBody, limits, prompt=["x"] * 2, n=4)
    check(CompletionBody, limits, prompt=[[1]] * 3, n=2)
    for fields in ({"n": 3}, {"best_of": 3}, {"n": 2, "best_of": 4}):
        with pytest.raises(ValidationError, match=r"3 prompts with \d outputs each are .* have 8 \(--max-outputs\)"):
            check(CompletionBody, limits, prompt=["x"] * 3, **fields)


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_unknown_fields_are_refused_when_strict_only(body: type[BoundedModel]) -> None:
    check(body, tempreture=1)
    with pytest.raises(ValidationError, match=r"unknown field 'tempreture' \(did you mean temperature\?\)"):
        check(body, replace(LIMITS, strict_fields=True), tempreture=1)
    for fields in ({"structured_outputs": None}, {"vllm_xargs": {"a": 1}}):
        check(body, replace(LIMITS, strict_fields=True), **fields)


def test_messages_keep_what_templates_may_read() -> None:
    message = Message.model_validate({"role": "tool", "content": "4", "tool_call_id": "c1", "reasoning": "hm"})
    assert message.model_dump(exclude_unset=True) == {
        "role": "tool", "content": "4", "tool_call_id": "c1", "reasoning": "hm",
    }  # fmt: skip


def test_logprobs_may_cover_the_vocabulary_when_allowed() -> None:
    whole = replace(LIMITS, max_logprobs=-1)
    check(ChatBody, whole, logprobs=True, top_logprobs=-1)
    check(CompletionBody, whole, prompt_logprobs=-1, logprobs=999)
    with pytest.raises(ValidationError, match="at most 5"):
        check(CompletionBody, logprobs=6)
