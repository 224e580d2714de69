"""The bytes that each token id stands for, read from a tokenizer's decoder.

Works for decoders that only join tokens: byte-level BPE, and SentencePiece-like ones with byte fallback.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from frame.interfaces import Pieces

_WORD_START = "▁"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: printable Latin-1 is itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _read_byte_level() -> Callable[[str], bytes]:
    alphabet = _byte_alphabet()

    def read(token: str) -> bytes:
        if all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode()

    return read


def _read_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes((int(token[3:5], 16),))
        except ValueError:
            pass
    return _read_words(token)


def _read_words(token: str) -> bytes:
    return token.replace(_WORD_START, " ").encode()


def _joins_with_fallback(steps: list[dict[str, Any]]) -> bool:
    """Whether the decoder only replaces word marks, reads byte tokens, joins, and perhaps strips the first space."""
    for step in steps:
        kind = step["type"]
        if kind == "Replace":
            if step.get("pattern") != {"String": _WORD_START} or step.get("content") != " ":
                return False
        elif kind == "Strip":
            if step.get("content") != " " or step.get("stop", 0) != 0:
                return False
        elif kind not in ("ByteFallback", "Fuse"):
            return False
    return any(step["type"] == "ByteFallback" for step in steps) and any(step["type"] == "Replace" for step in steps)


def _reader(decoder: dict[str, Any]) -> Callable[[str], bytes] | None:
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return _read_byte_level()
    if kind == "Metaspace" and decoder.get("replacement") == _WORD_START:
        return _read_words
    if kind == "Sequence":
        steps = decoder.get("decoders", [])
        if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
            return _read_byte_level()
        if _joins_with_fallback(steps):
            return _read_fallback
    return None


def read_pieces(backend: Any) -> Pieces | None:
    """The bytes of each token of a `tokenizers.Tokenizer`; None when its decoder does more than join tokens."""
    if backend is None or backend.decoder is None:
        return None
    decode = _reader(json.loads(backend.decoder.__getstate__()))
    if decode is None:
        return None

    added: dict[int, bytes] = {
        token_id: token.content.encode() for token_id, token in backend.get_added_tokens_decoder().items()
    }

    def read(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id]
        token = backend.id_to_token(token_id)
        return b"" if token is None else decode(token)

    return Pieces(read)
