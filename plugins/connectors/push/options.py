"""The options of the push connector, and to which engines it may send. Knows no socket."""

from __future__ import annotations

import ipaddress
import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

from frame.quoting import quoted
from frame.settings import read_secret

from ..nixl.options import matches

#: Of each buffer: places where senders show that they write, and what the device's allocator adds.
_BESIDE_BYTES = 4 << 20
_PLACE = re.compile(r"(?:\[([^\]\s]+)\]|([^\s:/]+)):([0-9]{1,5})")


class SendOptions(BaseModel):
    """What connectors have in common whose prefill engines send blocks to decode engines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    secret_file: str | None = Field(
        None,
        description="File with the secret that all engines share that exchange KV blocks, 16 characters at least; "
        "without one this engine exchanges none.",
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="TCP port at which prefill engines find this one; further data ranks take the next ones; 0: any "
        "free one, which is logged at the start.",
    )
    peers: list[str] = Field(
        default_factory=list,
        max_length=256,
        description="Hosts, or networks such as 10.1.0.0/16, of the engines that requests may name; default: this "
        "machine's own address only.",
    )
    buffer_bytes: int = Field(
        1 << 30,
        ge=1 << 16,
        le=1 << 40,
        description="Bytes of host memory of a worker for blocks that were received and that no request has yet; of "
        "this and of send_buffer_bytes the largest power of two in it is used.",
    )
    send_buffer_bytes: int = Field(
        1 << 28, ge=1 << 16, le=1 << 40, description="Bytes of host memory of a worker for blocks that are being sent."
    )
    wait_seconds: float = Field(
        10.0,
        gt=0,
        le=600,
        description="Seconds that a request waits for the first of its prompt's blocks; then it is computed here.",
    )
    expiry_seconds: float = Field(
        30.0,
        ge=1,
        le=600,
        description="Seconds after which blocks that nobody claimed, or of which no further ones come, are dropped, "
        "and for which a request that ended keeps those that are not on their way yet.",
    )
    timeout_seconds: float = Field(5.0, gt=0, le=60, description="Seconds that another engine gets for each answer.")
    retry_seconds: float = Field(5.0, ge=0, description="Seconds after a failure in which nothing is sent there.")
    max_held_share: float = Field(
        0.5, gt=0, le=1, description="Largest part of the KV cache that is kept for sending after requests ended."
    )

    checksums: bool = Field(
        True,
        description="Whether blocks are sent with a CRC-32, so that prompts whose blocks were changed on their way are "
        "computed; the engine that sends them decides.",
    )

    @field_validator("peers")
    @classmethod
    def _check_peers(cls, peers: list[str]) -> list[str]:
        for text in peers:
            if "/" in text:
                ipaddress.ip_network(text)
        return peers

    def secret(self) -> bytes | None:
        """The secret that both sides prove to know; None without a file. Raises `ValueError`."""
        return None if self.secret_file is None else read_secret(self.secret_file)

    def allows(self, host: str, own: str) -> bool:
        """Whether a request may name `host`; `own` is this machine's address."""
        return any(matches(host, text) for text in self.peers or [own])


class PushOptions(SendOptions):
    """Settings of the push connector."""

    decode: str | None = Field(
        None,
        description="HOST:PORT of the decode engine that gets the blocks of requests whose parameters name none.",
    )
    direct: bool = Field(
        True,
        description="Whether blocks of a GPU are written to the other engine's GPU where that is of the same machine "
        "and can be mapped; else all cross host memory.",
    )
    device_bytes: int = Field(
        1 << 30,
        ge=1 << 16,
        le=1 << 40,
        description="Bytes of a GPU for blocks that were written there and that no request has yet. The KV cache "
        "gets as many fewer, unless its size is given; where they are not free, blocks cross host memory.",
    )

    @field_validator("decode")
    @classmethod
    def _check_decode(cls, decode: str | None) -> str | None:
        if decode is not None:
            _place(decode)
        return decode

    @property
    def place(self) -> tuple[str, int] | None:
        """`decode` as host and port."""
        return None if self.decode is None else _place(self.decode)


def device_bytes(options: PushOptions, role: str, device_type: str) -> int:
    """Bytes of a worker's device for the buffer that this role needs, where blocks may go from device to device."""
    if device_type != "cuda" or not options.direct or options.secret_file is None or role == "producer":
        return 0
    return options.device_bytes + _BESIDE_BYTES


def _place(text: str) -> tuple[str, int]:
    found = _PLACE.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 65536:
        raise ValueError(f"{quoted(text)} is not HOST:PORT")
    return found[1] or found[2], int(found[3])
