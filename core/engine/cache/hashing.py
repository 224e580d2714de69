"""Chained hashes of blocks of token ids: equal in every process and on every machine.

Every hash is over canonical msgpack of plain values. The root covers what decides a block's content besides the
tokens; block i covers the hash before it and its own ids as little-endian int32, and the embeddings that stand in the
place of some. Knows no pool and no request.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import msgspec

from ...interfaces.engine import PromptEmbeds
from ...interfaces.kv import KVLayout

#: Enters every root, so that a change of the encoding can never match blocks kept by an older version.
ENCODING = "frame-block-2"


def _digest(algorithm: str) -> Callable[[bytes], bytes]:
    if algorithm == "sha256":
        sha256 = hashlib.sha256
        return lambda data: sha256(data).digest()
    if algorithm == "xxhash":
        try:
            xxhash: Any = import_module("xxhash")
        except ImportError as error:
            raise RuntimeError(
                "prefix_caching_hash_algo 'xxhash' needs the package xxhash: pip install xxhash, or choose sha256"
            ) from error
        digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
        return digest
    raise ValueError(f"no block hash '{algorithm}'; there are: sha256, xxhash")


class BlockHasher:
    """Hashes of token blocks for one layout, whose `model` and `numerics` are part of every hash."""

    def __init__(self, algorithm: str, layout: KVLayout) -> None:
        self._digest = _digest(algorithm)
        self._layout = layout
        self._encode = msgspec.msgpack.Encoder().encode

    def root(
        self,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        media_keys: Sequence[str] = (),
        deterministic: bool = False,
        encoder: bytes = b"",
    ) -> bytes:
        """The parent of a request's first block.

        A block of a deterministic request stands for equal bits, one of another request for equal tokens of a model.
        Behind an encoder each of them depends on all that the encoder read.
        """
        content = self._layout.numerics if deterministic else self._layout.model
        facts = [ENCODING, content, self._layout.block_size, salt, adapter, list(media_keys), bool(deterministic)]
        facts += [encoder] if encoder else []
        return self._digest(self._encode(facts))

    def extend(
        self,
        hashes: list[bytes],
        root: bytes,
        token_ids: array[int],
        num_blocks: int,
        embeds: PromptEmbeds | None = None,
    ) -> None:
        """Appends the hashes of `token_ids`' blocks len(hashes) .. num_blocks - 1 to `hashes`."""
        size, digest, encode = self._layout.block_size, self._digest, self._encode
        parent, first = hashes[-1] if hashes else root, len(hashes)
        ids = token_ids[first * size : num_blocks * size]
        if sys.byteorder == "big":
            ids.byteswap()
        data, length = ids.tobytes(), size * ids.itemsize
        parts = [data[start : start + length] for start in range(0, (num_blocks - first) * length, length)]
        if not parts:
            return
        if embeds is None:
            parent = digest(encode([parent, parts[0]]))  # a root may have another length than a hash
            hashes.append(parent)
            before, between = self._around(len(parent), length)
            for part in parts[1:]:
                parent = digest(before + parent + between + part)
                hashes.append(parent)
            return
        for index, part in enumerate(parts, first):
            rows = embeds.between(index * size, (index + 1) * size).rows
            parent = digest(encode([parent, part, rows.tobytes()] if len(rows) else [parent, part]))
            hashes.append(parent)

    def _around(self, parent: int, ids: int) -> tuple[bytes, bytes]:
        """What msgpack has before a parent and before the ids of a block, of so many bytes: only lengths decide it."""
        whole, end = self._encode([bytes(parent), bytes(ids)]), self._encode(bytes(ids))
        return whole[: -len(end) - parent], end[:-ids]
