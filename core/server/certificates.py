"""TLS of the public listener: its certificate, who must show one, and taking a renewed one while connections go on.

Knows no request.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

from ..config.errors import ConfigError
from ..config.server import ServerConfig

logger = logging.getLogger("frame.server")

_LOOK_SECONDS = 1.0


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """What connections are secured with; None without a certificate. Raises `ConfigError` for files that do not do."""
    if server.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    try:
        _read(context, server)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(_files(server))
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"TLS cannot be had from {files}: {reason} (--ssl-certfile, --ssl-keyfile)") from None
    return context


async def renew(context: ssl.SSLContext, server: ServerConfig) -> None:
    """Reads the files again whenever they change, for connections made from then on. What fails is only logged."""
    seen = _state(server)
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if (now := _state(server)) == seen:
            continue
        seen = now
        try:
            _read(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server)  # a wrong pair must not reach the one in use
            _read(context, server)
        except (OSError, ValueError) as error:
            logger.warning("the renewed certificate is not taken, the one before it stays: %s", error)
        else:
            logger.info("a renewed certificate is in use")


def _read(context: ssl.SSLContext, server: ServerConfig) -> None:
    context.load_cert_chain(str(server.ssl_certfile), server.ssl_keyfile, password=lambda: "")  # asks nobody
    if server.ssl_ca_certs is not None:
        context.load_verify_locations(server.ssl_ca_certs)


def _files(server: ServerConfig) -> list[str]:
    named = (server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs)
    return [name for name in named if name is not None]


def _state(server: ServerConfig) -> Sequence[object]:
    """Changes when a file does."""
    found: list[object] = []
    for name in _files(server):
        try:
            facts = Path(name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((facts.st_mtime_ns, facts.st_size, facts.st_ino))
    return found
