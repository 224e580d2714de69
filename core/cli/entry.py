"""Where the command `frame` begins: an interrupt while Python still imports ends in silence, as a later one does."""

from __future__ import annotations


def main() -> int:
    """Runs the command line of this process and returns the exit status."""
    try:
        from .main import main as run
    except KeyboardInterrupt:
        return 130
    return run()
