"""Two jobs in one run: the one that began to save last owns it, whatever their steps interleave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.removing.progress_files import Watch
from ckpt.run.owner import Ownership, epochs
from ckpt.stores.local_store import LocalStore
from ckpt.stores.store import open_store
from tests.faults.faulty_store import Fault, at, failing
from tests.selection import thorough
from tests.stores.server import Server


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((4,), float(value))}


def value_of(place: Path) -> float:
    return float(ckpt.read(place)["w"][0])  # type: ignore[index]


def job(folder: Path | str, **more: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(folder, **{"every_steps": 1, "signals": (), "blocking": True, **more})


OLDER = """
import sys, torch, ckpt
with ckpt.Checkpointer(sys.argv[1], every_steps=1, signals=(), keep=ckpt.Keep(last=1)) as run:
    for line in sys.stdin:
        run.save(int(line), {"w": torch.full((4,), -1.0)})
        run.wait_until_finished()
        print("saved", line, end="", flush=True)
"""


@pytest.mark.thorough
def test_a_job_that_lives_on_beside_a_newer_one_ends_with_an_error_that_names_the_newer(
    programs: Callable[..., Any], tmp_path: Path
) -> None:
    older = programs(OLDER, tmp_path)
    print("1", file=older.stdin, flush=True)
    assert older.stdout.readline() == "saved 1\n"
    with job(tmp_path) as run:
        assert run.restore(state_of(0)) == 1
        assert run.save(2, state_of(2))
        _, said = older.communicate("3\n")
        assert run.save(4, state_of(4))
        assert run.all_steps() == [4, 2, 1]  # the older job has removed nothing
    assert older.returncode == 1
    assert "NotOwnerError" in said
    assert f"process {os.getpid()}, which began to save" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("owner-2.json", "step-1", "step-2", "step-4")
    ]


@pytest.mark.parametrize("part", [0.0, 0.2, 0.5, 0.7])
def test_a_start_whose_claim_failed_half_way_claims_the_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    """Whatever the part of a microsecond at which it began: files have whole ones."""
    start = time.time() // 1 + 1e-6 * part
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: start)
        owner = Ownership(str(tmp_path), "run", None)
    owner.start()
    for number in range(20):  # each operation fails once, and the next claim meets what it left
        with failing(at({number: Fault.DENY})) as found, suppress(OSError):
            owner.take(1)
        if not found.met:
            break
    assert owner.epoch > 1
    assert epochs(path.name for path in tmp_path.iterdir()) == [owner.epoch]


def two_jobs(folder: str, blocking: bool, on_failure: str) -> list[tuple[str, str]]:
    older = job(folder, blocking=blocking, on_failure=on_failure)
    older.save(1, state_of(1))
    older.wait_until_finished()
    with job(folder) as newer:
        newer.restore(state_of(0))
        newer.save(2, state_of(2))
        dist.barrier()
        found = []
        for step in (3, 4):
            with pytest.raises(ckpt.NotOwnerError) as error:
                older.save(step, state_of(step))
            found.append((type(error.value).__name__, error.value.kind))
        older.close()
        assert older.failures == 0
        assert newer.save(5, state_of(5))
        assert newer.all_steps() == [5, 2, 1]
    return found


@pytest.mark.parametrize("on_failure", ["continue", "raise"])
@pytest.mark.parametrize("blocking", [True, False])
def test_all_ranks_of_the_older_job_get_the_error(
    clusters: Callable[[int], Any], tmp_path: Path, blocking: bool, on_failure: str
) -> None:
    told = clusters(2).run(two_jobs, str(tmp_path), blocking, on_failure)
    assert told == [[("NotOwnerError", "not_owner")] * 2] * 2


NEWER = """
import sys, torch, ckpt
for line in sys.stdin:
    folder, step = line.split()
    with ckpt.Checkpointer(folder, every_steps=1, signals=(), blocking=True) as run:
        first = run.restore({"w": torch.zeros(4)})
        run.save(int(step), {"w": torch.full((4,), 200.0)}, force=first == 1)
    print(first, flush=True)
"""
CALLS = (
    *("commit", "create", "delete", "entries", "exists", "names", "read_whole", "sizes"),
    "_give_name",  # the one system call of a commit
)
GIVES_NAME = "_give_name manifest.json"


def interleaved(
    older: Callable[[], object],
    newer: Callable[[], None],
    before: int,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Exception | None, list[str]]:
    """Runs `older`, and `newer` before one of its store calls. Returns its error and its calls."""
    calls: list[str] = []

    def hooked(name: str) -> Callable[..., Any]:
        method = getattr(LocalStore, name)

        def call(store: LocalStore, *args: Any, **more: Any) -> Any:
            about = args[1] if name == "_give_name" else args[0] if args else ""
            calls.append(f"{name} {about}".strip())
            if len(calls) == before:
                newer()
            return method(store, *args, **more)

        return call

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(LocalStore, name, hooked(name))
        try:
            older()
        except ckpt.CkptError as error:
            return error, calls
    return None, calls


@pytest.mark.thorough
@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_newer_job_that_comes_at_any_moment_of_a_save_owns_the_run_after_it(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older job saves step 2, the newer one step 3, or the same step."""
    with subprocess.Popen(
        [sys.executable, "-c", NEWER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        in_window, calls = every_moment(tmp_path, step, child, monkeypatch)
    # A commit to the newer job's own step finds its manifest, and looks again.
    assert in_window == ([] if step == 2 else [GIVES_NAME])
    assert len(calls) > 8
    assert calls.count("entries") >= 3


def every_moment(
    tmp_path: Path, step: int, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """The calls before which a newer job could not stop the older one's save; all its calls."""
    assert child.stdin is not None
    assert child.stdout is not None
    at, in_window = 0, []
    while True:
        at += 1
        folder = tmp_path / str(at)
        older = job(folder, keep=ckpt.Keep(last=1))
        older.save(1, state_of(1))
        older._saves.tidying.wait()  # or its calls are counted among those of the next save
        came: list[str] = []

        def comes(folder: Path = folder, came: list[str] = came) -> None:
            assert child.stdin is not None
            assert child.stdout is not None
            print(folder, step, file=child.stdin, flush=True)
            came.append(child.stdout.readline().strip())
            assert came in (["1"], ["2"])  # the newest step that the newer job found

        def save(older: ckpt.Checkpointer = older) -> None:
            older.save(2, state_of(100))
            older._saves.tidying.wait()

        error, calls = interleaved(save, comes, at, monkeypatch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ckpt.SaveFailedWarning)  # removed nothing any more
            older.close()
        if not came:
            assert error is None
            child.stdin.close()
            return in_window, calls
        call = calls[at - 1]
        if error is None and came == ["1"]:
            in_window.append(call)
        elif error is not None:
            assert isinstance(error, ckpt.NotOwnerError), (call, error)
            assert value_of(folder / f"step-{step}") == 200, call
            assert (folder / "step-1").exists(), call
            assert not ckpt.gc(folder), call
        with job(folder) as later:
            state = state_of(0)
            assert later.restore(state) == step
            # Only if the newer job saves the same step between the last look and the commit of the
            # older one, the older one's is there.
            is_older = step == 2 and came == ["2"]
            wanted = 100 if is_older else 200
            assert state["w"][0] == wanted, call


def test_a_program_that_only_restores_takes_no_run(tmp_path: Path) -> None:
    with job(tmp_path) as trainer:
        trainer.save(1, state_of(1))
        with job(tmp_path) as evaluator:
            assert evaluator.restore(state_of(0)) == 1
            assert evaluator.latest_step() == 1
        assert trainer.save(2, state_of(2))
    assert (tmp_path / "owner-1.json").exists()


@pytest.mark.parametrize("has_owner", [False, True], ids=["a new run", "a run with an owner"])
def test_a_job_that_has_never_saved_takes_no_run_from_a_newer_one(
    tmp_path: Path, has_owner: bool
) -> None:
    if has_owner:
        with job(tmp_path) as first:
            first.save(1, state_of(1))
    older = job(tmp_path)
    newer = job(tmp_path)
    for run in (older, newer):
        assert run.restore(state_of(0)) == (1 if has_owner else None)
    assert newer.save(2, state_of(2))
    with pytest.raises(ckpt.NotOwnerError, match=f"process {os.getpid()}"):
        older.save(2, state_of(-2))
    assert newer.save(3, state_of(3))
    assert [value_of(tmp_path / f"step-{step}") for step in (2, 3)] == [2, 3]
    older.close()
    with job(tmp_path) as last:  # and one that began before the owner saved, but after it began
        newer.save(4, state_of(4))
        assert last.restore(state_of(0)) == 4
        assert last.save(5, state_of(5))
        with pytest.raises(ckpt.NotOwnerError):
            newer.save(6, state_of(6))
    newer.close()


def test_a_run_goes_on_without_its_owner_file_and_one_of_an_older_release_gets_one(
    tmp_path: Path,
) -> None:
    ckpt.save(tmp_path / "step-1", state_of(1), metadata={"step": "1"})
    with job(tmp_path) as run:
        assert run.restore(state_of(0)) == 1
        run.save(2, state_of(2))
        [file] = tmp_path.glob("owner-*")
        told = json.loads(file.read_text())
        assert (told["epoch"], told["pid"], told["run"]) == (1, os.getpid(), str(tmp_path))
        file.unlink()
        assert run.save(3, state_of(3))
        file.write_text("{")  # damaged
        assert run.save(4, state_of(4))
    assert ckpt.latest(tmp_path) == str(tmp_path / "step-4")
    assert ckpt.gc(tmp_path) == []
    (tmp_path / ".owner-2.json.01234567.part").write_text("{")  # of a start that was killed
    assert Watch(tmp_path).look() == []
    assert len(ckpt.gc(tmp_path, delete=True, older_than=0)) == 1
    assert sorted(one.name for one in tmp_path.iterdir())[0] == "owner-1.json"


@pytest.mark.parametrize("where", [thorough("disk"), "s3"])
def test_starts_at_one_moment_get_epochs_of_their_own_and_the_highest_owns(
    where: str, tmp_path: Path, moto: Server
) -> None:
    url = str(tmp_path) if where == "disk" else moto.url("test_owner/run")
    options = None if where == "disk" else moto.options
    starts = [Ownership(url, url, options) for _ in range(6)]
    with ThreadPoolExecutor(len(starts)) as pool:
        taken = list(pool.map(lambda one: one.take(3), starts))
    assert len({*taken}) == len(starts)
    assert min(taken) >= 3
    for one in starts:
        if one.epoch == max(taken):
            one.look()
        else:
            with pytest.raises(ckpt.NotOwnerError, match="belongs to another job now"):
                one.look()
    with open_store(url, options) as store:
        assert epochs(store.names()) == [max(taken)]


def test_the_local_folder_of_a_host_has_one_run_and_one_owner(tmp_path: Path) -> None:
    local = {"every_steps": 100, "local": tmp_path / "near", "local_every_steps": 1}
    older = job(tmp_path / "run", **local)
    assert older.save(1, state_of(1))
    with job(tmp_path / "run", **local) as newer:
        assert newer.restore(state_of(0)) == 1
        assert newer.save(2, state_of(2))
        with pytest.raises(ckpt.NotOwnerError, match="near belongs to another job"):
            older.save(2, state_of(-2))
        assert value_of(tmp_path / "near" / "step-2") == 2
    older.close()
    other = job(tmp_path / "other", **{**local, "local": tmp_path / "shared"})
    beside = job(tmp_path / "beside", **{**local, "local": tmp_path / "shared"})
    assert other.save(1, state_of(1))
    with pytest.raises(ckpt.ArgumentError, match="other; give each run"):
        beside.save(1, state_of(-1))
    assert value_of(tmp_path / "shared" / "step-1") == 1
    other.close()
    beside.close()
