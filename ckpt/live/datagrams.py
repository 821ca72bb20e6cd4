"""Messages with descriptors over a Unix socket of datagrams in order (SOCK_SEQPACKET).

A message longer than `MESSAGE_BYTES` travels in shared memory: the datagram is then
`{"in": position of its descriptor, "nbytes": length}`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from ckpt.live.protocol import (
    LONG_MESSAGE_BYTES,
    MESSAGE_BYTES,
    MOST_DESCRIPTORS,
    RefusedError,
    json_bytes,
    object_of,
)

_LONG = b'{"in":'


def send_message(connected: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Sends a message. Raises BlockingIOError if the socket does not block and cannot take it."""
    if len(data) <= MESSAGE_BYTES:
        socket.send_fds(connected, [data], list(descriptors))
        return
    memory = memory_of(data)
    try:
        head = json_bytes({"in": len(descriptors), "nbytes": len(data)})
        socket.send_fds(connected, [head], [*descriptors, memory])
    finally:
        os.close(memory)


def receive_message(connected: socket.socket) -> tuple[bytes, list[int]]:
    """Returns a message and its descriptors; no bytes at the end of the connection.

    Raises RefusedError if the message is malformed, and has then closed its descriptors.
    """
    data, descriptors, flags, _ = socket.recv_fds(
        connected, MESSAGE_BYTES + 1, MOST_DESCRIPTORS + 3, socket.MSG_CMSG_CLOEXEC
    )
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) > MESSAGE_BYTES:
            raise RefusedError(
                "large",
                f"a message has at most {MESSAGE_BYTES} bytes and {MOST_DESCRIPTORS} descriptors",
            )
        if data.startswith(_LONG):
            data = _long_message(data, descriptors)
    except BaseException:
        close_all(descriptors)
        raise
    return data, descriptors


def close_all(descriptors: Sequence[int]) -> None:
    """Closes descriptors."""
    for one in descriptors:
        with suppress(OSError):
            os.close(one)


def memory_of(data: bytes) -> int:
    """Returns the descriptor of new shared memory with these bytes."""
    memory = os.memfd_create("ckpt-message", os.MFD_CLOEXEC)
    at = 0
    while at < len(data):
        at += os.pwrite(memory, data[at:], at)
    return memory


def _long_message(data: bytes, descriptors: list[int]) -> bytes:
    found = object_of(data, "a message")
    at, nbytes = found.get("in"), found.get("nbytes")
    if type(at) is not int or at != len(descriptors) - 1 or type(nbytes) is not int:
        raise RefusedError("protocol", "the last descriptor of a long message has its bytes")
    if not 0 <= nbytes <= LONG_MESSAGE_BYTES or os.fstat(descriptors[at]).st_size != nbytes:
        raise RefusedError("large", f"a long message has at most {LONG_MESSAGE_BYTES} bytes")
    memory = descriptors.pop()
    try:
        return os.pread(memory, nbytes, 0)
    finally:
        os.close(memory)
