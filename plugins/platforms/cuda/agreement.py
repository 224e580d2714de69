"""What the workers of an engine decide alike: each measures on its own device, and their steps must not differ."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from frame.interfaces import HostGroup, SingleHost


class PeerOutOfMemory(torch.OutOfMemoryError):
    """The device of another worker has no memory left; the message names it."""


class PeerFailed(RuntimeError):
    """Another worker has failed; the message names it."""


class Agreement:
    """Decisions over the workers of `host`, all of which make the same calls in the same order.

    `ranks` are theirs in the mesh, by which errors name them, and `rank` is this worker's.
    """

    def __init__(self, host: HostGroup | None = None, ranks: Sequence[int] = (0,), rank: int = 0) -> None:
        self._host = host or SingleHost()
        self._ranks, self._rank = ranks, rank

    def most(self, number: int) -> int:
        """The largest number that a worker gave."""
        return max(msgspec.json.decode(data, type=int) for data in self._host.gather(b"%d" % number))

    def first(self, data: bytes) -> bytes:
        """What the first worker gave."""
        return self._host.gather(data)[0]

    def failure(self, error: Exception | None = None) -> Exception | None:
        """The error of the first worker that gave one, as this worker is to take it; None where none did.

        An error of memory is one on all workers: `PeerOutOfMemory` where it was another's. Other errors of others are
        `PeerFailed`. What another worker has told before it must tell again itself: `error` is not told then.
        """
        short = isinstance(error, torch.OutOfMemoryError)
        told_by_other = error is None or isinstance(error, PeerOutOfMemory | PeerFailed)
        own = None if told_by_other else _Failure(f"{type(error).__name__}: {error}", short)
        for rank, data in zip(self._ranks, self._host.gather(msgspec.json.encode(own)), strict=True):
            failure = msgspec.json.decode(data, type=_Failure | None)
            if failure is not None and rank == self._rank:
                return error
            if failure is not None:
                kind = PeerOutOfMemory if failure.short else PeerFailed
                return kind(f"worker {rank}: {failure.message}")
        return None


class _Failure(msgspec.Struct, frozen=True):
    """`short`: of memory."""

    message: str
    short: bool


class CapturePeers:
    """With whom a worker captures alike: alone, until it has met the others.

    `stage` are the workers whose sums the launches of a step wait for, `all` also those of other pipeline stages, which
    pad steps alike. Both are one object where there is one stage.
    """

    def __init__(self) -> None:
        self.stage = self.all = Agreement()

    @property
    def one_stage(self) -> bool:
        """Whether all workers are of this one's stage."""
        return self.all is self.stage
