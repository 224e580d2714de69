"""TLS of the public listener: its certificate, client certificates, and renewed files while connections stay open."""

from __future__ import annotations

import contextlib
import logging
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from frame.quoting import shortened

from ..config.errors import ConfigError
from ..config.server import ServerConfig

logger = logging.getLogger("frame.server")

_CERTIFICATE = re.compile(rb"^-----BEGIN (X509 |TRUSTED )?CERTIFICATE-----", re.MULTILINE)
_KEY = re.compile(rb"^-----BEGIN ([A-Z]+ )?PRIVATE KEY-----", re.MULTILINE)
#: OpenSSL's errors for a key and a certificate that do not belong together (of the same or of different types).
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
_LOCKED = re.compile(rb"^(-----BEGIN ENCRYPTED PRIVATE KEY-----|Proc-Type: 4,ENCRYPTED)", re.MULTILINE)


class Certificates(ssl.SSLContext):
    """Secures each new connection with the newest context that could be built from the files.

    A renewal makes a whole new context, so that nothing of the one before it is left: neither a certificate of another
    type, nor an authority that is no longer listed, nor the sessions that clients of that authority could resume (which
    stay with the first context where one is exchanged during a handshake, by `sni_callback`).
    """

    def __new__(cls, server: ServerConfig) -> Self:
        """The settings of this object itself are never used."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, server: ServerConfig) -> None:
        self._server = server
        self._seen = _state(server)  # taken before reading, so that files that change meanwhile are read again
        self._current = _context(server)

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Called by event loops to secure an accepted connection."""
        return self._current.wrap_bio(*arguments, **named)

    def look(self) -> None:
        """Reads the files again if one has changed, for new connections. A failure is only logged."""
        if (now := _state(self._server)) == self._seen:
            return
        self._seen = now
        try:
            self._current = _context(self._server)
        except ConfigError as error:
            logger.warning("the renewed certificate cannot be used, the one before it stays in use: %s", error)
        else:
            logger.info("a renewed certificate is in use")


def tls_context(server: ServerConfig) -> Certificates | None:
    """The context that secures connections; None without a certificate. Raises `ConfigError` for unusable files."""
    return None if server.ssl_certfile is None else Certificates(server)


def _context(server: ServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    files = _files(server)
    for flag, file in files.items():
        _check(flag, file, with_key=flag == ("--ssl-keyfile" if "--ssl-keyfile" in files else "--ssl-certfile"))
    try:
        # an empty password, so that OpenSSL never asks for one at the terminal
        context.load_cert_chain(str(server.ssl_certfile), server.ssl_keyfile, password=lambda: "")
        if server.ssl_ca_certs is not None:
            context.load_verify_locations(server.ssl_ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        named = ", ".join(f"{flag} {file}" for flag, file in files.items())
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if getattr(error, "reason", None) in _MISMATCHES:
            reason = "the private key is not that of the certificate"
        raise ConfigError(f"TLS cannot be set up with {named}: {reason}") from None
    return context


def _check(flag: str, file: str, with_key: bool) -> None:
    """Raises `ConfigError` for a file that cannot be read or lacks what its flag is for."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {shortened(file)} cannot be read: {error.strerror or error}") from None
    if flag != "--ssl-keyfile" and not _CERTIFICATE.search(content):
        raise ConfigError(f"{flag} {file} holds no certificate (PEM: a line -----BEGIN CERTIFICATE-----)")
    if with_key and not _KEY.search(content):
        remedy = "; give its file with --ssl-keyfile" if flag == "--ssl-certfile" else ""
        raise ConfigError(f"{flag} {file} holds no private key (PEM: a line -----BEGIN PRIVATE KEY-----){remedy}")
    if with_key and _LOCKED.search(content):
        raise ConfigError(
            f"the private key in {flag} {file} is locked with a password, for which a server cannot ask; "
            "`openssl pkey -in FILE -out NEW` unlocks it"
        )


def _files(server: ServerConfig) -> dict[str, str]:
    named = {
        "--ssl-certfile": server.ssl_certfile,
        "--ssl-keyfile": server.ssl_keyfile,
        "--ssl-ca-certs": server.ssl_ca_certs,
    }
    return {flag: file for flag, file in named.items() if file is not None}


def _state(server: ServerConfig) -> Sequence[object]:
    """A value that changes when a file does."""
    found = []
    for name in _files(server).values():
        facts = None
        with contextlib.suppress(OSError):  # it is gone, perhaps while it is replaced
            facts = Path(name).stat()
        found.append(facts and (facts.st_mtime_ns, facts.st_size, facts.st_ino))
    return found
