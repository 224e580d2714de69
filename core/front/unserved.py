"""vLLM's keywords that `LLMEngine` and `AsyncLLM` refuse, and what each sleep level keeps. Knows no engine."""

from __future__ import annotations

from typing import Any

from .prompts import InvalidRequest


def sleep_keeps(level: int) -> list[str]:
    """What `sleep` keeps on this level; raises `ValueError` for an unknown level."""
    if level not in (1, 2):
        raise ValueError(f"sleep level must be 1 or 2, got {level!r}")
    return ["weights"] if level == 1 else []


def refuse_unserved(**arguments: Any) -> None:
    """Raises `InvalidRequest` for a keyword of vLLM's that is set but not served."""
    for name, value in arguments.items():
        if name not in ("lora_request", "tokenization_kwargs", "trace_headers", "prompt_text", "data_parallel_rank",
                        "mm_processor_kwargs"):  # fmt: skip
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value:
            raise InvalidRequest(f"{name} is not served yet; leave it out", name)
