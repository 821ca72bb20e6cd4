"""The connections of a server: bytes of non-blocking sockets with time-outs, and their number.

Rules:

1. Bodies go from a file to the socket by `sendfile`, in calls of up to `TURN_BYTES`: between two
   calls, other connections have their turn.
2. After `abort`, nothing more is sent, not even bytes that the system has buffered.
3. An operation tries first and waits then, because TLS may have bytes that the socket has not.
4. An operation has one time-out, however often it waits: the parts of a TLS record, or of the
   agreement on keys, may come byte by byte.

The event loop's own transports hide the progress of a `sendfile`, and so a reader that stalls.

[Note: the number of connections]
Each connection has a task, and their number has a bound:

1. A connection is silent from its start until a request has come, and between two requests.
   If there are too many connections, or no descriptors, the one that is silent for longest makes
   place for the next.
2. An unexpected exception ends one connection, and goes to standard error.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ckpt.live.protocol import Segment

BUFFER_BYTES = 4 << 20
"""The buffer of a socket that sends files: few wake-ups, and the reader need not wait for one."""
TURN_BYTES = 16 << 20
"""The most bytes that one connection sends before others have their turn."""
_BLOCK_BYTES = 256 << 10
"""The size of a write where `sendfile` is not possible."""
_LAST_READS = 16
_LAST_SECONDS = 1.0
"""The patience with the rest of a refused request."""
_RESET = struct.pack("ii", 1, 0)
_WANTS_READ = (BlockingIOError, ssl.SSLWantReadError)

ResultT = TypeVar("ResultT")


class Wire:
    """A connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._number = connected.fileno()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_large = False
        self.is_closed = False

    async def handshake(self, seconds: float) -> None:
        """Agrees on keys with the other side, if the connection is encrypted."""
        if isinstance(self.socket, ssl.SSLSocket):
            await self._try(self.socket.do_handshake, seconds)

    async def receive(self, nbytes: int, seconds: float) -> bytes:
        """Returns the next bytes; none at the end of the stream."""
        return await self._try(lambda: self.socket.recv(nbytes), seconds)

    async def send(self, data: bytes | memoryview, seconds: float) -> None:
        """Sends all of the data; `seconds` is the longest time without progress."""
        rest = memoryview(data)
        while rest:
            operation = partial(self.socket.send, rest)
            rest = rest[await self._try(operation, seconds, is_write=True) :]

    async def send_file(self, segment: Segment, seconds: float, is_slow: bool = False) -> None:
        """Sends a range of a file. Raises EOFError if the file has become shorter.

        If `is_slow`, threads read the file: a disk may take long. Nobody may then close this
        connection meanwhile, because its number would be another one's.
        """
        at, end = segment.offset, segment.offset + segment.nbytes
        step = self._block if isinstance(self.socket, ssl.SSLSocket) else self._sendfile
        while at < end:
            sent = await step(segment.descriptor, at, end - at, seconds, is_slow)
            if not sent:
                raise EOFError
            at += sent
            if at < end:
                await asyncio.sleep(0)

    def enlarge(self) -> None:
        """Gives the socket a large buffer to send from."""
        if self._is_large:
            return
        self._is_large = True
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    async def finish(self) -> None:
        """Ends the stream, and lets the other side read the answer before the connection closes.

        A close with unread bytes would reset the connection and the answer with it.
        """
        self.socket.shutdown(socket.SHUT_WR)
        for _ in range(_LAST_READS):
            if not await self.receive(_BLOCK_BYTES, _LAST_SECONDS):
                return

    def abort(self) -> None:
        """Resets the connection; the operation that waits for it raises ConnectionAbortedError."""
        with suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        if self.is_closed:
            return
        self.is_closed = True
        # Now, and not when the waiting task ends: the number may be another socket's by then.
        self._loop.remove_reader(self._number)
        self._loop.remove_writer(self._number)
        self.socket.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionAbortedError())

    async def _sendfile(
        self, descriptor: int, at: int, nbytes: int, seconds: float, is_slow: bool
    ) -> int:
        count = min(nbytes, TURN_BYTES)
        operation = partial(os.sendfile, self._number, descriptor, at, count)
        return await self._try(operation, seconds, is_write=True, in_thread=is_slow)

    async def _block(
        self, descriptor: int, at: int, nbytes: int, seconds: float, is_slow: bool
    ) -> int:
        read = partial(os.pread, descriptor, min(nbytes, _BLOCK_BYTES), at)
        data = await asyncio.to_thread(read) if is_slow else read()
        await self.send(data, seconds)
        return len(data)

    async def _try(
        self,
        operation: Callable[[], ResultT],
        seconds: float,
        is_write: bool = False,
        in_thread: bool = False,
    ) -> ResultT:
        until = self._loop.time() + seconds
        while True:
            if self.is_closed:
                raise ConnectionAbortedError
            try:
                return await asyncio.to_thread(operation) if in_thread else operation()
            except ssl.SSLWantWriteError:
                waits_to_write = True
            except _WANTS_READ as error:
                waits_to_write = is_write and isinstance(error, BlockingIOError)
            await self.ready(max(until - self._loop.time(), 0.0), waits_to_write)

    async def ready(self, seconds: float, to_write: bool = False) -> None:
        """Waits until the socket can be read, or written. Raises TimeoutError after `seconds`."""
        self._waiter = waiter = self._loop.create_future()
        timer = self._loop.call_later(seconds, _late, waiter)
        add = self._loop.add_writer if to_write else self._loop.add_reader
        add(self._number, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None
            if not self.is_closed:
                (self._loop.remove_writer if to_write else self._loop.remove_reader)(self._number)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _late(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


_ACCEPTS = 64
"""Connections that are accepted before others have their turn."""
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.1


class Acceptor:
    """Accepts connections, and closes the listening socket at the end.

    `prepare` makes a `Wire` of a socket, or closes it and returns None; `serve` serves it.
    """

    def __init__(
        self,
        listener: socket.socket,
        most: int,
        prepare: Callable[[socket.socket], Wire | None],
        serve: Callable[[Wire], Coroutine[None, None, None]],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._prepare = prepare
        self._serve = serve
        self._most = most
        self._all: set[Wire] = set()
        self._silent: dict[Wire, None] = {}
        """In the order in which they have become so."""
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closing = False
        """Whether no further request is to be served."""
        self._listen()

    async def silence(self, wire: Wire, wait: Awaitable[ResultT]) -> ResultT:
        """Returns the awaited result; the connection is silent meanwhile."""
        self._silent.pop(wire, None)
        if wire in self._all:
            self._silent[wire] = None  # the last in the order
        try:
            return await wait
        finally:
            self._silent.pop(wire, None)

    async def close(self, seconds: float = 0.0) -> None:
        """Ends all connections; those with a request have `seconds` for their answers."""
        self.is_closing = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        while self._make_place():
            pass
        if self._tasks and seconds:
            await asyncio.wait(self._tasks, timeout=seconds)
        for wire in list(self._all):
            wire.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(self) -> None:
        if not self.is_closing:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                connected, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                if not self._make_place():
                    self._loop.remove_reader(self._listener.fileno())
                    self._loop.call_later(_PAUSE_SECONDS, self._listen)
                return
            self._begin(connected)

    def _begin(self, connected: socket.socket) -> None:
        wire = self._prepare(connected)
        if wire is None:
            return
        if len(self._all) >= self._most and not self._make_place():
            wire.abort()
            return
        self._all.add(wire)
        self._silent[wire] = None  # it has said nothing yet
        task = self._loop.create_task(self._run(wire))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, wire: Wire) -> None:
        try:
            await self._serve(wire)
        except (OSError, EOFError):
            pass  # the other side has ended, or stalls; it gets a reset if it misses bytes
        except Exception:
            traceback.print_exc(file=sys.stderr)
        finally:
            self._leave(wire)
            wire.close()

    def _make_place(self) -> bool:
        """Closes the connection that is silent for longest; False if there is none (rule 1)."""
        oldest = next(iter(self._silent), None)
        if oldest is None:
            return False
        self._leave(oldest)
        oldest.close()
        return True

    def _leave(self, wire: Wire) -> None:
        self._all.discard(wire)
        self._silent.pop(wire, None)
