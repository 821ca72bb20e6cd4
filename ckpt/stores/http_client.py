"""Requests to servers of live states and of `ckpt serve`, over connections that are kept.

Rules:

1. A connection serves one request at a time. Idle connections wait for the next request of any
   thread, so there are as many connections as threads that read at once. A forked child has its
   own ones.
2. The bytes of a range go from the socket into the caller's memory.
3. All requests may be repeated. One that finds its kept connection closed goes over a new one. A
   server with too many connections resets new ones, so a request has two of these.
4. A wait for bytes ends after `HttpOptions.seconds`. A failure is an error with the address.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ckpt.errors import AccessDeniedError, ProtocolError, StoreTimeoutError, UnreachableError
from ckpt.stores.addresses import authority
from formats.errors import FormatError
from formats.limits import decode_object
from sharding.errors import ArgumentError

TIMEOUT_SECONDS = 30.0
MOST_ANSWER_BYTES = 64 << 20
"""The largest answer that is not a range of a file."""
NEW_CONNECTIONS = 2
"""For one request."""
BROKEN = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""The errors of a connection that the server has closed before its answer."""
TOKEN_VARIABLE = "CKPT_TOKEN"
JSON_TYPE = "application/json"
_IS_TOKEN = re.compile(r"[!-~]+")
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_NO_RANGE = re.compile(r"bytes \*/(\d{1,18})")
_CLIENTS: weakref.WeakSet[HttpClient] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    """Names in small letters."""
    body: bytes

    def text(self) -> str:
        """Returns the server's words for an error."""
        with suppress(FormatError):
            return str(decode_object(self.body, "the answer").get("message", ""))
        return self.body[:200].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a server."""

    host: str
    port: int
    is_secure: bool = False
    """Whether the server speaks TLS."""

    def __str__(self) -> str:
        return authority(self.host, self.port)


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """The options of the servers' stores, from `storage_options`."""

    token: str | None = field(default=None, repr=False)
    seconds: float = TIMEOUT_SECONDS
    """The longest wait for bytes."""
    certificate: str | None = None
    """The file with the certificates to trust; None trusts those of the system."""

    @classmethod
    def of(cls, options: Mapping[str, Any], token: str | None) -> HttpOptions:
        """Returns the options with a token: that of the URL, the options' or CKPT_TOKEN's.

        Raises ArgumentError for an option with another name or type.
        """
        unknown = sorted(set(options) - {"token", "timeout", "certificate"})
        if unknown:
            raise ArgumentError(
                f"storage_options has {unknown[0]!r}; servers of ckpt take token, timeout and "
                "certificate"
            )
        token = token or options.get("token") or os.environ.get(TOKEN_VARIABLE) or None
        seconds, certificate = options.get("timeout", TIMEOUT_SECONDS), options.get("certificate")
        if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ArgumentError(f"timeout in storage_options is {seconds!r}; give seconds above 0")
        for source in (token, options.get("token")):
            if source is not None and not (isinstance(source, str) and _IS_TOKEN.fullmatch(source)):
                raise ArgumentError(
                    "the token (of the URL, storage_options or CKPT_TOKEN) is no text of visible "
                    "ASCII characters"
                )
        if not isinstance(certificate, str | None):
            raise ArgumentError(f"certificate in storage_options is {certificate!r}; give a path")
        return cls(token, float(seconds), certificate)

    def as_storage_options(self) -> dict[str, object]:
        """Returns the options in the form of `storage_options`, for stores beside this one."""
        found = {"token": self.token, "timeout": self.seconds, "certificate": self.certificate}
        return {key: value for key, value in found.items() if value is not None}


class HttpClient:
    """The connections of one store to one server. Safe to use from several threads."""

    def __init__(self, place: Place, options: HttpOptions) -> None:
        self.place = place
        token = options.token
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._seconds = options.seconds
        self._context: ssl.SSLContext | None = None
        if place.is_secure:
            self._context = ssl.create_default_context(cafile=options.certificate)
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._is_closed = False
        _CLIENTS.add(self)

    def ask(self, method: str, path: str, body: object = None, wait_seconds: float = 0.0) -> Answer:
        """Returns the answer to a small request, which the server may delay by `wait_seconds`.

        Raises AccessDeniedError for status 401 and 403; other statuses are the caller's.
        """
        return self._check(self.answer(method, path, body, wait_seconds))

    def answer(
        self, method: str, path: str, body: object = None, wait_seconds: float = 0.0
    ) -> Answer:
        """Returns the answer to a small request, of any status."""
        headers = {"Accept": JSON_TYPE}
        data = None if body is None else json.dumps(body).encode()
        with self._answering(method, path, headers, data, wait_seconds) as response:
            content = _body(response, MOST_ANSWER_BYTES + 1)
            if len(content) > MOST_ANSWER_BYTES:
                raise ProtocolError(
                    f"{self.place}: an answer has more than {MOST_ANSWER_BYTES:,} bytes"
                )
            return Answer(response.status, _lower_headers(response), content)

    def read_whole(self, path: str, limit: int) -> Answer | int:
        """Returns the answer with all bytes of a file; its size if it is above `limit`."""
        with self._answering("GET", path, {}, None, 0.0) as response:
            size, is_file = response.length, response.status == http.client.OK
            if is_file and size is not None and size > limit:
                return size
            data = _body(response, limit + 1)
            if is_file and len(data) > limit:
                return len(data)
            return self._check(Answer(response.status, _lower_headers(response), data))

    def read_range(
        self, path: str, lo: int, views: Sequence[memoryview], headers: Mapping[str, str]
    ) -> int | Answer:
        """Fills the views with the bytes from `lo` on, and returns the size of the file.

        Returns the answer instead if the server does not send exactly these bytes; the views may
        have been changed. An answer of status 416 has the file's size in `past_end`. A connection
        that breaks within an answer tells no reason, so the request is sent once more.
        """
        try:
            return self._read_range(path, lo, views, headers)
        except UnreachableError:
            return self._read_range(path, lo, views, headers)

    def _read_range(
        self, path: str, lo: int, views: Sequence[memoryview], headers: Mapping[str, str]
    ) -> int | Answer:
        hi = lo + sum([len(view) for view in views])
        asked = {**headers, "Range": f"bytes={lo}-{hi - 1}"}
        with self._answering("GET", path, asked, None, 0.0) as response:
            if response.status != http.client.PARTIAL_CONTENT:
                data = _body(response, MOST_ANSWER_BYTES)
                return self._check(Answer(response.status, _lower_headers(response), data))
            content_range = response.headers.get("content-range", "")
            matched = _RANGE.fullmatch(content_range)
            if matched is None or int(matched[1]) != lo or response.length is None:
                raise ProtocolError(
                    f"{self.place}: bytes {lo}:{hi} were asked, {content_range!r} came"
                )
            size = int(matched[3])
            if size < hi:
                headers = {"content-range": f"bytes */{size}"}
                return Answer(http.client.REQUESTED_RANGE_NOT_SATISFIABLE, headers, b"")
            if int(matched[2]) + 1 != hi or response.length != hi - lo:
                raise ProtocolError(
                    f"{self.place}: bytes {lo}:{hi} were asked, {content_range!r} came"
                )
            for view in views:
                _fill(response, view)
            return size

    def close(self) -> None:
        """Closes the idle connections; those in use are closed after their request."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # an interrupt has ended `__init__`
            self.close()

    def _check(self, answer: Answer) -> Answer:
        if answer.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            problem = "refuses the token" if self._headers else "wants a token"
            raise AccessDeniedError(
                f"{self.place}: the server {problem} ({answer.status} {answer.text()}); give it as "
                "?token= in the URL, as storage_options={'token': ...} or in CKPT_TOKEN"
            )
        return answer

    @contextmanager
    def _answering(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        wait_seconds: float,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yields the answer to a request. Its connection is kept if the block reads all of it."""
        with self._name_errors(wait_seconds):
            connection, response = self._send(method, path, headers, body, wait_seconds)
            try:
                yield response
                is_whole = response.isclosed() and connection.sock is not None
            except BaseException:
                response.close()  # the connection does not know an answer that is its last one
                connection.close()
                raise
            with self._lock:
                is_kept = is_whole and not self._is_closed
                if is_kept:
                    self._idle.append(connection)
            if not is_kept:
                response.close()
                connection.close()

    def _send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        wait_seconds: float,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request, and again if the connection breaks before an answer (rule 3)."""
        new = 0
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            try:
                if connection is None:
                    new += 1
                    connection = self._connect()
                connection.sock.settimeout(self._seconds + wait_seconds)
                connection.request(method, path, body, {**self._headers, **headers})
                return connection, connection.getresponse()
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if new == NEW_CONNECTIONS or not isinstance(error, BROKEN):
                    raise

    def _connect(self) -> http.client.HTTPConnection:
        host, port, context = self.place.host, self.place.port, self._context
        connection = (
            http.client.HTTPConnection(host, port, timeout=self._seconds)
            if context is None
            else http.client.HTTPSConnection(host, port, timeout=self._seconds, context=context)
        )
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _name_errors(self, wait_seconds: float) -> Iterator[None]:
        try:
            yield
        except (ProtocolError, AccessDeniedError):
            raise
        except TimeoutError as error:
            seconds = self._seconds + wait_seconds
            raise StoreTimeoutError(
                f"{self.place}: the server sent nothing for {seconds:g} s; it hangs, or another "
                "program has its address (storage_options={'timeout': seconds} changes the wait)"
            ) from error
        except ssl.SSLError as error:
            raise UnreachableError(
                f"{self.place}: no secure connection: {error}; name the file of the certificate in "
                "storage_options={'certificate': path} if no public authority has signed it"
            ) from error
        except (OSError, http.client.IncompleteRead) as error:
            is_unknown = isinstance(error, socket.gaierror)
            problem = "its name is unknown" if is_unknown else type(error).__name__
            raise UnreachableError(
                f"{self.place}: no server answers, or it has ended: {problem}: {error}; "
                "is the address still right?"
            ) from error
        except http.client.HTTPException as error:
            raise ProtocolError(
                f"{self.place}: its answer is not HTTP: {type(error).__name__}: {error}"[:300]
            ) from error


def past_end(answer: Answer) -> int | None:
    """Returns the size of a file that ends before a range, from an answer of status 416."""
    matched = _NO_RANGE.fullmatch(answer.headers.get("content-range", ""))
    return None if matched is None else int(matched[1])


def json_of(answer: Answer, where: str) -> dict[str, object]:
    """Returns the JSON object of an answer. Raises ProtocolError if it is none."""
    try:
        return decode_object(answer.body, f"{where}: the answer", lone=True)  # names of files
    except FormatError as error:
        raise ProtocolError(str(error)) from error


def path_of(*parts: str) -> str:
    """Returns the path of a URL from its parts; each may have slashes.

    >>> path_of("runs", "step 1/manifest.json")
    '/runs/step%201/manifest.json'
    """
    inner = "/".join(part.strip("/") for part in parts if part.strip("/"))
    return "/" + quote(inner, errors="surrogateescape")  # as Python's names of files


def _lower_headers(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _body(response: http.client.HTTPResponse, most: int) -> bytes:
    """Returns at most so many bytes of an answer. Raises IncompleteRead if it ends before."""
    data = response.read(most)
    if response.length and len(data) < most:
        raise http.client.IncompleteRead(data, response.length)
    return data


def _fill(response: http.client.HTTPResponse, view: memoryview) -> None:
    at = 0
    while at < len(view):
        count = response.readinto(view[at:])
        if not count:
            raise ConnectionResetError(f"the connection ended after {at:,} of {len(view):,} bytes")
        at += count


def _forget_in_child() -> None:
    """Closes the idle connections of the parent: the two would read each other's answers."""
    for client in list(_CLIENTS):
        client._lock = threading.Lock()
        idle, client._idle = client._idle, []
        for connection in idle:
            connection.close()


os.register_at_fork(after_in_child=_forget_in_child)
