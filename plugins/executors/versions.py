"""What must be equal on all machines that compute one model."""

from __future__ import annotations

import platform
from importlib.metadata import version

from frame.interfaces import API_VERSION


def versions() -> dict[str, str]:
    """Versions by name, of this machine."""
    packages = {"frame": "frame-llm", "torch": "torch"}
    found = {name: version(package) for name, package in packages.items()}
    return found | {"Python": platform.python_version(), "plugin API": API_VERSION}
