"""The options of our own attention, in a module that needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TritonOptions(BaseModel):
    """Settings of our own attention."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hopper_prefill: Literal["measured", "all", "off"] = Field(
        default="measured",
        description="Prompts on Hopper by a kernel of their own: for the layers for which a GPU has shown it right and "
        "faster (heads of up to 128), for all that it can serve, or never.",
    )
    persistent_prefill: bool = Field(
        default=False,
        description="One program of that kernel for each multiprocessor instead of one for each 128 queries and head.",
    )
