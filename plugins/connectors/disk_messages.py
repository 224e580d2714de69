"""What the halves of the disk connector share: its options, its messages, and the name of a set of blocks.

Knows no file and no tensor.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.wire import encode


class DiskOptions(BaseModel):
    """Settings of the disk connector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path = Field(description="Where blocks are kept; made when missing. Engines on one folder share blocks.")
    max_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes that the folder may hold; the blocks unused for longest go first; default: no limit.",
    )
    fsync: bool = Field(False, description="Wait until each block has reached the disk.")

    @field_validator("folder")
    @classmethod
    def _make_absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One block of `owner`'s prompt: its hash, and its block id in each KV group (0: that group needs none)."""

    owner: str
    key: bytes
    blocks: list[int]


class DiskStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the worker side does in a step, and `entered`: the requests whose blocks are sound from here on.

    `known_breaks[rank]` says how many broken steps of a worker the scheduler side knew of when it wrote this.
    """

    blocks_name: str
    loads: list[Move] = []
    saves: list[Move] = []
    entered: list[str] = []
    known_breaks: dict[int, int] = {}


def blocks_name(layout: KVLayout, config: Any) -> str:
    """The folder name of all blocks that engines with this layout may exchange: 32 hexadecimal digits."""
    facts = [
        layout.numerics,
        layout.block_size,
        [[group.spec, list(group.layers)] for group in layout.groups],
        config.executor.tensor_parallel_size,
        config.executor.pipeline_parallel_size,
    ]
    return hashlib.sha256(encode(facts)).hexdigest()[:32]
