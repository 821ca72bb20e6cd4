"""The Unix socket of a host server: its place, and the requests of processes of the same host.

Rules of the place:

1. The folder of this user's sockets is CKPT_RUNTIME_DIR, or `ckpt` in XDG_RUNTIME_DIR, or
   `ckpt-UID` in the folder for temporary files. Only its user may look into it, and it belongs to
   this user, or it is not used.
2. Two processes are on the same host if they have the same folder and the same host name.
3. A server that binds or removes a socket holds the lock of the folder meanwhile.
4. A server that starts removes the sockets of killed servers of its user and host. It leaves those
   of other hosts, which it cannot ask.

Rules of the requests:

5. Only processes of the server's user may connect: the system says who they are.
6. A connection has one request at a time. Its end is an event: an owner has gone, or a reader has
   given back its descriptors and its leases.
7. A connection that neither owns a name nor holds a version counts as silent between requests.
8. A message is a datagram in order (SOCK_SEQPACKET), and may carry descriptors. A message longer
   than `MESSAGE_BYTES` travels in shared memory: the datagram is then
   `{"in": position of its descriptor, "nbytes": length}`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from time import monotonic

from ckpt.errors import StoreError, UnreachableError
from ckpt.live.host import Host
from ckpt.live.http_server import is_token
from ckpt.live.protocol import (
    LONG_MESSAGE_BYTES,
    MESSAGE_BYTES,
    MOST_DESCRIPTORS,
    MOST_SECONDS,
    STALL_SECONDS,
    Commit,
    Drop,
    Get,
    Hello,
    Own,
    Put,
    Reclaim,
    RefusedError,
    Remove,
    Request,
    Retire,
    Take,
    Versions,
    json_bytes,
    object_of,
    request_of,
)
from ckpt.live.shared_files import in_memory, memory_file
from ckpt.live.table import unknown_name
from ckpt.live.wire import Acceptor, Wire

Answer = tuple[dict[str, object], tuple[int, ...]]
"""The answer and its descriptors."""


@dataclass(slots=True, eq=False)
class _Client:
    wire: Wire
    owns: int = 0
    got: set[int] = field(default_factory=set)
    """The versions of which the reader has descriptors."""
    leases: list[str] = field(default_factory=list)
    """The keys of the leases that end with the connection."""


class ControlServer:
    """Serves the Unix socket."""

    def __init__(self, listener: socket.socket, host: Host, most: int) -> None:
        self._host = host
        self._clients: set[_Client] = set()
        self._acceptor = Acceptor(listener, most, _of_this_user, self._serve)

    async def close(self) -> None:
        """Stops: closes the listener and all connections."""
        await self._acceptor.close()

    async def _serve(self, wire: Wire) -> None:
        client = _Client(wire)
        self._clients.add(client)
        try:
            while await self._serve_one(client):
                pass
        finally:
            self._clients.discard(client)
            wire.close()  # before others hear of it
            if client.leases:
                self._host.release(client.leases)
            for _ in range(client.owns):
                self._host.disown()

    async def _serve_one(self, client: _Client) -> bool:
        waits = client.wire.ready(MOST_SECONDS)
        await (waits if client.owns or client.got else self._acceptor.silence(client.wire, waits))
        descriptors: list[int] = []
        try:
            data, descriptors = receive_message(client.wire.socket)
            if not data:
                return False
            answer, sent = await self._answer(client, request_of(data), descriptors)
        except BlockingIOError:
            return True
        except RefusedError as refusal:
            answer, sent = refusal.json(), ()
        finally:
            close_all(descriptors)
        await self._send(client, json_bytes(answer), sent)
        return True

    async def _send(self, client: _Client, data: bytes, descriptors: tuple[int, ...]) -> None:
        while True:
            try:
                send_message(client.wire.socket, data, descriptors)
                return
            except BlockingIOError:
                await client.wire.ready(STALL_SECONDS, to_write=True)

    async def _answer(self, client: _Client, request: Request, descriptors: list[int]) -> Answer:
        """Returns the answer. Takes those descriptors out of the list that stay open."""
        table, host = self._host.table, self._host
        found: dict[str, object] = {}
        if not isinstance(request, Hello) and request.name != table.name:
            raise unknown_name(request.name)
        match request:
            case Put():
                file = memory_file(request.segments, descriptors)
                table.put(request.version, request.file, file.nbytes)
                host.files[request.version, request.file] = file
                descriptors.clear()
            case _ if descriptors:
                raise RefusedError("protocol", "only put comes with descriptors")
            case Get():
                return self._get(client, request)
            case Take():
                return self._take(client, request)
            case Reclaim():
                overdue = await self._retire(request)
                found["held"] = self._drop(request.version, overdue)
            case Retire():
                found["overdue"] = await self._retire(request)
            case Drop():
                found["held"] = self._drop(request.version, request.overdue)
            case Hello():
                found |= {"address": list(host.address), "server": host.server, "pid": os.getpid()}
            case Versions():
                versions = table.versions().items()
                found["versions"] = {str(number): row.json() for number, row in versions}
            case Own():
                table.own(request.keep_seconds)
                client.owns += 1
                host.notify()
            case Commit():
                table.commit(request.version, request.files, request.info)
                host.notify()
            case Remove():
                table.remove(request.wait_seconds, monotonic())
                host.notify()
        return {"ok": found}, ()

    def _get(self, client: _Client, request: Get) -> Answer:
        self._check_token(request.token)
        self._host.table.find(request.version, request.file)
        segments, used = self._segments(request.version, request.file)
        client.got.add(request.version)
        return {"ok": {"segments": segments}}, used

    def _take(self, client: _Client, request: Take) -> Answer:
        """Answers with a lease, and with descriptors of as many files as one message can have."""
        self._check_token(request.token)
        host = self._host
        if request.address != host.address:
            raise RefusedError("unknown", f"{request.name} has the address {host.address} here")
        key, version, found = host.lease(request.which)
        client.leases.append(key)
        client.got.add(version)
        here: dict[str, object] = {}
        descriptors: list[int] = []
        for file in host.table.places(version):
            if (version, file) in host.files:
                segments, used = self._segments(version, file, len(descriptors))
                if len(descriptors) + len(used) <= MOST_DESCRIPTORS:
                    here[file] = segments
                    descriptors += used
        return {"ok": {**found, "here": here}}, tuple(descriptors)

    def _segments(
        self, version: int, file: str, first: int = 0
    ) -> tuple[list[list[int]], tuple[int, ...]]:
        """Returns the segments of a file, by positions from `first` on, and the descriptors."""
        parts = self._host.files[version, file].parts
        used = tuple(dict.fromkeys(part.descriptor for part in parts))
        at = {descriptor: first + place for place, descriptor in enumerate(used)}
        return [[at[part.descriptor], part.offset, part.nbytes] for part in parts], used

    def _check_token(self, token: str) -> None:
        if not is_token(token, self._host.token):
            raise RefusedError("token", "the token is wrong: the publisher's url has it")

    async def _retire(self, request: Retire) -> bool:
        table, version = self._host.table, request.version
        table.retire(version, request.wait_seconds, monotonic())
        self._host.notify()
        while (overdue := table.is_retired(version)) is None:
            await self._host.wait(STALL_SECONDS)
        return overdue

    def _drop(self, version: int, overdue: bool) -> bool:
        in_flight = self._host.is_in_flight(version, overdue)
        self._host.table.drop(version)
        self._host.forget(version)
        self._host.notify()
        return in_flight or any(version in client.got for client in self._clients)


def _of_this_user(connected: socket.socket) -> Wire | None:
    if _user(connected) == os.geteuid():
        return Wire(connected)
    connected.close()
    return None


def _user(connected: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    with suppress(OSError):
        found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", found)[1])
    return -1


_LONG = b'{"in":'


def send_message(connected: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Sends a message. Raises BlockingIOError if the socket does not block and cannot take it."""
    if len(data) <= MESSAGE_BYTES:
        socket.send_fds(connected, [data], list(descriptors))
        return
    memory = in_memory(data)
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
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


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


_SHOWN = 40
"""Characters of a long name that its socket shows."""


def runtime_folder() -> Path:
    """Returns the folder, which exists then. Raises StoreError if it cannot, or is not private."""
    path = _path()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{path}: the folder for sockets cannot be made: {error.strerror}; set CKPT_RUNTIME_DIR"
        ) from error
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StoreError(
            f"{path}: the folder for sockets must be a folder of this user with mode 0700; "
            "remove it, or set CKPT_RUNTIME_DIR"
        )
    return path


def socket_path(name: str) -> Path:
    """Returns the place of the socket of the server of `name` on this host."""
    host = socket.gethostname()
    if len(name) + len(host) > 2 * _SHOWN:
        digest = sha256(f"{name}@{host}".encode()).hexdigest()[:16]
        name, host = f"{name[:_SHOWN]}-{digest}", host[: _SHOWN // 2]
    return runtime_folder() / f"{name}@{host}.sock"


def connect(path: Path, seconds: float) -> socket.socket:
    """Returns a connection to a server's socket. Raises UnreachableError if none listens there."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.settimeout(seconds)
        with _short(path) as short:
            connected.connect(short)
    except OSError as error:
        connected.close()
        raise UnreachableError(
            f"{path}: no server listens on this socket: {error.strerror or error}"
        ) from None
    return connected


def bind(path: Path) -> socket.socket:
    """Returns a listening socket in the place of one that nobody listens on; with the lock held."""
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(path) as short:
            listener.bind(short)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def remove_dead() -> None:
    """Removes the sockets of this host that nobody listens on (rule 4); with the lock held."""
    host = socket.gethostname()
    if len(host) == _SHOWN // 2:
        return  # the name of another host may be cut to this one
    for path in runtime_folder().glob("*.sock"):
        if path.stem.rpartition("@")[2] == host and _is_dead(path):
            with suppress(OSError):
                path.unlink()
                remove_empty_log(path)


def remove_empty_log(path: Path) -> None:
    """Removes the log beside a socket, if it says nothing."""
    log = path.with_suffix(".log")
    with suppress(OSError):
        if not log.stat().st_size:
            log.unlink()


def _is_dead(path: Path) -> bool:
    """Whether a socket was left by a process that has ended."""
    with suppress(OSError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking, _short(path) as short:
        asking.setblocking(False)
        # A server with too many waiting connections gives another error.
        return asking.connect_ex(short) == errno.ECONNREFUSED


def inode(path: Path) -> int | None:
    """Returns the number of the file at a path; None if there is none."""
    with suppress(FileNotFoundError):
        return path.lstat().st_ino
    return None


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Holds the lock of the folder (rule 3)."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _path() -> Path:
    folder = os.environ.get("CKPT_RUNTIME_DIR")
    if folder:
        return Path(folder).absolute()
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.access(session, os.W_OK):
        return Path(session) / "ckpt"
    return Path(tempfile.gettempdir()) / f"ckpt-{os.geteuid()}"


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yields a path of the file that fits into the 107 bytes of a socket's address."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
