"""How much a tier in host memory holds: blocks of tokens and states, on all workers together. Knows no key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .messages import Hello, Rows
from .options import OffloadOptions

#: Share of a tier that is kept free, where what goes is written to a disk, or more, if a step may need more.
_FREE_SHARE, _MOST_FREE_SHARE = 1 / 16, 1 / 4


@dataclass(frozen=True)
class TierSizes:
    """Each of the `num_blocks` takes `block_bytes` of all workers, and so do states."""

    num_blocks: int = 0
    block_bytes: int = 0
    num_states: int = 0
    state_bytes: int = 0

    @classmethod
    def of(cls, hellos: Sequence[Hello], parts: int) -> TierSizes:
        """Of these workers, where a block has so many rows."""
        return cls(
            num_blocks=_num_rows(hello.tokens for hello in hellos) // parts,
            block_bytes=sum(hello.tokens.row_bytes for hello in hellos) * parts,
            num_states=_num_rows(hello.states for hello in hellos),
            state_bytes=sum(hello.states.row_bytes for hello in hellos),
        )

    @property
    def size_bytes(self) -> int:
        """What all of them take."""
        return self.num_blocks * self.block_bytes + self.num_states * self.state_bytes

    def check(self, options: OffloadOptions, block_tokens: int) -> None:
        """Raises `ValueError` where not one block or one state has room."""
        for num_bytes, count, what in (
            (self.state_bytes, self.num_states, "state of a request, which takes"),
            (self.block_bytes, self.num_blocks, f"block of {block_tokens} tokens, which take"),
        ):
            if num_bytes and not count:
                raise ValueError(
                    f"{options.size:g} GiB of host memory hold no {what} {num_bytes / (1 << 20):.1f} MiB: raise "
                    "kv_offloading_size"
                )


def num_free(options: OffloadOptions, num_slots: int, num_in_step: int) -> int:
    """How many slots are to be free, so that what needs one need not wait for the disk; a step may fill so many."""
    if options.disk is None:
        return 0
    most = int(num_slots * _MOST_FREE_SHARE)
    return max(1, min(most, max(num_in_step, int(num_slots * _FREE_SHARE))))


def _num_rows(workers: Iterable[Rows]) -> int:
    """How many rows there are on all workers that have any: a stage of a pipeline may have none."""
    return min((rows.num_rows for rows in workers if rows.row_bytes), default=0)
