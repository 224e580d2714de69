"""TLS of the public listener: its certificate, who must show one, and taking renewed files while connections go on.

Knows no request.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from ..config.errors import ConfigError
from ..config.server import ServerConfig

logger = logging.getLogger("frame.server")

_LOOK_SECONDS = 1.0


class Certificates(ssl.SSLContext):
    """Secures each new connection with a context of its own making: the last one whose files did.

    A renewal makes a whole new context, so that nothing of the one before it is left: neither a certificate of another
    type, nor an authority that is no longer listed, nor the sessions that clients of that authority could resume (which
    stay with the first context where one is exchanged during a handshake, by `sni_callback`).
    """

    def __new__(cls, server: ServerConfig) -> Self:
        """Settings of its own are never used."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, server: ServerConfig) -> None:
        self._server = server
        self._seen = _state(server)  # before they are read: what changes meanwhile is read again
        self._current = _context(server)

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """What event loops secure an accepted connection by."""
        return self._current.wrap_bio(*arguments, **named)

    async def renew(self) -> None:
        """Looks for renewed files for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Reads the files again if one has changed, for connections made from then on. What fails is only logged."""
        if (now := _state(self._server)) == self._seen:
            return
        self._seen = now
        try:
            self._current = _context(self._server)
        except ConfigError as error:
            logger.warning("the renewed certificate is not taken, the one before it stays: %s", error)
        else:
            logger.info("a renewed certificate is in use")


def tls_context(server: ServerConfig) -> Certificates | None:
    """What connections are secured with; None without a certificate. Raises `ConfigError` for files that do not do."""
    return None if server.ssl_certfile is None else Certificates(server)


def _context(server: ServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    try:
        context.load_cert_chain(str(server.ssl_certfile), server.ssl_keyfile, password=lambda: "")  # asks nobody
        if server.ssl_ca_certs is not None:
            context.load_verify_locations(server.ssl_ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        named = ", ".join(f"{flag} {file}" for flag, file in _files(server).items())
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"TLS cannot be had from {named}: {reason}") from None
    return context


def _files(server: ServerConfig) -> dict[str, str]:
    named = {
        "--ssl-certfile": server.ssl_certfile,
        "--ssl-keyfile": server.ssl_keyfile,
        "--ssl-ca-certs": server.ssl_ca_certs,
    }
    return {flag: file for flag, file in named.items() if file is not None}


def _state(server: ServerConfig) -> Sequence[object]:
    """Changes when a file does."""
    found: list[object] = []
    for name in _files(server).values():
        try:
            facts = Path(name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((facts.st_mtime_ns, facts.st_size, facts.st_ino))
    return found
