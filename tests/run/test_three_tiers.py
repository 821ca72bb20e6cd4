"""A run with all tiers: memory, a folder of each host, the shared folder. The newest step wins."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ckpt
from tests.run.test_memory_tier import holds, lose, on_host, server_on, state_of

HOSTS = ("host0", "host1")
"""Of two ranks, one each. A host is a folder for sockets, and a folder of a disk."""
SHARED_EVERY, LOCAL_EVERY, MEMORY_EVERY = 10, 4, 3

pytestmark = pytest.mark.thorough


def disk_of(folder: str | Path, host: str) -> Path:
    return Path(folder, f"disk of {host}")


def run_in(folder: str) -> ckpt.Checkpointer:
    on_host(folder, len(HOSTS))
    return ckpt.Checkpointer(
        f"{folder}/shared",
        every_steps=SHARED_EVERY,
        local=disk_of(folder, HOSTS[dist.get_rank()]),
        local_every_steps=LOCAL_EVERY,
        memory=ckpt.Memory(every_steps=MEMORY_EVERY),
        signals=(),
    )


def restored(folder: str) -> tuple[int | None, list[str]]:
    """The step that a run is restored to, and the steps that were found damaged; all tiers stay."""
    state = state_of(0.0)
    with (
        warnings.catch_warnings(record=True) as told,
        suppress(KeyError),
        run_in(folder) as run,
    ):
        warnings.simplefilter("always", ckpt.FallbackWarning)
        found = run.restore(state)
        raise KeyError
    assert holds(state, float(found or 0))
    return found, [str(one.message) for one in told]


def killed(folder: str, steps: int, loses_memory_at: int | None = None) -> None:
    """Trains up to a step, where all ranks are killed; host 0 may lose its memory before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckpt.SaveFailedWarning)
        run = run_in(folder)
        first = run.restore(state_of(0.0)) or 0
        for step in range(first + 1, steps + 1):
            if step == loses_memory_at and dist.get_rank() == 0:
                lose(Path(folder), HOSTS[0])
            run.save(step, state_of(float(step)))
            run.wait_until_finished()
        assert run.failures == (loses_memory_at is not None)  # of one save to memory
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run, whose servers are ended after the test."""
    for host in HOSTS:
        (tmp_path / host).mkdir(mode=0o700)
    yield tmp_path
    for host in HOSTS:
        lose(tmp_path, host)


@pytest.fixture
def restore(
    clusters: Callable[[int], Any], folder: Path
) -> Callable[[], tuple[int | None, list[str]]]:
    """Restores on all ranks; fails unless all of them get the same step."""

    def same() -> tuple[int | None, list[str]]:
        (first, told), (second, _) = clusters(2).run(restored, str(folder))
        assert first == second
        return first, told

    return same


def test_the_newest_complete_step_of_three_tiers_wins_on_all_ranks(
    doomed_cluster: Callable[[int], Any], folder: Path, restore: Callable[[], Any]
) -> None:
    with pytest.raises(Exception, match="died"):
        doomed_cluster(2).run(killed, str(folder), 13)
    # Memory: 12 and 10. Disks: 12 and 8. Shared folder: 10.
    for file in disk_of(folder, "host1").glob("step-12/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    assert restore() == (12, [])  # from memory, which is nearest: the damage is not seen
    lose(folder, "host0")
    assert restore() == (12, [])  # from the copies on the other host
    lose(folder, "host0")
    lose(folder, "host1")
    found, told = restore()  # the step of the disk is damaged
    assert found == 10
    assert "step-12" in told[0]
    shutil.rmtree(disk_of(folder, "host1"))
    assert restore() == (10, [])


@pytest.mark.slow
def test_a_stale_memory_does_not_hide_a_newer_step_of_a_disk(
    doomed_cluster: Callable[[int], Any], folder: Path, restore: Callable[[], Any]
) -> None:
    with pytest.raises(Exception, match="died"):
        doomed_cluster(2).run(killed, str(folder), 9, 7)
    server = server_on(folder, "host1")
    assert server is not None
    with server:
        assert len(server.versions()) == 2  # steps 3 and 6, and the copies of the other host
    assert restore() == (8, [])
    shutil.rmtree(disk_of(folder, "host0"))
    assert restore() == (6, [])


@pytest.mark.slow
def test_the_save_after_one_that_failed_starts_a_server_in_the_place_of_one_that_has_ended(
    doomed_cluster: Callable[[int], Any], folder: Path, restore: Callable[[], Any]
) -> None:
    with pytest.raises(Exception, match="died"):
        doomed_cluster(2).run(killed, str(folder), 13, 7)
    for host in HOSTS:
        shutil.rmtree(disk_of(folder, host))
        server = server_on(folder, host)
        assert server is not None
        with server:  # steps 10 and 12: those from before the failure are dropped
            assert len(server.versions()) == 2
    lose(folder, "host1")
    assert restore() == (12, [])
