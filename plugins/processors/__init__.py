"""Logits processors. Everything of `SamplingParams` is done by the sampler itself, so frame ships none."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_logits_processors() -> list[Provider]:
    """The logits processors that ship with frame."""
    return []
