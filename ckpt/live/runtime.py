"""The folder of this user's sockets on this host, and the sockets of host servers in it.

Rules:

1. The folder is CKPT_RUNTIME_DIR, or `ckpt` in XDG_RUNTIME_DIR, or `ckpt-UID` in the folder for
   temporary files. Only its user may look into it, and it belongs to this user, or it is not used.
2. Two processes are on the same host if they have the same folder and the same host name.
3. A server that binds or removes a socket holds the lock of the folder meanwhile.
4. A server that starts removes the sockets of killed servers of its user and host. It leaves those
   of other hosts, which it cannot ask.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from ckpt.errors import StoreError, UnreachableError

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


def listen(path: Path) -> socket.socket:
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
    told = os.environ.get("CKPT_RUNTIME_DIR")
    if told:
        return Path(told).absolute()
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
