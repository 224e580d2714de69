"""The options of the process executor, in a module that needs no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ProcessOptions(BaseModel):
    """Settings of the process executor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_timeout_seconds: float = Field(
        300.0,
        gt=0,
        description="Seconds without an answer to a step after which the workers count as hanging and are replaced; at "
        "most four fifths of --hang-seconds, so that the one that hangs is named.",
    )
