"""The options of the exchanges, in a module that needs no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PeerMemoryOptions(BaseModel):
    """Settings of the exchange over peer memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int = Field(
        512,
        ge=8,
        description="Tokens of a step, evenly over the data ranks, up to which they move through peer memory, which "
        "has room for so many; larger steps are gathered.",
    )
