"""What the messages of the offload connector ask for, until all workers have done it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .messages import Kind


@dataclass
class Transfer:
    """What one message asks for. `pending` [kind] are the workers that have not done it, `bad` the places that failed.

    `loads` are the keys that it reads for each request, `saves` (key, owner) of each part that it writes; `blocks`
    (pool, block) are those of the device that are read for it. `fetches` and `leaves` are keys.
    """

    loads: dict[str, list[bytes]]
    saves: list[tuple[bytes, str]]
    blocks: list[tuple[int, int]]
    fetches: list[bytes]
    leaves: list[bytes]
    pending: dict[Kind, int] = field(default_factory=dict)
    bad: dict[Kind, set[int]] = field(default_factory=dict)

    def sizes(self) -> dict[Kind, int]:
        """How many places there are of each kind."""
        return {
            "load": len(self.loads),
            "save": len(self.saves),
            "fetch": len(self.fetches),
            "leave": len(self.leaves),
        }


class Transfers:
    """Those under way, by the number of their message."""

    def __init__(self) -> None:
        self._transfers: dict[int, Transfer] = {}

    def __bool__(self) -> bool:
        return bool(self._transfers)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers.values())

    def begin(self, number: int, transfer: Transfer, num_workers: int) -> None:
        """Every worker is asked for all of it."""
        transfer.pending = {kind: num_workers for kind, size in transfer.sizes().items() if size}
        if transfer.pending:
            self._transfers[number] = transfer

    def end(self, number: int, kind: Kind, bad: list[int] | None) -> Transfer | None:
        """One worker has done its part, but for the places `bad` (None: all); returns it when that was the last one."""
        transfer = self._transfers.get(number)
        if transfer is None or kind not in transfer.pending:
            return None
        transfer.bad.setdefault(kind, set()).update(range(transfer.sizes()[kind]) if bad is None else bad)
        transfer.pending[kind] -= 1
        if transfer.pending[kind]:
            return None
        del transfer.pending[kind]
        if not transfer.pending:
            del self._transfers[number]
        return transfer

    def loading(self) -> dict[int, list[str]]:
        """Requests whose loads have not ended, by the numbers of the messages that asked for them."""
        return {number: list(one.loads) for number, one in self._transfers.items() if "load" in one.pending}
