"""Mappings of a publisher's memory: they show one version, and end with their last user."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.live import shared_files
from ckpt.live.protocol import Segment
from ckpt.live.shared_files import SharedFile
from ckpt.saving.arena import HEAD_BYTES, Arena
from tests.garbage import collect_garbage
from tests.live.hosts import descriptors_of, until
from tests.live.publishers import RUNTIME, SECONDS, wait_until_nothing_is_left

SHAPE = (512, 128)
"""More than one chunk: a reader of columns reads chunks in place."""
PUBLISHER = f"""
import sys, torch, ckpt
state = {{"w": torch.ones{SHAPE}}}
live = ckpt.publish(state, "policy", lease_seconds=float(sys.argv[1]))
print(live.url, live.hosts.server.pid, flush=True)
for _ in sys.stdin:
    state["w"] += 1
    live.update().wait()
    print(live.version, flush=True)
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets. Afterwards this process has no mapping and no descriptor more.

    An earlier test's save in the background keeps its arena.
    """
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(RUNTIME, str(folder))
    descriptors, maps = descriptors_of(), maps_of_arenas()
    yield folder
    until(lambda: maps_of_arenas() <= maps)
    until(lambda: descriptors_of() <= descriptors)


def maps_of_arenas() -> int:
    """The mappings of arenas in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:ckpt-arena")


class Publisher:
    """A job that publishes in a process of its own."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.is_running = True
        self.url, pid = program.stdout.readline().split()
        self.server = int(pid)

    def update(self) -> float:
        """Publishes the next version; returns its value."""
        self.program.stdin.write("go\n")
        self.program.stdin.flush()
        return float(self.program.stdout.readline())

    def kill(self, server: bool) -> None:
        """Kills the publisher, and its server too."""
        self.is_running = False
        os.kill(self.program.pid, signal.SIGKILL)
        self.program.communicate(timeout=SECONDS)
        if server:
            os.kill(self.server, signal.SIGKILL)


@pytest.fixture
def publisher(
    request: pytest.FixtureRequest, runtime: Path, programs: Callable[..., Any]
) -> Iterator[Publisher]:
    """A publisher with leases of the parameter's seconds, by default of half a second."""
    found = Publisher(programs(PUBLISHER, str(getattr(request, "param", 0.5))))
    yield found
    if found.is_running:  # the test has failed
        found.kill(server=True)


@pytest.mark.parametrize("publisher", [SECONDS], indirect=True)  # no lease ends meanwhile
@pytest.mark.parametrize("server", [False, True])
def test_a_reader_with_a_mapping_survives_the_death_of_its_publisher(
    publisher: Publisher, runtime: Path, server: bool
) -> None:
    with ckpt.open(publisher.url) as checkpoint:
        first = checkpoint["w"][:4]
        publisher.kill(server)
        try:
            assert bool((checkpoint["w"][:, 5:9] == 1).all())
        except ckpt.UnreachableError:  # it was time to renew the lease
            assert server
        assert bool((first == 1).all())
    for path in runtime.glob("policy*" if server else "nothing"):
        path.unlink()
    wait_until_nothing_is_left(runtime)


@pytest.mark.thorough
@pytest.mark.parametrize("verify", [True, False])
def test_a_version_whose_memory_was_given_up_is_gone_and_not_damaged(
    publisher: Publisher, runtime: Path, verify: bool
) -> None:
    with ckpt.open(publisher.url, verify=verify) as checkpoint:
        assert bool((checkpoint["w"][:4] == 1).all())
        for _ in range(3):
            publisher.update()
        for read in (lambda: checkpoint["w"][:, 5:9], lambda: checkpoint["w"][:]):
            with pytest.raises(ckpt.VersionGoneError, match="version 1 was replaced"):
                read()
    publisher.kill(server=False)
    wait_until_nothing_is_left(runtime)


@pytest.mark.thorough
def test_readers_in_turn_leave_no_mapping(publisher: Publisher, runtime: Path) -> None:
    before = maps_of_arenas()
    for _ in range(4):
        value = publisher.update()
        target = {"w": torch.zeros(SHAPE)}
        ckpt.load(publisher.url, target)
        assert bool((target["w"] == value).all())
        with ckpt.open(publisher.url) as checkpoint:
            assert bool((checkpoint["w"][:, 3:7] == value).all())
        collect_garbage()
        assert maps_of_arenas() == before
    publisher.kill(server=False)
    wait_until_nothing_is_left(runtime)


def test_memory_that_could_become_shorter_is_not_mapped(runtime: Path) -> None:
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.write(plain, bytes(range(200)))
    file = SharedFile([Segment(plain, 100, 50)], None)
    assert file.view(0, 10) is None
    into = bytearray(20)
    assert file.read_into(5, [memoryview(into)]) == 20
    assert into == bytes(range(105, 125))
    os.ftruncate(plain, 110)
    assert file.read_into(5, [memoryview(into)]) == 5
    del file


def test_sealed_memory_without_room_for_a_mapping_is_never_read_as_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(descriptor: int, writable: bool) -> memoryview:
        raise OSError(12, "no room")

    monkeypatch.setattr(shared_files, "map_memory", no_room)
    arena = Arena(is_sealed=True)
    arena.reserve(8)[:] = b"contents"
    file = SharedFile([Segment(os.dup(arena.descriptor), HEAD_BYTES, 8)], None)
    into = bytearray(8)
    assert file.view(0, 8) is None
    assert file.read_into(0, [memoryview(into)]) == 8
    assert into == b"contents"
    arena.discard()
    assert file.read_into(0, [memoryview(into)]) == 0
