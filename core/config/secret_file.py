"""Secrets that several processes are to know, each from a file of its own."""

from __future__ import annotations

from pathlib import Path

from frame.quoting import shortened

#: Fewer characters could be guessed.
LEAST_CHARACTERS = 16


def read_secret(path: str) -> bytes:
    """The secret in a file, without white space around it; raises `ValueError` where there is none, or a short one."""
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ValueError(f"secret_file {shortened(path)} cannot be read: {error.strerror or error}") from None
    if len(secret) < LEAST_CHARACTERS:
        raise ValueError(f"secret_file {shortened(path)} must hold at least {LEAST_CHARACTERS} characters")
    return secret
