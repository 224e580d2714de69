"""What must be equal on all machines that compute one model."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from frame.interfaces import API_VERSION


def versions() -> dict[str, str]:
    """Versions by name, of this machine."""
    packages = {"frame": "frame-llm", "torch": "torch"}
    found = {name: version(package) for name, package in packages.items()}
    return found | {"Python": platform.python_version(), "plugin API": API_VERSION}


def differences(here: Mapping[str, Any], there: Mapping[str, Any], who: str, whom: str, every: str) -> str:
    """Why machine `who`, described by `there`, cannot compute with `whom`, described by `here`; "" where it can.

    The first version or setting that differs is named. `every` are all machines.
    """
    for kind, what in (("versions", "has {} {}, {} {}"), ("settings", "was given {} {}, {} {}")):
        mine, theirs = here[kind], there.get(kind)
        if not isinstance(theirs, dict):
            return f"{who} does not say its {kind}"
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                said = what.format(name, theirs.get(name), whom, mine.get(name))
                return f"{who} {said}; all {every} need the same"
    return ""


#: Places of a file that are compared, and bytes at each.
_SAMPLES, _SAMPLE_BYTES = 64, 256
_COMPARED = ("config.json", "tokenizer.json", "*.safetensors")


def fingerprints(folder: Path) -> dict[str, str]:
    """Short digests of a checkpoint's files by name: of a few kilobytes of each and its length, so that it is quick.

    Training changes nearly all weights, so that other weights of the same shapes are told apart.
    """
    found = {}
    for path in sorted(path for pattern in _COMPARED for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for place in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * place // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
        found[f"the file {path.name}"] = digest.hexdigest()[:12]
    return found
