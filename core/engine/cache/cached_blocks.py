"""The blocks of one request. `KVCache` alone changes them. Knows no pool and no queue."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CachedBlocks:
    """`blocks[g]` are those of KV group g in order, 0 where one fell out of the window.

    `first_live[g]`: earlier entries of `blocks[g]` are 0. `hashes` are those of its tokens so far, one for each
    `block_size` of the layout, from `root` on; what `num_published` of them stand for is in the prefix cache, or could
    not be put there.
    """

    root: bytes
    blocks: list[list[int]]
    first_live: list[int]
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0

    @classmethod
    def none(cls, num_groups: int, root: bytes) -> CachedBlocks:
        """No block in any group."""
        return cls(root, [[] for _ in range(num_groups)], [0] * num_groups)
