"""What weights in memory were made of: who has the same key may use them. Imports no torch but for its version."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import torch

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.mesh import Placement
from frame.core.interfaces.provider import API_VERSION


def weights_key(config: FrameConfig, folder: Path, placement: Placement, device: str) -> str:
    """A digest of the whole configuration, the worker's place, the versions, and the files of the checkpoint `folder`.

    Of a file that is its name, size, number and time of change; none is read. Raises `OSError` where one cannot be
    looked at, `ConfigError` for settings that cannot leave the process.
    """
    place = [placement.rank, placement.local_rank, str(placement.mesh)]
    versions = [version("frame-llm"), API_VERSION, torch.__version__]
    facts = [config.to_plain(), str(folder), _files(folder), place, versions, device]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _files(folder: Path) -> list[list[object]]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            found.append([str(path), status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino])
    return found
