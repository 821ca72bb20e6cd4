"""The process of a host server: no torch, one thread, no part in any training.

`ckpt.live.process` starts it: the options come by standard input, and one answer goes to standard
output. Rules:

1. The process has a session of its own and ignores signals to a whole job: it outlives trainers.
   It ends when it serves no name any more, and if no owner comes within `START_SECONDS`.
2. It gives up the place of its socket as soon as its last name is ending, so that a new publisher
   of the same name need not wait for the old one's readers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.live import runtime
from ckpt.live.control import ControlServer
from ckpt.live.host import Host
from ckpt.live.http_server import HttpServer
from ckpt.live.listening import listen, most_connections
from ckpt.live.process import IGNORED, HostOptions, HostServer
from ckpt.live.protocol import Address, RefusedError
from ckpt.live.server import LiveApp
from ckpt.live.table import Table
from sharding.errors import CkptError


def main() -> None:
    """Serves until there is nothing to serve."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    options = HostOptions(**json.loads(sys.stdin.buffer.read()))
    if os.fork():  # the trainer's child ends at once, so that none of its children is left over
        os._exit(0)
    os.setsid()
    os.chdir("/")
    path = runtime.socket_path(options.name)
    try:
        with runtime.locked(path.parent):
            _refuse_second(options.name)
            runtime.remove_dead()
            listener = listen(options.address, options.port)
            unix = runtime.listen(path)
    except RefusedError as refusal:
        _tell(refusal.json())
        return
    except (OSError, CkptError) as error:
        runtime.remove_empty_log(path)
        _tell(_failure(options, error))
        return
    place = _Place(path, runtime.inode(path))
    try:
        asyncio.run(_serve(options, listener, unix, place))
    finally:
        place.leave()
        runtime.remove_empty_log(path)


@dataclass(slots=True)
class _Place:
    """The place of the socket in the folder."""

    path: Path
    inode: int | None

    def leave(self) -> None:
        """Removes the socket, unless another server has taken its place."""
        if self.inode is None:
            return
        with suppress(OSError), runtime.locked(self.path.parent):
            if runtime.inode(self.path) == self.inode:
                self.path.unlink()
        self.inode = None


async def _serve(
    options: HostOptions, listener: socket.socket, unix: socket.socket, place: _Place
) -> None:
    address: Address = (options.advertise, listener.getsockname()[1])
    table = Table(options.lease_seconds, options.memory_bytes)
    host = Host(options.token, table, address, str(place.path), place.leave)
    most = most_connections()
    http = HttpServer(listener, LiveApp(host), most)
    host.connections = http.connections
    control = ControlServer(unix, host, most // 8)
    _tell({"ok": {}})
    await host.is_done.wait()
    await control.close()
    await http.close()
    host.close()


def _refuse_second(name: str) -> None:
    try:
        other = HostServer.attach(name)
    except CkptError:
        return
    with other:
        raise RefusedError(
            "exists",
            f"{name} is served on this host already, by process {other.pid}; take another name, "
            "or end that publisher",
        )


def _failure(options: HostOptions, error: Exception) -> dict[str, Any]:
    where = f"{options.address}:{options.port}"
    return {"error": "internal", "message": f"the server cannot listen at {where}: {error}"}


def _tell(answer: dict[str, Any]) -> None:
    """Gives the answer to the process that waits, and lets go of it."""
    os.write(1, json.dumps(answer).encode())
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
