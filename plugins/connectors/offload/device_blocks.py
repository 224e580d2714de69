"""Which blocks of the device's pools a load or save is of, and which a step gives to requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from frame.interfaces import KVLayout, StepPlan

from ..blocks.messages import Move


def blocks_of(layout: KVLayout, moves: Sequence[Move]) -> list[tuple[int, int]]:
    """(pool, block) of the blocks that these moves read or write."""
    return [
        (group.pool, block)
        for move in moves
        for group, blocks in zip(layout.groups, move.blocks, strict=True)
        for block in blocks
        if block
    ]


def given_blocks(layout: KVLayout, plan: StepPlan) -> Iterator[tuple[int, int]]:
    """(pool, block) of the blocks that requests get in this step and may write to."""
    for new in plan.added:
        for group, blocks in zip(layout.groups, new.block_ids, strict=True):
            yield from ((group.pool, block) for block in blocks[new.num_computed // group.block_size :].tolist())
    for append in plan.appends:
        yield from ((layout.groups[append.group].pool, block) for block in append.block_ids.tolist())
