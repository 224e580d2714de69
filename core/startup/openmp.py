"""How torch's threads on a CPU wait for each other. Imports no torch by itself.

libgomp, which torch's wheels for Linux carry, spins for about ten milliseconds wherever parallel work ends, before a
thread sleeps. With a processor for each thread that costs nothing. Beside another busy process the spinning threads
take the time of the one that they wait for, and each operation takes as long as the kernel's time slices. Spinning for
about as long as it takes to wake a thread up is nearly as quick alone, and many times as quick in company. libgomp
reads its variables when it is loaded, so they have to be there before torch is.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

#: Whoever sets one of these has decided how threads wait.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
#: Rounds of libgomp's waiting loop, 50 to 150 microseconds; docs/operating.md has what others cost.
SPIN_COUNT = "3000"
#: The warning for a program whose threads spin long.
LATE = (
    "torch was imported before frame, so its threads spin for ten milliseconds wherever they wait, and steps take many "
    "times as long as soon as other processes want the same processors: make the LLM before torch is imported, or "
    f"start the program with GOMP_SPINCOUNT={SPIN_COUNT}"
)
#: A name in the module torch: it was imported here.
_MARK = "_frame_imported"


def child_environment() -> dict[str, str]:
    """The environment of a child process that will import torch; what the user has set stays."""
    return {**os.environ, **_wanted()}


def import_torch() -> None:
    """Imports torch so that its threads spin briefly, unless the user or an earlier import has decided it.

    The environment of the process is afterwards what it was.
    """
    if "torch" in sys.modules:
        return
    wanted = _wanted()
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
    return torch is not None and not hasattr(torch, _MARK) and bool(_wanted()) and torch.get_num_threads() > 1


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


def _wanted() -> dict[str, str]:
    return {} if any(name in os.environ for name in WAITING) else {"GOMP_SPINCOUNT": SPIN_COUNT}
