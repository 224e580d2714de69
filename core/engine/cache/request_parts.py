"""The blocks of one request, and the state of its transfers by a KV connector."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CachedBlocks:
    """The blocks of one request; `KVCache` alone changes them.

    `blocks[g]` are the block ids of KV group g in order, 0 where a block fell out of the window; before `first_live[g]`
    all are 0. `hashes` chain from `root`, one for each `block_size` tokens of the layout; the blocks of the first
    `num_published` hashes are in the prefix cache, or could not be put there.
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
        """Has the request computed without the connector."""
        self.asks = False

    def load(self, loading: bool) -> None:
        """Notes whether the connector writes to the request's blocks."""
        self.loading = loading

    def hold(self, held: bool) -> None:
        """Notes whether the connector reads the request's blocks, which are then kept after its end."""
        self.held = held

    def hold_loaded(self, num_tokens: int) -> None:
        """Notes the computed tokens of a request without a slot; 0 once it has one, whose batch counts them."""
        self.num_loaded = num_tokens

    def await_step(self, fills: bool) -> None:
        """Notes whether a launched step, which has no result yet, fills some of the request's blocks."""
        self.unconfirmed = fills

    def forget(self) -> None:
        """Called when the request has given up its blocks."""
        self.num_loaded, self.unconfirmed = 0, False

    def lose(self, first: int) -> None:
        """Notes that the block which begins with token `first` failed to load."""
        self.num_good = first if self.num_good is None else min(first, self.num_good)

    def take_losses(self) -> int | None:
        """Returns, once, the number of tokens before the first block that failed to load; None where none did."""
        found, self.num_good = self.num_good, None
        return found
