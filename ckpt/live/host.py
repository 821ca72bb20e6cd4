"""A host server while it runs: the table, the open files, the waiting requests, and its HTTP side.

    GET     /NAME?after=V&wait=S   the newest version, at once if it is newer than V
    POST    /NAME/leases           a lease on a version, with the places of its files
    POST    /NAME/leases/ID        renews it;  DELETE releases it
    GET     /NAME/V/               the files of a version
    GET     /NAME/V/FILE           a range of a file;  HEAD its size
    POST    /NAME/V/FILE           a delta, or the pieces that a reader of a swarm is to take next

Every request needs the token. All events are handled in one thread, so that no event sees another
one half done.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from ckpt.live.http_server import (
    HttpAnswer,
    HttpConnection,
    HttpRequest,
    check_token,
    file_answer,
    json_answer,
)
from ckpt.live.protocol import (
    WAIT_SECONDS,
    Address,
    RefusedError,
    files_json,
    object_of,
    version_or_newest,
)
from ckpt.live.shared_files import MemoryFile, SharedFile
from ckpt.live.swarm import TRACKER_SECONDS, Tracker
from ckpt.live.table import LOST_SECONDS, Table, unknown_name
from ckpt.stores.addresses import FILE, NAME, version_of
from formats.errors import FormatError

if TYPE_CHECKING:
    from ckpt.transfer.live_deltas import Area, Array

START_SECONDS = 30.0
"""The time in which a new server must get an owner."""
LEASE_HEADER = "ckpt-lease"
_TICK_SECONDS = 0.02
"""The shortest time between two ticks of the table."""


class Host:
    """The state of a server, and its answers to requests over HTTP."""

    def __init__(
        self,
        token: str,
        table: Table,
        address: Address,
        unix: str,
        on_ending: Callable[[], None] = lambda: None,
    ) -> None:
        self.token = token
        self.table = table
        self.address = address
        self.unix = unix
        self._on_ending = on_ending
        """Called when the name is ending."""
        self.server = secrets.token_hex(8)
        self.files: dict[tuple[int, str], MemoryFile] = {}
        self.trackers: dict[tuple[int, str], Tracker] = {}
        self.connections: Iterable[HttpConnection] = ()
        self._left: dict[int, set[bool]] = {}
        """By the version: whether connections that ended after an answer had a lease."""
        self.is_done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._waiters: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.call_later(START_SECONDS, self._end_if_idle)
        # More threads than processors would take the bytes from each other's cache.
        self._comparing = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    def notify(self) -> None:
        """Lets the table look at the time, and wakes all who wait for a change."""
        for version in self.table.tick(monotonic()):
            self.forget(version)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self.table.is_ending:
            self._on_ending()
        self._set_timer()

    async def wait(self, seconds: float) -> None:
        """Returns at the next change, or after `seconds`."""
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=max(seconds, 0.0))
        finally:
            self._waiters.discard(waiter)

    def due_in(self, seconds: float) -> None:
        """Says that the table has something to do at that time."""
        at = self._loop.time() + max(seconds, _TICK_SECONDS)
        if self._timer is None or at < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at, self.notify)

    def lease(
        self, wanted: int | None, is_bound: bool = False
    ) -> tuple[str, int, dict[str, object]]:
        """Takes a lease on a version, or on the newest one; returns key, version and answer."""
        key, seconds = secrets.token_hex(8), self.table.lease_seconds
        version = self.table.lease(wanted, key, monotonic(), is_bound)
        self.due_in(seconds)
        found = {"lease": key, "version": version, "seconds": seconds, "server": self.server}
        return key, version, {**found, "files": files_json(self.table.places(version))}

    def release(self, keys: Iterable[str]) -> None:
        """Ends leases whose reader has all bytes that it wants."""
        for key in keys:
            self.table.release(key)
        self.notify()

    def disown(self) -> None:
        """Takes notice that the connection of an owner has ended."""
        self.table.disown(monotonic())
        self.notify()
        self._end_if_idle()

    def forget(self, version: int) -> None:
        """Closes the files of a version, and the connections that are sending them."""
        for connection in self._senders(version):
            connection.wire.abort()
        for key in self._keys(version):
            self.files.pop(key).give()
            self.trackers.pop(key, None)
        self._left.pop(version, None)
        self._end_if_idle()

    def on_end(self, connection: HttpConnection) -> None:
        """Takes notice of a connection that has ended, perhaps before all its bytes were read."""
        for (version, _), file in self.files.items():
            if file is connection.content:
                self._left.setdefault(version, set()).add(connection.is_leased)
        reader = connection.reader if connection.is_left else None
        if reader is not None and all(
            open_connection.reader != reader for open_connection in self.connections
        ):
            self.table.lose(reader, monotonic())
            for tracker in self.trackers.values():
                tracker.leave(reader)
            self.due_in(LOST_SECONDS)

    def is_in_flight(self, version: int, overdue: bool) -> bool:
        """Whether bytes of the version may be on their way to a reader that wants them."""
        leases = {sender.is_leased for sender in self._senders(version)}
        leases |= self._left.get(version, set())
        return False in leases or (overdue and True in leases)

    def earlier(self, version: int, file: str) -> MemoryFile | None:
        """Returns the same rank's file of the version before, if it has the same size."""
        rank, new = file.rpartition("-")[2], self.files[version, file]
        for number, name in sorted(self.files, reverse=True):
            if number < version and name.rpartition("-")[2] == rank:
                old = self.files[number, name]
                return old if old.nbytes == new.nbytes else None
        return None

    def close(self) -> None:
        """Closes all files."""
        for file in self.files.values():
            file.give()
        self.files.clear()

    def _senders(self, version: int) -> list[HttpConnection]:
        files = {id(self.files[key]) for key in self._keys(version)}
        return [connection for connection in self.connections if id(connection.content) in files]

    def _keys(self, version: int) -> list[tuple[int, str]]:
        return [key for key in self.files if key[0] == version]

    def _end_if_idle(self) -> None:
        if not self.table.is_served:
            self.is_done.set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.table.next_at()
        if at is not None:
            self.due_in(at - monotonic())

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """Returns the answer to a request. Raises RefusedError."""
        check_token(request.headers, request.query, self.token)
        name, *rest = request.path.removeprefix("/").split("/")
        if not NAME.fullmatch(name):
            raise RefusedError("unknown", f"{request.path:.200}: the path must begin with a name")
        if name != self.table.name:
            raise unknown_name(name)
        if not rest:
            _only(request, "GET")
            return await self._newest(request)
        if rest[0] == "leases":
            return self._leases(request, rest[1:])
        version = version_of(rest[0])
        if version is None or len(rest) != 2:
            raise RefusedError("unknown", f"{request.path:.200}: the form is /NAME/VERSION/FILE")
        return await self._file(request, version, rest[1])

    async def _newest(self, request: HttpRequest) -> HttpAnswer:
        after, until = _after(request), monotonic() + _wait(request)
        while True:
            versions, left = self.table.visible(), until - monotonic()
            newest = max(versions, default=None)
            if left <= 0 or (newest is not None and newest > after):
                break
            await self.wait(left)
        found = {"name": self.table.name, "newest": newest, "versions": versions}
        more = {"unix": self.unix, "lease_seconds": self.table.lease_seconds}
        return json_answer({**found, "server": self.server, **more})

    def _leases(self, request: HttpRequest, rest: list[str]) -> HttpAnswer:
        if not rest:
            _only(request, "POST")
            return self._lease(request)
        if len(rest) != 1:
            raise RefusedError("unknown", f"{request.path:.200}: the form is /NAME/leases/ID")
        _only(request, "POST", "DELETE")
        request.connection.reader = rest[0]
        if request.method == "DELETE":
            self.release(rest)
            return json_answer({})
        version = self.table.renew(rest[0], monotonic())
        return json_answer({"version": version, "seconds": self.table.lease_seconds})

    def _lease(self, request: HttpRequest) -> HttpAnswer:
        body = object_of(request.body, "the body")
        if set(body) != {"version"}:
            raise RefusedError("protocol", 'the body of a lease is {"version": number or null}')
        wanted = version_or_newest("version", body["version"])
        key, _, found = self.lease(wanted, request.query.get("while") == "connected")
        request.connection.reader = key
        return json_answer({**found, "unix": self.unix})

    async def _file(self, request: HttpRequest, version: int, file: str) -> HttpAnswer:
        if not file:
            _only(request, "GET")
            sizes = {key: place.size for key, place in self.table.places(version).items()}
            return json_answer({"files": sizes, "folders": []})
        if not FILE.fullmatch(file):
            raise RefusedError("unknown", f"{request.path:.200}: no file has such a name")
        _only(request, "GET", "HEAD", "POST")
        if request.method == "POST":
            return await self._post(request, version, file)
        self.table.find(version, file)
        request.connection.is_leased = self._is_leased(request, version)
        return file_answer(self.files[version, file], request.headers.get("range"))

    def _is_leased(self, request: HttpRequest, version: int) -> bool:
        """Renews the lease that a request names; returns whether it is one on this version."""
        lease = request.headers.get(LEASE_HEADER)
        if lease is None:
            return False
        request.connection.reader = lease
        try:
            return self.table.renew(lease, monotonic()) == version
        except RefusedError:  # another server has it, or it has ended
            return not self.table.is_committed(version)

    async def _post(self, request: HttpRequest, version: int, file: str) -> HttpAnswer:
        body = object_of(request.body, "the body")
        if set(body) == {"delta"}:
            return await self._delta(version, file, body["delta"])
        if set(body) == {"pieces"}:
            return await self._pieces(request.connection, (version, file), body["pieces"])
        raise RefusedError("protocol", 'the body is {"delta": [area, ...]} or {"pieces": [...]}')

    async def _pieces(
        self, connection: HttpConnection, key: tuple[int, str], message: object
    ) -> HttpAnswer:
        """Answers a reader of a swarm, at once or when there is a piece for it."""
        self.table.find(*key)
        tracker = self.trackers.setdefault(key, Tracker(self.files[key]))
        until = monotonic() + TRACKER_SECONDS
        lease, own, wants = tracker.tell(connection.wire.socket.getpeername()[0], message)
        connection.reader = lease
        with suppress(RefusedError):  # another server has it, or it has ended
            self.table.renew(lease, monotonic())
        self.notify()
        while not (found := tracker.choose(lease, own, wants)):
            if not wants or monotonic() >= until or tracker.is_busy(lease):
                break
            await self.wait(until - monotonic())
            self.table.find(*key)  # raises if the version has been replaced
        self.notify()
        return json_answer({"pieces": [[*one, await tracker.digest(one.piece)] for one in found]})

    async def _delta(self, version: int, file: str, wanted: object) -> HttpAnswer:
        from ckpt.transfer.live_deltas import areas_in  # a server starts without numpy

        try:
            areas = areas_in(wanted)
        except FormatError as error:
            raise RefusedError("protocol", str(error)) from None
        self.table.find(version, file)
        where, new = f"{self.table.name}/{version}", self.files[version, file]
        old = self.earlier(version, file)
        if old is None:
            raise RefusedError("unknown", f"no version before {where} is like it")
        mapped = old.mapped(), new.mapped()
        try:
            async with self._comparing:
                data = await asyncio.to_thread(_delta_between, areas, *mapped)
        except MemoryError:
            raise RefusedError("memory", "no memory is left to make a delta") from None
        if not all(mapped_file.is_intact(area.offset) for area in areas for mapped_file in mapped):
            self.table.find(version, file)  # raises if the version has been replaced
            raise RefusedError("unknown", f"the version before {where} has been replaced")
        return HttpAnswer(data, headers=[("content-type", "application/octet-stream")])


def _only(request: HttpRequest, *methods: str) -> None:
    if request.method not in methods:
        raise RefusedError(
            "method", f"{request.method} {request.path:.200}: use {' or '.join(methods)}"
        )


def _after(request: HttpRequest) -> int:
    text = request.query.get("after", "")
    found = version_of(text)
    if text and found is None and text != "-1":
        raise RefusedError("protocol", f"after={text:.80}: give a version, or -1 for any")
    return -1 if found is None else found


def _wait(request: HttpRequest) -> float:
    text = request.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise RefusedError("protocol", f"wait={text:.80}: give seconds")
    return min(seconds, WAIT_SECONDS)


def _delta_between(areas: Sequence[Area], old: SharedFile, new: SharedFile) -> bytes:
    """Returns the delta of areas. Raises RefusedError if the bytes do not lie in memory."""
    from ckpt.transfer.live_deltas import make_delta  # a server starts without numpy

    def lend(file: SharedFile) -> list[Array]:
        found = [(area, file.view(area.offset, area.span)) for area in areas]
        return [area.of(view) for area, view in found if view is not None]

    before, after = lend(old), lend(new)
    if not len(areas) == len(before) == len(after):
        raise RefusedError("unknown", "an area is not in the memory of both versions")
    return make_delta(areas, before, after)
