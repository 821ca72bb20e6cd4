"""States published from several ranks, and read by other jobs."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.live.hosts import Dropped
from ckpt.live.process import HostServer
from ckpt.live.shared_files import SharedFile
from ckpt.stores.addresses import parse
from tests.live import publishers
from tests.live.publishers import RUNTIME, SECONDS, same, wait_until_nothing_is_left, whole_state


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the sockets of servers; nothing may be left in it or run from it."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(RUNTIME, str(folder))
    yield folder
    wait_until_nothing_is_left(folder)


def loaded_on_ranks(url: str, value: float) -> bool:
    """Whether the ranks of another job, of another size, read the version with this value."""
    size = 2
    wanted = whole_state(size, value)
    target = {key: torch.zeros_like(one) for key, one in wanted.items() if key != "step"}
    found = ckpt.load(url, {**target, "step": 0.0})
    return same(found, wanted)


@pytest.mark.thorough
def test_other_jobs_read_each_version_as_they_read_a_checkpoint(
    clusters: Callable[[int], Any], runtime: Path
) -> None:
    publisher, name = clusters(2), "policy"
    url = publisher.run(publishers.begin, str(runtime), name)[0]
    assert same(ckpt.read(url), whole_state(2, 1.0))
    for value in (2.0, 3.0, 4.0, 5.0):
        assert publisher.run(publishers.update, name, value) == [value] * 2
        assert same(ckpt.read(url), whole_state(2, value))
    assert all(clusters(3).run(loaded_on_ranks, url, 5.0))
    with ckpt.open(url) as checkpoint:
        assert torch.equal(checkpoint["sharded"][10:20], publishers.long_of(5.0)[10:20])
    assert ckpt.verify(url).sound
    assert publisher.run(publishers.update, name, 6.0, 40) == [40, 40]
    assert len(os.listdir(runtime)) <= 3
    publisher.run(publishers.end, name)


def published_again(runtime: str, name: str) -> str:
    os.environ[RUNTIME] = runtime
    with pytest.raises(ckpt.CkptError) as raised:
        ckpt.publish({"w": torch.ones(2)}, name)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.thorough
def test_what_fails_on_a_rank_fails_on_all_and_readers_keep_the_last_version(
    clusters: Callable[[int], Any], runtime: Path
) -> None:
    on, name = clusters(2), "policy"
    url = on.run(publishers.begin, str(runtime), name)[0]
    first = on.run(publishers.fails_on_a_rank, name)
    assert first[1].startswith("StateError")
    assert "rank 1" in first[0]
    assert all("not above 1" in said for said in on.run(publishers.refused, name, 1))
    assert all("whole number" in said for said in on.run(publishers.refused, name, "2"))
    said = on.run(publishers.refused, name, [5, 6])
    assert all(f"version={5 + rank}" in one for rank, one in enumerate(said))
    for said in on.run(published_again, str(runtime), name):
        assert "ExistsError" in said
        assert name in said
    assert same(ckpt.read(url), whole_state(2, 1.0))
    assert on.run(publishers.update, name, 2.0) == [2, 2]
    assert same(ckpt.read(url), whole_state(2, 2.0))
    assert "rank 1" in on.run(publishers.fails_on_a_rank, name)[0]  # both arenas had a version
    assert same(ckpt.read(url), whole_state(2, 2.0))
    for version in (3, 4):
        assert on.run(publishers.update, name, float(version)) == [version, version]
        assert same(ckpt.read(url), whole_state(2, float(version)))
    on.run(publishers.end, name)
    with pytest.raises(ckpt.CkptError):
        ckpt.read(url)


@pytest.mark.thorough
def test_the_files_of_each_host_come_from_its_server_and_its_end_fails_updates_on_all_ranks(
    clusters: Callable[[int], Any], runtime: Path
) -> None:
    on, name = clusters(4), "policy"
    for host in ("host0", "host1"):
        (runtime / host).mkdir(mode=0o700)
    url = on.run(publishers.begin, str(runtime), name, 2)[0]
    assert same(ckpt.read(url), whole_state(4, 1.0))
    assert on.run(publishers.update, name, 2.0) == [2] * 4
    assert same(ckpt.read(url), whole_state(4, 2.0))
    servers = on.run(publishers.server_of_rank, name)
    assert [bool(pid) for pid in servers] == [True, False, True, False]
    os.kill(servers[2], signal.SIGKILL)
    for rank, said in enumerate(on.run(publishers.update_fails, name)):
        assert "policy" in said, said
        assert rank >= 2 or "rank 2" in said, said
    with pytest.raises(ckpt.CkptError):
        ckpt.read(url)
    on.run(publishers.end, name)
    for host in ("host0", "host1"):
        for path in (runtime / host).glob("policy*" if host == "host1" else "nothing"):
            path.unlink()
        wait_until_nothing_is_left(runtime / host)
        shutil.rmtree(runtime / host)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "a/b"}, "letters, digits"),
        ({"lease_seconds": 0}, "lease_seconds is 0"),
        ({"lease_seconds": "5"}, "lease_seconds is '5'; give a number"),
        ({"lease_seconds": True}, "lease_seconds is True"),
        ({"lease_seconds": np.float32(5)}, "lease_seconds is .*5.0"),
        ({"address": ""}, "address is ''"),
        ({"address": b"127.0.0.1"}, "address is b'127.0.0.1'"),
        ({"address": "203.0.113.7"}, "203.0.113.7"),
    ],
)
def test_a_wrong_argument_is_an_error_and_leaves_no_server(
    options: dict[str, Any], said: str, runtime: Path
) -> None:
    with pytest.raises(ckpt.CkptError, match=said):
        ckpt.publish({"w": torch.ones(2)}, **options)


@pytest.mark.thorough
def test_an_update_that_is_refused_takes_no_version_away(runtime: Path) -> None:
    with ckpt.publish({"w": torch.ones(2), "step": 1}, "policy") as live:
        live.update().wait(SECONDS)
        with pytest.raises(ckpt.ArgumentError, match="version 2 is not above 2"):
            live.update(2)
        for version in (1, 2):
            assert ckpt.read(str(parse(live.url).at(version)))["step"] == 1


def test_memory_whose_server_gave_no_answer_keeps_its_bytes(runtime: Path) -> None:
    with ckpt.publish({"w": torch.full((100_000,), 1.0)}, "policy") as live:
        slot = next(slot for slot in live._slots if slot.version == 1)
        theirs = os.dup(slot.arena.descriptor)
        before = os.pread(theirs, 1 << 20, 0)
        slot.held = Dropped.UNKNOWN
        live._place(live._slots.index(slot), 2)
        assert not os.path.sameopenfile(slot.arena.descriptor, theirs)
        assert os.pread(theirs, 1 << 20, 0) == before
        os.close(theirs)


@pytest.mark.thorough
@pytest.mark.parametrize("fails", [False, True], ids=["", "after an update that fails"])
def test_memory_that_a_reader_holds_is_never_written_again(runtime: Path, fails: bool) -> None:
    state: dict[str, Any] = {"w": torch.full((100_000,), 1.0)}
    with ckpt.publish(state, "policy", lease_seconds=0.2) as live:
        with HostServer.attach("policy") as reader:
            file = next(name for name in reader.versions()[1].files if name != "manifest.json")
            held = SharedFile(reader.get(1, file, live.hosts.token), reader)
            middle = held.size // 8 * 4
            view = held.view(middle, 4)
            assert view is not None
            assert bytes(view) == state["w"][:1].numpy().tobytes()
            assert held.is_intact(middle)
            for value in (2.0, 3.0, 4.0):
                state["w"].fill_(value)
                if fails and value == 3.0:  # the version of the reader is retired, and dropped
                    state["bad"] = threading.Lock()
                    with pytest.raises(ckpt.StateError, match="bad"):
                        live.update()
                    state.pop("bad")
                live.update().wait(SECONDS)
            assert live.version == 4
            assert not held.is_intact(middle)
            assert held.read_into(middle, [memoryview(bytearray(4))]) == 0
            assert bytes(view) == bytes(4)
            del held
        assert torch.equal(ckpt.read(live.url)["w"], state["w"])  # type: ignore[index]
        assert sorted(live.hosts.server.versions()) == [3, 4]  # type: ignore[union-attr]
        used = {slot.arena.descriptor for slot in live._slots}
        state["w"].fill_(5.0)
        live.update().wait(SECONDS)
        assert {slot.arena.descriptor for slot in live._slots} == used


def test_updates_and_saves_to_a_disk_do_not_wait_for_each_other(
    runtime: Path, tmp_path: Path
) -> None:
    go, writing = threading.Event(), threading.Event()

    def held(_: int) -> None:
        writing.set()
        assert go.wait(SECONDS)

    state = {"w": torch.zeros(1_000_000)}
    with ckpt.publish(state, "policy") as live:
        saving = ckpt.save(tmp_path / "a", state, blocking=False, progress=held)
        assert writing.wait(SECONDS)
        state["w"] += 1
        live.update().wait(SECONDS)
        assert torch.equal(ckpt.read(live.url)["w"], state["w"])  # type: ignore[index]
        assert not saving.done()
        go.set()
        saving.wait(SECONDS)
    assert torch.equal(ckpt.read(tmp_path / "a")["w"], torch.zeros(1_000_000))  # type: ignore[index]


def test_a_closed_live_state_says_so_and_its_handle_names_no_token(runtime: Path) -> None:
    live = ckpt.publish({"w": torch.ones(2)}, "policy")
    handle = live.update()
    handle.wait(SECONDS)
    for shown in (handle.url, repr(handle), repr(live)):
        assert live.hosts.token not in shown
    live.close()
    live.close()
    with pytest.raises(ckpt.ClosedError, match="publish the state again"):
        live.update()


def test_a_version_that_is_no_whole_number_or_too_large_is_an_error(runtime: Path) -> None:
    with ckpt.publish({"w": torch.ones(2)}, "policy") as live:
        for version in (np.int64(3), True, 2.0, "2"):
            with pytest.raises(ckpt.ArgumentTypeError, match=r"version is .*; give a whole number"):
                live.update(version)  # type: ignore[arg-type]
        with pytest.raises(ckpt.ArgumentError, match="not above 1, the newest, and at most 9"):
            live.update(10**30)
        live.update(3).wait(SECONDS)
        assert live.version == 3
