"""What both sides of a connector that stores prompt blocks share: the message of a step, and the name of a block set.

Knows no file, no socket and no tensor.
"""

from __future__ import annotations

import hashlib

import msgspec

from frame.interfaces import KVLayout, Mesh, encode


class Move(msgspec.Struct, frozen=True, array_like=True):
    """Grain number `index` of `owner`'s prompt: its hash, its block ids in each KV group (0: that group needs none).

    With `state` it is not the tokens of the grain but the running state behind them, whose key is `state_key`; only
    groups of states have a block then, and only then.
    """

    owner: str
    key: bytes
    blocks: list[list[int]]
    index: int
    state: bool = False


class BlockStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the worker side loads and saves in a step.

    `entered` are requests that begin in this step: their blocks hold what their hashes say unless a step breaks.
    `known_breaks[rank]` is how many failed steps of that worker the scheduler side knew of when it wrote the message.
    `number` counts messages; a step whose blocks may be saved later has one, so that a worker knows of lost steps.
    `states` are copies that the step makes of the states which the step before left, to be saved before it goes on.
    """

    blocks_name: str
    number: int = -1
    loads: list[Move] = []
    saves: list[Move] = []
    states: list[Move] = []
    entered: list[str] = []
    known_breaks: dict[int, int] = {}


def state_key(key: bytes) -> bytes:
    """The key of the state behind the grain with that hash."""
    return key + b"state"


def blocks_name(layout: KVLayout, mesh: Mesh) -> str:
    """The name of the set of blocks that engines with this layout may exchange: 32 hexadecimal digits.

    Each worker adds how its blocks lie in memory, see `StepWorker.formats`.
    """
    facts = [layout.model, layout.grain, layout.groups, mesh.tensor, mesh.pipeline]
    return hashlib.sha256(encode(facts)).hexdigest()[:32]
