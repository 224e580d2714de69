"""`frame worker FD`: a worker process, started by an executor; the descriptor is its socket to the engine."""

from __future__ import annotations

import argparse

from ..interfaces.endpoint import Command


class WorkerCommand(Command):
    """Serves one engine until its socket closes."""

    help = "Internal: a worker process, started by an executor."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the inherited socket."""
        parser.add_argument("descriptor", type=int, help="File descriptor of an inherited socket.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the worker's loop; the exit status is the worker's."""
        from ..worker.worker_process import serve_worker

        return serve_worker(arguments.descriptor)
