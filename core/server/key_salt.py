"""A cache salt for each API key, so that no key can learn from timing what another has sent.

Every prompt passes here on its way to the text side. Knows no route.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from ..front.prompts import ParsedPrompt, parse_prompt
from .ingress import OWNER, REQUEST

#: A prefix that makes these digests differ from all other digests of keys.
_PURPOSE = "frame cache salt"


def key_salt(owner: str, given: str | None) -> str:
    """The salt of a request of the key with the digest `owner` that asks for the salt `given`.

    Equal in all processes and after a restart, so that blocks on disk are found again; it says nothing about the key.
    """
    return hashlib.sha256(msgspec.msgpack.encode([_PURPOSE, owner, given])).hexdigest()


def salted(prompt: Any) -> ParsedPrompt:
    """The prompt with the salt of the key that the present HTTP request came with; raises `InvalidRequest`."""
    scope = REQUEST.get()
    parsed = parse_prompt(prompt)
    return msgspec.structs.replace(parsed, salt=key_salt("" if scope is None else scope.get(OWNER, ""), parsed.salt))
