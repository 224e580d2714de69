"""The options of the nixl connector, and which hosts it may be sent to. Knows no socket."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from frame.quoting import shortened
from frame.settings import read_secret

#: The name of a network interface behind an IPv6 address.
_ZONE = re.compile(r"[0-9A-Za-z_.@-]{1,15}")


class NixlOptions(BaseModel):
    """Settings of the nixl connector."""

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
        description="TCP port on which decode engines ask this one for blocks; further data ranks take the next ones; "
        "0: any free one, which requests learn with their answer.",
    )
    peers: list[str] = Field(
        default_factory=list,
        max_length=256,
        description="Hosts, or networks such as 10.1.0.0/16, from which requests may have blocks pulled; default: this "
        "machine's own address only.",
    )
    lease_seconds: float = Field(
        30.0, ge=3, le=600, description="Seconds for which blocks are kept for a decode engine; it may renew them."
    )
    lookup_seconds: float = Field(
        5.0,
        gt=0,
        le=60,
        description="Seconds that a request waits for the prefill engine's answer; then it is computed.",
    )
    retry_seconds: float = Field(
        5.0, ge=0, description="Seconds after a failure in which a prefill engine is not asked."
    )
    stall_seconds: float = Field(
        20.0,
        gt=0,
        le=600,
        description="Seconds after which nobody waits for a read that has not ended, beyond those that its bytes take "
        "at 100 MB/s; then the prompt is computed.",
    )
    max_held_share: float = Field(
        0.5, gt=0, le=1, description="Largest part of the KV cache that is kept for decode engines at a time."
    )
    direct: bool = Field(
        True,
        description="Whether blocks in another GPU of this machine are read by one kernel where this process can map "
        "them, and not through NIXL.",
    )
    host_buffer: bool = Field(
        False,
        description="Exchange blocks through host memory, of which it takes as much as the KV cache has, because NIXL "
        "cannot reach the device's; so it is in any case on devices other than CPUs and CUDA GPUs.",
    )
    ucx_config: str | None = Field(
        None,
        description="Settings of NIXL's UCX backend, such as NET_DEVICES=mlx5_0:1; default: NET_DEVICES=lo with a "
        "loopback address, else UCX's own choice.",
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
        """Whether blocks may be pulled from `host`, which a request names; `own` is this machine's address."""
        return any(matches(host, text) for text in self.peers or [own])

    def backend_config(self, own: str) -> str:
        """What the UCX backend is told: without a word from the user it stays on a loopback address."""
        if self.ucx_config is not None:
            return self.ucx_config
        return "NET_DEVICES=lo" if is_loopback(own) else ""


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine alone."""
    address: Any = _address(host)
    return host == "localhost" if address is None else bool(address.is_loopback)


def peers_words(connector: str, peers: Sequence[str], own: str) -> str:
    """The hosts that requests may name, and the flag that lists them, for the end of a sentence."""
    listed = ", ".join(peers) if peers else f"none are listed, so {own}, the --kv-ip of this engine"
    return f"the hosts of --plugin.{connector}.peers ({shortened(listed)})"


def matches(host: str, text: str) -> bool:
    """Whether `host` is `text`, or lies in the network that it names."""
    if "/" not in text:
        return host == text
    address = _address(host)
    return address is not None and address in ipaddress.ip_network(text)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    zone = host.partition("%")[2]
    if zone and _ZONE.fullmatch(zone) is None:  # in which `ipaddress` takes anything, also what forges lines of the log
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
