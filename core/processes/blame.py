"""Decides from the deaths of engines which requests to compute alone, which to refuse, and when to give up.

Gets the names of the requests that were being computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..engine.recovery.suspects import Suspects
from .messages import Begin

#: A suspect is at fault after so many deaths, in the last of which it was computed alone. One kill from outside may
#: well hit the same request twice.
_PROOF = 2
_PROOF_IF_KILLED = 3
_MAX_GUILTY = 256


class Blame:
    """Which requests are suspected of killing the engines of one supervisor."""

    def __init__(self) -> None:
        self._suspects = Suspects()
        self._deaths: Counter[str] = Counter()  # suspect -> deaths since a request was last cleared
        self._guilty: dict[str, str] = {}

    @property
    def begin(self) -> Begin:
        """The message with which the next engine begins."""
        return Begin(self._suspects.groups, self._guilty)

    def death(self, names: Sequence[str], cause: str, *, cleared: bool, killed: bool) -> str | None:
        """Records that an engine died with `names` in flight.

        Returns the request that caused it, if that is now certain. `cleared`: the engine had computed all suspects
        without dying. `killed`: by SIGKILL, which a request need not have caused.
        """
        if cleared:
            self._suspects = Suspects()
            self._deaths.clear()
        self._deaths.update(names)
        name = self._suspects.blame(names)
        if name is None:
            return None
        if self._deaths[name] < (_PROOF_IF_KILLED if killed else _PROOF):
            self._suspects.try_again(name)
            return None
        while len(self._guilty) >= _MAX_GUILTY:
            del self._guilty[next(iter(self._guilty))]
        self._guilty[name] = f"{cause} each time the request was computed, also when it was alone"
        return name
