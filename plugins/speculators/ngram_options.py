"""The options of prompt lookup, in a module that needs no torch."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class NgramOptions(BaseModel):
    """Settings of the n-gram speculator."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_lookup_max: int = Field(ge=1, le=32, description="How many of the newest tokens to look up, at most.")
    prompt_lookup_min: int = Field(1, ge=1, description="How many of them must match, at least.")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self
