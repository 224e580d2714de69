"""What a request says to the KV connector, where vLLM's users put it: in the `extra_args` of its parameters."""

from __future__ import annotations

from copy import copy
from typing import Any

from frame.core.front.prompts import InvalidRequest

#: The name in `SamplingParams.extra_args`, as in HTTP bodies.
NAME = "kv_transfer_params"


def take_transfer(params: Any, given: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any] | None]:
    """Returns (params without what they say to the KV connector, that); `given` is what the caller says besides.

    Raises `InvalidRequest` where it is no dictionary, where both say something, or where it asks for both ends.
    """
    extra = getattr(params, "extra_args", None)
    if not isinstance(extra, dict) or NAME not in extra:
        return params, given
    found = extra[NAME]
    params = copy(params)
    params.extra_args = {name: value for name, value in extra.items() if name != NAME} or None
    if found is None:
        return params, given
    where = f"extra_args[{NAME!r}]"
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidRequest(f"{where} must be a dictionary with texts as names, got {type(found).__name__}", where)
    if given is not None:
        raise InvalidRequest(f"both {where} and kv_transfer were given: leave one out", where)
    if found.get("do_remote_prefill") and found.get("do_remote_decode"):
        raise InvalidRequest(f"{where}: do_remote_prefill and do_remote_decode cannot both be true", where)
    return params, found
