"""What a supervisor concludes from the deaths of its engines: whom to try alone, whom to refuse, when to give up.

Fed with the names of the requests that were being computed. Knows no process and no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..engine.recovery.suspects import Suspects
from .messages import Verdict

#: Deaths of a suspect, the last of them alone, that prove its guilt. Whoever kills engines from outside may well hit
#: the same request twice.
_PROOF = 2
_PROOF_IF_KILLED = 3
_MAX_GUILTY = 256


class Blame:
    """The state of suspicion over the engines of one supervisor."""

    def __init__(self) -> None:
        self._suspects = Suspects()
        self._deaths: Counter[str] = Counter()  # of each suspect since anybody was last acquitted
        self._guilty: dict[str, str] = {}

    @property
    def verdict(self) -> Verdict:
        """For the next engine."""
        return Verdict(self._suspects.groups, self._guilty)

    def death(self, names: Sequence[str], cause: str, *, cleared: bool, killed: bool) -> str | None:
        """An engine died with `names` in flight; returns the one that is guilty of it, if that is now certain.

        `cleared`: it had acquitted all suspects. `killed`: by SIGKILL, which need not be a request's doing.
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
