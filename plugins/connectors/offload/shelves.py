"""What an engine takes over of its shelf, and which other shelves it reads: of blocks of tokens, and of states.

For the scheduler side. Knows no row's bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from frame.interfaces import encode

from .index import Ledger, TierIndex
from .messages import Hello
from .neighbours import Neighbours
from .rows_file import STATES
from .shelf import Shelf
from .shelf_index import ShelfLedger


def shelve(
    shelf: Shelf, hellos: Mapping[int, Hello], num_slots: int, make: Callable[[Ledger], TierIndex], *, states: bool
) -> tuple[TierIndex, Neighbours]:
    """Has the shelf say what the slots of an index hold, that `make` makes, and takes over what is there."""
    ranked = [(rank, hello, hello.states if states else hello.tokens) for rank, hello in sorted(hellos.items())]
    facts = {rows.family for _, _, rows in ranked}
    if len(facts) > 1:  # its workers hold different layers: only an engine that divides them alike is of use
        facts = {encode((rank, hello.formats, rows.family)) for rank, hello, rows in ranked}
    shape, kind = _digest(sorted(facts)), STATES if states else ""
    ledger = ShelfLedger(shelf, shape, _digest([rows.identity for _, _, rows in ranked]), num_slots, kind)
    index = make(ledger)
    index.adopt(ledger.found())
    return index, Neighbours(shelf, shape, kind)


def _digest(facts: list[bytes]) -> bytes:
    return hashlib.blake2b(encode(facts), digest_size=16).digest()
