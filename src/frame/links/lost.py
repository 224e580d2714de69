"""Connections that end when their peer's machine has gone. By itself TCP notices that late, or never."""

from __future__ import annotations

import socket

#: Seconds after which a machine that does not answer is given up.
LOST_SECONDS = 20
#: Seconds of silence before a connection is probed, between probes, and the probes that may stay without an answer.
_PROBES = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


def end_when_lost(connection: socket.socket) -> None:
    """Has a TCP connection end when it idles and nobody answers probes, or when nobody takes what was sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    # without it probes wait for data that is under way, which is sent again for a quarter of an hour
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS)
