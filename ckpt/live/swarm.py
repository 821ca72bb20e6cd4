"""A swarm: readers of one live state that give one another its bytes.

A file is cut into *pieces*. The server that has the file is the *tracker*: it knows the pieces of
each reader that shares, and tells a reader which piece to take next, and from whom. A reader that
shares is a *source*: it keeps the pieces that it has read, and a thread serves them. Rules:

1. The bytes of a file are shared, not tensors: a source and its readers may have any layouts, and
   a program may change its tensors while it shares. Sets of pieces are numbers with a bit for each.
2. A piece is used, and offered, once it has the checksum that the tracker has made of its memory. A
   source that sends other bytes, or none, gets no more readers of this version.
3. A source has one version. The next one takes its place, by deltas where they pay.
4. Sharing is never the reason of an error: a read that the swarm does not fulfil goes to the
   server of the file, as without a swarm.
5. A piece that is on its way from the server to one reader is not sent to others, who wait for that
   reader or take other pieces, unless the reader is lost or `STALE_SECONDS` are over.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from random import random
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import xxhash

from ckpt.errors import StoreError
from ckpt.live.http_server import (
    HttpAnswer,
    HttpConnection,
    HttpRequest,
    HttpServer,
    check_token,
    file_answer,
    listen,
    most_connections,
)
from ckpt.live.protocol import Address, RefusedError, Segment, address_of
from ckpt.live.shared_files import MemoryFile
from ckpt.saving.arena import map_memory, new_memory
from ckpt.stores.addresses import parse, version_of
from ckpt.stores.http_client import HttpClient, HttpOptions, Place, path_of
from formats.errors import FormatError
from formats.storage import Reader
from sharding.errors import CkptError

if TYPE_CHECKING:
    from ckpt.transfer.live_deltas import Area, Delta

LEAST_PIECE, MOST_PIECE = 64 << 10, 4 << 20
PIECES = 128
"""The pieces of a file whose size is between the two bounds then."""
FRESH = 2
"""The most pieces that a reader takes from the server at a time, where nobody else has any."""
BATCH = 4
"""The most pieces that a reader takes from a source at a time."""
UPLOADS = 8
"""The most pieces that are taken from a source at a time."""
STALE_SECONDS = 20.0
SOURCE_SECONDS = 5.0
"""The longest wait for bytes of a source."""
TRACKER_SECONDS = 1.0
"""The longest wait of a tracker with its answer."""
DELTA_PAYS = 0.5
"""The part of their bytes up to which a delta of pieces tells that deltas pay."""


def piece_bytes_of(nbytes: int) -> int:
    """Returns the size of the pieces of a file.

    >>> piece_bytes_of(1), piece_bytes_of(1 << 30) >> 20, piece_bytes_of(1 << 40) >> 20
    (65536, 4, 4)
    """
    return max(LEAST_PIECE, min(MOST_PIECE, nbytes // PIECES // LEAST_PIECE * LEAST_PIECE))


def set_of(pieces: Sequence[int]) -> int:
    """Returns the set of these pieces."""
    return reduce(or_, [1 << piece for piece in pieces], 0)


def some_of(pieces: int, most: int) -> list[int]:
    """Returns a few pieces of a set, from a place on that is chosen by chance."""
    digits, found = f"{pieces:b}"[::-1], list[int]()
    at = digits.find("1", int(random() * len(digits)))
    while len(found) < most and (at := at if at >= 0 else digits.find("1")) not in (-1, *found):
        found.append(at)
        at = digits.find("1", at + 1)
    return found


class Take(NamedTuple):
    """A piece to take, and its source: None is the server of the file."""

    piece: int
    source: Address | None


class Tracker:
    """The readers of one file that share, and the pieces that are on their way to them."""

    def __init__(self, file: MemoryFile) -> None:
        self._file = file
        self._digests: dict[int, str] = {}
        self._has: dict[Address, int] = {}
        self._bad: set[Address] = set()
        self._taken: dict[tuple[str, int], tuple[Address | None, float]] = {}
        """The sources of pieces on their way, and when they began, by lease and piece."""

    def leave(self, lease: str) -> None:
        """Takes notice that a reader has ended: nothing is on its way to it."""
        self._taken = {one: way for one, way in self._taken.items() if one[0] != lease}

    def is_busy(self, lease: str) -> bool:
        """Whether a piece is on its way to a reader."""
        return any(one[0] == lease for one in self._taken)

    def tell(self, host: str, message: object) -> tuple[str, Address, int]:
        """Notes the news in a message; returns its lease, source and wanted pieces.

        The message is `[lease, port, has, wants, bad]`: where the reader serves the pieces that it
        has, those that it lacks and is not taking, and sources that have failed. Raises
        RefusedError.
        """
        every = (1 << -(-self._file.nbytes // piece_bytes_of(self._file.nbytes))) - 1
        try:
            lease, port, has, wants, bad = cast("list[Any]", message)
            own = host, address_of("port", ["-", port])[1]
            has, wants = int(has, 16) & every, int(wants, 16) & every
            lost = {address_of("a source", one) for one in bad}
        except (TypeError, ValueError):
            raise RefusedError("protocol", "[lease, port, has, wants, bad] is wanted") from None
        self._bad |= lost
        self._has[own] = self._has.get(own, 0) | has
        self._has = {one: has for one, has in self._has.items() if one not in self._bad}
        late = monotonic() - STALE_SECONDS
        for (who, piece), (source, began) in [*self._taken.items()]:
            if began < late or (who == lease and (has >> piece & 1 or source in lost)):
                del self._taken[who, piece]
        return str(lease), own, wants

    def choose(self, lease: str, own: Address, wants: int) -> list[Take]:
        """Returns the pieces that a reader is to take now, from one source; none if it must wait.

        A reader takes a piece that nobody has from the server, and others from the least busy one
        of those that have them, on its own host if it can.
        """
        known, own_fresh = reduce(or_, self._has.values(), 0), 0
        for (who, piece), (source, _) in self._taken.items():
            wants &= ~(1 << piece) if who == lease else -1
            known |= 1 << piece if source is None else 0
            own_fresh += who == lease and source is None
        fresh, busy = wants & ~known, Counter(source for source, _ in self._taken.values())
        free = [
            (one[0] != own[0], busy[one], random(), one)
            for one, has in self._has.items()
            if has & wants and one != own and busy[one] < UPLOADS
        ]
        found = list[Take]()
        if fresh and own_fresh < (1 if free else FRESH):
            found = [Take(some_of(fresh, 1)[0], None)]
        elif free:
            source = min(free)[-1]
            found = [Take(piece, source) for piece in some_of(self._has[source] & wants, BATCH)]
        for one in found:
            self._taken[lease, one.piece] = one.source, monotonic()
        return found

    async def digest(self, piece: int) -> str:
        """Returns the checksum of a piece. Raises RefusedError if its memory was taken away."""
        if piece not in self._digests:
            size = piece_bytes_of(self._file.nbytes)
            data = bytearray(min(size, self._file.nbytes - piece * size))
            read = self._file.mapped().read_into
            if await asyncio.to_thread(read, piece * size, [memoryview(data)]) < len(data):
                raise RefusedError("gone", "the version was replaced: load again")
            self._digests[piece] = xxhash.xxh3_128_hexdigest(data)
        return self._digests[piece]


class Lender(Reader, Protocol):
    """The version of a live state that a load reads: a `ckpt.live.store.LiveStore`."""

    @property
    def version(self) -> int: ...

    def ask_pieces(self, name: str, told: list[object]) -> list[list[Any]]: ...

    def delta(self, name: str, areas: Sequence[Area], is_of_swarm: bool) -> Delta | None: ...

    def fetch(self, name: str, offset: int, views: Sequence[memoryview]) -> None: ...


@dataclass(slots=True, eq=False)
class _Pieces:
    """A file in the memory of a source."""

    file: str
    version: int
    memory: MemoryFile
    view: memoryview = field(repr=False)
    base: int = 0
    """The pieces that have the version before."""
    has: int = 0
    needs: int = 0
    doing: int = 0
    """The pieces that threads are taking."""
    width: int = 1
    """Bytes of the elements of the largest range."""
    bad: list[Address] = field(default_factory=list)
    is_left: bool = False
    """Whether the swarm gives no more of it."""
    users: int = 0
    """Calls that are filling the memory, or copying from it."""

    @property
    def wants(self) -> int:
        return self.needs & ~self.has & ~self.doing

    def span(self, piece: int) -> tuple[int, int]:
        size = piece_bytes_of(len(self.view))
        return piece * size, min(piece * size + size, len(self.view))

    def pieces(self, lo: int, hi: int, is_whole: bool = False) -> int:
        """Returns the pieces with bytes from `lo` to `hi`, or with no others."""
        size = piece_bytes_of(len(self.view))
        first, end = (-(-lo // size), hi // size) if is_whole else (lo // size, -(-hi // size))
        return (1 << max(first, end)) - (1 << first)


class Share:
    """The pieces of one live state that this process has, and the server that offers them."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        address = parse(url)
        self.users, self._name = 0, address.name
        self._told = HttpOptions.of(options, address.token)
        self._files: dict[str, _Pieces] = {}
        """By the end of the name, which is the same for all versions of a rank's file."""
        self._changed = threading.Condition()
        self._clients: dict[Address, HttpClient] = {}
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*found[:2]) as route:
            route.connect(found[4])  # sends nothing; tells the address towards that host
            self._listener = listen(route.getsockname()[0], 0)
        self._port: int = self._listener.getsockname()[1]
        self._loop, self._end = asyncio.new_event_loop(), asyncio.Event()
        serve = self._loop.run_until_complete
        self._thread = threading.Thread(target=serve, args=(self._serve(),), daemon=True)
        self._thread.start()

    def expect(self, store: Lender, file: str, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Notes the pieces of a file that a load will read: bytes `[lo, hi)` and the itemsize."""
        lo, hi = min(lo for lo, _, _ in ranges), max(hi for _, hi, _ in ranges)
        width = max(ranges, key=lambda one: one[1] - one[0])[2]
        with self._changed:
            one = self._pieces(file, store.version, store.size(file))
            if one is None:
                return
            one.width = width if width in (1, 2, 4, 8) else 1
            one.base &= one.pieces(lo, hi, is_whole=True)  # without header and chunk table
            for lo, hi, _ in ranges:
                one.needs |= one.pieces(lo, hi)

    def read_into(self, store: Lender, file: str, offset: int, views: Sequence[memoryview]) -> bool:
        """Fills the views; returns whether the swarm gives their pieces.

        Until these are here, takes whichever pieces of the file the load needs.
        """
        with self._changed:
            one = self._files.get(_end_of(file))
            if one is None or (one.file, one.version) != (file, store.version):
                return False
            pieces, is_given = one.pieces(offset, offset + sum(map(len, views))), False
            if pieces & ~one.has & ~one.needs:
                return False
            one.users += 1
        try:
            while pieces & ~one.has:
                if one.is_left:
                    return False
                self._work(store, one)
            for view in views:
                view[:] = one.view[offset : offset + len(view)]
                offset += len(view)
            is_given = True
        except (CkptError, OSError, MemoryError, ValueError):  # the usual read tells it
            pass
        finally:
            with self._changed:
                one.users -= 1
                one.is_left |= not is_given
                self._changed.notify_all()
        return is_given

    def close(self) -> None:
        """Ends the server, and frees the memory."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()
        for client in self._clients.values():
            client.close()
        for one in self._files.values():
            one.memory.give()

    def _pieces(self, file: str, version: int, nbytes: int) -> _Pieces | None:
        """Returns the pieces of a file, in the memory of the version before if it has the size."""
        old, base = self._files.get(_end_of(file)), 0
        if old is not None and (old.file, old.version) == (file, version):
            return old
        if old is not None and (old.version > version or old.users):
            return None
        if old is not None and len(old.view) == nbytes:
            memory, view, base = old.memory, old.view, old.has
        else:
            descriptor = new_memory("ckpt-share")
            os.ftruncate(descriptor, nbytes)
            memory, view = MemoryFile([Segment(descriptor, 0, nbytes)]), map_memory(descriptor)
            if old is not None:
                self._loop.call_soon_threadsafe(old.memory.give)
        found = self._files[_end_of(file)] = _Pieces(file, version, memory, view, base)
        return found

    def _work(self, store: Lender, one: _Pieces) -> None:
        """Takes some of the pieces that are wanted, or waits for those that others take."""
        with self._changed:
            batch = some_of(one.base & one.wants, MOST_PIECE * BATCH // one.span(0)[1])
            one.doing |= set_of(batch)
            one.base &= ~set_of(batch)
            if not one.wants and not batch:
                self._changed.wait(TRACKER_SECONDS)
                return
        if batch:
            self._done(one, batch, self._brought(store, one, batch))
        else:
            self._take(store, one)
        if not one.needs & ~one.has:
            store.ask_pieces(one.file, self._message(one, 0))  # tells which it has

    def _brought(self, store: Lender, one: _Pieces, batch: Sequence[int]) -> int:
        """Returns the pieces that a delta has brought from the version before to this one."""
        from ckpt.transfer.live_deltas import Area  # numpy is for those who need it

        spans, width = [one.span(piece) for piece in batch], one.width
        areas = [Area(lo, width, ((hi - lo) // width,), (width,), True) for lo, hi in spans]
        try:
            delta = store.delta(one.file, areas, is_of_swarm=True)
            if delta is None or delta.nbytes > DELTA_PAYS * sum(area.nbytes for area in areas):
                one.base = 0
            views = [area.of(one.view[lo:hi]) for area, (lo, hi) in zip(areas, spans, strict=True)]
            brought = zip(batch, areas, views, strict=delta is not None)
            return set_of([at for at, area, view in brought if delta and delta.apply(area, view)])
        except FormatError:  # it was damaged
            one.base = 0
            return 0

    def _take(self, store: Lender, one: _Pieces) -> None:
        """Asks for pieces, and takes them from their source."""
        with self._changed:
            message = self._message(one, one.wants)
        found = store.ask_pieces(one.file, message)
        with self._changed:
            found = [take for take in found if one.wants >> take[0] & 1]
            one.doing |= set_of([take[0] for take in found])
            if not found and one.doing:
                self._changed.wait(TRACKER_SECONDS)
        for piece, source, digest in found:
            right, (lo, hi) = False, one.span(piece)
            try:
                if source is None:
                    store.fetch(one.file, lo, [one.view[lo:hi]])
                else:
                    path = path_of(self._name, str(one.version), one.file)
                    self._client(tuple(source)).read_range(path, lo, [one.view[lo:hi]], {})
                right = xxhash.xxh3_128_hexdigest(one.view[lo:hi]) == digest
                if source is None and not right:
                    raise StoreError(f"{store.url}/{one.file}: a piece changed on its way")
            except StoreError:
                if source is None:
                    raise
            finally:
                if source is not None and not right:
                    one.bad.append(tuple(source))
                self._done(one, [piece], right << piece)

    def _message(self, one: _Pieces, wants: int) -> list[object]:
        bad, one.bad = one.bad, []
        return [self._port, f"{one.has:x}", f"{wants:x}", bad]

    def _done(self, one: _Pieces, taken: Sequence[int], right: int) -> None:
        with self._changed:
            one.doing &= ~set_of(taken)
            one.has |= right
            self._changed.notify_all()

    def _client(self, source: Address) -> HttpClient:
        with self._changed:
            if source not in self._clients:
                told = replace(self._told, seconds=min(SOURCE_SECONDS, self._told.seconds))
                self._clients[source] = HttpClient(Place(*source), told)
            return self._clients[source]

    async def _serve(self) -> None:
        server = HttpServer(self._listener, self, most_connections())
        await self._end.wait()
        await server.close()

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """Returns the answer to a request for pieces. Raises RefusedError."""
        check_token(request.headers, request.query, self._told.token or "")
        *_, version, file = ["", *request.path.split("/")]
        one = self._files.get(_end_of(file))
        if one is None or (one.file, one.version) != (file, version_of(version)):
            raise RefusedError("gone", f"{request.path:.200} is not here, or not any more")
        answer = file_answer(one.memory, request.headers.get("range"))
        if request.method != "GET" or one.pieces(answer.lo, answer.hi) & ~one.has:
            raise RefusedError("unknown", f"{request.path:.200}: these bytes are not here")
        return answer

    def on_end(self, connection: HttpConnection) -> None:
        """Does nothing: a checksum tells the reader that memory has changed."""


def _end_of(file: str) -> str:
    return file.rpartition("-")[2]


_SHARES: dict[str, Share] = {}
_LOCK = threading.Lock()


def share_of(url: str) -> Share | None:
    """Returns the share of a live state in this process, if it shares the state."""
    return _SHARES.get(parse(url).at(None).shown)


@contextmanager
def sharing(url: str, options: Mapping[str, object]) -> Iterator[None]:
    """Shares what this process reads of a live state, for the time of the block."""
    state = parse(url).at(None).shown
    with _LOCK:
        share = _SHARES[state] = _SHARES.get(state) or Share(url, options)
        share.users += 1
    try:
        yield
    finally:
        with _LOCK:
            share.users -= 1
            if not share.users:
                del _SHARES[state]
                share.close()
