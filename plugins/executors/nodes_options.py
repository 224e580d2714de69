"""The options of the nodes executor, in a module that needs no torch."""

from __future__ import annotations

from pydantic import Field

from frame.settings import read_secret

from .process_options import ProcessOptions


class NodesOptions(ProcessOptions):
    """Settings of the nodes executor."""

    wait_seconds: float = Field(
        600.0, gt=0, description="Seconds in which all nodes must have come, and after which a node gives node 0 up."
    )
    address: str = Field(
        "", description="This machine's own address, at which others reach it; default: the one it reaches node 0 from."
    )
    secret_file: str | None = Field(
        None,
        description="File with the secret that all nodes share, 16 characters at least: only who knows it is let in. "
        "Default: none, for networks that only trusted machines reach.",
    )

    def secret(self) -> bytes:
        """The secret, empty without a file; raises `ValueError` for a file that has none."""
        return b"" if self.secret_file is None else read_secret(self.secret_file)
