"""The options of the policy `prefix`."""

from __future__ import annotations

from pydantic import Field

from .text_prefix_options import TextPrefixOptions


class PrefixOptions(TextPrefixOptions):
    """As those of `text-prefix`, and how tokens are found out, and how many blocks are remembered."""

    min_body_bytes: int = Field(
        1024, ge=0, description="Requests with smaller bodies are not tokenised before they are routed."
    )
    tokenize_seconds: float = Field(
        0.25, gt=0, le=60, description="Longest wait for a server's /tokenize; later than that, texts decide."
    )
    max_blocks: int = Field(
        1_000_000, ge=1024, le=1 << 28, description="Most blocks of all servers together, some 200 bytes each."
    )
