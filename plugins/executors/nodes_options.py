"""The options of the nodes executor, in a module that needs no torch."""

from __future__ import annotations

from pydantic import Field

from .process_options import ProcessOptions


class NodesOptions(ProcessOptions):
    """Settings of the nodes executor."""

    wait_seconds: float = Field(
        600.0, gt=0, description="Seconds in which all nodes must have come, and after which a node gives node 0 up."
    )
    address: str = Field(
        "", description="This machine's own address, at which others reach it; default: the one it reaches node 0 from."
    )
    key_file: str = Field(
        "",
        description="File with a secret that all nodes share: only who knows it is let in. Default: none, for networks "
        "that only trusted machines reach.",
    )
