"""The two requests that one becomes when a server computes its prompt and another one answers it.

The fields are vLLM's: `kv_transfer_params` asks the first server to keep the prompt's KV, its answer says in a field of
that name where the KV is, and that goes on to the second server as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .policy import RouteRequest

PARAMS = "kv_transfer_params"
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


def decode_body(request: RouteRequest, answer: bytes) -> bytes:
    """The body for the server that answers: the client's bytes, before which stands where the KV is.

    The client's bytes alone where `answer`, the first server's, does not say that.
    """
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return request.body
    params = found.get(PARAMS) if isinstance(found, dict) else None
    if not isinstance(params, dict):
        return request.body
    start = request.body.index(b"{") + 1
    comma = b"," if request.content else b""
    return b'{"%b":%b%b%b' % (PARAMS.encode(), msgspec.json.encode(params), comma, request.body[start:])
