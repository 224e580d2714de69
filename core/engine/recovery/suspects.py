"""Finding the one request that breaks a step: whoever was in a broken step is tried again in halves.

Plain data about names; both the engine (for steps that raise) and its supervisor (for steps that end the process) use
it. Knows no request and no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


class Suspects:
    """Groups of names, tried one after the other: a step on trial holds requests of `groups[0]` and no others."""

    def __init__(self, groups: Iterable[Sequence[str]] = ()) -> None:
        self.groups = [list(group) for group in groups if group]

    def __bool__(self) -> bool:
        return bool(self.groups)

    def blame(self, names: Collection[str]) -> str | None:
        """A step of these broke. Returns the one at fault when it was alone; else they stand first, in halves.

        Groups before the one on trial, which passed, are dropped.
        """
        culprits = list(names)
        if not culprits:
            return None
        for index, group in enumerate(self.groups):
            if set(culprits) <= set(group):
                rest = [name for name in group if name not in names]
                self.groups[: index + 1] = [rest] if rest else []
                break
        else:
            for group in self.groups:
                group[:] = [name for name in group if name not in names]
            self.groups = [group for group in self.groups if group]
        if len(culprits) == 1:
            return culprits[0]
        middle = (len(culprits) + 1) // 2
        self.groups[:0] = [culprits[:middle], culprits[middle:]]
        return None

    def try_again(self, name: str) -> None:
        """Puts one that was returned by `blame` first again."""
        self.groups.insert(0, [name])
