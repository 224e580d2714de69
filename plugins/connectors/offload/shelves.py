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
from .row_forms import family_of
from .rows_file import STATES
from .shelf import Shelf
from .shelf_index import ShelfLedger


def shelve(
    shelf: Shelf, hellos: Mapping[int, Hello], num_slots: int, make: Callable[[Ledger], TierIndex], *, states: bool
) -> tuple[TierIndex, Neighbours]:
    """Has the shelf say what the slots of an index hold, that `make` makes, and takes over what is there."""
    rows = [hello.states if states else hello.tokens for _, hello in sorted(hellos.items())]
    shape, kind = family_of(one.form for one in rows), STATES if states else ""
    identity = hashlib.blake2b(encode([one.identity for one in rows]), digest_size=16).digest()
    ledger = ShelfLedger(shelf, shape, identity, num_slots, kind)
    index = make(ledger)
    index.adopt(ledger.found())
    return index, Neighbours(shelf, shape, kind)
