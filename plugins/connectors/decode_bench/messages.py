"""The options of the decode-bench connector, and the message between its sides. Knows no tensor."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel, ConfigDict, Field


class DecodeBenchOptions(BaseModel):
    """Settings of the decode-bench connector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fill_mean: float = Field(
        0.015, ge=-1000, le=1000, allow_inf_nan=False, description="Mean of the numbers that blocks are filled with."
    )
    fill_std: float = Field(
        0.0, ge=0, le=1000, allow_inf_nan=False, description="Their standard deviation; 0: all are equal."
    )


class FillStep(msgspec.Struct):
    """The block ids that are to be filled in this step, for each KV group."""

    blocks: list[list[int]]
