"""`ckpt serve` as a function: a folder of checkpoints over HTTP, until a signal ends it.

Rules:

1. Nothing outside the folder is served. A name is decoded part by part, no part is `..` or contains
   a slash or NUL, and the opened file itself is looked up: it lies in the folder, whichever links
   led to it.
2. Only files and folders are served: no pipes, no devices.
3. Looking into a folder and reading from a disk may take long. Threads do both, so that other
   readers need not wait.
4. A file has an entity tag that changes when it is replaced.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from html import escape
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

from ckpt.live.http_server import (
    EVERY_ADDRESS,
    Content,
    HttpAnswer,
    HttpConnection,
    HttpRequest,
    HttpServer,
    check_token,
    file_answer,
    json_answer,
    listen,
    most_connections,
)
from ckpt.live.protocol import RefusedError, Segment
from ckpt.stores.addresses import authority
from sharding.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The folder, and who may read it from where. Raises ArgumentError."""

    folder: Path
    address: str = "127.0.0.1"
    port: int = 0
    """0 for any free port."""
    token: str | None = field(default=None, repr=False)
    """The token of readers; None to ask for none."""
    certificate: Path | None = None
    """A certificate chain in PEM: the folder is served by https."""
    key: Path | None = None
    """The certificate's key; None if it is in the same file."""

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise ArgumentError(f"{self.folder}: not a folder; give one to serve")
        if self.token == "":
            raise ArgumentError("the token is empty: give one, or ask for none")
        if not 0 <= self.port < 65536:
            raise ArgumentError(f"port={self.port}: give a number from 0 to 65535")
        if self.key is not None and self.certificate is None:
            raise ArgumentError("a key without a certificate: give both")

    @property
    def is_local(self) -> bool:
        """Whether only programs of this host can connect."""
        if self.address == "localhost":
            return True
        try:
            return ip_address(self.address).is_loopback
        except ValueError:
            return False


def serve(options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Serves the folder until SIGINT or SIGTERM. Calls `ready` with the URL once it listens.

    Raises ArgumentError for an address or certificate that is not possible.
    """
    asyncio.run(_serve(options, ready))


async def _serve(options: ServeOptions, ready: Callable[[str], None]) -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    context = _context(options)
    try:
        listener = listen(options.address, options.port)
    except OSError as error:
        raise ArgumentError(
            f"{authority(options.address, options.port)}: the server cannot listen there: {error}"
        ) from None
    server = HttpServer(
        listener, FolderApp(options.folder, options.token), most_connections(), context
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    try:
        ready(_url(options, listener.getsockname()[1]))
        await end.wait()
    finally:
        await server.close()


def _context(options: ServeOptions) -> ssl.SSLContext | None:
    if options.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A password cannot be asked for here: the text stands for "none", and fails.
        context.load_cert_chain(options.certificate, options.key, lambda: "")
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"{os.fspath(options.certificate)}: no certificate with its key: {error}"
        ) from None
    return context


def _url(options: ServeOptions, port: int) -> str:
    scheme = "http" if options.certificate is None else "https"
    key = "" if options.token is None else f"?token={quote(options.token, safe='')}"
    # Readers cannot connect to "every address".
    host = socket.gethostname() if options.address in EVERY_ADDRESS else options.address
    return f"{scheme}://{authority(host, port)}/{key}"


_PAGE_HEADERS = (
    ("content-type", "text/html; charset=utf-8"),
    ("content-security-policy", "default-src 'none'"),
    ("referrer-policy", "no-referrer"),
)


class DiskFile(Content):
    """An open file of a disk, which closes when it has been sent."""

    is_slow = True

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.status = descriptor, os.fstat(descriptor)
        super().__init__(self.status.st_size)

    def close(self) -> None:
        os.close(self._descriptor)

    def segments(self, lo: int, hi: int) -> Iterator[Segment]:
        """Yields the one range."""
        if lo < hi:
            yield Segment(self._descriptor, lo, hi - lo)


class FolderApp:
    """Answers by the files of a folder. Without a token, everybody may read them."""

    def __init__(self, folder: Path, token: str | None) -> None:
        self._folder = os.path.realpath(os.fsencode(folder))
        self._token = token

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """Returns the answer to a request. Raises RefusedError."""
        if self._token is not None:
            check_token(request.headers, request.query, self._token)
        if request.method not in ("GET", "HEAD"):
            raise RefusedError("method", f"{request.method}: the folder is read-only")
        return await asyncio.to_thread(self._answer, request)

    def on_end(self, connection: HttpConnection) -> None:
        """Returns at once: the bytes of a disk do not change in the system's buffers."""

    def _answer(self, request: HttpRequest) -> HttpAnswer:
        parts = _parts(request.path)
        try:
            return self._answer_with(request, self._open(parts))
        except OSError as error:
            raise _refusal(request, error) from None

    def _answer_with(self, request: HttpRequest, descriptor: int) -> HttpAnswer:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if not is_folder:
            return _file(request, descriptor)
        try:
            if not request.path.endswith("/"):
                return _redirect(request)
            files, folders = self._listing(descriptor)
        finally:
            os.close(descriptor)
        if "application/json" in request.headers.get("accept", ""):
            return json_answer({"files": files, "folders": folders})
        return _page(request, files, folders)

    def _open(self, parts: list[bytes]) -> int:
        """Returns a descriptor of a file or folder in the folder. Raises OSError."""
        path = os.path.realpath(os.path.join(self._folder, *parts))
        self._check_inside(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # Links may have changed since: the system knows the file that was opened.
            self._check_inside(os.readlink(b"/proc/self/fd/%d" % descriptor))
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise FileNotFoundError(0, "neither a file nor a folder")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_inside(self, path: bytes) -> None:
        inside = self._folder if self._folder.endswith(b"/") else self._folder + b"/"
        if path != self._folder and not path.startswith(inside):
            raise FileNotFoundError(0, "no such file or folder")

    def _listing(self, descriptor: int) -> tuple[dict[str, int], list[str]]:
        """Returns the sizes of the files and the names of the folders that can be read."""
        files: dict[str, int] = {}
        folders: list[str] = []
        where = os.readlink(b"/proc/self/fd/%d" % descriptor)
        with os.scandir(descriptor) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_symlink():
                        name = os.fsencode(entry.name)
                        self._check_inside(os.path.realpath(os.path.join(where, name)))
                    if entry.is_file():
                        files[entry.name] = entry.stat().st_size
                    elif entry.is_dir():
                        folders.append(entry.name)
        return dict(sorted(files.items())), sorted(folders)


_NOTHING_THERE = frozenset(
    {
        *(0, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
        *(errno.EACCES, errno.EPERM, errno.ENXIO),
    }
)
"""The error numbers of a file that is not served; 0 is that of one outside. Any other, as that for
too many open files, says nothing about the file: no reader may take it for a missing one."""


def _refusal(request: HttpRequest, error: OSError) -> RefusedError:
    kind = "unknown" if error.errno in _NOTHING_THERE else "busy"
    return RefusedError(kind, f"{request.path:.200}: {error.strerror}")


def _parts(path: str) -> list[bytes]:
    """Returns the names in the path of a request. Raises RefusedError if one could lead outside."""
    found = [unquote_to_bytes(part) for part in path.removeprefix("/").split("/")]
    if found[-1] == b"":
        found.pop()
    for part in found:
        if part in (b"", b".", b"..") or b"/" in part or b"\0" in part:
            raise RefusedError("unknown", f"{path:.200}: no file has such a name")
    return found


def _file(request: HttpRequest, descriptor: int) -> HttpAnswer:
    content = DiskFile(descriptor)
    try:
        if request.path.endswith("/"):
            raise RefusedError("unknown", f"{request.path:.200}: this is a file, not a folder")
        found = content.status
        tag = f'"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"'
        headers = (("etag", tag), ("last-modified", formatdate(found.st_mtime, usegmt=True)))
        return file_answer(content, request.headers.get("range"), headers)
    except RefusedError:
        content.close()
        raise


def _redirect(request: HttpRequest) -> HttpAnswer:
    # From the root, so that no name is taken for a host.
    where = f"/{request.path.strip('/')}/{_key(request)}"
    return HttpAnswer(status=301, headers=[("location", where)])


def _page(request: HttpRequest, files: dict[str, int], folders: list[str]) -> HttpAnswer:
    """Returns the list for people. Its links have the token if the request has it in its URL."""
    key, title = _key(request), escape(request.path)
    rows = [f"<li>{_link(f'{name}/', key)}</li>" for name in folders]
    rows += [f"<li>{_link(name, key)} {size:,} bytes</li>" for name, size in files.items()]
    text = f"<!DOCTYPE html><title>{title}</title><h1>{title}</h1><ul>{''.join(rows)}</ul>"
    return HttpAnswer(text.encode("utf-8", "replace"), headers=_PAGE_HEADERS)


def _link(name: str, key: str) -> str:
    target = quote_from_bytes(os.fsencode(name))
    return f'<a href="./{escape(target + key)}">{escape(name)}</a>'


def _key(request: HttpRequest) -> str:
    token = request.query.get("token")
    return "" if token is None else f"?token={quote(token, safe='')}"
