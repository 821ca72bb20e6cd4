"""Strangers at every socket that ckpt opens, while ranks save and load (docs/hostile-input.md).

A stranger ends its own connection at most. Ranks and readers go on, and the process that listens
has no more descriptors afterwards.
"""

from __future__ import annotations

import random
import resource
import shlex
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.live import control
from sharding.agreement.channel import PROTOCOL, Call, WaitWarning, greeting
from sharding.agreement.coordinator import Coordinator
from sharding.agreement.ranks import Ranks
from sharding.agreement.rendezvous import LOOPBACK, Rendezvous
from tests.live.hosts import TOKEN, descriptors_of, until
from tests.live.offered import offered
from tests.live.test_serve import certificate, serving
from tests.selection import slow, thorough

SECONDS = 60
CALLS = 3
"""The saves or loads of the ranks beside a stranger."""
DRIP_SECONDS = 0.1
SPARE = 12
"""The descriptors that rank 0 may have beside those before many strangers come."""
SERVER_DESCRIPTORS = 128
"""All that a server may have."""
MANY = 2_000


@dataclass(frozen=True, slots=True)
class Port:
    """A listening socket as a stranger finds it."""

    family: str
    """Of its messages: ranks, http or unix."""
    address: tuple[str, int] | str
    secret: str = field(default="?" * 32, repr=False)
    """The right secret or token, which only those of another version have."""

    def connect(self, is_patient: bool = True) -> socket.socket:
        """A connection; one that is perhaps on its way, unless `is_patient`."""
        if self.family == "unix":
            return control.connect(Path(str(self.address)), SECONDS)
        if is_patient:
            return socket.create_connection(self.address, SECONDS)  # type: ignore[arg-type]
        found = socket.socket()
        found.setblocking(False)
        found.connect_ex(self.address)
        return found

    def says(self, stranger: str) -> bytes:
        """The bytes of a stranger."""
        if stranger == "garbage":
            return random.Random(7).randbytes(30_000)
        return _SAID[self.family, stranger](self.secret)


def _http(lines: str, body: str = "") -> bytes:
    return f"{lines}\r\nHost: a\r\n\r\n{body}".encode()


def _another_version(secret: str) -> bytes:
    said = bytearray(greeting(secret, 1))
    struct.pack_into("!H", said, 4, PROTOCOL + 1)
    return bytes(said)


_NESTED = "[" * 60_000
_SAID: dict[tuple[str, str], Callable[[str], bytes]] = {
    ("ranks", "drip"): lambda secret: greeting("?" * 32, 1),
    ("ranks", "nested"): lambda secret: struct.pack("!II", len(_NESTED), 0) + _NESTED.encode(),
    ("ranks", "long"): lambda secret: struct.pack("!II", 3, 2**32 - 1) + b"[1]" + bytes(30_000),
    ("ranks", "version"): _another_version,
    ("http", "drip"): lambda secret: _http("GET /live HTTP/1.1"),
    ("http", "nested"): lambda secret: _http(
        f"POST /live/leases?token={secret} HTTP/1.1\r\nContent-Length: {len(_NESTED)}", _NESTED
    ),
    ("http", "long"): lambda secret: _http(
        f"POST /live/leases?token={secret} HTTP/1.1\r\nContent-Length: {10**18}", "a" * 30_000
    ),
    ("http", "version"): lambda secret: _http(f"GET /live?token={secret} HTTP/7.3"),
    ("unix", "drip"): lambda secret: b'{"do":"hello"}',
    ("unix", "nested"): lambda secret: _NESTED.encode(),
    ("unix", "long"): lambda secret: b'{"in":0,"nbytes":1152921504606846976}',
    ("unix", "version"): lambda secret: b'{"do":"hello","version":9}',
}


@contextmanager
def stranger_at(port: Port, stranger: str) -> Iterator[None]:
    """A stranger that has connected, and stays as long as it is let."""
    with ExitStack() as stack:
        if stranger == "many":
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
            wanted = min(MANY + 500, before[1])
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, before[0]), before[1]))
            for _ in range(min(MANY, wanted - 500)):
                connected = stack.enter_context(port.connect(is_patient=False))
                with suppress(OSError):  # it is on its way, or closed already
                    connected.send(port.says("drip")[:1])
        elif stranger == "drip":
            stack.enter_context(_dripping(port))
        else:
            connected = stack.enter_context(port.connect())
            if stranger != "idle":
                with suppress(ConnectionError):  # it is closed before it has said all
                    connected.sendall(port.says(stranger))
        yield


@contextmanager
def _dripping(port: Port) -> Iterator[None]:
    """A stranger that says one byte after the other."""
    is_over = threading.Event()

    def drip() -> None:
        with port.connect() as connected, suppress(OSError):
            for byte in port.says("drip"):
                connected.sendall(bytes([byte]))
                if is_over.wait(DRIP_SECONDS):
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(SECONDS)


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Lets this process have only a few descriptors more than now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors_of() + SPARE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def save_beside(stranger: str, folder: str) -> None:
    """Save and load in new groups, at whose port the stranger comes before rank 1."""
    rank = dist.get_rank()
    for number in range(CALLS):
        with ExitStack() as stack:
            group = dist.new_group([0, 1])
            if rank == 1:
                stack.enter_context(stranger_at(_port_of(group), stranger))
            elif stranger == "many":
                stack.enter_context(few_descriptors())
            state, target = {"w": torch.arange(7.0) + number}, {"w": torch.zeros(7)}
            ckpt.save(f"{folder}/{number}", state, group=group, timeout=SECONDS)
            ckpt.load(f"{folder}/{number}", target, group=group, timeout=SECONDS)
            assert torch.equal(target["w"], state["w"])
            channel = Ranks(group)._channel
            if isinstance(channel, Coordinator):
                assert channel._listener is not None
                assert channel._listener.fileno() < 0
                assert not channel._strangers
                assert len(channel._selector.get_map()) == 1  # the other rank
            dist.destroy_process_group(group)


def _port_of(group: dist.ProcessGroup) -> Port:
    """Rank 0's port, once it listens."""
    store = dist.PrefixStore("ckpt", dist.distributed_c10d._get_process_group_store(group))
    waiting = WaitWarning(Call(1, "a call", 60.0, "a stage"), 1)
    place = Rendezvous(store, "calls")._place(monotonic() + SECONDS, waiting)
    assert place is not None
    return Port("ranks", (LOOPBACK, place.port), place.secret)


def load_beside(url: str, options: dict[str, str]) -> list[float]:
    """Load on all ranks, several times; returns the last values."""
    target = {"w": torch.zeros(7)}
    for _ in range(CALLS):
        target["w"].zero_()
        ckpt.load(url, target, storage_options=options, timeout=SECONDS)
    return target["w"].tolist()


@dataclass(frozen=True, slots=True)
class Served:
    """A served checkpoint."""

    port: Port
    pid: int
    url: str
    options: dict[str, str]


STRANGERS = ["idle", "drip", "garbage", "nested", "long", "version", slow("many")]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_at_rank_0_end_no_call(clusters: Callable, tmp_path: Path, stranger: str) -> None:
    clusters(2).run(save_beside, stranger, str(tmp_path))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """A function from the kind of a server to a running one with a checkpoint."""
    folder = tmp_path_factory.mktemp("served")
    ckpt.save(folder / "saved", {"w": torch.arange(7.0)})
    python = folder / "python"
    program = shlex.quote(sys.executable)
    python.write_text(f'#!/bin/sh\nulimit -n {SERVER_DESCRIPTORS}\nexec {program} "$@"\n')
    python.chmod(0o700)

    def over_http(stack: ExitStack, arguments: tuple[object, ...], **options: str) -> Served:
        url, process = stack.enter_context(serving(folder, *arguments, "--token", TOKEN))
        parts = urlsplit(url)
        port = Port("http", (str(parts.hostname), int(parts.port or 0)), TOKEN)
        return Served(port, process.pid, url.replace("/?", "/saved?"), options)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("CKPT_RUNTIME_DIR", str(folder / "runtime"))
        # A server counts its descriptors as it begins.
        patch.setattr(sys, "executable", str(python))

        @cache
        def start(server: str) -> Served:
            if server == "serve":
                return over_http(stack, ())
            if server == "tls":
                chain, key = certificate(folder)
                pair = ("--certificate", chain, "--key", key)
                return over_http(stack, pair, certificate=str(chain))
            offer = stack.enter_context(offered(folder / "saved", name=server))
            http = Port("http", offer.server.address, offer.token)
            unix = Port("unix", str(control.socket_path(server)))
            return Served(unix if server == "unix" else http, offer.server.pid, offer.url, {})

        yield start


@pytest.mark.thorough
@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("server", ["live", "unix", "serve", thorough("tls")])
def test_strangers_at_a_server_end_no_load(
    clusters: Callable, served: Callable[[str], Served], server: str, stranger: str
) -> None:
    found = served(server)
    before = descriptors_of(found.pid)
    with stranger_at(found.port, stranger):
        loaded = clusters(2).run(load_beside, found.url, found.options)
    assert loaded == [list(range(7))] * 2
    until(lambda: descriptors_of(found.pid) <= before)
