"""The environment that makes torch's threads on a CPU wait for each other briefly. Imports no torch.

libgomp, which torch's wheels for Linux carry, spins for about ten milliseconds wherever parallel work ends, before a
thread sleeps. With a processor for each thread that costs nothing. Beside another busy process the spinning threads
take the time of the one that they wait for, and each operation takes as long as the kernel's time slices. Spinning for
about as long as it takes to wake a thread up is nearly as quick alone, and many times as quick in company. libgomp
reads its variables when it is loaded, so they must be set before torch is imported.
"""

from __future__ import annotations

import os

#: Whoever sets one of these has decided how threads wait.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
#: Rounds of libgomp's waiting loop, 50 to 150 microseconds; docs/operating.md has what others cost.
SPIN_COUNT = "3000"


def child_environment() -> dict[str, str]:
    """The environment of a child process that will import torch; what the user has set stays."""
    return {**os.environ, **short_waits()}


def short_waits() -> dict[str, str]:
    """The variables to set before torch is imported; empty where the user has decided how threads wait."""
    return {} if any(name in os.environ for name in WAITING) else {"GOMP_SPINCOUNT": SPIN_COUNT}
