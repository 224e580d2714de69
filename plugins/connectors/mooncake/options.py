"""The options of the mooncake connector. Knows no socket."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..push.options import SendOptions


class MooncakeOptions(SendOptions):
    """Settings of the mooncake connector."""

    bootstrap_port: int = Field(
        8998,
        ge=0,
        le=65535,
        description="TCP port at which this engine, when it computes prompts, answers GET /query; further data ranks "
        "take the next ones; 0: any free one, which is logged at the start.",
    )
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="How Mooncake moves bytes.")
    device: str = Field(
        "", max_length=256, description="Network device that Mooncake uses for rdma; default: its choice."
    )
    timeout_seconds: float = Field(
        5.0,
        gt=0,
        le=60,
        description="Seconds for all that a prefill engine is asked about a prompt, together, and for each answer of "
        "another engine while blocks are sent.",
    )
    trusted_network: bool = Field(
        False,
        description="Whether only machines that you trust reach this one. Mooncake listens on all addresses, and "
        "whoever connects to it may read and write the memory for blocks; without this it is not started.",
    )
