"""What a server and another machine tell each other of engines that share experts, which end and begin together."""

from __future__ import annotations

import msgspec

from frame.core.processes.shared_fate import Death, Verdict
from frame.ranks.standstill import Standing


class Died(msgspec.Struct, tag=True):
    """To the server: an engine has ended, and where it stood."""

    rank: int
    death: Death
    standing: Standing | None


class Kill(msgspec.Struct, tag=True):
    """To the machine: an engine must end with the others; answered by `Died`."""

    rank: int


class Judge(msgspec.Struct, tag=True):
    """To the machine: this engine is at fault for the end of all; answered by `Judged`."""

    rank: int
    death: Death


class Judged(msgspec.Struct, tag=True):
    """To the server: whether the engine at fault is started again."""

    rank: int
    verdict: Verdict


class Settled(msgspec.Struct, tag=True):
    """To the machine: all engines have ended; this one starts again, or never."""

    rank: int
    verdict: Verdict


class SharedWave(msgspec.Struct, tag=True):
    """To the server: an engine asks for this wave of steps. And to the machine: one must begin it."""

    rank: int
    number: int


FateNews = Died | Judged | SharedWave
FateOrder = Kill | Judge | Settled | SharedWave
