"""HTTP/1.1 for live states and served folders: h11 parses, `sendfile` sends, an `App` answers.

Rules:

1. A request has limits: of its head and body, and of the time that it takes to arrive. What breaks
   them is answered by a refusal where an answer is possible, and the connection is closed.
2. A connection without a whole request costs a task and a descriptor until its time is over, or
   until others need its place (`ckpt.live.wire`). Without the token it gets one answer.
3. `HttpConnection.content` is the content of the last answer, until the connection asks again: the
   reader may not yet have taken all bytes out of the system's buffers, not even at the end of the
   connection.
4. An unexpected exception ends one connection, by an answer with status 500, and never the server.
5. A request has one reading: a proxy in front of the server sees the same end of it. h11 is
   generous, as RFC 9112 allows; `_check_head` is not.
"""

from __future__ import annotations

import hmac
import json
import re
import resource
import socket
import ssl
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol, cast
from urllib.parse import parse_qsl

import h11

from ckpt.installation import __version__
from ckpt.live.protocol import (
    BODY_BYTES,
    HEADER_BYTES,
    IDLE_SECONDS,
    REQUEST_SECONDS,
    STALL_SECONDS,
    STATUS,
    RefusedError,
    Segment,
)
from ckpt.live.wire import Acceptor, Wire

SERVER = f"ckpt/{__version__}"
_READ_BYTES = 64 << 10
LAST_SECONDS = 1.0
"""The time for answers when the server ends."""
Headers = Sequence[tuple[str, str]]


class Content(ABC):
    """A file to answer with. It closes after as many calls of `give` as of `take`."""

    is_slow = False
    """Whether a read may wait for a disk."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._users = nbytes, 0

    def take(self) -> None:
        """Keeps the file open."""
        self._users += 1

    def give(self) -> None:
        """Lets the file be closed."""
        self._users -= 1
        if self._users == 0:
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Closes the file."""

    @abstractmethod
    def segments(self, lo: int, hi: int) -> Iterator[Segment]:
        """Yields the ranges of descriptors for bytes `lo` to `hi`."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request with its body."""

    method: str
    path: str
    """As it was sent, without the query."""
    query: dict[str, str]
    headers: dict[str, str]
    """Names in small letters."""
    body: bytes
    connection: HttpConnection


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer: bytes, or a range of a file."""

    body: bytes = b""
    status: int = 200
    headers: Headers = ()
    content: Content | None = None
    lo: int = 0
    hi: int = 0


class App(Protocol):
    """Answers requests. Raises RefusedError for those that it does not serve."""

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """Returns the answer."""

    def on_end(self, connection: HttpConnection) -> None:
        """Takes notice of the end of a connection, with the content of its last answer."""


@dataclass(slots=True, eq=False)
class HttpConnection:
    """One connection."""

    wire: Wire
    content: Content | None = None
    """See rule 3."""
    is_leased: bool = False
    """Whether the last request named a lease."""
    reader: str | None = None
    """The key of the lease that was named last."""
    is_left: bool = False
    """Whether the other side has ended the connection."""
    parser: h11.Connection = field(
        default_factory=lambda: h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)
    )


class HttpServer:
    """Accepts connections from a listening socket, which it closes at the end."""

    def __init__(
        self, listener: socket.socket, app: App, most: int, context: ssl.SSLContext | None = None
    ) -> None:
        self._app = app
        self._context = context
        self.connections: set[HttpConnection] = set()
        self._acceptor = Acceptor(listener, most, self._prepare, self._serve)

    async def close(self) -> None:
        """Stops. Requests that were read have `LAST_SECONDS` for their answers."""
        await self._acceptor.close(LAST_SECONDS)

    def _prepare(self, connected: socket.socket) -> Wire | None:
        try:
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                connected = self._context.wrap_socket(
                    connected, server_side=True, do_handshake_on_connect=False
                )
            return Wire(connected)
        except OSError:  # the other side has ended already
            connected.close()
            return None

    async def _serve(self, wire: Wire) -> None:
        connection = HttpConnection(wire)
        self.connections.add(connection)
        try:
            await self._acceptor.silence(wire, wire.handshake(REQUEST_SECONDS))
            await self._serve_all(connection)
        except (BrokenPipeError, ConnectionResetError, h11.ProtocolError):
            connection.is_left = True  # also in the middle of an answer
        finally:
            self.connections.discard(connection)
            self._app.on_end(connection)

    async def _serve_all(self, connection: HttpConnection) -> None:
        wire, seconds = connection.wire, REQUEST_SECONDS
        while not self._acceptor.is_closing and await self._first_bytes(connection, seconds):
            try:
                request = await self._acceptor.silence(wire, _request(connection))
                connection.content = None
                answer = await self._answer(request)
            except RefusedError as refusal:
                request, answer = None, answer_refusal(refusal)
            await _send(connection, request, answer)
            if _is_last(request, answer):
                await self._acceptor.silence(wire, wire.finish())
                return
            if connection.parser.our_state is not h11.DONE:
                return
            connection.parser.start_next_cycle()
            seconds = IDLE_SECONDS

    async def _first_bytes(self, connection: HttpConnection, seconds: float) -> bool:
        """Waits for the next request. False if the other side has closed, or says nothing."""
        parser, wire = connection.parser, connection.wire
        if parser.trailing_data[0]:
            return True
        try:
            data = await self._acceptor.silence(wire, wire.receive(_READ_BYTES, seconds))
        except TimeoutError:
            return False
        connection.is_left = not data
        if data:
            parser.receive_data(data)
        return bool(data)

    async def _answer(self, request: HttpRequest) -> HttpAnswer:
        try:
            return await self._app.answer(request)
        except RefusedError as refusal:
            return answer_refusal(refusal)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            text = "the server has a bug, which its log tells"
            return answer_refusal(RefusedError("internal", text))


def answer_refusal(refusal: RefusedError) -> HttpAnswer:
    """Returns the answer that tells a refusal."""
    return json_answer(refusal.json(), refusal.status)


def json_answer(value: object, status: int = 200) -> HttpAnswer:
    """Returns an answer with a JSON value."""
    body = json.dumps(value).encode()
    return HttpAnswer(body, status, [("content-type", "application/json")])


async def _request(connection: HttpConnection) -> HttpRequest:
    """Returns the whole request. Raises RefusedError if it is malformed, too large or too slow."""
    deadline = monotonic() + REQUEST_SECONDS
    try:
        event = await _event(connection, deadline)
        if not isinstance(event, h11.Request):
            raise ConnectionResetError
        body = bytearray()
        if connection.parser.they_are_waiting_for_100_continue:
            go = connection.parser.send(h11.InformationalResponse(status_code=100, headers=[]))
            await connection.wire.send(go, REQUEST_SECONDS)
        while isinstance(part := await _event(connection, deadline), h11.Data):
            body += part.data
            if len(body) > BODY_BYTES:
                raise RefusedError("large", f"the body of a request has at most {BODY_BYTES} bytes")
    except TimeoutError:
        raise RefusedError(
            "timeout", f"the request took over {REQUEST_SECONDS} s to arrive"
        ) from None
    except h11.RemoteProtocolError as error:
        kind = "header" if error.error_status_hint == 431 else "protocol"
        raise RefusedError(kind, str(error)) from None
    return _read(connection, event, bytes(body))


async def _event(connection: HttpConnection, deadline: float) -> object:
    parser = connection.parser
    while True:
        if parser.their_state is h11.IDLE:
            _check_head(parser.trailing_data[0])
        if (event := parser.next_event()) is not h11.NEED_DATA:
            break
        left = max(deadline - monotonic(), 0.001)
        parser.receive_data(await connection.wire.receive(_READ_BYTES, left))
    if isinstance(event, h11.ConnectionClosed):
        raise ConnectionResetError
    return event


def _check_head(data: bytes) -> None:
    """Raises RefusedError if the head of a request, or its part so far, can be read in two ways.

    RFC 9112: bare line feeds (2.2), folded lines (5.2), two lengths of a body (6.1, 6.3). Also
    bounds a head that has arrived at once, which h11 does not.
    """
    head, end, _ = data.partition(b"\r\n\r\n")
    if len(head) > HEADER_BYTES:
        raise RefusedError("header", f"the head of a request has at most {HEADER_BYTES} bytes")
    if _BARE.search(head):
        raise RefusedError("protocol", "a line of the request ends with LF alone, not with CR LF")
    if b"\r\n " in head or b"\r\n\t" in head:
        raise RefusedError("protocol", "a header of the request is folded over two lines")
    if not end:
        return
    fields = [line.partition(b":")[::2] for line in head.lower().split(b"\r\n")[1:]]
    lengths = [value for name, value in fields if name == b"content-length"]
    has_coding = any(name == b"transfer-encoding" for name, _ in fields)
    if len(lengths) + has_coding > 1 or any(b"," in value for value in lengths):
        raise RefusedError("protocol", "the request tells the length of its body twice")
    if has_coding:
        text = "the request has a Transfer-Encoding: send its body with a Content-Length"
        raise RefusedError("length", text)


_BARE = re.compile(rb"(?<!\r)\n")


def _read(connection: HttpConnection, event: h11.Request, body: bytes) -> HttpRequest:
    headers: dict[str, str] = {}
    for name, value in event.headers:
        key = name.decode("ascii")
        if key in headers and key in ("authorization", "ckpt-lease", "range"):
            raise RefusedError("protocol", f"the request has the header {key} twice")
        headers[key] = value.decode("latin-1")
    path, _, query = event.target.decode("ascii").partition("?")
    try:
        found = parse_qsl(query, keep_blank_values=True, max_num_fields=16)
    except ValueError as error:
        raise RefusedError("protocol", f"the query of the request: {error}") from None
    if len(dict(found)) != len(found):
        raise RefusedError("protocol", "the query of the request has a key twice")
    return HttpRequest(event.method.decode("ascii"), path, dict(found), headers, body, connection)


async def _send(
    connection: HttpConnection, request: HttpRequest | None, answer: HttpAnswer
) -> None:
    """Sends an answer; to a request that could not be read, as the last one."""
    if answer.content is None:
        await _send_bytes(connection, request, answer)
        return
    content, is_head = answer.content, request is not None and request.method == "HEAD"
    connection.content = None if is_head else content
    content.take()
    try:
        await _send_content(connection, request, answer, content)
    except (OSError, EOFError, TimeoutError):
        connection.wire.abort()
        raise
    finally:
        content.give()


async def _send_bytes(
    connection: HttpConnection, request: HttpRequest | None, answer: HttpAnswer
) -> None:
    head = _head(connection, request, answer, len(answer.body))
    is_head = request is not None and request.method == "HEAD"
    body = b"" if is_head else connection.parser.send(h11.Data(data=answer.body)) or b""
    end = connection.parser.send(h11.EndOfMessage()) or b""
    await connection.wire.send(head + body + end, STALL_SECONDS)


async def _send_content(
    connection: HttpConnection,
    request: HttpRequest | None,
    answer: HttpAnswer,
    content: Content,
) -> None:
    wire, nbytes = connection.wire, answer.hi - answer.lo
    await wire.send(_head(connection, request, answer, nbytes), STALL_SECONDS)
    if request is None or request.method != "HEAD":
        connection.parser.send_with_data_passthrough(h11.Data(data=cast(bytes, _Length(nbytes))))
        wire.enlarge()
        for segment in content.segments(answer.lo, answer.hi):
            await wire.send_file(segment, STALL_SECONDS, content.is_slow)
    connection.parser.send(h11.EndOfMessage())


def _is_last(request: HttpRequest | None, answer: HttpAnswer) -> bool:
    """Whether the answer is for a stranger: to no request, or to one without the token."""
    return request is None or answer.status == STATUS["token"]


def _head(
    connection: HttpConnection, request: HttpRequest | None, answer: HttpAnswer, nbytes: int
) -> bytes:
    headers = [("server", SERVER), ("content-length", str(nbytes)), *answer.headers]
    if _is_last(request, answer):
        headers.append(("connection", "close"))
    if connection.parser.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        raise ConnectionResetError
    response = h11.Response(status_code=answer.status, headers=headers)
    return connection.parser.send(response)


class _Length:
    """Stands in h11's bookkeeping for bytes that `sendfile` sends."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes


_RANGE = re.compile(r"bytes=([0-9]{0,20})-([0-9]{0,20})")


def byte_range(header: str, size: int) -> tuple[int, int]:
    """Returns the half-open range that a header asks for. Raises RefusedError unless it is one.

    >>> byte_range("bytes=2-5", 10), byte_range("bytes=7-", 10), byte_range("bytes=-2", 10)
    ((2, 6), (7, 10), (8, 10))
    """
    found = _RANGE.fullmatch(header.strip())
    if found is None or found.groups() == ("", ""):
        raise RefusedError(
            "range", f"Range: {header:.80}: give one range, as bytes=0-99", size=size
        )
    first, last = found.groups()
    if first:
        lo, hi = int(first), min(int(last) + 1 if last else size, size)
    else:
        lo, hi = max(size - int(last), 0), size
    if lo >= hi:
        raise RefusedError("range", f"Range: {header:.80}: the file has {size} bytes", size=size)
    return lo, hi


def file_answer(
    content: Content, header: str | None, headers: tuple[tuple[str, str], ...] = ()
) -> HttpAnswer:
    """Returns the answer with a file, or with the wanted range of it."""
    size = content.nbytes
    fields = (("accept-ranges", "bytes"), ("content-type", "application/octet-stream"), *headers)
    if header is None:
        return HttpAnswer(headers=fields, content=content, lo=0, hi=size)
    lo, hi = byte_range(header, size)
    fields += (("content-range", f"bytes {lo}-{hi - 1}/{size}"),)
    return HttpAnswer(status=206, headers=fields, content=content, lo=lo, hi=hi)


_BEARER = "bearer "


def is_token(token: str, wanted: str) -> bool:
    """Whether two tokens are equal, in a time that does not tell how equal they are."""
    return hmac.compare_digest(token.encode("utf-8", "replace"), wanted.encode())


def check_token(headers: Mapping[str, str], query: Mapping[str, str], wanted: str) -> None:
    """Raises RefusedError unless a request has the token, in a header or in its query."""
    header = headers.get("authorization", "")
    is_bearer = header.lower().startswith(_BEARER)
    token = header[len(_BEARER) :].strip() if is_bearer else query.get("token")
    if token is None or not token:
        text = "a token is needed: `Authorization: Bearer TOKEN`, or ?token= in the URL"
        raise RefusedError("token", text)
    if not is_token(token, wanted):
        order = "; the path of a URL comes before ?token=" if "/" in token else ""
        raise RefusedError("token", f"the token is wrong{order}")


EVERY_ADDRESS = ("", "0.0.0.0", "::")
"""These mean all addresses of the host: a server can listen there, and no reader can connect."""
_LEAST, _MOST = 64, 100_000
"""Bounds of the number of connections."""


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this host. Raises OSError."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family, backlog=1024)


def most_connections() -> int:
    """Returns the number of connections that a server may have; lifts the limit of descriptors.

    A quarter of the descriptors stays for files.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(max(soft // 4 * 3, _LEAST), _MOST)
