"""Listening sockets at the configured address."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from frame.quoting import shortened

from ..config.errors import ConfigError
from ..config.server import ServerConfig

_BACKLOG = 2048


def bind_all(server: ServerConfig) -> list[socket.socket]:
    """One listening socket for each API process, among which the kernel spreads connections; for a path, one for all.

    Each socket outlives its process, so that connections wait for the replacement of one that dies. Raises
    `ConfigError`.
    """
    count = server.api_server_count
    if server.uds is not None or count == 1:
        return [bind(server)] * count
    probe = bind(server)  # first without sharing, since a shared bind would not notice that the port is taken
    address = server.model_copy(update={"port": probe.getsockname()[1]})
    probe.close()
    return [bind(address, shared=True) for _ in range(count)]


def bind_admin(server: ServerConfig) -> socket.socket | None:
    """The admin listener: a Unix socket of this user, or loopback; None when none is configured."""
    if server.admin_uds is not None:
        return _bind_unix(Path(server.admin_uds), 0o600)
    if server.admin_port is not None:
        return bind(ServerConfig(host="127.0.0.1", port=server.admin_port), settings="--admin-port")
    return None


def bind(server: ServerConfig, shared: bool = False, settings: str = "--port or --host") -> socket.socket:
    """A listening socket at the configured address; raises `ConfigError`, which names `settings`, when that fails.

    `shared`: other sockets of this user may listen there, too.
    """
    if server.uds is not None:
        return _bind_unix(Path(server.uds), 0o660)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid name
        raise ConfigError(
            f"cannot listen on {shortened(server.host)}:{server.port}: {getattr(error, 'strerror', None) or error}; "
            f"choose another {settings}"
        ) from None
    return listener


def _bind_unix(path: Path, mode: int) -> socket.socket:
    """A listening socket whose file has at most the permissions `mode`, from the moment that it exists."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()  # the file of a server that has ended
                else:
                    raise FileExistsError(errno.EADDRINUSE, "a server listens there already")
        os.fchmod(listener.fileno(), mode)  # Linux gives the file these permissions minus the umask
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {shortened(path)}: {error.strerror or error}") from None
    return listener


def close_all(server: ServerConfig, *listeners: socket.socket | None) -> None:
    """Closes the listeners of a server, and removes the files of its Unix sockets."""
    for listener in listeners:
        if listener is not None:
            listener.close()
    for path in (server.admin_uds, server.uds):
        if path is not None:
            Path(path).unlink(missing_ok=True)


def url(listener: socket.socket, secure: bool = False) -> str:
    """The URL of the listener; `secure`: it speaks TLS."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
