"""The two requests that one becomes when a server computes its prompt and another one answers it.

The fields are vLLM's: `kv_transfer_params` asks the first server to keep the prompt's KV, its answer says in a field of
that name where the KV is, and that goes on to the second server as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from frame.core.interfaces.errors import RequestError

from .policy import RouteRequest

PARAMS = "kv_transfer_params"
_NAME = PARAMS.encode()
#: A letter or an underscore as an escape of JSON, which no program writes that has nothing to hide.
_HIDDEN = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")
#: Routes whose requests can be divided → the fields of theirs that bound the length of an answer, the first of which
#: is always set.
_LENGTHS: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
}
_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def check_params(request: RouteRequest) -> None:
    """Raises `RequestError` for a request that says itself where its KV is, at any depth, or that cannot be read."""
    if request.body and not request.is_json:
        raise RequestError(400, "the body is no JSON that a front which divides requests can read")
    # a name may be written with escapes
    if (_NAME in request.body or b"\\u" in request.body) and _names_params(request.content):
        raise _refused()


class ParamsScan:
    """Looks for the field in a file that passes by in pieces, whose lines may be requests."""

    def __init__(self) -> None:
        self._end = b""

    def __call__(self, piece: bytes) -> None:
        """Raises `RequestError` where a piece, behind what came before it, has the field's name or hides letters."""
        data = self._end + piece
        if _NAME in data or _HIDDEN.search(data):
            raise _refused()
        self._end = data[1 - len(_NAME) :]


def _refused() -> RequestError:
    return RequestError(
        400,
        f"{PARAMS} would have a server fetch KV from an address that a client names; this front names them itself "
        "(--allow-kv-transfer-params)",
        param=PARAMS,
    )


def _names_params(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get(PARAMS) is not None or any(map(_names_params, value.values()))
    return isinstance(value, list) and any(map(_names_params, value))


def divides(request: RouteRequest) -> bool:
    """Whether the prompt can be computed elsewhere: the route is one of those, and the client does not do so itself.

    Of several prompts an answer could say of one only where its KV is, and the KV of the others would be kept in vain.
    """
    content = request.content
    if request.path not in _LENGTHS or content is None or PARAMS in content:
        return False
    prompt = content.get("prompt")
    return not isinstance(prompt, list) or len(prompt) < 2 or isinstance(prompt[0], int)


def prefill_body(request: RouteRequest) -> bytes:
    """The body for the server that computes the prompt: the client's, but for one output of one token and no stream."""
    body: dict[str, Any] = dict(request.content or {})
    for name in ("stream_options", "min_tokens", "n", "best_of"):
        body.pop(name, None)
    first, *others = _LENGTHS[request.path]
    body |= {first: 1, **{name: 1 for name in others if name in body}, "stream": False, PARAMS: _ASKED}
    return msgspec.json.encode(body)


def decode_body(request: RouteRequest, answer: bytes) -> bytes | None:
    """The body for the server that answers: the client's bytes, before which stands where the KV is.

    None where `answer`, the first server's, does not say that.
    """
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    params = found.get(PARAMS) if isinstance(found, dict) else None
    if not isinstance(params, dict):
        return None
    start = request.body.index(b"{") + 1
    comma = b"," if request.content else b""
    return b'{"%b":%b%b%b' % (PARAMS.encode(), msgspec.json.encode(params), comma, request.body[start:])
