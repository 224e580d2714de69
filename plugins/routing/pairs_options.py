"""The options of the policy `pairs`."""

from __future__ import annotations

from pydantic import BaseModel, Field


class PairsOptions(BaseModel):
    """Which requests are worth a transfer of KV."""

    min_body_bytes: int = Field(
        4096, ge=0, description="Requests with smaller bodies are computed where they are answered."
    )
