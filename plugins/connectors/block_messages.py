"""What the halves of a connector that moves blocks of prompts share: its message, and the name of a set of blocks.

Knows no file, no socket and no tensor.
"""

from __future__ import annotations

import hashlib

import msgspec

from frame.interfaces import KVLayout, Mesh, encode


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One block of `owner`'s prompt: its hash, and its block id in each KV group (0: that group needs none)."""

    owner: str
    key: bytes
    blocks: list[int]


class BlockStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the worker side does in a step, and `entered`: the requests whose blocks are sound from here on.

    `known_breaks[rank]` says how many broken steps of a worker the scheduler side knew of when it wrote this.
    """

    blocks_name: str
    loads: list[Move] = []
    saves: list[Move] = []
    entered: list[str] = []
    known_breaks: dict[int, int] = {}


def blocks_name(layout: KVLayout, mesh: Mesh) -> str:
    """The name of all blocks that engines with this layout may exchange: 32 hexadecimal digits."""
    facts = [
        layout.numerics,
        layout.block_size,
        [[group.spec, list(group.layers)] for group in layout.groups],
        mesh.tensor,
        mesh.pipeline,
    ]
    return hashlib.sha256(encode(facts)).hexdigest()[:32]
