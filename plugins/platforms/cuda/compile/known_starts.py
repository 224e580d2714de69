"""Notes in Triton's cache which starts found all their kernels there, so that the next such start looks for none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from triton import knobs

import frame


class KnownStart:
    """A start that `steps_key` names (see `PlatformSetup`), on this device, with this code and these libraries.

    Its note goes with the cache when that is emptied. Where it is wrong, because a kernel is missing in spite of it,
    that kernel is compiled when it is first launched.
    """

    def __init__(self, steps_key: str, device: torch.device) -> None:
        facts = [
            steps_key, torch.cuda.get_device_name(device), torch.__version__, torch.version.cuda, version("triton"),
            sorted(_sources()),
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
        self._file = Path(knobs.cache.dir, f"frame-start-{digest}") if steps_key else None

    def is_noted(self) -> bool:
        """Whether an earlier start was this one."""
        return self._file is not None and self._file.exists()

    def note(self) -> None:
        """Notes that all its kernels are in the cache; where that cannot be written to, it is not known next time."""
        if self._file is not None:
            with suppress(OSError):
                self._file.touch()


def _sources() -> Iterator[tuple[str, int, int]]:
    """Name, size and time of change of frame's files, whose code decides what is launched."""
    for root in frame.__path__:
        for folder, _, names in os.walk(root, followlinks=True):
            for name in names:
                if name.endswith(".py"):
                    status = os.stat(place := os.path.join(folder, name))
                    yield place, status.st_size, status.st_mtime_ns
