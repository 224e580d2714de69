"""The entry point of the command `frame`: ctrl-C while Python still imports ends it without a traceback, as later.

Nothing is imported from the working directory, also where `python -m frame` runs in it.
"""

from __future__ import annotations

from ..processes.python_command import leave_working_directory


def main() -> int:
    """Runs the command line of this process and returns the exit status."""
    leave_working_directory()
    try:
        from .main import main as run
    except KeyboardInterrupt:
        return 130
    return run()
