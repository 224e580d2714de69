"""The options of our own attention, in a module that needs no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TritonOptions(BaseModel):
    """Settings of our own attention."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hopper_prefill: bool = Field(
        default=True, description="Prompts on Hopper by a kernel of their own, for the layers that it can serve."
    )
    persistent_prefill: bool | None = Field(
        default=None,
        description="One program of that kernel for each multiprocessor instead of one for each 128 queries and head; "
        "by default for heads of up to 128, for which most prompts take a few percent less time.",
    )
    few_decodes: bool | None = Field(
        default=None,
        description="Steps of up to eight rows of one token each by a kernel that reads cached keys while the kernels "
        "before it still run, for the layers that it can serve. By default on Hopper, for as many rows, KV heads and "
        "tokens as it was measured to be no slower for.",
    )
