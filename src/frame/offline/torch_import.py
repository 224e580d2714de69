"""Imports torch into a program that embeds frame so that its threads wait briefly (`frame.core.startup.openmp`)."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from frame.core.startup.openmp import SPIN_COUNT, short_waits

#: The warning for a program whose threads spin long.
LATE = (
    "torch was imported before frame, so its threads spin for ten milliseconds wherever they wait, and steps take many "
    "times as long as soon as other processes want the same processors: make the LLM before torch is imported, or "
    f"start the program with GOMP_SPINCOUNT={SPIN_COUNT}"
)
#: A name in the module torch: it was imported here.
_MARK = "_frame_imported"


def import_torch() -> None:
    """Imports torch so that its threads spin briefly, unless the user or an earlier import has decided it.

    The environment of the process is afterwards what it was.
    """
    if "torch" in sys.modules:
        return
    wanted = short_waits()
    os.environ.update(wanted)
    try:
        with _without_collections():
            import_module("torch")
    finally:
        for name in wanted:
            del os.environ[name]
    if "torch" in sys.modules:
        setattr(sys.modules["torch"], _MARK, True)


def spins_long() -> bool:
    """Whether torch has several threads that spin long: somebody else imported it, and nobody set how they wait."""
    torch = sys.modules.get("torch")
    return torch is not None and not hasattr(torch, _MARK) and bool(short_waits()) and torch.get_num_threads() > 1


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collects no garbage inside: a large import makes objects that stay, and examining them 300 times takes 0.2 s.

    Afterwards they are in the oldest generation, as if they had been examined, unless the program has frozen objects.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if collects:
            gc.enable()
