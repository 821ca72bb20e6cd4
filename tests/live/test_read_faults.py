"""Publishers and servers that end, hang or replace a version while it is read: named errors."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.live.store import LiveStore
from ckpt.stores.store import open_store
from sharding.agreement.ranks import result_or_error
from tests.garbage import collect_garbage
from tests.live.offered import RUNTIME, Offer, offered

pytestmark = pytest.mark.thorough

PLACES = ("here", "elsewhere")
ROWS = 60_000


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The folder of the servers' sockets, and an empty one, as of another host."""
    found = {place: str(tmp_path_factory.mktemp(place)) for place in PLACES}
    for folder in found.values():
        os.chmod(folder, 0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNTIME, found["here"])
        yield found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints whose elements all have one value: 0, 1, 2."""
    found = []
    for value in range(3):
        found.append(tmp_path_factory.mktemp("saved") / "c")
        state = {name: torch.full((ROWS,), float(value)) for name in "abcd"}
        ckpt.save(found[-1], state | {"step": value})
    return found


def target() -> dict[str, Any]:
    return {name: torch.full((ROWS,), -1.0) for name in "abcd"} | {"step": -1}


@pytest.fixture(params=PLACES)
def place(
    request: pytest.FixtureRequest, sockets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Makes this process a reader on the host of the server, or elsewhere, from the call on."""

    def move() -> None:
        monkeypatch.setenv(RUNTIME, sockets[request.param])

    return move


@pytest.fixture
def offer(folders: list[Path], sockets: dict[str, str]) -> Iterator[Offer]:
    with offered(folders[1], name="faulty") as one:
        yield one


def test_a_version_that_was_replaced_names_both_versions(
    place: Callable[[], None], offer: Offer, folders: list[Path]
) -> None:
    place()
    with open_store(offer.at(1)) as store, ckpt.open(offer.at(1)) as checkpoint:
        shard = store.names()[0]
        store.read(shard, 0, 8)
        offer.publish(2, folders[2])
        offer.retire(1)
        with pytest.raises(
            ckpt.VersionGoneError, match=r"version 1 was replaced \(2 is the newest"
        ) as one:
            store.read(shard, 8, 1000)
        assert (one.value.version, one.value.newest) == (1, 2)
        with pytest.raises(ckpt.VersionGoneError):
            checkpoint["a"][5:9]
    for call in (ckpt.open, ckpt.read, ckpt.verify):
        with pytest.raises(ckpt.VersionGoneError, match="2 is the newest"):
            call(offer.at(1))
    with pytest.raises(ckpt.VersionGoneError, match="2 is the newest"):
        ckpt.load(offer.at(1), target())


@contextmanager
def after_reads(count: int, action: Callable[[], object]) -> Iterator[None]:
    """Once this process has read so often from live states, something happens."""
    read_into, reads = LiveStore.read_into, itertools.count(1)  # threads share the iterator

    def instead(self: LiveStore, name: str, offset: int, *targets: memoryview) -> None:
        read_into(self, name, offset, *targets)
        if next(reads) == count:
            action()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveStore, "read_into", instead)
        yield


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_load_without_a_version_goes_on_with_the_newest_one(
    place: Callable[[], None], offer: Offer, folders: list[Path], count: int
) -> None:
    place()

    def replace() -> None:
        offer.publish(2, folders[2])
        offer.retire(1)

    with after_reads(count, replace):
        state = ckpt.load(offer.url, target())
    assert state["step"] in (1, 2)
    values = {float(value) for name in "abcd" for value in state[name].unique()}
    assert values == {float(state["step"])}


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_load_of_one_version_ends_when_it_is_replaced(
    place: Callable[[], None], offer: Offer, folders: list[Path], count: int
) -> None:
    place()
    changed = target()

    def replace() -> None:
        offer.publish(2, folders[2])
        offer.retire(1)

    with after_reads(count, replace):
        loaded, error = result_or_error(lambda: ckpt.load(offer.at(1), changed))
    if error is None:
        assert loaded is not None
        assert loaded["step"] == 1
        return
    assert isinstance(error, ckpt.ReplacedError)
    assert "version 1 was replaced (2 is the newest)" in str(error)
    touched = set(getattr(error, "touched", ()))
    assert all(not (changed[name] + 1).any() for name in set("abcd") - touched)


@pytest.mark.thorough
def test_reads_that_race_with_retirements_are_whole_or_errors(
    place: Callable[[], None], offer: Offer, folders: list[Path]
) -> None:
    place()
    start, found = Barrier(2), []

    def publish() -> None:
        start.wait(60)
        for number in range(2, 14):
            offer.publish(number, folders[number % 3])
            offer.retire(number - 1)

    publisher = Thread(target=publish)
    publisher.start()
    start.wait(60)
    while publisher.is_alive() or not found:
        loaded, error = result_or_error(lambda: ckpt.load(offer.url, target(), verify=False))
        assert error is None or isinstance(error, ckpt.ReplacedError), error
        if loaded is not None:
            values = {float(value) for name in "abcd" for value in loaded[name].unique()}
            assert values == {float(loaded["step"])}
            found.append(loaded["step"])
    publisher.join()


def test_a_lease_that_ended_is_taken_again_while_the_version_is_there(
    place: Callable[[], None], folders: list[Path], sockets: dict[str, str]
) -> None:
    with offered(folders[1], name="short", lease_seconds=0.2) as one:
        place()
        with open_store(one.url) as store:
            manifest = store.read("manifest.json", 0, 9)
            one.server.versions()
            with socket.socket() as silent:  # waits without a sleep
                silent.settimeout(0.5)
                silent.bind(("127.0.0.1", 0))
                silent.listen()
                with pytest.raises(TimeoutError):
                    silent.accept()
            assert store.read("manifest.json", 0, 9) == manifest


def test_a_killed_server_is_an_error_within_the_time_out(
    place: Callable[[], None], folders: list[Path], sockets: dict[str, str]
) -> None:
    with offered(folders[1], name="killed") as one:
        place()
        with open_store(one.url, {"timeout": 5}) as store:
            shard = store.names()[0]
            store.read(shard, 0, 8)
            os.kill(one.server.pid, signal.SIGKILL)
            # A reader of the same host still has the bytes; the next renewal tells it.
            with (
                pytest.raises(ckpt.UnreachableError, match="no server answers"),
                ckpt.open(one.url),
            ):
                pass
        with pytest.raises(ckpt.UnreachableError):
            ckpt.load(one.url, target())


def test_an_address_without_a_server_is_an_error_that_names_it() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ckpt.UnreachableError, match=f"127.0.0.1:{port}: no server answers"):
        ckpt.load(f"live://127.0.0.1:{port}/policy", target())


def test_an_unknown_name_or_version_is_no_checkpoint(offer: Offer) -> None:
    other = offer.url.replace("/faulty", "/other")
    for url in (other, offer.at(9)):
        with pytest.raises(ckpt.NotACheckpointError):
            ckpt.load(url, target())
        with pytest.raises(ckpt.NotACheckpointError):
            ckpt.open(url)


@pytest.mark.thorough
@pytest.mark.parametrize("token", ["?token=wrong", ""])
def test_a_wrong_token_is_denied_here_and_elsewhere(
    place: Callable[[], None], offer: Offer, token: str
) -> None:
    place()
    url = offer.url.partition("?")[0] + token
    said = "refuses the token" if token else "wants a token"
    for call in (ckpt.open, ckpt.verify, lambda url: ckpt.load(url, target())):
        with pytest.raises(ckpt.AccessDeniedError, match=said):
            call(url)


def test_a_server_that_says_nothing_is_an_error_within_the_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"live://127.0.0.1:{silent.getsockname()[1]}/policy"
        with pytest.raises(ckpt.StoreTimeoutError, match=r"sent nothing for 0.3 s"):
            ckpt.load(url, target(), storage_options={"timeout": 0.3})


ANSWERS = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "no JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "another object": b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}',
    "half an answer": b"HTTP/1.1 200 OK\r\nContent-Length: 70\r\n\r\n{",
    "half of a last answer": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 70\r\n\r\n{",
    "an end": b"",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"A: " + b"a" * 100_000,
    "a size below zero": b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n{}",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_another_program_at_the_address_is_a_named_error(answer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(20):
                try:
                    connected, _ = listener.accept()
                except OSError:
                    return
                with connected:
                    connected.recv(1 << 16)
                    connected.sendall(ANSWERS[answer])

        server = Thread(target=serve, daemon=True)
        server.start()
        url = f"live://127.0.0.1:{listener.getsockname()[1]}/policy"
        with pytest.raises((ckpt.ProtocolError, ckpt.UnreachableError)) as raised:
            ckpt.load(url, target())
        assert "127.0.0.1" in str(raised.value)
        del raised
        collect_garbage()  # an answer that is still open would be a ResourceWarning
        listener.shutdown(socket.SHUT_RDWR)
    server.join(60)


@contextmanager
def unsteady(address: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """A way to a server on which each second connection is reset before a request is read."""
    listener = socket.create_server(("127.0.0.1", 0))

    def relay(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        for number in itertools.count():
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            if number % 2 == 0:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connected.close()
                continue
            server = stack.enter_context(socket.create_connection(address, 60))
            stack.enter_context(connected)
            for ends in ((connected, server), (server, connected)):
                Thread(target=relay, args=ends, daemon=True).start()

    with listener, ExitStack() as stack:
        accepting = Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield listener.getsockname()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(60)


def test_a_load_goes_on_while_each_second_connection_is_reset(
    offer: Offer, sockets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME, sockets["elsewhere"])
    with unsteady(offer.server.address) as (host, port):
        url = offer.url.replace(f":{offer.server.address[1]}/", f":{port}/")
        assert host == offer.server.address[0]
        for _ in range(3):
            state = ckpt.load(url, target())
    assert {float(value) for name in "abcd" for value in state[name].unique()} == {1.0}


def loaded(url: str, sockets: str, is_killed: int) -> str:
    """On each rank: the error of a load whose server rank 0 kills once the ranks have begun."""
    os.environ[RUNTIME] = sockets

    def kill() -> None:
        if is_killed and dist.get_rank() == 0:
            os.kill(is_killed, signal.SIGKILL)

    try:
        with after_reads(2, kill):
            ckpt.load(url, target(), storage_options={"timeout": 5}, timeout=60)
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_server_that_is_killed_while_ranks_read_is_an_error_on_all_ranks(
    clusters: Callable[[int], Any], folders: list[Path], sockets: dict[str, str]
) -> None:
    with offered(folders[1], name="killed-ranks") as one:
        errors = clusters(2).run(loaded, one.url, sockets["elsewhere"], one.server.pid)
    assert all("UnreachableError" in error for error in errors), errors


def test_a_wrong_token_is_an_error_on_all_ranks(
    clusters: Callable[[int], Any], offer: Offer, sockets: dict[str, str]
) -> None:
    errors = clusters(2).run(loaded, offer.url + "x", sockets["here"], 0)
    assert all("AccessDeniedError" in error for error in errors), errors
