"""Request bodies of the pooling routes, as the clients of OpenAI, vLLM, Jina and Cohere send them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator, model_validator

from frame import PoolingParams
from frame.interfaces import MAX_INT, BoundedModel, Name, Text, TokenIds, at_most
from frame.quoting import quoted

from .openai_bodies import check_prompts
from .pooling_answers import to_base64

_MAX_LIST = 1 << 16  # a coarse bound; the setting max_inputs is usually far lower
_MANY = Field(min_length=1, max_length=_MAX_LIST, fail_fast=True)

Prompts = Text | TokenIds | Annotated[list[Text], _MANY] | Annotated[list[TokenIds], _MANY]
Texts = Annotated[list[Text], _MANY]
Task = Literal["encode", "embed", "classify", "reward", "token_embed", "token_classify"]


class PoolingFields(BoundedModel):
    """What every pooling route has."""

    model: Name | None = None
    user: Name | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT)
    priority: int = Field(0, ge=-MAX_INT, le=MAX_INT)
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _refuse_nothing(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be at least 1, or -1 for as many as the model takes, got 0")
        return value

    def params(self, **fields: Any) -> PoolingParams:
        """The pooling parameters; `fields` come from the route."""
        return PoolingParams(truncate_prompt_tokens=self.truncate_prompt_tokens, **fields)


class InputBody(PoolingFields):
    """`input` is text, token ids, or a list of either."""

    not_served: ClassVar[Mapping[str, str]] = {
        "messages": "inputs are text or token ids",
        "chat_template": "inputs are text or token ids",
        "mm_processor_kwargs": "inputs are text or token ids",
        "media_io_kwargs": "inputs are text or token ids",
    }

    input: Prompts

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, value: Any, info: ValidationInfo) -> Any:
        return check_prompts(value, info, "max_inputs")

    def prompts(self) -> list[dict[str, Any]]:
        """The inputs, one or many, as prompts."""
        single = isinstance(self.input, str) or isinstance(self.input[0], int)
        given: list[Any] = [self.input] if single else list(self.input)
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one, **salt} for one in given]


class EmbeddingBody(InputBody):
    """`POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    endianness: Literal["native", "little", "big"] = "little"
    dimensions: int | None = Field(None, ge=1, le=MAX_INT)
    normalize: bool | None = None

    @model_validator(mode="after")
    def _bytes_have_a_layout(self) -> EmbeddingBody:
        if self.encoding_format == "float" and self.embed_dtype != "float32":
            raise ValueError(f"embed_dtype needs encoding_format='base64', got {quoted(self.embed_dtype)}")
        return self

    def encoded(self, values: np.ndarray) -> Any:
        """A row or rows in the form that is asked for."""
        if self.encoding_format == "float":
            return values.tolist()
        return to_base64(values, self.embed_dtype, big=(self.endianness.replace("native", sys.byteorder)) == "big")


class ActivationFields(BoundedModel):
    """Whether scores go through the model's activation; `activation` and `softmax` are older names for it."""

    use_activation: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, data: Any) -> Any:
        old = [name for name in ("activation", "softmax") if isinstance(data, dict) and name in data]
        if not old:
            return data
        values = {name: value for name, value in data.items() if name not in old}
        given = [data[name] for name in (*old, "use_activation") if data.get(name) is not None]
        if any(value is not given[0] for value in given):
            raise ValueError(f"use_activation and {' and '.join(old)} say different things; send use_activation")
        return {**values, "use_activation": given[0]} if given else values


class ClassifyBody(ActivationFields, InputBody):
    """`POST /classify`."""


class PoolingBody(ActivationFields, EmbeddingBody):
    """`POST /pooling`."""

    task: Task | None = None


class ScoreBody(ActivationFields, PoolingFields):
    """`POST /score`: one text with one or many, or many pairwise. `data_1`, `data_2` and `queries`, `documents` too."""

    text_1: Text | Texts
    text_2: Text | Texts

    @model_validator(mode="before")
    @classmethod
    def _read_other_names(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = dict(data)
            for name, others in (("text_1", ("data_1", "queries")), ("text_2", ("data_2", "documents"))):
                for other in others:
                    if other in data and name not in data:
                        data[name] = data.pop(other)
        return data

    @field_validator("text_1", "text_2")
    @classmethod
    def _bound_texts(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        at_most(1 if isinstance(value, str) else len(value), "max_inputs", info, "texts")
        return value

    @model_validator(mode="after")
    def _check_numbers(self) -> ScoreBody:
        first, second = self._lists()
        if len(first) not in (1, len(second)):
            raise ValueError(f"text_1 must be one text or as many as text_2, got {len(first)} and {len(second)}")
        return self

    def _lists(self) -> tuple[list[str], list[str]]:
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        return first, [self.text_2] if isinstance(self.text_2, str) else self.text_2

    def pairs(self) -> tuple[list[str], list[str]]:
        """Both sides, equally long."""
        first, second = self._lists()
        return first * (len(second) // len(first)), second


class Document(BoundedModel):
    """A document in Jina's and Cohere's longer form."""

    text: Text


class RerankBody(PoolingFields):
    """`POST /rerank`, `/v1/rerank` (Jina) and `/v2/rerank` (Cohere)."""

    not_served: ClassVar[Mapping[str, str]] = {
        "max_tokens_per_doc": "give truncate_prompt_tokens",
        "rank_fields": "documents are text",
    }

    query: Text
    documents: Annotated[list[Text | Document], _MANY]
    top_n: int | None = Field(None, ge=1, le=MAX_INT)
    return_documents: bool | None = None

    @field_validator("documents", mode="before")
    @classmethod
    def _bound_documents(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list):
            at_most(len(value), "max_inputs", info, "documents")
        return value

    def texts(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]
