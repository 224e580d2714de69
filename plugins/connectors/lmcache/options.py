"""The options of the lmcache connector. Knows no socket."""

from __future__ import annotations

import ipaddress

from pydantic import BaseModel, ConfigDict, Field, model_validator

from frame.quoting import quoted

from ..peer.options import Address


class LMCacheOptions(BaseModel):
    """Settings of the lmcache connector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    server: str = Field("tcp:127.0.0.1:5555", description="Where the LMCache server of this machine listens.")
    trusted_network: bool = Field(
        False, description="Allow a server that listens at other addresses than loopback, where all can speak to it."
    )
    max_bytes: int = Field(1 << 30, ge=1, description="Bytes of host memory, of each worker, for chunks to be stored.")
    timeout_seconds: float = Field(5.0, gt=0, le=60, description="Seconds that the server gets for each answer.")
    lookup_seconds: float = Field(
        0.5, gt=0, le=60, description="Seconds that a request waits to learn which chunks the server has."
    )
    retry_seconds: float = Field(5.0, ge=0, description="Seconds after a failure in which the server is not asked.")

    @model_validator(mode="after")
    def _check_server(self) -> LMCacheOptions:
        address = self.address()
        if not (self.trusted_network or _is_loopback(address.host)):
            raise ValueError(
                f"{self.server} is not a loopback address, and an LMCache server knows no secret: set trusted_network "
                "where only engines can reach it"
            )
        return self

    def address(self) -> Address:
        """Where the server listens. Raises `ValueError`."""
        try:
            address = Address.parse(self.server)
        except ValueError:
            address = Address()
        if not address.host:
            raise ValueError(f"{quoted(self.server)} is not an address of an LMCache server; write tcp:host:port")
        return address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
