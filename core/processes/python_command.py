"""The command line with which frame starts Python processes. Imports nothing heavy.

`python -m` puts the working directory first in `sys.path`. That may be a checkpoint's folder, whose files are data: a
`uvicorn.py` in it must never run.
"""

from __future__ import annotations

import os
import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs an installed module and imports nothing from the working directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def leave_working_directory() -> None:
    """Removes the working directory from `sys.path`, and keeps it out of that of child processes."""
    if sys.path and not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"
