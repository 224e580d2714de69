"""What is wrong with the secret of connectors that talk to other engines, before an engine loads anything."""

from __future__ import annotations

from typing import Protocol


class SecretOptions(Protocol):
    """Options of such a connector."""

    def secret(self) -> bytes | None:
        """What both sides prove to know. Raises `ValueError` where its file cannot be read, or holds too little."""


def check_secret(options: SecretOptions, num_workers: int, num_machines: int) -> None:
    """Raises `ValueError` as `secret` does."""
    del num_workers, num_machines
    options.secret()
