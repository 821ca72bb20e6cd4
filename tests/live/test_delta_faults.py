"""Faults while a delta of a live state is on its way: a load is right, or a named error."""

from __future__ import annotations

import http.client
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import ckpt
from ckpt.stores.store import open_store
from tests.live.hosts import is_running, until
from tests.live.offered import RUNTIME

SECONDS = 60
ELEMENTS = 300_000
"""Several chunks and blocks."""
Hook = Callable[[bytes], bytes]
"""Gets the bytes of a delta, and returns those that the reader gets."""


def state_of(version: int) -> dict[str, torch.Tensor]:
    """A hundredth of the elements differs from those of the version before."""
    generator = torch.Generator().manual_seed(7)
    found = {name: torch.randn(ELEMENTS, generator=generator).bfloat16() for name in "ab"}
    for number in range(1, version + 1):
        for tensor in found.values():
            places = torch.randperm(ELEMENTS, generator=generator)[: ELEMENTS // 100]
            tensor[places] += number
    return found


def is_version(state: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(state[name], one) for name, one in state_of(version).items())


class Relay(BaseHTTPRequestHandler):
    """A connection through a proxy, and its own one to the server."""

    protocol_version = "HTTP/1.1"
    server: Between

    def setup(self) -> None:
        super().setup()
        self.upstream = http.client.HTTPConnection(*self.server.target, timeout=SECONDS)

    def finish(self) -> None:
        self.upstream.close()
        with suppress(OSError):
            super().finish()

    def relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        with suppress(OSError, http.client.HTTPException):
            self.upstream.request(self.command, self.path, body or None, dict(self.headers))
            answer = self.upstream.getresponse()
            data = answer.read()
            length, is_delta = len(data), body.startswith(b'{"delta"') and answer.status == 200
            if is_delta:
                self.server.deltas += 1
                data = self.server.hook(data)
            elif answer.getheader("content-type") == "application/json":  # the server's own place
                ports = str(self.server.target[1]), str(self.server.server_address[1])
                data = data.replace(*(port.encode() for port in ports))
            self.send_response(answer.status)
            for name in ("content-type", "content-range"):
                if answer.getheader(name):
                    self.send_header(name, str(answer.getheader(name)))
            self.send_header("content-length", str(length))
            self.end_headers()
            self.wfile.write(data)
            self.server.came += len(data)
            self.close_connection = len(data) < length
            return
        self.close_connection = True

    def log_message(self, *said: object) -> None: ...


for method in ("GET", "POST", "DELETE"):
    setattr(Relay, f"do_{method}", Relay.relay)


class Between(ThreadingHTTPServer):
    """A proxy in front of a server of live states."""

    daemon_threads = True
    hook: Hook = staticmethod(bytes)
    deltas = came = 0

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), Relay)
        address = url.partition("//")[2].partition("/")[0]
        self.target = address.partition(":")[0], int(address.partition(":")[2])
        self.url = url.replace(address, f"127.0.0.1:{self.server_address[1]}")


@contextmanager
def between(url: str) -> Iterator[Between]:
    with Between(url) as proxy:
        serving = Thread(target=proxy.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            serving.join()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process a reader on another host than the servers."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    monkeypatch.setenv(RUNTIME, str(tmp_path / "elsewhere"))


PUBLISHER = """
import resource, sys, torch, ckpt
from tests.live.test_delta_faults import state_of

state = state_of(0)
live = ckpt.publish(state, "faulty", lease_seconds=float(sys.argv[1]))
print(live.url, live.hosts.server.pid, flush=True)
version = 0
while most := sys.stdin.readline().strip():
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), -1))
    version += 1
    for name, tensor in state_of(version).items():
        state[name].copy_(tensor)
    try:
        live.update().wait(60)
        print(version, flush=True)
    except ckpt.CkptError as error:
        print(type(error).__name__, error, flush=True)
"""


class Publisher:
    """A process that publishes; version 1 has `state_of(0)`."""

    def __init__(self, runtime: str, lease_seconds: float = 600.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(lease_seconds)],
            env={**os.environ, RUNTIME: runtime},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url, server = self._line().split()
        self.server = int(server)

    def update(self, most_bytes: int = -1) -> str:
        """Returns its number once the next version can be read, or the error of the update."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{most_bytes}\n")
        self.process.stdin.flush()
        return self._line().strip()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        for pid, one in ((self.process.pid, self.process), (self.server, None)):
            with suppress(ProcessLookupError):
                if one is None or one.poll() is None:
                    os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        until(lambda: not is_running(self.server))


@pytest.fixture
def publishers(tmp_path: Path) -> Iterator[Callable[..., Publisher]]:
    with ExitStack() as stack:

        def start(**options: float) -> Publisher:
            (tmp_path / "here").mkdir(mode=0o700)
            found = Publisher(str(tmp_path / "here"), **options)
            stack.callback(found.close)
            return found

        yield start


@pytest.fixture(scope="module")
def two_versions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a live state whose newest version has `state_of(1)`."""
    folder = tmp_path_factory.mktemp("here")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNTIME, str(folder))
        state = state_of(0)
        live = ckpt.publish(state, "damaged")
        for name, tensor in state_of(1).items():
            state[name].copy_(tensor)
        live.update().wait(SECONDS)
    with live:
        yield live.url


DAMAGE: dict[str, Callable[[bytearray, random.Random], bytes]] = {
    "a bit": lambda data, chance: flipped(data, chance),
    "the end is missing": lambda data, chance: bytes(data[: chance.randrange(len(data))]),
    "zeros": lambda data, chance: bytes(len(data)),
    "of other areas": lambda data, chance: bytes(data[::-1]),
}


def params(names: Iterable[str]) -> list[Any]:
    """The first name for each run of the tests, the others for thorough ones."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.thorough) for name in others)]


def flipped(data: bytearray, chance: random.Random) -> bytes:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("damage", params(DAMAGE))
@pytest.mark.parametrize("first", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_delta_that_is_damaged_on_its_way_is_read_whole(
    two_versions: str, elsewhere: None, damage: str, first: int
) -> None:
    """`first` is 0 for the probe, 1 for the delta of the load."""
    chance = random.Random(first)
    with between(two_versions) as proxy:

        def hook(data: bytes) -> bytes:
            return DAMAGE[damage](bytearray(data), chance) if proxy.deltas > first else data

        proxy.hook = hook
        for _ in range(2):
            proxy.deltas = 0
            assert is_version(ckpt.load(proxy.url, state_of(0)), 1)
            assert proxy.deltas == 1 + first


def test_weights_that_were_trained_on_are_loaded_whole(two_versions: str, elsewhere: None) -> None:
    trained = state_of(0)
    for tensor in trained.values():
        tensor[::1000] += 1
    with between(two_versions) as proxy:
        assert is_version(ckpt.load(proxy.url, trained), 1)


@pytest.mark.slow
def test_a_publisher_that_is_killed_within_a_delta_leaves_its_version_to_the_reader(
    publishers: Callable[..., Publisher], elsewhere: None
) -> None:
    one = publishers()
    one.update()
    with between(one.url) as proxy:

        def hook(data: bytes) -> bytes:
            if proxy.deltas == 2:
                one.process.kill()
                one.process.wait()
            return data

        proxy.hook = hook
        assert is_version(ckpt.load(proxy.url, state_of(0)), 1)
        assert proxy.deltas >= 2


@pytest.mark.slow
def test_a_server_that_is_killed_within_a_delta_is_an_error_by_name(
    publishers: Callable[..., Publisher], elsewhere: None
) -> None:
    one = publishers()
    one.update()
    with between(one.url) as proxy:

        def hook(data: bytes) -> bytes:
            if proxy.deltas == 2:
                os.kill(one.server, signal.SIGKILL)
                until(lambda: not is_running(one.server))
                return data[: len(data) // 2]
            return data

        proxy.hook = hook
        with pytest.raises(ckpt.PartialLoadError, match=r"UnreachableError.* a mix .* in: a, b"):
            ckpt.load(proxy.url, state_of(0))


@pytest.mark.slow
def test_versions_that_come_while_a_delta_travels_are_never_mixed(
    publishers: Callable[..., Publisher], elsewhere: None
) -> None:
    one = publishers(lease_seconds=0.3)
    one.update()
    with between(one.url) as proxy:

        def hook(data: bytes) -> bytes:
            if proxy.deltas == 2:
                one.update()
                one.update()
            return data

        proxy.hook = hook
        state = ckpt.load(proxy.url, state_of(0))
        assert is_version(state, 1) or is_version(state, 3)


@pytest.mark.slow
def test_a_publisher_without_room_for_two_versions_says_so_and_keeps_the_first(
    publishers: Callable[..., Publisher], elsewhere: None
) -> None:
    one = publishers()
    assert "StoreError" in one.update(most_bytes=ELEMENTS)
    assert is_version(ckpt.load(one.url, state_of(5)), 0)
    assert one.update() == "2"
    with between(one.url) as proxy:
        assert is_version(ckpt.load(proxy.url, state_of(0)), 2)
        assert proxy.came < ELEMENTS // 4  # the differences of two steps


@pytest.mark.slow
def test_a_server_without_room_for_a_delta_sends_whole_chunks(
    publishers: Callable[..., Publisher], elsewhere: None
) -> None:
    one = publishers()
    one.update()
    status = Path(f"/proc/{one.server}/status").read_text()
    used = int(status.partition("VmSize:")[2].split()[0]) << 10
    resource.prlimit(one.server, resource.RLIMIT_AS, (used, used))
    with between(one.url) as proxy:
        assert is_version(ckpt.load(proxy.url, state_of(0)), 1)
        assert proxy.deltas == 0


READER = """
import sys, torch, ckpt
from tests.live.test_delta_faults import state_of

for version in ckpt.follow(sys.argv[1]):
    ckpt.load(version.url, state_of(0))
"""


@pytest.mark.slow
def test_a_reader_that_is_killed_within_a_delta_holds_no_publisher(
    publishers: Callable[..., Publisher], tmp_path: Path, elsewhere: None
) -> None:
    one = publishers(lease_seconds=600.0)
    one.update()
    with between(one.url) as proxy:
        reader = subprocess.Popen([sys.executable, "-c", READER, proxy.url])

        def hook(data: bytes) -> bytes:
            reader.kill()
            reader.wait()
            return data

        proxy.hook = hook
        until(lambda: proxy.deltas > 0)
        assert reader.wait(SECONDS) == -signal.SIGKILL
        proxy.hook = bytes
        one.update()  # replaces the version that the reader has not seen
        one.update()  # and this one its own
        assert is_version(ckpt.load(proxy.url, state_of(0)), 3)


@pytest.mark.slow
def test_a_reader_that_keeps_silent_with_its_connection_keeps_its_version(
    publishers: Callable[..., Publisher], elsewhere: None
) -> None:
    one = publishers(lease_seconds=600.0)
    with between(one.url) as proxy, open_store(proxy.url) as store:
        name = store.names()[0]
        one.update()
        until_lost = Thread(target=one.update)
        until_lost.start()
        until_lost.join(3.0)  # longer than the lease of a lost reader
        assert until_lost.is_alive()
        assert store.read(name, 0, 8)
        store.close()
        until_lost.join(SECONDS)
        assert not until_lost.is_alive()
