"""What must be equal in two engines one of which sends blocks to the other. Knows no socket."""

from __future__ import annotations

import hashlib

import msgspec

from frame.interfaces import KVLayout, Mesh, encode

_VERSION = 4
_WORDS = {
    "version": "the version of the protocol",
    "model": "the model (a hash of config.json, weights and dtype)",
    "grain": "the block size",
    "groups": "what layers keep",
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "formats": "the format of blocks (attention backend or element type), or the connector",
}


class Facts(msgspec.Struct, frozen=True):
    """Those of a worker; compared before anything else is read. `formats` says how its blocks lie in memory."""

    version: int
    model: str
    grain: int
    groups: str
    tensor: int
    pipeline: int
    formats: str

    @classmethod
    def of(cls, layout: KVLayout, mesh: Mesh, formats: str) -> Facts:
        """Those of a worker whose blocks lie so."""
        groups = hashlib.sha256(encode(layout.groups)).hexdigest()
        return cls(_VERSION, layout.model, layout.grain, groups, mesh.tensor, mesh.pipeline, formats)

    def difference(self, other: Facts) -> str | None:
        """The first thing in which `other`, the caller's, differ, with both numbers; None where nothing does."""
        for name, words in _WORDS.items():
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return (
                    f"{words} ({theirs} at the calling engine, {ours} at the called one)"
                    if isinstance(ours, int)
                    else words
                )
        return None
