"""The memory tier of a run: servers outlive the trainers. A host here is a runtime folder."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from ckpt.live.process import HostServer
from ckpt.live.protocol import Address, FileAt, VersionInfo
from ckpt.run.steps import BEGAN, STEP
from ckpt.run.tiers import TOKEN, name_of_run, whole
from tests.live.publishers import RUNTIME, wait_until_nothing_is_left

ROWS = 12


def long_of(value: float) -> torch.Tensor:
    return torch.arange(ROWS * 1000.0).reshape(ROWS, 1000) + value


def state_of(value: float) -> dict[str, Any]:
    """A replica, and shards over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(long_of(value), mesh, [Shard(0)])
    return {"plain": long_of(value), "sharded": sharded, "step": value}


def holds(state: dict[str, Any], value: float) -> bool:
    sharded, wanted = state["sharded"], state_of(value)["sharded"]
    assert isinstance(sharded, DTensor)
    return (
        torch.equal(state["plain"], long_of(value))
        and torch.equal(sharded.to_local(), wanted.to_local())
        and state["step"] == value
    )


def on_host(folder: str, hosts: int) -> None:
    """From now on this rank is on one of so many hosts."""
    host = dist.get_rank() * hosts // dist.get_world_size()
    os.environ[RUNTIME] = f"{folder}/host{host}"


def run_in(folder: str, **memory: Any) -> ckpt.Checkpointer:
    options = ckpt.Memory(every_steps=1, **memory)
    return ckpt.Checkpointer(f"{folder}/shared", every_steps=10, memory=options, signals=())


def trained(folder: str, hosts: int, steps: int, end: str = "") -> int | None:
    """Restores, and trains up to a step; returns the restored step. Then ends as told."""
    on_host(folder, hosts)
    state = state_of(0.0)
    run = run_in(folder)
    first = run.restore(state)
    assert holds(state, float(first or 0))
    for step in range((first or 0) + 1, steps + 1):
        assert run.save(step, state_of(float(step)))
        run.wait_until_finished()
    if end == "killed":
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "halfway":  # rank 1 is killed between the seal of its part and the commit
        on_rank = dist.get_rank()
        version = __import__("ckpt.live.publish", fromlist=["_Version"])._Version
        version.end = lambda *_: os.kill(os.getpid(), signal.SIGKILL) if on_rank else None
        run.save(steps + 1, state_of(steps + 1.0))
        os.kill(os.getpid(), signal.SIGKILL) if on_rank == 0 else signal.pause()
    if end == "failed":
        with pytest.raises(KeyError), run:
            raise KeyError
    else:
        run.close()
    return first


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run, whose servers are ended after the test."""
    for host in ("host0", "host1"):
        (tmp_path / host).mkdir(mode=0o700)
    yield tmp_path
    for host in ("host0", "host1"):
        lose(tmp_path, host)


def server_on(folder: Path, host: str) -> HostServer | None:
    before = os.environ.get(RUNTIME)
    os.environ[RUNTIME] = str(folder / host)
    try:
        return HostServer.attach(name_of_run(f"{folder}/shared"))
    except ckpt.CkptError:
        return None
    finally:
        os.environ.pop(RUNTIME)
        if before is not None:
            os.environ[RUNTIME] = before


def lose(folder: Path, host: str) -> None:
    """End the server of a host as a power failure does."""
    server = server_on(folder, host)
    if server is not None:
        with server:
            os.kill(server.pid, signal.SIGKILL)
        for path in (folder / host).iterdir():
            path.unlink()


def killed(cluster: Any, *arguments: Any) -> None:
    with pytest.raises(Exception, match="died"):
        cluster.run(trained, *arguments)


@pytest.mark.thorough
def test_killed_trainers_go_on_from_memory_on_any_number_of_ranks(
    doomed_cluster: Callable[[int], Any], clusters: Callable[[int], Any], folder: Path
) -> None:
    killed(doomed_cluster(2), str(folder), 1, 14, "killed")
    server = server_on(folder, "host0")
    assert server is not None
    with server:
        assert len(server.versions()) == 2
    assert clusters(3).run(trained, str(folder), 1, 15, "failed") == [14] * 3
    assert clusters(1).run(trained, str(folder), 1, 16) == [15]
    wait_until_nothing_is_left(folder / "host0")
    assert clusters(2).run(trained, str(folder), 1, 12) == [10, 10]


@pytest.mark.thorough
def test_a_lost_host_is_read_from_the_replicas_of_its_neighbour(
    doomed_cluster: Callable[[int], Any], clusters: Callable[[int], Any], folder: Path
) -> None:
    killed(doomed_cluster(2), str(folder), 2, 13, "killed")
    lose(folder, "host0")
    assert clusters(2).run(trained, str(folder), 2, 14, "failed") == [13, 13]
    lose(folder, "host1")
    assert clusters(2).run(trained, str(folder), 2, 15, "failed") == [14, 14]
    lose(folder, "host0")
    lose(folder, "host1")
    assert clusters(2).run(trained, str(folder), 2, 11) == [10, 10]
    for host in ("host0", "host1"):
        wait_until_nothing_is_left(folder / host)


def test_a_save_to_memory_that_fails_names_its_step_and_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(step: int) -> None:
        run.save(step, {"w": torch.ones(2)})
        run.wait_until_finished()

    monkeypatch.setenv(RUNTIME, str(folder / "host0"))
    with run_in(str(folder)) as run:
        save(1)
        lose(folder, "host0")
        with pytest.warns(ckpt.SaveFailedWarning, match=r"^step 2 in memory \(live://.*not saved"):
            save(2)


def test_a_save_to_the_folder_that_fails_names_its_step_not_a_later_one_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME, str(folder / "host0"))
    with run_in(str(folder)) as run:
        run.save(9, {"w": torch.ones(2)})
        shutil.rmtree(folder / "shared")
        (folder / "shared").write_text("in the place of the folder")
        run.save(10, {"w": torch.ones(2)})
        run.save(11, {"w": torch.ones(2)})
        with pytest.warns(ckpt.SaveFailedWarning, match=f"^{folder}/shared/step-10 was not saved"):
            run.wait_until_finished()
        (folder / "shared").unlink()


def test_a_step_whose_server_ends_in_the_restore_is_read_from_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_memory(event: ckpt.events.Event) -> None:
        if event.stage == "telling the servers of each other":
            lose(folder, "host0")

    monkeypatch.setenv(RUNTIME, str(folder / "host0"))
    state = {"w": torch.ones(2)}
    with run_in(str(folder)) as run:
        run.save(10, state)
        run.wait_until_finished()
        state["w"].zero_()
        stop = ckpt.events.subscribe(lose_memory)
        try:
            with pytest.warns(ckpt.FallbackWarning):
                assert run.restore(state, step=10) == 10
        finally:
            stop()
    assert state["w"].tolist() == [1.0, 1.0]


@pytest.mark.thorough
def test_a_step_that_was_not_committed_is_skipped(
    doomed_cluster: Callable[[int], Any], clusters: Callable[[int], Any], folder: Path
) -> None:
    killed(doomed_cluster(2), str(folder), 2, 12, "halfway")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ckpt.FallbackWarning)
        assert clusters(2).run(trained, str(folder), 2, 13) == [12, 12]


SERVERS: list[Address] = [("a", 1), ("b", 2), ("c", 3)]


@given(
    kept=st.lists(st.sets(st.integers(1, 3)), min_size=3, max_size=3),
    alive=st.sets(st.integers(0, 2)),
    replicas=st.integers(0, 2),
)
def test_a_version_counts_if_all_of_its_files_are_left(
    kept: list[set[int]], alive: set[int], replicas: int
) -> None:
    """Server n has the file n, and those of the servers before it in the ring."""
    places = {
        str(host): FileAt(9, tuple(SERVERS[(host + step) % 3] for step in range(1 + replicas)))
        for host in range(3)
    }
    info = {STEP: "5", BEGAN: "1.000000", TOKEN: "t"}
    told = [
        (SERVERS[host], {version: VersionInfo(places, True, info) for version in kept[host]})
        for host in sorted(alive)
    ]
    wanted = []
    for version in (3, 2, 1):
        having = {host for host in alive if version in kept[host]}
        if having and all(
            any((host + step) % 3 in having for step in range(1 + replicas)) for host in range(3)
        ):
            wanted.append(version)
    found = whole(told)
    assert [one.version for one in found] == wanted
    for one in found:
        for file in one.files.values():
            assert file.at
            assert set(file.at) <= {SERVERS[host] for host in alive}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": -1}, "replicas=-1"),
        ({"every_steps": 0}, "every_steps=0"),
        ({"memory_bytes": 0.5}, "memory_bytes=0.5"),
        ({"keep_seconds": -1.0}, "keep_seconds=-1.0"),
        ({"keep_seconds": "1h"}, "keep_seconds='1h'"),
    ],
)
def test_a_wrong_option_of_the_memory_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ckpt.ArgumentError, match=said):
        ckpt.Memory(**options)
