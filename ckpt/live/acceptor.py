"""The connections of a listening socket: each has a task, and their number has a bound.

Rules:

1. A connection is silent from its start until a request has come, and between two requests.
   If there are too many connections, or no descriptors, the one that is silent for longest makes
   place for the next.
2. An unexpected exception ends one connection, and goes to standard error.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from ckpt.live.wire import Wire

_ACCEPTS = 64
"""Connections that are accepted before others have their turn."""
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.1

ResultT = TypeVar("ResultT")


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
        self._crowd = Crowd(most)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closing = False
        """Whether no further request is to be served."""
        self._listen()

    async def silence(self, wire: Wire, wait: Awaitable[ResultT]) -> ResultT:
        """Returns the awaited result; the connection is silent meanwhile."""
        return await self._crowd.silence(wire, wait)

    async def close(self, seconds: float = 0.0) -> None:
        """Ends all connections; those with a request have `seconds` for their answers."""
        self.is_closing = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        while self._crowd.make_place():
            pass
        if self._tasks and seconds:
            await asyncio.wait(self._tasks, timeout=seconds)
        self._crowd.close()
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
                if not self._crowd.make_place():
                    self._loop.remove_reader(self._listener.fileno())
                    self._loop.call_later(_PAUSE_SECONDS, self._listen)
                return
            self._begin(connected)

    def _begin(self, connected: socket.socket) -> None:
        wire = self._prepare(connected)
        if wire is None:
            return
        if not self._crowd.admit(wire):
            wire.abort()
            return
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
            self._crowd.leave(wire)
            wire.close()


class Crowd:
    """The connections of a server: at most `limit` (rule 1)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: set[Wire] = set()
        self._silent: dict[Wire, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, wire: Wire) -> bool:
        """Adds a connection, if need be in the place of the one that is silent for longest."""
        if len(self._all) >= self._limit and not self.make_place():
            return False
        self._all.add(wire)
        self._silent[wire] = None  # it has said nothing yet
        return True

    def make_place(self) -> bool:
        """Closes the connection that is silent for longest; False if there is none."""
        oldest = next(iter(self._silent), None)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.close()
        return True

    def leave(self, wire: Wire) -> None:
        """Removes a connection, which its caller closes."""
        self._all.discard(wire)
        self._silent.pop(wire, None)

    async def silence(self, wire: Wire, wait: Awaitable[ResultT]) -> ResultT:
        """Returns the awaited first bytes; the connection counts as silent meanwhile."""
        self._silent.pop(wire, None)
        if wire in self._all:
            self._silent[wire] = None  # the last in the order
        try:
            return await wait
        finally:
            self._silent.pop(wire, None)

    def close(self) -> None:
        """Closes all connections."""
        for wire in list(self._all):
            wire.close()
