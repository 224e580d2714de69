"""What the two sides of the push connector tell one another in one engine. Knows no socket and no tensor."""

from __future__ import annotations

from typing import Literal

import msgspec

from frame.interfaces import KVLayout, RequestView

from ..nixl.pulls import whole_tokens

#: What becomes of a prompt's blocks at one worker of the engine that takes them.
State = Literal["begun", "arrived", "gone"]


class Goal(msgspec.Struct, frozen=True, array_like=True):
    """Which prompt's blocks go where: those of the first `num_tokens` tokens, for which `digest` stands."""

    host: str
    port: int
    digest: bytes
    num_tokens: int


class Start(msgspec.Struct, frozen=True):
    """A request that is admitted, for the first time or again: what was sent of it before counts no more."""

    owner: str
    goal: Goal


class Chunk(msgspec.Struct, frozen=True):
    """Blocks of a request that are right once this step's layers have run: of group g `blocks[g]`, from `firsts[g]`.

    A state is, where this step ends at the prompt's last grain: the block of the request, which a later one overwrites.
    """

    owner: str
    firsts: list[int]
    blocks: list[list[int]]


class End(msgspec.Struct, frozen=True):
    """A request that ended: all its blocks `blocks[g]`, from the first one that is needed. They stay until it is sent.

    Of states the block is the copy of that behind the prompt's last grain. Those that are not on their way yet are sent
    now; without blocks none are.
    """

    owner: str
    goal: Goal
    blocks: list[list[int]]


class Load(msgspec.Struct, frozen=True):
    """Received blocks that a request gets: of group g those of the places `places[g]` into `blocks[g]`."""

    owner: str
    digest: bytes
    places: list[list[int]]
    blocks: list[list[int]]


class PushStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The scheduler side's message of a step, its fields in the order in which the worker does them.

    With `clear` all that was received is dropped, as are the prompts `forget`. `drops` are requests whose blocks are
    not sent any further; of the prompts `refused` nothing was sent, nor will be. `held` and `loading` are the requests
    whose blocks wait for the worker's word, so that it knows of messages that never came.
    """

    clear: bool = False
    forget: list[bytes] = []
    drops: list[str] = []
    starts: list[Start] = []
    chunks: list[Chunk] = []
    ends: list[End] = []
    refused: list[Goal] = []
    loads: list[Load] = []
    held: list[str] = []
    loading: list[str] = []


class PushNote(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker's word to the scheduler side.

    `arrivals` are what became of prompts that other engines send, by digest; `unsent` requests whose blocks could not
    be sent.
    """

    arrivals: dict[bytes, State] = {}
    unsent: list[str] = []


class Hello(msgspec.Struct, frozen=True):
    """A worker's handshake: its machine, how its blocks lie in memory, the port at which it takes blocks (0: none)."""

    machine: str
    formats: str
    port: int


def spans(layout: KVLayout, num_tokens: int) -> list[tuple[int, int]]:
    """For each KV group the places [first, last) of the blocks that tokens from `num_tokens` on read.

    A state has one block, which stands for all tokens before. Of tokens the last block may be filled in part.
    """
    return [
        (0, 1)
        if group.keeps_states
        else (group.specs[0].first_needed(num_tokens) // group.block_size, -(-num_tokens // group.block_size))
        for group in layout.groups
    ]


def moved_tokens(request: RequestView, layout: KVLayout) -> int:
    """How many tokens of a prompt are sent: all but the last, which the decode engine computes, as a decode step.

    Whole grains where layers keep states, each of which stands for such; 0 where no grain is whole.
    """
    whole = whole_tokens(request, layout)
    return request.prompt_len - 1 if whole and not keeps_states(layout) else whole


def keeps_states(layout: KVLayout) -> bool:
    """Whether some layers keep a running state."""
    return any(group.keeps_states for group in layout.groups)
