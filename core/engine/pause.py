"""Whether the engine goes on planning steps: pauses by request, and sleep without its memory. Knows no device."""

from __future__ import annotations

from typing import Any

from .schedule.scheduler import Scheduler

MODES = ("keep", "wait", "abort")
_TAGS = frozenset(("weights", "kv_cache"))


class Pause:
    """`keep` freezes requests where they are, `wait` lets running ones finish; new ones are queued meanwhile."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._mode: str | None = None
        self._asleep: frozenset[str] = frozenset()  # tags of the memory that is gone

    @property
    def active(self) -> bool:
        """Whether requests are held back."""
        return self._mode is not None or bool(self._asleep)

    @property
    def paused(self) -> bool:
        """Whether somebody asked for it."""
        return self._mode is not None

    @property
    def asleep(self) -> bool:
        """Whether memory is gone."""
        return bool(self._asleep)

    @property
    def stops_steps(self) -> bool:
        """Whether no step may be launched now."""
        return bool(self._asleep) or self._mode == "keep" or (self._mode == "wait" and not self._scheduler.num_running)

    def begin(self, mode: str) -> None:
        """Pauses; raises `ValueError` for an unknown mode."""
        if mode not in MODES:
            raise ValueError(f"no pause mode {mode!r}; there are: {', '.join(MODES)}")
        self._mode = "wait" if mode == "wait" else "keep"
        self._scheduler.admits = False

    def end(self) -> None:
        """Goes on."""
        self._mode = None
        self._scheduler.admits = not self._asleep

    def sleep(self, keep: Any) -> None:
        """The memory that `keep` does not name is gone, and of what it names the KV cache all the same."""
        self._asleep = _TAGS - (frozenset(keep) - {"kv_cache"})
        self._scheduler.admits = False

    def wake(self, tags: Any) -> None:
        """Memory came back."""
        self._asleep -= frozenset(tags)
        self._scheduler.admits = self._mode is None and not self._asleep
