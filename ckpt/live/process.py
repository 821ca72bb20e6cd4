"""The host server as its publisher and the readers of the same host see it: a Python object.

`HostServer.start` starts the process, `HostServer.attach` connects to one that runs. Every object
has a connection of its own. A connection has one request at a time; threads wait for each other.

The process of a host server: no torch, one thread, no part in any training.

`ckpt.live.process` starts it: the options come by standard input, and one answer goes to standard
output. Rules:

1. The process has a session of its own and ignores signals to a whole job: it outlives trainers.
   It ends when it serves no name any more, and if no owner comes within `START_SECONDS`.
2. It gives up the place of its socket as soon as its last name is ending, so that a new publisher
   of the same name need not wait for the old one's readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.errors import ProtocolError, StoreError, StoreTimeoutError, UnreachableError
from ckpt.live.control import (
    ControlServer,
    bind,
    close_all,
    connect,
    inode,
    lock,
    receive_message,
    remove_dead,
    remove_empty_log,
    send_message,
    socket_path,
)
from ckpt.live.host import Host
from ckpt.live.http_server import HttpServer, listen, most_connections
from ckpt.live.protocol import (
    LEASE_SECONDS,
    STALL_SECONDS,
    Address,
    Commit,
    Drop,
    FileAt,
    Get,
    Hello,
    Own,
    Put,
    Reclaim,
    RefusedError,
    Remove,
    Request,
    Retire,
    Segment,
    Take,
    VersionInfo,
    Versions,
    address_of,
    error_of,
    object_of,
    request_message,
    segments_of,
    versions_of,
)
from ckpt.live.shared_files import in_memory
from ckpt.live.table import Table
from ckpt.saving.arena import HEAD_BYTES, map_memory, new_memory, take_huge_pages
from ckpt.stores.addresses import authority
from ckpt.stores.http_client import HttpClient, HttpOptions, Place, path_of
from formats.storage import Pool
from sharding.errors import CkptError

if TYPE_CHECKING:
    from typing_extensions import Self

    from formats.native.shard import ShardSummary

LOOPBACK = "127.0.0.1"
START_SECONDS = 60.0
PULLS = 4
"""Files that are copied at once."""
ANSWER_SECONDS = 60.0
"""The longest wait for an answer, beside the wait that the request asks for."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals to a whole job, which the server ignores."""
_START = "import sys; sys.path[:] = sys.argv[1:]; from ckpt.live.process import main; main()"
_OPEN: weakref.WeakSet[HostServer] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The options of a server."""

    name: str
    token: str = field(default="", repr=False)
    address: str | None = None
    """The address to listen at; None is the loopback."""
    advertise: str | None = None
    """The host in the addresses that readers get; None is `address`."""
    lease_seconds: float = LEASE_SECONDS
    keep_seconds: float = 0.0
    """The seconds that the name outlives its publisher."""


class HostServer:
    """A connection to the server of one name on this host."""

    def __init__(self, name: str, seconds: float = ANSWER_SECONDS) -> None:
        """Connects, and asks nothing yet. `seconds` is the longest wait for an answer."""
        self.name = name
        self._seconds = seconds
        self._lock = threading.Lock()
        self._path = socket_path(name)
        self._connection = connect(self._path, seconds)
        self._interrupted: float | None = None
        """The wait of a request that an interrupt has ended: its answer may still come."""
        _OPEN.add(self)

    @cached_property
    def _hello(self) -> tuple[Address, str, int]:
        with self._answer(Hello()) as (found, _):
            return address_of("address", found["address"]), str(found["server"]), int(found["pid"])

    @property
    def address(self) -> Address:
        """The place where readers of other hosts connect."""
        return self._hello[0]

    @property
    def server(self) -> str:
        """The identity of this server: no other has it, before or after."""
        return self._hello[1]

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._hello[2]

    @classmethod
    def start(cls, options: HostOptions) -> Self:
        """Starts the server of a name and connects to it. The caller owns the name next.

        Raises:
            ExistsError: the name is served on this host already.
            StoreError: the server could not start.
        """
        answer = _start(options)
        if "error" in answer:
            raise error_of(answer["error"], answer["message"])
        return cls(options.name)

    @classmethod
    def attach(cls, name: str, seconds: float = ANSWER_SECONDS) -> Self:
        """Connects to the server of a name. Raises UnreachableError if none runs on this host."""
        found = cls(name, seconds)
        try:
            found.server  # noqa: B018 - a server that is ending may have let this connect
        except BaseException:
            found.close()
            raise
        return found

    def own(self, keep_seconds: float = 0.0) -> None:
        """Owns the name until this connection ends, or the process with it.

        After the last owner, the name stays for `keep_seconds`, and ends then with its leases.
        """
        self._do(Own(self.name, keep_seconds))

    def put(self, version: int, file: str, segments: Sequence[Segment]) -> None:
        """Adds a file to a version that is not committed; the caller keeps its descriptors."""
        used = list(dict.fromkeys(segment.descriptor for segment in segments))
        renumbered = tuple(
            replace(segment, descriptor=used.index(segment.descriptor)) for segment in segments
        )
        self._do(Put(self.name, version, file, renumbered), used)

    def commit(
        self, version: int, files: Mapping[str, FileAt], info: Mapping[str, object] | None = None
    ) -> None:
        """Makes a version visible. `files` has all files of the version, on whichever server."""
        self._do(Commit(self.name, version, dict(files), dict(info or {})))

    def retire(self, version: int, wait_seconds: float) -> bool:
        """Gives no new leases on a version; returns when its leases have ended.

        They end after `wait_seconds` in any case. Returns whether the version is overdue: a lease
        has ended without its reader's word that it has all bytes.
        """
        asked = Retire(self.name, version, wait_seconds)
        with self._answer(asked, seconds=wait_seconds) as (found, _):
            return bool(found["overdue"])

    def reclaim(self, version: int, wait_seconds: float) -> bool:
        """Retires a version and then drops it; returns what `drop` returns."""
        asked = Reclaim(self.name, version, wait_seconds)
        try:
            with self._answer(asked, seconds=wait_seconds) as (found, _):
                return bool(found["held"])
        except ProtocolError:  # a server of an earlier ckpt, which outlives its trainers
            return self.drop(version, self.retire(version, wait_seconds))

    def drop(self, version: int, overdue: bool = True) -> bool:
        """Forgets the files of a version, and ends the connections that are sending them.

        Returns whether a reader may still have the memory in its hands; the publisher then gives
        the memory up, and does not write to it again. `overdue` is the result of `retire`.
        """
        with self._answer(Drop(self.name, version, overdue)) as (found, _):
            return bool(found["held"])

    def get(self, version: int, file: str, token: str) -> tuple[Segment, ...]:
        """Returns the segments of a file, with descriptors that the caller closes.

        The version counts as held until this connection is closed. Read by `pread`: a range that
        a publisher has given up is read short, and a mapping of it would kill the process.
        """
        with self._answer(Get(self.name, version, file, token)) as (found, received):
            return _take_descriptors({file: found["segments"]}, received)[file]

    def take(
        self, which: int | None, address: Address, token: str
    ) -> tuple[dict[str, Any], dict[str, tuple[Segment, ...]]]:
        """Takes a lease on a version, or on the newest one, that ends with this connection.

        Returns the answer, as that of a lease by HTTP, and the segments of files on this host (see
        `get`); others may be here too. Refused unless the server has this address.
        """
        with self._answer(Take(self.name, which, address, token)) as (found, received):
            return found, _take_descriptors(found.pop("here"), received)

    def versions(self) -> dict[int, VersionInfo]:
        """Returns the versions on this server, also those without a commit."""
        with self._answer(Versions(self.name)) as (found, _):
            return versions_of(found["versions"])

    def remove(self, wait_seconds: float = 0.0) -> None:
        """Ends the name now: nobody finds it, and its memory is free after its last leases.

        Leases end after `wait_seconds` in any case. The caller need not wait.
        """
        self._do(Remove(self.name, wait_seconds))

    def close(self) -> None:
        """Ends the connection: gives up the ownership, and the hold on versions."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _do(self, request: Request, descriptors: Sequence[int] = ()) -> None:
        with self._answer(request, descriptors):
            pass

    @contextlib.contextmanager
    def _answer(
        self, request: Request, descriptors: Sequence[int] = (), seconds: float = 0.0
    ) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Yields an answer, and its descriptors; closes those that the block leaves in the list.

        Raises ProtocolError if the block finds the answer to have another form.
        """
        with self._lock:
            if self._interrupted is not None:
                mark = secrets.token_hex(8)
                message = request_message(Versions(mark))  # the answer names the unknown name
                self._exchange(message, (), self._interrupted, mark.encode())
                self._interrupted = None
            data, received = self._exchange(request_message(request), descriptors, seconds)
        try:
            answer = object_of(data, "an answer")
            if "error" in answer:
                raise error_of(
                    answer["error"],
                    answer["message"],
                    where=f"{self._path.name}",
                    version=answer.get("version"),
                    newest=answer.get("newest"),
                )
            yield answer["ok"], received
        except CkptError:
            raise
        except (RefusedError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(
                f"{self._path}: the server, perhaps of another version of ckpt, gave an answer of "
                f"another form: {error!r:.200}"
            ) from error
        finally:
            close_all(received)

    def _exchange(
        self, message: bytes, descriptors: Sequence[int], seconds: float, mark: bytes = b""
    ) -> tuple[bytes, list[int]]:
        """Returns the answer to a message: the first one with `mark` in it.

        An error closes the connection, and after an interrupt the next request skips this answer.
        """
        try:
            self._connection.settimeout(seconds + self._seconds)
            send_message(self._connection, message, descriptors)
            data, received = receive_message(self._connection)
            while data and mark not in data:
                close_all(received)
                data, received = receive_message(self._connection)
        except TimeoutError as error:
            self.close()
            raise StoreTimeoutError(
                f"{self._path}: the server gave no answer within {seconds + self._seconds:g} s"
            ) from error
        except OSError as error:
            self.close()
            raise UnreachableError(f"{self._path}: the server has ended: {error}") from error
        except RefusedError as error:
            self.close()
            raise ProtocolError(f"{self._path}: the answer: {error}") from error
        except BaseException:
            self._interrupted = seconds
            raise
        if not data:
            self.close()
            raise UnreachableError(f"{self._path}: the server has ended, or closed the connection")
        return data, received


def seal(
    fields: Mapping[str, Any], data: memoryview, arena: int, advance: Callable[[int], None]
) -> ShardSummary:
    """Gives a rank's staged part to the server of this host as a shard file, without a copy.

    Hashes the part, and adds header and chunk table: the bytes are those that `write_shard` writes.
    `fields` are the `name` of the live state, `version`, `file` and `plan`; `arena` is the
    descriptor of the memory of `data`. Raises UnreachableError without a server.
    """
    from ckpt.transfer.write_job import make_sealed  # a server starts without it

    made = make_sealed(fields["plan"].items, data, advance)
    frame = in_memory(made.header + made.table)
    try:
        head = len(made.header)
        segments = [
            Segment(frame, 0, head),
            Segment(arena, HEAD_BYTES, made.data_bytes),
            Segment(frame, head, len(made.table)),
        ]
        server = HostServer(fields["name"])
        try:
            server.put(fields["version"], fields["file"], segments)
        finally:
            server.close()
    finally:
        os.close(frame)
    return made.summary


def copy_files(
    fields: Mapping[str, Any], data: memoryview, arena: int, advance: Callable[[int], None]
) -> ShardSummary:
    """Gives the server of this host copies of files of other hosts, each in memory of its own.

    `fields` are the `name` of the live state, its `token`, the `version` and the `files`: name,
    size and server of each. The version is not yet committed. The writer process calls this, so
    that the training's interpreter does not wait. Raises StoreError if a server cannot be reached,
    or has no such file.
    """
    from formats.native.shard import ShardSummary  # a server starts without it

    name, version = fields["name"], fields["version"]

    def copy(wanted: tuple[str, int, Address]) -> None:
        file, nbytes, source = wanted
        path, descriptor = path_of(name, str(version), file), new_memory("ckpt-replica")
        client = HttpClient(Place(*source), HttpOptions(fields["token"], STALL_SECONDS))
        try:
            advance(0)
            os.ftruncate(descriptor, nbytes)
            with map_memory(descriptor) as view:
                take_huge_pages(view)
                found = client.read_range(path, 0, [view], {"Ckpt-Lease": "copy"})
            if not isinstance(found, int):
                raise StoreError(f"it answers with status {found.status}: {found.text()}")
            server.put(version, file, [Segment(descriptor, 0, nbytes)])
        except (OSError, CkptError) as error:
            raise StoreError(f"{path}: no copy from {authority(*source)}: {error}") from error
        finally:
            client.close()
            os.close(descriptor)

    with HostServer(name) as server, Pool(min(PULLS, len(fields["files"]))) as pool:
        list(pool.map(copy, fields["files"]))
    return ShardSummary(0, 0, 0, "-")


def _take_descriptors(
    message: Mapping[str, object], received: list[int]
) -> dict[str, tuple[Segment, ...]]:
    """Returns the segments of files with their descriptors, which it takes out of the list.

    Raises RefusedError unless each descriptor belongs to one file.
    """
    files = {file: segments_of(file, segment) for file, segment in message.items()}
    used = [at for parts in files.values() for at in {segment.descriptor for segment in parts}]
    if sorted(used) != list(range(len(received))):
        raise RefusedError("protocol", f"{len(received)} descriptors came, files have {used}")
    own, received[:] = tuple(received), ()
    return {
        file: tuple(replace(segment, descriptor=own[segment.descriptor]) for segment in parts)
        for file, parts in files.items()
    }


def _start(options: HostOptions) -> dict[str, Any]:
    """Starts the process; returns its answer once it listens."""
    name = options.name
    log = socket_path(name).with_suffix(".log")
    paths = [os.path.abspath(path) for path in sys.path]
    # A signal to the job may come before the process has said that it ignores signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        with open(log, "ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        answer, _ = process.communicate(json.dumps(asdict(options)).encode(), START_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise StoreTimeoutError(f"{name}: the server did not start in {START_SECONDS} s") from None
    with contextlib.suppress(ValueError):
        found = json.loads(answer)
        if isinstance(found, dict):
            return found
    raise StoreError(f"{name}: the server did not start; {log} says why")


def _close_in_child() -> None:
    """Closes the copies of connections in a forked child, which would keep a name owned."""
    for connection in list(_OPEN):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def main() -> None:
    """Serves until there is nothing to serve."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    options = HostOptions(**json.loads(sys.stdin.buffer.read()))
    if os.fork():  # the trainer's child ends at once, so that none of its children is left over
        os._exit(0)
    os.setsid()
    os.chdir("/")
    path = socket_path(options.name)
    try:
        with lock(path.parent):
            _refuse_second(options.name)
            remove_dead()
            listener = listen(options.address or LOOPBACK, 0)
            unix = bind(path)
    except RefusedError as refusal:
        _tell(refusal.json())
        return
    except (OSError, CkptError) as error:
        remove_empty_log(path)
        text = f"the server cannot listen at {options.address or LOOPBACK}:0: {error}"
        _tell({"error": "internal", "message": text})
        return
    try:
        with ExitStack() as place:
            place.callback(_leave, path, inode(path))
            asyncio.run(_serve(options, listener, unix, path, place.close))
    finally:
        remove_empty_log(path)


def _leave(path: Path, number: int | None) -> None:
    """Removes the socket, unless another server has taken its place."""
    with suppress(OSError), lock(path.parent):
        if number is not None and inode(path) == number:
            path.unlink()


async def _serve(
    options: HostOptions,
    listener: socket.socket,
    unix: socket.socket,
    path: Path,
    leave: Callable[[], None],
) -> None:
    table = Table(options.name, options.lease_seconds)
    address = options.advertise or options.address or LOOPBACK, listener.getsockname()[1]
    host = Host(options.token, table, address, str(path), leave)
    most = most_connections()
    http = HttpServer(listener, host, most)
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


def _tell(answer: dict[str, Any]) -> None:
    """Gives the answer to the process that waits, and lets go of it."""
    os.write(1, json.dumps(answer).encode())
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
