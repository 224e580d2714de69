"""A row of the table of model families, and the tiny configuration that most rows begin with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: Tokens in the vocabularies of tiny models.
NUM_TOKENS = 512


@dataclass(frozen=True)
class Family:
    """One row of the table: the architecture, transformers' model type, and what its tiny configuration sets.

    `embedding_scale` shrinks random embeddings where the model would otherwise only repeat its newest token,
    `router_scale` enlarges what routers are given where they would find all experts about as good. The long tests of a
    row whose traits other rows show are run by `make matrix` alone, if `in_matrix`. `states` says that some layers keep
    a running state of each request, "all" that no layer keeps tokens.
    """

    architecture: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    embedding_scale: float = 1.0
    in_matrix: bool = False
    router_scale: float = 1.0
    states: Literal["none", "some", "all"] = "none"


TINY: Mapping[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(**parameters: Any) -> dict[str, Any]:
    """The tiny configuration with other positions."""
    return {**TINY, "rope_parameters": {"rope_theta": 10000.0, **parameters}}
