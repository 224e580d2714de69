"""A torch profiler trace around some steps, started and stopped by request."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class Profiler:
    """Writes Chrome traces to `folder`, their names ending in `suffix`; without it, `start` says how to set one."""

    def __init__(self, folder: str | None, suffix: str = "") -> None:
        if folder is not None and not Path(folder).is_absolute():
            raise ValueError(f"profile_dir must be an absolute path, got {folder!r}")
        self._folder = folder
        self._suffix = suffix
        self._profile: Any = None

    def start(self) -> None:
        """Begins a trace. Raises when there is no folder for it or one is running."""
        if self._folder is None:
            raise ValueError("profiling needs profile_dir, the folder for traces")
        if self._profile is not None:
            raise RuntimeError("a profile is running already")
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self) -> str:
        """Ends the trace and returns the file it was written to."""
        if self._profile is None or self._folder is None:
            raise RuntimeError("no profile is running")
        self._profile.stop()
        path = Path(self._folder) / f"frame-{time.strftime('%Y%m%d-%H%M%S')}{self._suffix}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        return str(path)
