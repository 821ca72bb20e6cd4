"""Senders of nonsense, of nothing, and readers that stall: answered by name, and alone with it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.errors import StoreError
from ckpt.live import control, http_server
from ckpt.live.control import receive_message, send_message
from ckpt.live.http_server import HttpServer, listen
from ckpt.live.process import HostOptions, HostServer
from ckpt.live.protocol import MESSAGE_BYTES, STATUS, FileAt, Segment
from ckpt.live.serve import FolderApp
from tests.live.hosts import (
    TOKEN,
    Client,
    Hosts,
    check_no_more_descriptors,
    copy,
    descriptors_of,
    is_running,
    memory,
    publish_closed,
    random_bytes,
    until,
)
from tests.selection import examples

pytestmark = pytest.mark.thorough

SECONDS = 60
ROUTES = [
    ("GET", "/policy"),
    ("POST", "/policy/leases"),
    ("POST", "/policy/leases/0123456789abcdef"),
    ("DELETE", "/policy/leases/0123456789abcdef"),
    ("GET", "/policy/1/"),
    ("GET", "/policy/1/f"),
    ("HEAD", "/policy/1/f"),
    ("POST", "/policy/2/f"),
    ("DELETE", "/policy/1"),
    ("GET", "/another"),
    ("GET", "/"),
]
WORDS = [
    *(
        "GET",
        "POST",
        "DELETE",
        "HEAD",
        "PUT",
        "/policy",
        "/policy/1/f",
        "/policy/leases",
        "/1",
        "/",
    ),
    *("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", " ", "\r\n", "\r\n\r\n", "\n", "\0", ": ", "Host: a\r\n"),
    *("Content-Length: 5\r\n", "Content-Length: -1\r\n", "Transfer-Encoding: chunked\r\n"),
    *("Range: bytes=0-1\r\n", "Range: bytes=9-\r\n", "Expect: 100-continue\r\n", "5\r\nhello\r\n"),
    *(f"Authorization: Bearer {TOKEN}\r\n", "Authorization: Bearer x\r\n", "?token=", TOKEN),
    *("?after=1&wait=0", "?after=x", "?wait=nan", "?wait=-1", "%2e%2e", "{}", '{"version":null}'),
    *(
        '{"version":1e999}',
        '{"delta":[[0,1,[1],[1],true]]}',
        "\xff",
        "A" * 20_000,
        "Connection: close\r\n",
    ),
]
MESSAGES = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=12).map(
    lambda words: "".join(words).encode("utf-8", "surrogatepass")
)
REASONABLE = st.builds(
    lambda route, headers, body: (
        f"{route[0]} {route[1]} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"{headers}Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode(),
    st.sampled_from(ROUTES),
    st.sampled_from(["", "Range: bytes=0-0\r\n", "Range: x\r\n", "Ckpt-Lease: y\r\n"]),
    st.sampled_from(["", "{}", '{"version":null}', '{"version":-1}', '{"delta":[]}', "[1]", "\0"]),
)


def exchange(address: tuple[str, int], data: bytes) -> bytes:
    """All that the server says to these bytes before it closes the connection."""
    found = bytearray()
    with socket.create_connection(address, SECONDS) as connection:
        with suppress(OSError):  # the server may have closed already
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                found += part
    return bytes(found)


def check_answers(said: bytes) -> None:
    """Each answer is one of HTTP/1.1, and each refusal has a kind and a text."""
    for answer in re.split(rb"(?=HTTP/1\.1 \d{3} )", said)[1:]:
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        if status >= 400 and body:
            told = json.loads(body)
            assert STATUS[told["error"]] == status
            assert told["message"]
            assert status != STATUS["internal"], told
        else:
            assert status in (100, 200, 206) or not body


@pytest.fixture
def serving(hosts: Hosts) -> HostServer:
    server = hosts.start(lease_seconds=0.5)  # a fuzzer that takes leases does not release them
    publish_closed(server, 1, f=b"12345")
    return server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServer]:
    """One server for tests that do not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPT_RUNTIME_DIR", str(tmp_path_factory.mktemp("shared") / "runtime"))
        with HostServer.start(HostOptions("policy", TOKEN)) as server:
            server.own()
            publish_closed(server, 1, f=b"12345")
            log = control.socket_path("policy").with_suffix(".log")
            patch.undo()
            yield server
            assert log.read_text() == ""
    until(lambda: not is_running(server.pid))


@contextmanager
def undisturbed(server: HostServer) -> Iterator[None]:
    """Afterwards the server answers as before, and has as many descriptors."""

    def ask() -> None:
        with Client(server.address) as client:
            assert client.get("/policy/1/f").body == b"12345"

    ask()
    with HostServer.attach("policy"):
        pass
    before = descriptors_of(server.pid)
    yield
    until(lambda: descriptors_of(server.pid) <= before)
    ask()
    assert is_running(server.pid)


def log_of(server: HostServer) -> str:
    return control.socket_path(server.name).with_suffix(".log").read_text()


def test_malformed_requests_are_refused_by_name(serving: HostServer) -> None:
    @settings(
        max_examples=examples(600), suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(MESSAGES | st.binary(max_size=300) | st.lists(REASONABLE, max_size=3).map(b"".join))
    def send(data: bytes) -> None:
        if b"DELETE /policy/1 " not in data:
            check_answers(exchange(serving.address, data))

    with undisturbed(serving):
        send()
    assert log_of(serving) == ""


@pytest.mark.parametrize(
    ("data", "status", "kind"),
    [
        (b"GET /policy HTTP/1.1\r\n" + b"a: " + b"b" * 20_000, 431, "header"),
        (b"GET /policy HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400, "protocol"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "protocol"),
        (b"GET /policy HTTP/1.1\r\n\r\n", 400, "protocol"),
        (
            b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\n" + b"b" * 99_999,
            413,
            "large",
        ),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400, "protocol"),
        *(
            (b"POST /policy/leases HTTP/1.1\r\nHost: a" + lines, status, kind)
            for lines, status, kind in [
                (b"\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400, "protocol"),
                (b"\r\ntransfer-encoding: x\r\nCONTENT-LENGTH:2\r\n\r\n{}", 400, "protocol"),
                (b"\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "protocol"),
                (b"\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400, "protocol"),
                (b"\r\nContent-Length: 2, 2\r\n\r\n{}", 400, "protocol"),
                (b"\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411, "length"),
                (b"\r\nTransfer-Encoding: identity\r\n\r\n{}", 411, "length"),
                (b"\r\nA: b\r\n Content-Length: 2\r\n\r\n{}", 400, "protocol"),
                (b"\r\nA: b\r\n\tc\r\n\r\n", 400, "protocol"),
                (b"\nContent-Length: 2\r\n\r\n{}", 400, "protocol"),
                (b"\r\nContent-Length: 0\r\n\n", 400, "protocol"),
                (b"\r\nContent-Length: 0\n\r\n", 400, "protocol"),
                (b"\r\nA: b\rContent-Length: 2\r\n\r\n{}", 400, "protocol"),
                (b"\r\nContent-Length : 2\r\n\r\n{}", 400, "protocol"),
            ]
        ),
        (b"GET /a HTTP/1.1\r\nHost: a\r\nRange: b\r\nRange: b\r\n\r\n", 400, "protocol"),
        (b"GET /a?x=1&x=2 HTTP/1.1\r\nHost: a\r\n\r\n", 400, "protocol"),
        (b"GET /policy HTTP/1.1\r\nHost: a\r\n\r\n", 401, "token"),
    ],
)
def test_a_broken_rule_has_its_status(
    shared: HostServer, data: bytes, status: int, kind: str
) -> None:
    # A second request behind it gets no answer: nobody knows where it begins.
    is_refused = status in (400, 411, 413, 431)
    said = exchange(shared.address, data + (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * is_refused))
    assert said.startswith(b"HTTP/1.1 %d " % status)
    assert said.count(b"HTTP/1.1 ") == 1
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"] == kind


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_is_told_without_the_token(shared: HostServer, method: str, path: str) -> None:
    for token in (None, "wrong", TOKEN[:-1], TOKEN + "x"):
        with Client(shared.address, token) as client:
            found = client.ask(method, path, b"{}")
            assert client.connection.sock is None  # it has one answer
        assert found.status == 401
        if method != "HEAD":
            assert found.json["error"] == "token"
    with Client(shared.address) as client:
        assert client.get("/policy/1/f").body == b"12345"


FRAGMENTS = st.sampled_from(
    [b'{"do":"hello"}', b'{"do":"own","name":"policy","keep_seconds":0}', b"{}", b"[]", b"", b"\0"]
) | st.builds(
    lambda do, fields: json.dumps({"do": do, **fields}).encode(),
    st.sampled_from(["put", "commit", "drop", "reclaim", "take", "get", "versions", "hello", "no"]),
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.sampled_from(["other", "", 1, None]),
            "version": st.sampled_from([0, 9, -1, 1.5, "1", 2**64]),
            "file": st.sampled_from(["g", "..", "a/b", "", 3]),
            "segments": st.sampled_from(
                [[], [[0, 0, 1]], [[0, 0, 10**12]], [[9, 0, 1]], [[0]], {}]
            ),
            "files": st.sampled_from([{}, {"f": {}}, {"f": {"size": 1, "at": [["h", 1]]}}, []]),
            "info": st.sampled_from([{}, {"a": [1, {"b": None}]}, []]),
            "overdue": st.sampled_from([True, 0]),
            "token": st.sampled_from([TOKEN, "", 1]),
            "in": st.sampled_from([0, 1, -1, "0"]),
            "nbytes": st.sampled_from([5, 0, -1, 2**40]),
        },
    ),
)


@pytest.mark.thorough
def test_malformed_datagrams_are_refused_by_name(serving: HostServer) -> None:
    path = control.socket_path("policy")
    theirs, ours = os.pipe()
    kinds = [memory(b"12345"), theirs, ours]

    @settings(
        max_examples=examples(600), suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(
        st.lists(
            st.tuples(
                FRAGMENTS | st.binary(min_size=1, max_size=200),
                st.lists(st.sampled_from(kinds), max_size=4),
            ),
            max_size=4,
        )
    )
    def send(messages: Sequence[tuple[bytes, list[int]]]) -> None:
        with control.connect(path, SECONDS) as connection:
            for data, descriptors in messages:
                if not data:
                    return
                socket.send_fds(connection, [data], descriptors)
                answer, received = receive_message(connection)
                for one in received:
                    os.close(one)
                told = json.loads(answer)
                assert "ok" in told or told["error"] in STATUS
                assert told.get("error") != "internal"

    with undisturbed(serving):
        send()
    assert log_of(serving) == ""
    for one in kinds:
        os.close(one)


def test_a_long_message_that_is_none_is_refused(serving: HostServer) -> None:
    def said(data: bytes, *descriptors: int) -> str:
        with control.connect(control.socket_path("policy"), SECONDS) as connection:
            socket.send_fds(connection, [data], list(descriptors))
            answer, _ = receive_message(connection)
            return str(json.loads(answer)["error"])

    one, (theirs, ours) = memory(b"{}"), os.pipe()
    with undisturbed(serving):
        assert said(b"x" * (MESSAGE_BYTES + 1)) == "large"
        assert said(b'{"in":0,"nbytes":3}', one) == "large"
        assert said(b'{"in":0,"nbytes":2}', theirs) == "large"
        assert said(b'{"in":1,"nbytes":2}', one) == "protocol"
        assert said(b'{"in":0,"nbytes":2}') == "protocol"
        assert said(b'{"in":0,"nbytes":2}', one) == "protocol"  # without `do`
    for descriptor in (one, theirs, ours):
        os.close(descriptor)


@contextmanager
def saying(answer: bytes) -> Iterator[tuple[str, int]]:
    """A server that says this to each connection, and closes it; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense",
        b"HTTP/1.1 200 \r\n\r\n",
        b"HTTP/1.1 200 \r\nContent-Length: 10\r\n\r\n12345",
        b"HTTP/1.1 200 \r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 \r\nContent-Length: %d\r\n\r\n" % 10**18,
        b"HTTP/1.1 200 \r\nContent-Length: %d\r\n\r\n" % 10**19,
        b"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 302 \r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 100 \r\n\r\nHTTP/1.1 500 \r\n\r\n",
        b"HTTP/1.1 200 \r\n" + b"a: b\r\n" * 100_000,
    ],
    ids=lambda answer: answer[:50],
)
def test_a_copy_from_a_server_that_says_nonsense_fails_by_name(hosts: Hosts, answer: bytes) -> None:
    server, before = hosts.start(), descriptors_of()
    with saying(answer) as source, pytest.raises(StoreError, match="no copy from"):
        copy(source, 2, f=10)
    assert server.versions() == {}
    check_no_more_descriptors(before)


def test_connections_that_end_at_any_moment_leave_nothing(serving: HostServer) -> None:
    ask = f"GET /policy/1/f HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    reset = struct.pack("ii", 1, 0)
    with undisturbed(serving):
        for length in range(0, len(ask) + 1, 3):
            for is_reset in (False, True):
                with socket.create_connection(serving.address, SECONDS) as connection:
                    connection.sendall(ask[:length])
                    if is_reset:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert log_of(serving) == ""


def test_readers_that_stall_disturb_nobody(hosts: Hosts) -> None:
    server, data = hosts.start(), random_bytes(32 << 20)
    publish_closed(server, 1, f=data)
    ask = f"GET /policy/1/f HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with ExitStack() as stack:
        for _ in range(20):
            stalled = stack.enter_context(socket.create_connection(server.address, SECONDS))
            stalled.sendall(ask)
        assert hosts.client(server).get("/policy/1/f").body == data
        assert server.drop(1) is True
        publish_closed(server, 2, f=b"2")
        assert hosts.client(server).get("/policy/2/f").body == b"2"
    assert log_of(server) == ""


@contextmanager
def in_thread(
    folder: Path, most: int, context: ssl.SSLContext | None = None
) -> Iterator[tuple[tuple[str, int], HttpServer]]:
    """An HTTP server over a folder, in a thread of this process."""
    began: list[tuple[asyncio.AbstractEventLoop, asyncio.Event, HttpServer]] = []
    is_ready = threading.Event()
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()

    async def serve() -> None:
        server = HttpServer(listener, FolderApp(folder, None), most, context)
        end = asyncio.Event()
        began.append((asyncio.get_running_loop(), end, server))
        is_ready.set()
        await end.wait()
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_ready.wait(SECONDS)
    loop, end, server = began[0]
    try:
        yield address, server
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("said", [b"", b"GET / HT"])
def test_connections_without_a_request_make_place_for_others(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    before = descriptors_of()
    with in_thread(tmp_path, most=8) as (address, server), ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(address, SECONDS)).sendall(said)
        until(lambda: len(server.connections) == 8)
        with Client(address, None) as client:
            assert client.get("/f").body == b"12345"
        assert len(server.connections) <= 8
    check_no_more_descriptors(before)


def test_a_request_that_takes_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_thread(tmp_path, most=8) as (address, server):
        with socket.create_connection(address, SECONDS) as slow:
            # After an answer, the silence before the next request has a longer limit.
            slow.sendall(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.2)
            slow.sendall(b"GET / HTTP/1.1\r\n")
            said = b"".join(iter(lambda: slow.recv(1 << 16), b""))
            assert said.startswith(b"HTTP/1.1 408 ")
            assert json.loads(said.partition(b"\r\n\r\n")[2])["error"] == "timeout"
        with socket.create_connection(address, SECONDS) as silent:
            assert silent.recv(1) == b""
        until(lambda: not server.connections)


def test_a_stranger_that_drips_a_record_of_tls_has_one_time_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.3)
    context, is_over = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), threading.Event()
    with (
        in_thread(tmp_path, most=8, context=context) as (address, server),
        socket.create_connection(address, SECONDS) as slow,
    ):

        def drip() -> None:
            with suppress(OSError):
                slow.sendall(b"\x16\x03\x01\x40\x00")  # 16 kB follow
                while not is_over.wait(0.02):
                    slow.sendall(b"\x01")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            until(lambda: len(server.connections) == 1)
            until(lambda: not server.connections)
        finally:
            is_over.set()
            thread.join(SECONDS)


def test_a_connection_without_a_second_request_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.2)
    with in_thread(tmp_path, most=8) as (address, server), Client(address, None) as client:
        assert client.get("/").status == 200
        until(lambda: not server.connections)


def test_a_reader_that_takes_no_bytes_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "STALL_SECONDS", 0.2)
    with (tmp_path / "f").open("wb") as file:
        file.truncate(1 << 30)
    before = descriptors_of()
    with in_thread(tmp_path, most=8) as (address, server), ExitStack() as stack:
        stalled = stack.enter_context(socket.create_connection(address, SECONDS))
        stalled.sendall(b"GET /f HTTP/1.1\r\nHost: a\r\n\r\n")
        assert stalled.recv(1) == b"H"
        until(lambda: not server.connections)
        with pytest.raises(ConnectionResetError):
            list(iter(lambda: stalled.recv(1 << 20), b""))
    check_no_more_descriptors(before)


def test_a_server_without_descriptors_goes_on_as_soon_as_it_can(
    hosts: Hosts, serving: HostServer
) -> None:
    kept = hosts.client(serving)
    assert kept.get("/policy/1/f").body == b"12345"
    limit = descriptors_of(serving.pid) + 4
    resource.prlimit(serving.pid, resource.RLIMIT_NOFILE, (limit, limit))
    with undisturbed(serving), ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(serving.address, SECONDS))
            stack.enter_context(control.connect(control.socket_path("policy"), SECONDS))
        with Client(serving.address) as another:
            assert another.get("/policy/1/f").body == b"12345"
    assert serving.versions()[1].complete


@pytest.fixture
def many_descriptors() -> Iterator[Callable[[int], None]]:
    """Raises the soft limit of descriptors, or skips the test."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def need(count: int) -> None:
        if limits[1] < count:
            pytest.skip(f"the system allows {limits[1]} descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(count, limits[0]), limits[1]))

    yield need
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.parametrize("is_unix", [False, True])
def test_ten_thousand_silent_connections_disturb_nobody(
    hosts: Hosts, serving: HostServer, many_descriptors: Callable[[int], None], is_unix: bool
) -> None:
    count = 10_000
    many_descriptors(count + 1000)
    path = control.socket_path("policy")
    client, data = hosts.client(serving), random_bytes(8 << 20)
    publish_closed(serving, 2, f=data)
    before = descriptors_of(serving.pid)
    with ExitStack() as stack:
        for number in range(count):
            if is_unix:
                stack.enter_context(control.connect(path, SECONDS))
            else:
                stack.enter_context(socket.create_connection(serving.address, SECONDS))
            if number % 100 == 0:
                assert client.get("/policy/2/f").body == data
                assert serving.versions()
        with Client(serving.address) as another:
            assert another.get("/policy").json["newest"] == 2
        with HostServer.attach("policy") as reader:
            for part in reader.get(2, "f", TOKEN):
                os.close(part.descriptor)
    until(lambda: descriptors_of(serving.pid) <= before + 1)
    assert serving.versions()[2].complete
    assert log_of(serving) == ""


def test_a_reader_holds_files_only_while_its_connection_is_open(serving: HostServer) -> None:
    with ExitStack() as stack:
        for _ in range(50):
            reader = stack.enter_context(HostServer.attach("policy"))
            for part in reader.get(1, "f", TOKEN):
                os.close(part.descriptor)
        assert serving.drop(1, overdue=False) is True
    serving.put(2, "f", [])
    serving.commit(2, {"f": FileAt(0, (serving.address,))})
    assert serving.drop(2, overdue=False) is False


def test_a_client_that_floods_without_reading_answers_stalls_alone(serving: HostServer) -> None:
    with control.connect(control.socket_path("policy"), SECONDS) as flood, undisturbed(serving):
        flood.setblocking(False)
        with suppress(BlockingIOError):
            for _ in range(100_000):
                send_message(flood, b'{"do":"versions","name":"policy"}')
        one = memory(b"1")
        serving.put(2, "f", [Segment(one, 0, 1)])
        os.close(one)
        serving.drop(2)
