"""Every field that the official clients can send is either taken or refused with a reason."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import ValidationError

from frame.core.interfaces.schema import BoundedModel, Limits
from frame.core.server.errors import IgnoredFields
from frame.plugins.endpoints.anthropic_bodies import ConversationBody, MessagesBody
from frame.plugins.endpoints.openai_bodies import ChatBody, CompletionBody
from frame.plugins.endpoints.pooling_answers import to_base64
from frame.plugins.endpoints.pooling_bodies import ClassifyBody, EmbeddingBody, PoolingBody
from frame.plugins.endpoints.responses_bodies import InputBody, ResponsesBody

LIMITS = Limits(
    max_model_len=128, vocab_size=1000, max_logprobs=5, max_n=4, max_prompts=3, max_messages=6, max_stop=2,
    max_stop_length=10, strict_fields=True,
)  # fmt: skip
LOOSE = replace(LIMITS, strict_fields=False)
MESSAGES = [{"role": "user", "content": "x"}]
CASES: list[tuple[type[BoundedModel], Any, dict[str, Any]]] = [
    (ChatBody, chat_create_params.CompletionCreateParamsStreaming, {"messages": MESSAGES}),
    (CompletionBody, completion_create_params.CompletionCreateParamsStreaming, {"prompt": "x"}),
    (MessagesBody, message_create_params.MessageCreateParamsStreaming, {"messages": MESSAGES, "max_tokens": 5}),
    (ResponsesBody, response_create_params.ResponseCreateParamsStreaming, {"input": "x"}),
    (InputBody, input_token_count_params.InputTokenCountParams, {"input": "x"}),
    (ConversationBody, message_count_tokens_params.MessageCountTokensParams, {"messages": MESSAGES}),
]


def names(params: Any) -> Iterable[str]:
    return get_type_hints(params)


@pytest.mark.parametrize(("body", "params", "_"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_is_known(body: type[BoundedModel], params: Any, _: Any) -> None:
    aliases = {field.alias for field in body.model_fields.values() if field.alias}
    assert set(names(params)) - set(body.model_fields) - aliases - set(body.not_served) == set()


@pytest.mark.parametrize(("body", "params", "base"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_null_is_as_good_as_nothing(body: type[BoundedModel], params: Any, base: dict[str, Any]) -> None:
    nothing = dict.fromkeys(names(params))
    assert body.model_validate({**nothing, **base}, context={"limits": LIMITS}) == body.model_validate(base)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (ChatBody, {"function_call": "auto"}),
        (ChatBody, {"web_search_options": {"search_context_size": "low"}}),
        (ChatBody, {"modalities": ["text", "audio"]}),
        (CompletionBody, {"suffix": "x"}),
        (CompletionBody, {"best_of": 1, "n": 2}),
        (CompletionBody, {"best_of": 5}),
        (CompletionBody, {"best_of": 2, "stream": True}),
        (MessagesBody, {"container": "x"}),
        (ResponsesBody, {"conversation": "x"}),
        (ResponsesBody, {"previous_input_messages": [{"role": "user"}]}),
        (ResponsesBody, {"response_format": {"type": "json_object"}}),
        (ResponsesBody, {"max_tokens": 5}),
        (ChatBody, {"length_penalty": 0.5}),
        (ChatBody, {"thinking_token_budget": 0}),
        (ChatBody, {"regex": "a+"}),
        (EmbeddingBody, {"embed_dtype": "fp8_e4m3", "encoding_format": "base64"}),
        (EmbeddingBody, {"embed_dtype": "float16"}),
        (EmbeddingBody, {"endianness": "middle"}),
        (ClassifyBody, {"softmax": True, "use_activation": False}),
    ],
)
def test_what_cannot_be_had_is_refused(body: type[BoundedModel], fields: dict[str, Any]) -> None:
    base = next((base for kind, _, base in CASES if kind is body), {"input": "x"})
    body.model_validate(base, context={"limits": LIMITS})
    with pytest.raises(ValidationError) as caught:
        body.model_validate({**base, **fields}, context={"limits": LOOSE})
    assert "unknown field" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "fields", "name", "value"),
    [
        (ChatBody, {"length_penalty": 1.0}, "length_penalty", 1.0),
        (ChatBody, {"vllm_xargs": {"a": 1}}, "extra_args", {"a": 1}),
        (ResponsesBody, {"vllm_xargs": {"a": 1}}, "extra_args", {"a": 1}),
        (ClassifyBody, {"softmax": False}, "use_activation", False),
        (PoolingBody, {"activation": True, "softmax": True}, "use_activation", True),
    ],
)
def test_other_names_are_understood(body: type[BoundedModel], fields: dict[str, Any], name: str, value: Any) -> None:
    base = next((base for kind, _, base in CASES if kind is body), {"input": "x"})
    assert getattr(body.model_validate({**base, **fields}, context={"limits": LIMITS}), name) == value


def test_each_ignored_field_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    limits = replace(LOOSE, ignored=IgnoredFields())
    for number in range(200):
        for _ in range(2):
            ChatBody.model_validate({"messages": MESSAGES, f"made_up_{number}\n": 1}, context={"limits": limits})
    lines = [record.getMessage() for record in caplog.records if "made_up" in record.getMessage()]
    assert len(lines) == len(set(lines)) == 64
    assert "'made_up_0\\n', which is ignored" in lines[0]


def test_vectors_in_base64_have_the_asked_type_and_order() -> None:
    values = np.array([1.0, -2.5, 1 + 2**-8, 3e38], np.float32)
    assert np.frombuffer(base64.b64decode(to_base64(values, "float16")), "<f2").tolist()[:2] == [1.0, -2.5]
    for big in (False, True):
        got = np.frombuffer(base64.b64decode(to_base64(values, "bfloat16", big=big)), ">u2" if big else "<u2")
        wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).tolist()
        assert got.tolist() == wanted
    body = EmbeddingBody(input="x", encoding_format="base64", endianness="big")
    assert np.frombuffer(base64.b64decode(body.encoded(values)), ">f4").tolist() == values.tolist()


def test_an_embedding_request_may_have_more_inputs_than_a_completion_has_prompts() -> None:
    limits = replace(LIMITS, max_inputs=2048)
    EmbeddingBody.model_validate({"input": ["x"] * 2048}, context={"limits": limits})
    with pytest.raises(ValidationError, match=r"2048 inputs \(--max-inputs\), got 2049"):
        EmbeddingBody.model_validate({"input": ["x"] * 2049}, context={"limits": limits})
