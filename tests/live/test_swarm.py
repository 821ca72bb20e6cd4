"""Readers that share give one another what they have read: no errors, and no other bytes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ckpt
from ckpt.live import swarm
from ckpt.live.shared_files import MemoryFile
from ckpt.live.swarm import LEAST_PIECE, Tracker, share_of, some_of
from tests.live.hosts import Client, check_no_more_descriptors, descriptors_of
from tests.live.layouts import spread
from tests.live.offered import RUNTIME

ROOT = Path(__file__).parents[2]
SECONDS = 60
ROWS, COLUMNS = 600, 1500
STATE_BYTES = 2 * 2 * ROWS * COLUMNS
FEW = 0.1
"""The part of a model that a reader takes from the publisher beside pieces: header and tables."""


def state_of(version: int) -> dict[str, torch.Tensor]:
    """A hundredth of the elements of a version differ from those before."""
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(ROWS, COLUMNS, generator=generator).bfloat16() for name in "ab"}
    for number in range(1, version):
        for tensor in state.values():
            tensor.reshape(-1)[number::101] += number
    return state


class Publisher:
    """A live state on another host, which is reached by each address of the loopback."""

    def __init__(self, live: ckpt.LiveState, state: dict[str, torch.Tensor]) -> None:
        self.live, self.state = live, state
        server = live.hosts.server
        assert server is not None
        self.pid, self.port = server.pid, server.address[1]

    def url(self, reader: int) -> str:
        """The address for a reader, whose share is its own."""
        return self.live.url.replace("127.0.0.1", f"127.0.0.{reader}")

    def sent(self) -> int:
        """The bytes that the server has sent of files."""
        counts = Path(f"/proc/{self.pid}/io").read_text().split()
        return int(counts[counts.index("wchar:") + 1])

    def client(self) -> Client:
        return Client(("127.0.0.1", self.port), self.live.url.partition("token=")[2])

    def update(self) -> None:
        for name, tensor in state_of(self.live.version + 1).items():
            self.state[name].copy_(tensor)
        self.live.update().wait(SECONDS)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publisher]:
    with pytest.MonkeyPatch.context() as patching:
        patching.setenv("CKPT_HOST", "127.0.0.1")
        patching.setenv(RUNTIME, str(tmp_path_factory.mktemp("here")))
        state = state_of(1)
        with ckpt.publish(state, "swarm", address="0.0.0.0") as live:
            yield Publisher(live, state)


@pytest.fixture
def publisher(running: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    """A publisher with a new version, of which this test is another host."""
    monkeypatch.setenv(RUNTIME, str(tmp_path))
    tmp_path.chmod(0o700)
    running.update()
    return running


class Reader:
    """A job that follows a live state and shares it."""

    def __init__(self, url: str) -> None:
        self.url, self.state = url, {k: torch.zeros_like(v) for k, v in state_of(1).items()}
        self.versions = ckpt.follow(url, share=True, timeout=SECONDS)

    def load(self) -> bool:
        """Loads the next version; returns whether the tensors are those of it."""
        version = next(self.versions)
        ckpt.load(version.url, self.state)
        return all(torch.equal(self.state[k], v) for k, v in state_of(version.number).items())

    @property
    def share(self) -> swarm.Share:
        found = share_of(self.url)
        assert found is not None
        return found


@contextmanager
def readers(publisher: Publisher, count: int) -> Iterator[list[Reader]]:
    found = [Reader(publisher.url(number + 1)) for number in range(count)]
    try:
        yield found
    finally:
        for one in found:
            one.versions.close()  # type: ignore[attr-defined]
    assert all(share_of(one.url) is None for one in found)


@pytest.mark.thorough
def test_readers_that_start_together_take_one_model_from_the_publisher(
    publisher: Publisher,
) -> None:
    descriptors = descriptors_of()
    with readers(publisher, 8) as jobs, ThreadPoolExecutor(8) as pool:
        before = publisher.sent()
        assert all(pool.map(Reader.load, jobs))
        assert publisher.sent() - before < 1.5 * STATE_BYTES
    check_no_more_descriptors(descriptors)


@pytest.mark.thorough
def test_a_late_reader_takes_a_version_from_those_that_got_it_by_deltas(
    publisher: Publisher,
) -> None:
    with readers(publisher, 2) as (early, late):
        assert early.load()
        publisher.update()
        before = publisher.sent()
        assert early.load()
        assert late.load()
        assert publisher.sent() - before < FEW * STATE_BYTES


@pytest.mark.thorough
def test_a_reader_of_the_version_before_gets_it_while_the_sources_have_the_next_one(
    publisher: Publisher,
) -> None:
    with readers(publisher, 2) as (early, late):
        assert early.load()
        before = next(late.versions)
        publisher.update()
        assert early.load()
        ckpt.load(before.url, late.state)
        wanted = state_of(before.number)
        assert all(torch.equal(late.state[name], tensor) for name, tensor in wanted.items())


def test_a_source_whose_bytes_have_changed_is_left(publisher: Publisher) -> None:
    with readers(publisher, 2) as (early, late):
        assert early.load()
        for one in early.share._files.values():
            one.view[::1000] = bytes(len(one.view[::1000]))
        assert late.load()


def answers(listener: socket.socket, data: bytes) -> None:
    """Gives each connection these bytes, or nothing at all."""
    with ExitStack() as kept, suppress(OSError):
        while True:
            connected = kept.enter_context(listener.accept()[0])
            connected.recv(1 << 16)
            if data:
                connected.sendall(data)
                connected.close()


HALF = "HTTP/1.1 206 Half\r\nContent-Length: 65536\r\nContent-Range: bytes 0-65535/{}\r\n\r\nhalf"
FAILURES = {
    "silent": "",
    "gone": "HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n",
    "ends in the middle": HALF,
    "another program": "no HTTP\r\n\r\n",
    "ended": None,
}


@pytest.mark.thorough
@pytest.mark.parametrize("failure", FAILURES)
def test_a_source_that_fails_costs_nobody_an_error(publisher: Publisher, failure: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(patch.object(swarm, "SOURCE_SECONDS", 0.2))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        client = stack.enter_context(publisher.client())
        lease, folder = client.lease("swarm"), f"/swarm/{publisher.live.version}/"
        files = client.get(folder).json["files"]
        file = max(files, key=lambda name: int(files[name]))
        told = [lease, port, "f" * 40, "0", []]
        assert client.ask("POST", folder + file, {"pieces": told}).json == {"pieces": []}
        data = FAILURES[failure]
        if data is None:
            listener.close()
        else:
            said = data.format(files[file]).encode()
            thread = Thread(target=answers, args=(listener, said))
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
        (job,) = stack.enter_context(readers(publisher, 1))
        assert job.load()
        told = [lease, 1, "0", "1", []]
        found = client.ask("POST", folder + file, {"pieces": told}).json["pieces"]
        assert found[0][1] == ["127.0.0.1", job.share._port]  # and not the one that failed
        client.ask("DELETE", f"/swarm/leases/{lease}")


SOURCE = """
import sys
from tests.live.test_swarm import Reader

job = Reader(sys.argv[1])
assert job.load()
print("shares", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_source_that_is_killed_in_the_middle_costs_nobody_an_error(publisher: Publisher) -> None:
    command, done = [sys.executable, "-c", SOURCE, publisher.url(2)], swarm.Share._done
    first: list[int] = []  # the pieces that were right when the source was killed

    def kill(share: swarm.Share, one: Any, taken: Any, right: int) -> None:
        if not first:
            source.kill()
        first.append(right)
        done(share, one, taken, right)

    with ExitStack() as stack:
        source = stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, cwd=ROOT))
        stack.callback(source.kill)
        assert source.stdout is not None
        assert source.stdout.readline() == b"shares\n"
        (job,) = stack.enter_context(readers(publisher, 1))
        before = publisher.sent()
        stack.enter_context(patch.object(swarm.Share, "_done", kill))
        assert job.load()
        assert source.wait() == -signal.SIGKILL
        assert first[0]  # the source had given a piece
        assert publisher.sent() - before > FEW * STATE_BYTES  # and not the rest


_following: list[Any] = []


def follow(url: str, runtime: str, dim: int | None) -> bool:
    """Loads a version in a layout, and shares it until `stop`."""
    os.environ[RUNTIME] = runtime
    versions = ckpt.follow(url, share=True, timeout=SECONDS)
    _following.append(versions)
    state, version = spread(state_of(1), dim), next(versions)
    ckpt.load(version.url, state)
    wanted = spread(state_of(version.number), dim)
    return all(torch.equal(state[k].to_local(), v.to_local()) for k, v in wanted.items())


def stop() -> None:
    _following.pop().close()


@pytest.mark.thorough
@pytest.mark.parametrize("dim", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_reader_takes_from_sources_of_another_layout(
    clusters: Callable[[int], Any], publisher: Publisher, dim: int
) -> None:
    assert all(clusters(2).run(follow, publisher.url(1), os.environ[RUNTIME], dim))
    with readers(publisher, 1) as (late,):
        before = publisher.sent()
        assert late.load()
        assert publisher.sent() - before < FEW * STATE_BYTES
    clusters(2).run(stop)


def test_a_job_shares_only_if_it_is_asked_to(publisher: Publisher, tmp_path: Path) -> None:
    versions = ckpt.follow(publisher.url(1), timeout=SECONDS)
    ckpt.load(next(versions).url, state_of(1))
    assert share_of(publisher.url(1)) is None
    with pytest.raises(ckpt.ArgumentError, match="share is True for"):
        ckpt.follow(tmp_path, share=True)


@pytest.mark.parametrize("told", [7, [], ["x", 0, "0", "0", []], ["x", 1, "0", "no", []]])
def test_a_malformed_request_for_pieces_is_refused(publisher: Publisher, told: object) -> None:
    with publisher.client() as client:
        folder = f"/swarm/{publisher.live.version}/"
        file = next(iter(client.get(folder).json["files"]))
        found = client.ask("POST", folder + file, {"pieces": told})
    assert (found.status, found.json["error"]) == (400, "protocol")


def test_a_tracker_lets_each_piece_go_once_and_again_if_its_reader_is_lost() -> None:
    """Readers of other speeds, two of which are lost; a step is the end of one piece."""
    chance, count, names = random.Random(4), 40, [f"reader{number}" for number in range(8)]
    file = MemoryFile([])
    file.nbytes = count * LEAST_PIECE
    tracker, sent = Tracker(file), 0
    has, doing = dict.fromkeys(names, 0), {name: list[int]() for name in names}
    every = (1 << count) - 1
    while left := [name for name in has if has[name] != every]:
        name = chance.choice(left)
        if len(left) == 8 and chance.random() < 0.05 and len(has) > 6:
            tracker.leave(name)
            del has[name]
            continue
        if doing[name]:
            has[name] |= 1 << doing[name].pop()
        wants = every & ~has[name] & ~sum(1 << piece for piece in doing[name])
        told = [name, 1 + names.index(name), f"{has[name]:x}", f"{wants:x}", []]
        lease, own, wanted = tracker.tell("host", told)
        for take in tracker.choose(lease, own, wanted):
            sent += take.source is None
            doing[name].append(take.piece)
    assert count <= sent <= count + 2 * swarm.FRESH


def test_some_pieces_of_a_set_are_of_it() -> None:
    for pieces in (0, 1, 0b1000, 0b10110, (1 << 70) - 1):
        found = some_of(pieces, 4)
        assert len(found) == len(set(found)) == min(4, pieces.bit_count())
        assert all(pieces >> piece & 1 for piece in found)
