"""The entry point of the command `frame`: ctrl-C while Python still imports ends it without a traceback, as later.

Nothing is imported from the working directory, also where `python -m frame` runs in it.
"""

from __future__ import annotations

import os

from ..processes.python_command import leave_working_directory


def main() -> int:
    """Runs the command line of this process and returns the exit status."""
    _open_closed_files()
    leave_working_directory()
    try:
        from .main import main as run
    except KeyboardInterrupt:
        return 130
    return run()


def _open_closed_files() -> None:
    """Opens /dev/null as each standard file that is closed: a socket with its number would be lost in a child."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
