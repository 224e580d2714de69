"""What the KV cache and its connector keep of one request. Knows no pool, no connector and no queue."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CachedBlocks:
    """The blocks of one request; `KVCache` alone changes them.

    `blocks[g]` are those of KV group g in order, 0 where one fell out of the window; before `first_live[g]` all are 0.
    `hashes` are those of its tokens so far, one for each `block_size` of the layout, from `root` on; what
    `num_published` of them stand for is in the prefix cache, or could not be put there.
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


@dataclass(slots=True)
class TransferState:
    """What a KV connector does with the blocks of one request; changed by its own methods only.

    `asks`: the connector is asked for its blocks. `loading`: it writes to them. `held`: it reads them after the
    request's end. `unconfirmed`: the launched step that fills some of them was not answered yet. `num_loaded`: computed
    tokens whose blocks the request holds while it has no slot. `num_good`: tokens before the first block that failed.
    """

    asks: bool
    loading: bool = False
    held: bool = False
    unconfirmed: bool = False
    num_loaded: int = 0
    num_good: int | None = None

    def give_up(self) -> None:
        """The request goes on without the connector."""
        self.asks = False

    def load(self, loading: bool) -> None:
        """Whether the connector writes to its blocks from now on."""
        self.loading = loading

    def hold(self, held: bool) -> None:
        """Whether the connector reads its blocks from now on."""
        self.held = held

    def keep(self, num_tokens: int) -> None:
        """It holds blocks for so many computed tokens and has no slot, or, with 0, a slot that counts them."""
        self.num_loaded = num_tokens

    def expect(self, fills: bool) -> None:
        """Whether a launched step fills some of its blocks that was not answered yet."""
        self.unconfirmed = fills

    def forget(self) -> None:
        """Its blocks are gone."""
        self.num_loaded, self.unconfirmed = 0, False

    def lose(self, first: int) -> None:
        """The block that begins with token `first` failed to load."""
        self.num_good = first if self.num_good is None else min(first, self.num_good)

    def take_losses(self) -> int | None:
        """Returns, once, the number of tokens before the first block that failed to load; None where none did."""
        found, self.num_good = self.num_good, None
        return found
