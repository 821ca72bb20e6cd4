"""Sockets that listen, and the number of connections for which there are descriptors."""

from __future__ import annotations

import resource
import socket
from contextlib import suppress

EVERY_ADDRESS = ("", "0.0.0.0", "::")
"""These mean all addresses of the host: a server can listen there, and no reader can connect."""
_LEAST, _MOST = 64, 100_000
"""Bounds of the number of connections."""


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this host. Raises OSError."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family, backlog=1024)


def most_connections() -> int:
    """Returns the number of connections that a server may have; lifts the limit of descriptors.

    A quarter of the descriptors stays for files.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(max(soft // 4 * 3, _LEAST), _MOST)
