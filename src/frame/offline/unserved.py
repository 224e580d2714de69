"""vLLM's keywords that `LLM`, `LLMEngine` and `AsyncLLM` refuse, and what each sleep level keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from frame.core.config.errors import near
from frame.core.front.prompts import InvalidRequest
from frame.quoting import quoted


def sleep_keeps(level: int) -> list[str]:
    """What `sleep` keeps on this level; raises `ValueError` for an unknown level."""
    if level not in (1, 2):
        raise ValueError(f"sleep level must be 1 or 2, got {quoted(level)}")
    return ["weights"] if level == 1 else []


#: vLLM's keywords that mean something only when they are set, and then are not served.
_UNSERVED = (
    "lora_request", "tokenization_kwargs", "trace_headers", "prompt_text", "data_parallel_rank", "mm_processor_kwargs",
)  # fmt: skip


def refuse_unserved(method: Callable[..., Any], **arguments: Any) -> None:
    """Raises `InvalidRequest` for a keyword of vLLM's that is set but not served, and for one that `method` lacks."""
    for name, value in arguments.items():
        if name not in _UNSERVED:
            variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            known = [each.name for each in inspect.signature(method).parameters.values() if each.kind not in variadic]
            hint = near(name, known) or f"; there are: {', '.join(known)}"
            raise InvalidRequest(f"{method.__name__} has no keyword {name!r}{hint}", name)
        if value:
            raise InvalidRequest(f"{name} is not served yet; leave it out", name)
