"""The options of the offload connector, and what its two sides tell each other. Knows no tensor."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from .block_messages import BlockStep, Move


class OffloadOptions(BaseModel):
    """Settings of the offload connector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: float = Field(
        4.0,
        gt=0,
        le=1 << 20,
        description="GiB of host memory for blocks, of all workers of an engine together; set by kv_offloading_size.",
    )
    policy: str = Field("lru", description="Tier policy plugin, which says which blocks go when others need room.")
    block_size: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Tokens of a block of the tier, a multiple of the cache's; 0: as many as there.",
    )

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return int(self.size * (1 << 30))


class OffloadStep(BlockStep, kw_only=True, omit_defaults=True):
    """`load_rows` and `save_rows` are the rows of host memory of `loads` and `saves`.

    `join`: blocks that are being saved get other content in this step or by its loads. `lookups` are tokens that were
    asked for and `hits` those found, since the message before; `used_bytes` of `size_bytes` hold blocks. `waiting` are
    the requests whose loads earlier messages asked for and no report has ended, by their numbers. States, which lie in
    rows of their own, are apart: `state_loads` in `state_load_rows`, and `states`, to be saved, in `state_rows`.
    """

    load_rows: list[int] = msgspec.field(default_factory=list)
    save_rows: list[int] = msgspec.field(default_factory=list)
    join: bool = False
    lookups: int = 0
    hits: int = 0
    used_bytes: int = 0
    size_bytes: int = 0
    waiting: dict[int, list[str]] = msgspec.field(default_factory=dict)
    state_loads: list[Move] = msgspec.field(default_factory=list)
    state_load_rows: list[int] = msgspec.field(default_factory=list)
    state_rows: list[int] = msgspec.field(default_factory=list)


class Hello(msgspec.Struct, frozen=True):
    """A worker's handshake: how many rows it has, and how many bytes each takes; for states, too."""

    num_rows: int
    row_bytes: int
    num_states: int = 0
    state_bytes: int = 0


class OffloadNote(msgspec.Struct, omit_defaults=True):
    """What became of messages, by their numbers, on one worker.

    `breaks`: how many of its steps failed. `loaded`: those whose loads have ended. `saved`: those whose saves have,
    with the places of saves that did not succeed, or None where that is all; `states`: the same of states.
    """

    breaks: int
    loaded: list[int] = []
    saved: list[tuple[int, list[int] | None]] = []
    states: list[tuple[int, list[int] | None]] = []
