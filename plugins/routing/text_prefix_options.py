"""The options of the policy `text-prefix`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TextPrefixOptions(BaseModel):
    """How long prompts that were sent are remembered, and what a request under way weighs."""

    model_config = ConfigDict(extra="forbid")

    load_tokens: float = Field(
        256,
        ge=0,
        le=1 << 20,
        description="A request under way weighs as much as so many tokens of a prompt to compute.",
    )
    min_prefill_tokens: int = Field(
        1024, ge=0, description="A prompt of which a server lacks fewer tokens is not divided into prefill and decode."
    )
    server_tokens: int = Field(
        500_000, ge=1024, le=1 << 30, description="Tokens that a server's prefix cache is taken to hold."
    )
