"""Every field that the official clients can send is either taken or refused with a reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import ValidationError

from frame.core.interfaces.schema import BoundedModel, Limits
from frame.plugins.endpoints.anthropic_bodies import ConversationBody, MessagesBody
from frame.plugins.endpoints.openai_bodies import ChatBody, CompletionBody
from frame.plugins.endpoints.responses_bodies import InputBody, ResponsesBody

LIMITS = Limits(
    max_model_len=128, vocab_size=1000, max_logprobs=5, max_n=4, max_prompts=3, max_messages=6, max_stop=2,
    max_stop_length=10, strict_fields=True,
)  # fmt: skip
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
    ],
)
def test_what_cannot_be_had_is_refused(body: type[BoundedModel], fields: dict[str, Any]) -> None:
    base = next(base for kind, _, base in CASES if kind is body)
    with pytest.raises(ValidationError):
        body.model_validate({**base, **fields}, context={"limits": LIMITS})
