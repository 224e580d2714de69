"""The parameters of a request for the engine's KV connector, as clients and proxies send them: bounded JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from frame.quoting import quoted

#: Objects and lists that lie in one another, the outermost among them.
MAX_DEPTH = 3
#: Objects and lists, names in all of them, and plain values in all of them: block ids of a million tokens.
MAX_PARTS, MAX_NAMES, MAX_VALUES = 4096, 64, 65_536
#: Names that all connectors between engines know.
_TRUTHS = "do_remote_prefill", "do_remote_decode"
_MAX_NAME, _MAX_TEXT, _MAX_FLOAT = 256, 4096, 1e38


def _checked(value: Any) -> dict[str, Any]:
    """Returns `value`, unchanged; raises `ValueError` with what is wrong with it."""
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {quoted(value)}")
    num_parts = num_names = num_values = 0
    for inner in _parts(value, 1):
        names, values = (inner, inner.values()) if isinstance(inner, dict) else ((), inner)
        plain = [one for one in values if not isinstance(one, dict | list)]
        num_parts, num_names, num_values = num_parts + 1, num_names + len(names), num_values + len(plain)
        if num_names > MAX_NAMES:
            raise ValueError(f"must have at most {MAX_NAMES} names in all")
        if num_parts > MAX_PARTS or num_values > MAX_VALUES:
            raise ValueError(f"must have at most {MAX_VALUES} values in at most {MAX_PARTS} objects and lists")
        for one in plain:
            _check_plain(one)
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"names must be texts, got {type(name).__name__}")
            if len(name) > _MAX_NAME:
                raise ValueError(f"a name must have at most {_MAX_NAME} characters, got {len(name)}")
    for name in _TRUTHS:
        if not isinstance(value.get(name), bool | None):
            raise ValueError(f"{name} must be true or false, got {quoted(value[name])}")
    if value.get("do_remote_prefill") and value.get("do_remote_decode"):
        raise ValueError("do_remote_prefill and do_remote_decode cannot both be true: one engine does not do both")
    return value


def _parts(value: dict[str, Any] | list[Any], depth: int) -> Iterator[dict[str, Any] | list[Any]]:
    """`value` and the objects and lists in it; each is checked by the caller before what lies in it comes."""
    if depth > MAX_DEPTH:
        raise ValueError(f"objects and lists must lie at most {MAX_DEPTH} deep in one another")
    yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _parts(inner, depth + 1)


def _check_plain(value: Any) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError("a number is out of range")
    elif isinstance(value, float):
        if not math.isfinite(value) or abs(value) > _MAX_FLOAT:
            raise ValueError("a number is out of range")
    elif not isinstance(value, str):
        raise ValueError(f"values must be JSON, got {type(value).__name__}")
    elif len(value) > _MAX_TEXT:
        raise ValueError(f"a text must have at most {_MAX_TEXT} characters, got {len(value)}")


#: A field of a request body. Which other names mean something is the connector's business.
TransferParams = Annotated[
    dict[str, Any], PlainValidator(_checked), WithJsonSchema({"type": "object", "maxProperties": MAX_NAMES})
]
