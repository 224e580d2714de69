"""What the two sides of the offload connector tell each other. Knows no tensor."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..blocks.messages import BlockStep, Move
from .row_forms import RowForm

#: What a message asks for, and a note says the end of: loads to the device, saves from it, blocks that come to host
#: memory from elsewhere, and those that leave it for the disk; the last three are of states.
Kind = Literal["load", "save", "fetch", "leave", "save state", "fetch state", "leave state"]
#: For the name of a shelf: this engine's own.
HERE = "."
#: Before the name of engines of other parallel sizes, whose files on the disk are read.
OTHERS = "/"


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """A block of the tier that is to come to `row` and the rows behind it, as many as a block has, or to leave them.

    `generation` is that of its slot. It comes from `their_slot` of another engine's `shelf`, whose generation is
    `theirs`, or from the disk, where that is empty or begins with `OTHERS`; in the `HERE` shelf it is there and to be
    checked.
    """

    key: bytes
    row: int
    generation: int = 0
    shelf: str = ""
    their_slot: int = 0
    theirs: int = 0


class OffloadStep(BlockStep, kw_only=True, omit_defaults=True):
    """`load_rows` and `save_rows` are the rows of host memory of `loads` and `saves`; -1: there is none.

    `join`: blocks that are being saved get other content in this step or by its loads. `lookups` are tokens that were
    asked for and `hits` those found, since the message before; `used_bytes` of `size_bytes` hold blocks. `waiting` are
    the requests whose loads earlier messages asked for and no report has ended, by their numbers. `fetches` are blocks
    that come from elsewhere, before they are loaded, and `leaves` those that are written to the disk. `unsaved` blocks
    were left out since the message before, because earlier ones are not written yet; `lost` ones went without having
    been written to the disk. `save_marks` are the key and the generation of each row of `save_rows` in shared memory.
    States, which lie in rows of their own, are apart: `state_loads` in `state_load_rows`, and `states`, to be saved, in
    `state_rows` with `state_marks`; `state_fetches` and `state_leaves` are as those of blocks.
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
    state_marks: list[tuple[bytes, int]] = msgspec.field(default_factory=list)
    state_fetches: list[Fetch] = msgspec.field(default_factory=list)
    state_leaves: list[Fetch] = msgspec.field(default_factory=list)
    fetches: list[Fetch] = msgspec.field(default_factory=list)
    leaves: list[Fetch] = msgspec.field(default_factory=list)
    save_marks: list[tuple[bytes, int]] = msgspec.field(default_factory=list)
    unsaved: int = 0
    lost: int = 0


class Rows(msgspec.Struct, frozen=True):
    """Rows of host memory of a worker: how many there are, and how many bytes each takes; none where that is 0.

    `identity` is the name of those in shared memory, if there are such; `form` says what lies in each.
    """

    num_rows: int = 0
    row_bytes: int = 0
    identity: bytes = b""
    form: RowForm = RowForm(0, [])


class Hello(msgspec.Struct, frozen=True):
    """A worker's handshake: its rows of tokens and of states, and how blocks lie on its device.

    `mark` is the name of a file that it left in the disk's folder.
    """

    tokens: Rows
    states: Rows
    formats: str = ""
    mark: str = ""


class OffloadNote(msgspec.Struct, omit_defaults=True):
    """What became of messages, by their numbers, on one worker.

    `breaks`: how many of its steps failed. `ended`: what has ended of which message, with the places of those that did
    not succeed, or None where that is all.
    """

    breaks: int
    ended: list[tuple[Kind, int, list[int] | None]] = []
