"""Host servers, their clients, and small states in memory, for the tests of live states."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from ckpt.live import control
from ckpt.live.control import close_all, receive_message, send_message
from ckpt.live.process import HostOptions, HostServer, copy_files
from ckpt.live.protocol import FileAt, Segment
from tests.garbage import collect_garbage

TOKEN = "a-token"
END_SECONDS = 30


def memory(data: bytes) -> int:
    """A descriptor of shared memory with these bytes."""
    descriptor = os.memfd_create("test")
    os.write(descriptor, data)
    return descriptor


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(holds: Callable[[], bool], seconds: float = END_SECONDS) -> None:
    """Waits for a condition that another process makes true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """An HTTP client with a kept connection."""

    def __init__(self, address: tuple[str, int], token: str | None = TOKEN) -> None:
        self.connection = http.client.HTTPConnection(*address, timeout=60)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request(method, path, data, {**self._headers, **told})
        found = self.connection.getresponse()
        return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def lease(self, name: str, version: int | None = None) -> str:
        found = self.ask("POST", f"/{name}/leases", {"version": version})
        assert found.status == 200, found.body
        return str(found.json["lease"])

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


class Hosts:
    """Starts servers, and ends them."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.pids: list[int] = []

    def start(self, name: str = "policy", keep_seconds: float = 0.0, **options: Any) -> HostServer:
        """A server that this connection owns."""
        started = HostServer.start(HostOptions(name, TOKEN, **options))
        server = self.stack.enter_context(started)
        self.pids.append(server.pid)
        server.own(keep_seconds)
        return server

    def client(self, server: HostServer, token: str | None = TOKEN) -> Client:
        return self.stack.enter_context(Client(server.address, token))


def copy(source: tuple[str, int], version: int, **files: int) -> None:
    """Copies files of another server, as the writer process does, to the server of this host."""
    wanted = [(name, nbytes, source) for name, nbytes in files.items()]
    fields = {"name": "policy", "token": TOKEN, "version": version, "files": wanted}
    copy_files(fields, memoryview(b""), -1, lambda done: None)


def descriptors_of(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def check_no_more_descriptors(before: int) -> None:
    """Fails if this process has more open descriptors than before, beside those of garbage."""
    if descriptors_of() > before:
        collect_garbage()
    assert descriptors_of() <= before


def publish(server: HostServer, version: int, **files: bytes) -> dict[str, int]:
    """Publishes files of one segment each; returns their descriptors, which the caller closes."""
    found = {name: memory(data) for name, data in files.items()}
    for name, descriptor in found.items():
        server.put(version, name, [Segment(descriptor, 0, len(files[name]))])
    server.commit(
        version, {name: FileAt(len(data), (server.address,)) for name, data in files.items()}
    )
    return found


def publish_closed(server: HostServer, version: int, **files: bytes) -> None:
    """As `publish`; only the server has the memory."""
    for descriptor in publish(server, version, **files).values():
        os.close(descriptor)


def random_bytes(nbytes: int) -> bytes:
    return secrets.token_bytes(nbytes)


@contextmanager
def in_its_place(
    name: str, *answers: Mapping[str, object], descriptors: int = 0
) -> Iterator[list[Any]]:
    """Another program at the socket of a name: gives each connection these answers, and ends it.

    Yields the list of the requests that it gets.
    """
    requests: list[Any] = []
    path = control.socket_path(name)
    aside = path.with_suffix(".aside")
    with suppress(FileNotFoundError):
        path.rename(aside)
    listener = control.bind(path)
    there = control.inode(path)

    def serve() -> None:
        with suppress(OSError):
            while True:
                connected, _ = listener.accept()
                with connected, suppress(OSError):
                    for answer in answers:
                        requests.append(json.loads(receive_message(connected)[0]))
                        files = [memory(b"12345") for _ in range(descriptors)]
                        send_message(connected, json.dumps(answer).encode(), files)
                        close_all(files)

    thread = Thread(target=serve)
    thread.start()
    try:
        yield requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        if control.inode(path) == there:
            path.unlink()
        with suppress(FileNotFoundError):
            aside.rename(path)
