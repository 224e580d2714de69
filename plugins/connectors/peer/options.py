"""The options of the peer connector, and where an engine listens. Knows no socket."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from frame.quoting import quoted
from frame.settings import read_secret


class Address(NamedTuple):
    """A Unix socket (`path`), or a TCP one."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str, rank: int = 0) -> Address:
        """From "unix:/path" or "tcp:host:port"; each rank has its own, the next port or PATH.1, PATH.2, ….

        Raises `ValueError`.
        """
        kind, _, rest = text.partition(":")
        if kind == "unix" and rest.startswith("/"):
            return cls(path=f"{rest}.{rank}" if rank else rest)
        host, _, port = rest.rpartition(":")
        if kind == "tcp" and host and len(port) < 6 and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
            if int(port) + rank > 65535:
                raise ValueError(
                    f"{quoted(text)} leaves no port to the worker that is {rank} behind its own: give a lower one"
                )
            return cls(host=host.strip("[]"), port=int(port) + rank)
        raise ValueError(f"{quoted(text)} is not an address; write unix:/path or tcp:host:port")

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"tcp:{self.host}:{self.port}"


class PeerOptions(BaseModel):
    """Settings of the peer connector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: str | None = Field(
        None,
        description="Where other engines may ask for blocks: unix:/path or tcp:host:port; default: do not listen. "
        "Further workers take the next ports or PATH.1, PATH.2, ..., and so does each further data rank for its first.",
    )
    peers: list[str] = Field(
        default_factory=list, max_length=64, description="Addresses of the engines that are asked for blocks."
    )
    secret_file: str | None = Field(
        None, description="File with the secret that all engines share, 16 characters at least; TCP needs it."
    )
    max_bytes: int = Field(1 << 30, ge=1, description="Bytes of host memory for the copies that peers may ask for.")
    timeout_seconds: float = Field(5.0, gt=0, le=600, description="Seconds that a peer gets for each answer.")
    lookup_seconds: float = Field(
        0.5, gt=0, le=60, description="Seconds that a request waits to learn which blocks peers hold."
    )
    retry_seconds: float = Field(5.0, ge=0, description="Seconds after a failure in which a peer is not asked.")

    @model_validator(mode="after")
    def _check_addresses(self) -> PeerOptions:
        for text in (*self.peers, *([self.listen] if self.listen is not None else [])):
            if not Address.parse(text).path and self.secret_file is None:
                raise ValueError(f"{text} is reached over TCP, so secret_file must be given")
        return self

    def secret(self) -> bytes:
        """The secret that both sides prove to know; empty without a file (Unix sockets only). Raises `ValueError`."""
        return b"" if self.secret_file is None else read_secret(self.secret_file)
