"""Copies a file from the memory of another server into new memory of this one."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import h11

from ckpt.live.address import authority
from ckpt.live.memory_file import MemoryFile
from ckpt.live.protocol import STALL_SECONDS, Address, RefusedError, Segment
from ckpt.live.wire import Wire
from ckpt.shared_memory import mapped, new_memory, take_huge_pages

CONNECT_SECONDS = 10.0
COPY = "copy"
"""The lease that a copying server names."""
_TURN_BYTES = 4 << 20
_HEAD_BYTES = 4 << 10


async def pull(
    source: Address, path: str, token: str, reserve: Callable[[int], None]
) -> MemoryFile:
    """Returns a copy of the file at `path` of another server.

    Calls `reserve` with the size before any memory is taken. Raises RefusedError if the other
    server refuses, cannot be reached, or stops.
    """
    where = f"http://{authority(*source)}{path}"
    try:
        wire = await _connected(source)
        try:
            return await _copy(wire, where, source, path, token, reserve)
        finally:
            wire.close()
    except (OSError, EOFError, KeyError, OverflowError, ValueError, h11.ProtocolError) as error:
        said = str(error) or type(error).__name__
        raise RefusedError("pull", f"{where}: the copy failed: {said}") from None


async def _connected(source: Address) -> Wire:
    # The system's resolver blocks, so that a thread asks it.
    found = await asyncio.to_thread(socket.getaddrinfo, *source, type=socket.SOCK_STREAM)
    family, kind, proto, _, where = found[0]
    connected = socket.socket(family, kind, proto)
    wire = Wire(connected)
    try:
        failed = connected.connect_ex(where)
        if failed == errno.EINPROGRESS:
            await wire.ready(CONNECT_SECONDS, to_write=True)
            failed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
    except BaseException:
        wire.close()
        raise
    return wire


async def _copy(
    wire: Wire,
    where: str,
    source: Address,
    path: str,
    token: str,
    reserve: Callable[[int], None],
) -> MemoryFile:
    parser = h11.Connection(h11.CLIENT)
    headers = [
        ("host", authority(*source)),
        ("authorization", f"Bearer {token}"),
        ("connection", "close"),
        # The bytes count as read once this server has answered, as those of a released lease do.
        ("ckpt-lease", COPY),
    ]
    asks = parser.send(h11.Request(method="GET", target=path, headers=headers))
    await wire.send(asks, STALL_SECONDS)
    parser.send(h11.EndOfMessage())
    response = await _head(wire, parser)
    if response.status_code != 200:
        raise RefusedError(
            "pull", f"{where}: that server answered with status {response.status_code}"
        )
    nbytes = int(dict(response.headers)[b"content-length"])
    reserve(nbytes)
    with _new_memory(nbytes) as (descriptor, view):
        at = 0
        while isinstance(event := parser.next_event(), h11.Data):
            view[at : at + len(event.data)] = event.data
            at += len(event.data)
        while at < nbytes:
            with view[at : at + _TURN_BYTES] as part:
                got = await wire.receive_into(part, STALL_SECONDS)
            if not got:
                raise EOFError(f"it ended after {at} of {nbytes} bytes")
            at += got
            await asyncio.sleep(0)
        return MemoryFile([Segment(descriptor, 0, nbytes)])


async def _head(wire: Wire, parser: h11.Connection) -> h11.Response:
    while (event := parser.next_event()) is h11.NEED_DATA:
        parser.receive_data(await wire.receive(_HEAD_BYTES, STALL_SECONDS))
    if not isinstance(event, h11.Response):
        raise EOFError("it ended without an answer")
    return event


@contextmanager
def _new_memory(nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yields the descriptor and the bytes of new memory, which an error frees."""
    descriptor = new_memory("ckpt-replica")
    try:
        os.ftruncate(descriptor, nbytes)
        if not nbytes:
            yield descriptor, memoryview(bytearray())
            return
        with mapped(descriptor) as view:
            take_huge_pages(view)
            yield descriptor, view
    except BaseException:
        os.close(descriptor)
        raise
