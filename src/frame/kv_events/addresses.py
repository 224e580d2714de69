"""Where KV events are published: addresses of ZMQ, of which each data rank has its own."""

from __future__ import annotations

from ipaddress import ip_address

from frame.quoting import quoted

#: Bytes that the address of a Unix socket may have, with the longest suffix of a rank.
_MOST_PATH = 90


def problem(name: str, address: str, rank: int = 0, *, listens: bool = True) -> str | None:
    """Why the setting `name` cannot be `address`, in a sentence; None where it can, for the given data rank too.

    One that another process `listens` at is no address within this one.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "tcp":
        host, port = host_of(address), rest.rpartition(":")[2]
        if host == "*" and not listens:
            return f"{name} {address} names no host; write the server's, as tcp://127.0.0.1:{port}"
        if host == "*":
            return (
                f"{name} {address} would show the tokens of all prompts on every network of this machine: write the "
                f"address of one, as tcp://127.0.0.1:{port}, or tcp://0.0.0.0:{port} where all of them are trusted"
            )
        if not (port.isascii() and port.isdigit() and 0 < int(port) + rank < 65536 and int(port)):
            return f"{name} {address} has no port from 1 to 65535" + f" for data rank {rank}" * bool(rank)
        if host and not any(mark in host for mark in ";/@ "):
            return None
    elif scheme == "ipc" and rest.startswith("/"):
        return None if len(rest.encode()) <= _MOST_PATH else f"{name} {address} is longer than {_MOST_PATH} bytes"
    elif scheme == "inproc" and rest and listens:
        return None
    choices = "tcp://HOST:PORT, ipc:///PATH or inproc://NAME" if listens else "tcp://HOST:PORT or ipc:///PATH"
    return f"{name} {quoted(address)} is no address; write {choices}"


def host_of(address: str) -> str:
    """The host of a tcp address, empty for another one."""
    scheme, _, rest = address.partition("://")
    return rest.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""


def of_rank(address: str, rank: int) -> str:
    """The address of a data rank: the port of `address` plus the rank, or `address` with its suffix."""
    if not rank:
        return address
    if address.startswith("tcp://"):
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + rank}"
    return f"{address}_dp{rank}"


def clash(one: str, other: str, num_ranks: int) -> bool:
    """Whether ranks of two tcp addresses would share a port of a host."""
    if not one.startswith("tcp://") or not other.startswith("tcp://"):
        return one == other
    hosts = {host_of(one), host_of(other)}
    ports = [int(address.rpartition(":")[2]) for address in (one, other)]
    same = len(hosts) == 1 or any(is_open(host) for host in hosts)
    return same and abs(ports[0] - ports[1]) < num_ranks


def is_open(host: str) -> bool:
    """Whether a host stands for every network of the machine."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def is_local(address: str) -> bool:
    """Whether only processes of this machine reach an address."""
    try:
        return not address.startswith("tcp://") or ip_address(host_of(address)).is_loopback
    except ValueError:
        return False
