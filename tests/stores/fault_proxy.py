"""An HTTP proxy in front of a store's server: it counts, and it does harm on a schedule.

    with FaultProxy(server, seeded(7, 0.1, [Fault.CUT_ANSWER, Fault.SLOW_DOWN])) as proxy:
        ckpt.save(proxy.server.url("run"), state, storage_options=proxy.server.options)
    assert proxy.seen

Rules:

1. Drivers are given the proxy's address and sign for it; requests go on with their `Host` as it
   came, so signatures hold.
2. What goes wrong, and when, `faults` says: a schedule is asked once for each request.
3. Bodies are streamed. One thread serves one connection of a client; the server sees a new
   connection for every request.
4. Counted are bodies, without headers: what was received for the server, and what was sent to the
   client.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import BinaryIO
from urllib.parse import urlsplit

from tests.stores.child import HOST
from tests.stores.faults import REFUSALS, Fault, Refusal, Request, Schedule, no_faults
from tests.stores.http_messages import PIECE_BYTES, ClientGone, Message, pieces
from tests.stores.server import Server

SECONDS = 60
"""How long a peer may be silent before its connection is given up."""


@dataclass(slots=True)
class Seen:
    """What becomes of a request; all of it is told before the client has all of the answer."""

    request: Request
    fault: Fault | Refusal | None
    status: int = 0
    """Of the answer; 0 where the client got none."""
    received_bytes: int = 0
    """Of the request's body."""
    sent_bytes: int = 0
    """Of the answer's body."""


class FaultProxy:
    """The proxy; it listens from `with` on, until its end."""

    def __init__(
        self, server: Server, schedule: Schedule = no_faults, delay_seconds: float = 0.2
    ) -> None:
        self.schedule = schedule
        """May be replaced at any time."""
        self.delay_seconds = delay_seconds
        self.seen: list[Seen] = []
        """In the order of coming."""
        self.at_once = self.most_at_once = 0
        """The requests that are on their way now, and the most that were."""
        self._upstream = urlsplit(server.endpoint)
        self._listener = socket.create_server((HOST, 0), backlog=128)
        port = self._listener.getsockname()[1]
        self.server = server.at(f"http://{HOST}:{port}")
        """The server by way of the proxy."""
        self._lock = threading.Lock()
        self._number = 0
        self._down = False
        self._late: list[bytes] = []
        self._over = threading.Event()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> FaultProxy:
        self._start(self._listen)
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._hang_up()
        for thread in list(self._threads):
            thread.join()
        self._listener.close()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Inside, the server is gone: connections end, and new ones too."""
        self._down = True
        self._hang_up()
        try:
            yield
        finally:
            self._down = False

    def deliver(self) -> list[int]:
        """Hands the late requests to the server; the statuses of its answers."""
        statuses = []
        for request in self._late:
            with self._connected() as server, server.makefile("rb") as answers:
                server.sendall(request)
                statuses.append(int(Message.read(answers).start.split(" ")[1]))
        self._late.clear()
        return statuses

    def clear(self) -> None:
        """Forget what was seen, and count requests from 0 again."""
        with self._lock:
            self._number = self.most_at_once = 0
            self.seen.clear()

    def count(self, *methods: str) -> int:
        """Requests of these methods, or of all."""
        return sum(1 for one in self.seen if not methods or one.request.method in methods)

    @property
    def received_bytes(self) -> int:
        """Bytes that were uploaded."""
        return sum(one.received_bytes for one in self.seen)

    @property
    def sent_bytes(self) -> int:
        """Bytes that were downloaded."""
        return sum(one.sent_bytes for one in self.seen)

    def faults(self) -> Collection[Fault | Refusal]:
        """Those that befell something."""
        return {one.fault for one in self.seen if one.fault is not None}

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()

    def _hang_up(self) -> None:
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self._down or self._over.is_set():
                connection.close()
            else:
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with (
            suppress(ClientGone, OSError),
            connection,
            connection.makefile("rb", PIECE_BYTES) as stream,
            self._ended_in_time(connection),
        ):
            while not (self._over.is_set() or self._down):
                Exchange(self, connection, stream).run()

    def _next(self, head: Message) -> Seen:
        """A request with its number and fate."""
        method, target, _ = head.start.split(" ")
        span = head.get("range") or head.get("x-ms-range")
        with self._lock:
            key = head.get("authorization").partition("Credential=")[2].partition("/")[0]
            agent = head.get("user-agent")
            request = Request(self._number, method, target, span, head.length, key, agent)
            self._number += 1
            self.seen.append(Seen(request, self.schedule(request)))
            return self.seen[-1]

    def _count(self, more: int) -> None:
        with self._lock:
            self.at_once += more
            self.most_at_once = max(self.most_at_once, self.at_once)

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """A new connection to the server."""
        where = (self._upstream.hostname, self._upstream.port)
        with socket.create_connection(where, SECONDS) as server, self._ended_in_time(server):
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield server

    @contextmanager
    def _ended_in_time(self, connection: socket.socket) -> Iterator[None]:
        """Inside, an outage and the proxy's end are the connection's end too."""
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)


class Exchange:
    """One request and its answer."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, stream: BinaryIO) -> None:
        self._proxy = proxy
        self._client = client
        self._stream = stream

    def run(self) -> None:
        """Serve one request. Raises ClientGone or OSError where the connection is over with it."""
        head = Message.read(self._stream)
        self._seen = self._proxy._next(head)
        self._proxy._count(1)
        try:
            self._answer(head)
        finally:
            self._proxy._count(-1)

    def _answer(self, head: Message) -> None:
        fault = self._seen.fault
        if head.get("expect"):
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head.without("expect")
        refusal = fault if isinstance(fault, Refusal) else REFUSALS.get(fault) if fault else None
        if refusal is not None:
            self._take(head, lambda piece: None)
            self._refuse(refusal)
            return
        if fault is Fault.HANG:
            self._hang()
        if fault is Fault.LATE:
            parts = [head.encoded()]
            self._take(head, lambda piece: parts.append(bytes(piece)))
            self._proxy._late.append(b"".join(parts))
            raise ClientGone
        if fault is Fault.DELAY:
            self._proxy._over.wait(self._proxy.delay_seconds)
        head.put("Connection", "close")
        if fault is Fault.TWICE:
            parts = [head.encoded()]
            self._take(head, lambda piece: parts.append(bytes(piece)))
            self._proxy._late.append(b"".join(parts))
            self._proxy.deliver()
            with self._proxy._connected() as server, server.makefile("rb", PIECE_BYTES) as answers:
                server.sendall(b"".join(parts))
                self._pass_back(answers)
            return
        with ExitStack() as stack:
            server = stack.enter_context(self._proxy._connected())
            send = self._spoiled(server.sendall, head.length)
            server.sendall(head.encoded())
            self._take(head, send)
            answers = stack.enter_context(server.makefile("rb", PIECE_BYTES))
            self._pass_back(answers)

    def _take(self, head: Message, send: Callable[[memoryview], object]) -> None:
        """Pass a request's body on."""
        for piece in pieces(self._stream, head):
            self._seen.received_bytes += len(piece)
            send(piece)

    def _spoiled(
        self, send: Callable[[memoryview], object], length: int
    ) -> Callable[[memoryview], object]:
        """Another way to send a request's body: as its fault has it."""
        middle = length // 2
        if self._seen.fault is Fault.DROP_REQUEST:
            if not length:
                raise ClientGone

            def drop(piece: memoryview) -> None:
                send(piece[: max(0, middle - (self._seen.received_bytes - len(piece)))])
                if self._seen.received_bytes > middle:
                    raise ClientGone

            return drop
        if self._seen.fault is Fault.FLIP_REQUEST:
            return lambda piece: send(
                flipped(piece, middle - (self._seen.received_bytes - len(piece)))
            )
        return send

    def _pass_back(self, answers: BinaryIO) -> None:
        seen, fault = self._seen, self._seen.fault
        answer = Message.read(answers)
        while answer.start.split(" ")[1] == "100":
            answer = Message.read(answers)
        answer.without("connection", "keep-alive")
        status = int(answer.start.split(" ")[1])
        bare = seen.request.method == "HEAD" or status in (204, 304)
        framed = bare or answer.chunked or bool(answer.get("content-length"))
        length = 0 if bare else answer.length
        if fault is Fault.DROP_ANSWER or (fault is Fault.CUT_ANSWER and not length):
            raise ClientGone
        if fault in (Fault.SHORT_ANSWER, Fault.FLIP_ANSWER) and not length:
            seen.fault = fault = None  # there is nothing to spoil
        if not framed:
            answer.put("Connection", "close")
        keep = length
        if fault is Fault.SHORT_ANSWER:
            keep = length // 2
            answer.put("Content-Length", str(keep))
        if fault is Fault.CUT_ANSWER:
            keep = length // 2
        seen.status = status
        self._client.sendall(answer.encoded())
        if not bare:
            self._send_body(answers, answer, keep, length)
        if fault is Fault.CUT_ANSWER or not framed:
            raise ClientGone

    def _send_body(self, answers: BinaryIO, answer: Message, keep: int, length: int) -> None:
        if answer.chunked or not answer.get("content-length"):
            for piece in pieces(answers, answer, until_end=True):
                self._seen.sent_bytes += len(piece)
                self._client.sendall(piece)
            return
        at = 0
        for piece in pieces(answers, replace(answer, headers=[("content-length", str(length))])):
            if self._seen.fault is Fault.FLIP_ANSWER:
                piece = flipped(piece, length // 2 - at)
            at += len(piece)
            kept = piece[: max(0, keep - self._seen.sent_bytes)]
            self._seen.sent_bytes += len(kept)
            self._client.sendall(kept)

    def _refuse(self, refusal: Refusal | tuple[int, str, str, str]) -> None:
        request, headers = self._seen.request, []
        if isinstance(refusal, Refusal):
            status, words, code, azure_code = refusal.status, "No", refusal.code, refusal.code
            headers = list(refusal.headers)
        else:
            status, words, code, azure_code = refusal
        self._seen.status = status
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
            f"<Message>a fault of the test, request {request.number}</Message></Error>"
        ).encode()
        answer = Message(
            f"HTTP/1.1 {status} {words}",
            [
                ("Content-Type", "application/xml"),
                ("Content-Length", str(len(body))),
                ("x-ms-error-code", azure_code),
                *headers,
            ],
        )
        self._client.sendall(answer.encoded() + (b"" if request.method == "HEAD" else body))

    def _hang(self) -> None:
        """Read what comes and say nothing, until the client has had enough."""
        coming = select.poll()
        coming.register(self._client, select.POLLIN)
        while not (self._proxy._over.is_set() or self._proxy._down):
            if coming.poll(100) and not self._client.recv(PIECE_BYTES):
                break
        raise ClientGone


def flipped(piece: memoryview, at: int) -> memoryview:
    """The same bytes, one bit of that at an index another; as they are where it lies elsewhere."""
    if not 0 <= at < len(piece):
        return piece
    copy = bytearray(piece)
    copy[at] ^= 0x10
    return memoryview(copy)
