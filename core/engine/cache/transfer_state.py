"""What a KV connector does with the blocks of one request. Knows no connector and no block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferState:
    """Changed by its own methods only.

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

    def begin(self) -> None:
        """The connector writes to its blocks from now on."""
        self.loading = True

    def end(self) -> None:
        """The connector no longer writes to its blocks."""
        self.loading = False

    def take(self, num_tokens: int) -> None:
        """It holds blocks for so many computed tokens, and has no slot."""
        self.num_loaded = num_tokens

    def enter(self) -> None:
        """It has a slot: the batch counts what is computed."""
        self.num_loaded = 0

    def expect(self, fills: bool) -> None:
        """The step that it enters with fills some of its blocks, or none."""
        self.unconfirmed = fills

    def confirm(self) -> None:
        """The step that filled some of its blocks was answered."""
        self.unconfirmed = False

    def forget(self) -> None:
        """Its blocks are gone."""
        self.num_loaded, self.unconfirmed = 0, False

    def hold(self, held: bool) -> None:
        """Whether the connector reads its blocks from now on."""
        self.held = held

    def lose(self, first: int) -> None:
        """The block that begins with token `first` failed to load."""
        self.num_good = first if self.num_good is None else min(first, self.num_good)

    def take_losses(self) -> int | None:
        """The number of tokens before the first block that failed to load, None where none did; told once."""
        found, self.num_good = self.num_good, None
        return found
