"""The options of the balancer that weighs moves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class StickyOptions(BaseModel):
    """What waiting for the fullest rank costs, and what copying weights costs, both as time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    microseconds_per_token: float = Field(
        0.2, gt=0, description="Time in which a rank computes one token in one expert of one layer."
    )
    copy_gigabytes_per_second: float = Field(
        5.0,
        gt=0,
        description="Weights that each rank receives in a second while it computes; ranks copy at the same time.",
    )
    windows: float = Field(
        1.0, gt=0, description="How many times the measured tokens a placement is expected to serve before it changes."
    )
