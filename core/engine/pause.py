"""Decides whether the engine plans steps: pauses that somebody asked for, and sleep without the device's memory."""

from __future__ import annotations

from typing import Any

from frame.quoting import quoted

from .lifecycle import Lifecycle

MODES = ("keep", "wait", "abort")
_TAGS = frozenset(("weights", "kv_cache"))


class Pause:
    """Mode `keep` stops running requests where they are, `wait` lets them finish; new requests are queued meanwhile."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._mode: str | None = None
        self._asleep: frozenset[str] = frozenset()  # tags of the memory that is gone

    @property
    def paused(self) -> bool:
        """Whether a pause was asked for and has not ended."""
        return self._mode is not None

    @property
    def asleep(self) -> bool:
        """Whether weights or KV cache are gone from the device."""
        return bool(self._asleep)

    @property
    def admits(self) -> bool:
        """Whether waiting requests may run."""
        return self._mode is None and not self._asleep

    @property
    def stops_steps(self) -> bool:
        """Whether no step may be launched now."""
        waits = self._mode == "wait" and not self._lifecycle.num_running
        return bool(self._asleep) or self._mode == "keep" or waits

    def begin(self, mode: str) -> None:
        """Pauses; raises `ValueError` for an unknown mode."""
        if mode not in MODES:
            raise ValueError(f"no pause mode {quoted(mode)}; there are: {', '.join(MODES)}")
        self._mode = "wait" if mode == "wait" else "keep"

    def end(self) -> None:
        """Ends the pause; requests are admitted again unless the engine sleeps."""
        self._mode = None

    def sleep(self, keep: Any) -> None:
        """Notes that weights and KV cache are gone, but for the weights where `keep` names them."""
        self._asleep = _TAGS - (frozenset(keep) - {"kv_cache"})

    def wake(self, tags: Any) -> None:
        """Notes that the memory of `tags` is back."""
        self._asleep -= frozenset(tags)
