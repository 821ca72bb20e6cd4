"""Runs that look after their checkpoints: by one process, and by ranks that must agree."""

from __future__ import annotations

import copy
import errno
import logging
import math
import os
import pickle
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import optimizer

import ckpt
from ckpt.run.owner import git_revision
from ckpt.run.steps import metrics_text
from ckpt.saving.writers import arena_writer
from ckpt.stores import local_store
from ckpt.transfer.facts import step_of
from tests.conftest import Program, RankDied
from tools.main import main


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((4,), value), "seen": int(value)}


def train(run: ckpt.Checkpointer, state: dict[str, Any], steps: range, **more: Any) -> list[int]:
    """The steps at which the run saved."""
    saved = []
    for step in steps:
        state["w"].fill_(step)
        state["seen"] = step
        if run.save(step, state, **more):
            saved.append(step)
    return saved


def test_a_run_saves_when_due_keeps_what_it_should_and_goes_on(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=10, keep=ckpt.Keep(last=2, every=40)) as run:
        assert run.restore(state_of(0)) is None
        assert train(run, state_of(0), range(1, 75)) == [10, 20, 30, 40, 50, 60, 70]
    with ckpt.Checkpointer(tmp_path, every_steps=10, keep=ckpt.Keep(last=2, every=40)) as run:
        assert run.all_steps() == [70, 60, 40]
        state = state_of(0)
        assert run.restore(state) == run.latest_step() == 70
        assert (state["seen"], state["w"].tolist()) == (70, [70.0] * 4)
        assert run.restore(state, step=40) == 40
        assert state["seen"] == 40
        assert train(run, state, range(41, 61)) == [50, 60]  # the steps 60 and 70 were given up
        run.wait_until_finished()
        assert run.latest_step() == 60
        assert ckpt.read(tmp_path / "step-60")["seen"] == 60  # type: ignore[index]


@pytest.mark.thorough
@pytest.mark.parametrize("back", [1, 30, 3600])
@pytest.mark.parametrize("keep", [ckpt.Keep(last=1), ckpt.Keep(last=2, every=100), ckpt.Keep()])
def test_a_clock_that_steps_back_removes_no_newer_step_and_restores_none_older(
    tmp_path: Path, keep: ckpt.Keep, back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.time
    for start, shift in enumerate((0, -back, -back + 5, -2 * back)):
        monkeypatch.setattr(time, "time", lambda shift=shift: clock() + shift)
        with ckpt.Checkpointer(tmp_path, every_steps=1, keep=keep) as run:
            assert (run.restore(state_of(0)) or 0) == 3 * start
            assert train(run, state_of(0), range(3 * start + 1, 3 * start + 3))
            # also in the middle of a start
            monkeypatch.setattr(time, "time", lambda shift=shift: clock() + shift - back)
            assert train(run, state_of(0), range(3 * start + 3, 3 * start + 4))
            run.wait_until_finished()
            assert run.latest_step() == 3 * start + 3
        assert ckpt.latest(tmp_path) == str(tmp_path / f"step-{3 * start + 3}")


def test_a_run_of_an_older_release_goes_on_though_the_clock_is_behind_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):  # without a counter
        ckpt.save(tmp_path / f"step-{step}", state_of(step), metadata={"step": str(step)})
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 3600)
    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=ckpt.Keep(last=2)) as run:
        assert run.restore(state_of(0)) == 3
        train(run, state_of(0), range(4, 6))
        run.wait_until_finished()
        assert run.all_steps() == [5, 4]
    assert ckpt.latest(tmp_path) == str(tmp_path / "step-5")


def test_the_best_checkpoints_stay_by_their_metric(tmp_path: Path) -> None:
    losses = {1: 0.9, 2: 0.2, 3: float("nan"), 4: 0.5, 5: 0.2, 6: 0.8}
    keep = ckpt.Keep(best=2, metric="loss")
    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=keep) as run:
        for step, loss in losses.items():
            assert run.save(step, state_of(step), {"loss": torch.tensor(loss), "lr": 1})
        run.wait_until_finished()
        assert run.all_steps() == [6, 5, 2]
        assert run.best_step() == 5
    found = ckpt.run_steps(tmp_path)
    assert [one.metrics["lr"] for one in found] == [1.0] * 3
    assert found[0].metrics["loss"] == pytest.approx(0.8)


def diverges(folder: str) -> tuple[list[int], list[str]]:
    """A run whose numbers are finite up to step 3: the steps that stay, and the warnings."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt.save").addHandler(handler)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = torch.zeros(20_000, dtype=torch.bfloat16)  # of which each rank writes its own
    state = {"w": DTensor.from_local(part, mesh, [Shard(0)]), "same": torch.zeros(3), "seen": 0}
    with ckpt.Checkpointer(folder, every_steps=1, keep=ckpt.Keep(last=2, last_finite=1)) as run:
        for step in range(1, 7):
            if step == 4 and dist.get_rank() == 1:
                part[-5:] = -math.inf
            if step == 5:
                state["same"][1] = math.nan
            run.save(step, state)
        run.wait_until_finished()
        steps = run.all_steps()
        assert run.latest_finite_step() == 3
    logging.getLogger("ckpt.save").removeHandler(handler)
    return steps, told


def test_the_last_step_whose_numbers_are_all_finite_stays(
    clusters: Callable[[int], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (steps, told), (_, others) = clusters(2).run(diverges, str(tmp_path))
    assert steps == [6, 5, 3]
    assert [one.nonfinite for one in ckpt.run_steps(tmp_path)] == [6, 6, 0]
    where = [str(tmp_path / f"step-{step}") for step in (4, 5, 6)]
    told_of = zip(where, (5, 6, 6), strict=True)
    assert told == [f"{place}: {count} numbers are NaN or infinite" for place, count in told_of]
    assert others == []
    assert main(["ls", str(tmp_path)]) == 0
    assert "complete, 6 NaN or infinite" in capsys.readouterr().out
    assert main(["rm", str(tmp_path), "--keep", "last_finite=1"]) == 0
    assert [one.step for one in ckpt.run_steps(tmp_path)] == [6, 3]


def test_numbers_are_counted_only_for_the_rule_that_asks(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=ckpt.Keep(last=2)) as run:
        run.save(1, {"w": torch.tensor([math.nan])})
        run.wait_until_finished()
        assert run.latest_finite_step() is None
    assert ckpt.run_steps(tmp_path)[0].nonfinite is None
    assert "nonfinite" not in (tmp_path / "step-1" / "manifest.json").read_text()


def test_a_save_that_fails_is_told_and_counted_and_the_next_step_saves(tmp_path: Path) -> None:
    (tmp_path / "step-2").write_text("a file where a folder has to be")
    with ckpt.Checkpointer(tmp_path, every_steps=2) as run:
        with pytest.warns(ckpt.SaveFailedWarning, match=r"step-2 was not saved.*failure 1"):
            saved = train(run, state_of(0), range(1, 5))
        run.wait_until_finished()
        assert run.failures == 1
        assert {3, 4} & set(saved)
    assert {one.step for one in ckpt.run_steps(tmp_path)} <= {3, 4}
    assert (tmp_path / "step-2").is_file()


def test_a_step_whose_save_failed_can_be_saved_again(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("a file where a folder has to be")
    with ckpt.Checkpointer(tmp_path, every_steps=1, blocking=True) as run:
        with pytest.warns(ckpt.SaveFailedWarning, match="step-1"):
            assert not run.save(1, state_of(1))
        (tmp_path / "step-1").unlink()
        assert run.save(1, state_of(1), force=True)
        assert run.all_steps() == [1]


def test_the_seconds_between_saves_begin_anew_with_each_save(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_seconds=1000.0, blocking=True) as run:
        assert not any(run.save(step, state_of(step)) for step in range(8))
        run._due._began -= 1500.0  # so much later
        saved = [step for step in range(8, 64) if run.save(step, state_of(step))]
        assert len(saved) == 1


def test_steps_after_one_that_was_gone_back_to_are_decided_anew(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1, blocking=True) as run:
        assert all(run.save(step, state_of(step)) for step in (1, 2))
        assert run.restore(state_of(0), step=1) == 1
        assert run.save(2, state_of(2))


def test_the_clock_is_looked_at_after_a_run_goes_far_back(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_seconds=1000.0, blocking=True) as run:
        assert run.save(1, state_of(1), force=True)
        run.should_save(10**6)  # the next exchange is some 10**6 steps later
        assert run.restore(state_of(0)) == 1
        run._due._began -= 1500.0  # so much later
        assert run.should_save(2)


def test_a_failure_is_raised_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("a file where a folder has to be")
    with ckpt.Checkpointer(tmp_path, every_steps=1, blocking=True, on_failure="raise") as run:
        with pytest.raises(OSError, match="step-1"):
            run.save(1, state_of(1))
        assert run.save(2, state_of(2))


def test_a_run_prepares_its_first_save_at_its_first_step(tmp_path: Path) -> None:
    with ckpt.events.recorded() as events, ckpt.Checkpointer(tmp_path, every_steps=4) as run:
        assert train(run, state_of(0), range(1, 4)) == []
    calls = [event.call for event in events if not event.stage]
    assert calls.count("ckpt.prepare") == 1


def test_the_saves_of_all_tiers_share_one_bound_on_host_memory(tmp_path: Path) -> None:
    model = torch.nn.Linear(600, 600)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optim": optimizer}
    bound: Any = {"host_memory": "1MiB", "local": tmp_path / "near", "local_every_steps": 1}
    with ckpt.Checkpointer(tmp_path / "far", every_steps=6, **bound) as run:
        for step in range(1, 7):  # the arena has the size of its last saves
            model(torch.ones(600)).sum().backward()
            optimizer.step()
            assert run.save(step, state)
        run.wait_until_finished()
        assert arena_writer().arena.size <= 1 << 20
    assert ckpt.read(tmp_path / "far/step-6")["model"]["weight"].equal(model.weight)  # type: ignore[index]
    assert not ckpt.verify(tmp_path / "near/step-5").problems
    for more in ({"memory": ckpt.Memory()}, {"also": ckpt.HuggingFace("hf/step-{step}")}):
        with pytest.raises(ckpt.ArgumentError, match="leave out one of them"):
            ckpt.Checkpointer(tmp_path / "far", host_memory="1MiB", **more)


def test_a_run_that_waits_for_its_saves_makes_no_copy_of_the_state(tmp_path: Path) -> None:
    run = ckpt.Checkpointer(tmp_path, every_steps=1, blocking=True)
    with ckpt.events.recorded() as events, run:
        assert train(run, state_of(0), range(1, 3)) == [1, 2]
    assert not [event for event in events if event.stage == "copying the state"]


def test_a_state_that_cannot_be_stored_is_raised_at_once(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        with pytest.raises(ckpt.StateError, match="lock"):
            run.save(1, {"lock": threading.Lock()})
        with pytest.raises(TypeError, match=r"metrics\['loss'\] is a str"):
            run.save(2, state_of(2), {"loss": "low"})
        assert run.failures == 0


def test_a_run_never_saves_over_one_that_it_did_not_restore(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        run.save(1, state_of(1))
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        with pytest.raises(ckpt.ExistsError, match=r"restore\(state\)"):
            run.save(1, state_of(2))
        assert run.restore(state_of(0)) == 1
        assert run.save(2, state_of(2))
    assert ckpt.read(tmp_path / "step-1")["seen"] == 1  # type: ignore[index]


def test_a_run_whose_driver_is_missing_is_an_error_and_no_new_run() -> None:
    fsspec.register_implementation(
        "lacking", "no_such_package.FileSystem", clobber=True, errtxt="Install no_such_package"
    )
    with pytest.raises(ckpt.StoreError, match=r"no_such_package; install the fsspec driver"):
        ckpt.Checkpointer("lacking://bucket/run", every_steps=1)


def test_a_folder_with_steps_of_another_format_is_no_new_run(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-5")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ckpt.ExistsError, match=r"its step-5 is a checkpoint of .*dcp.*convert it"):
        ckpt.Checkpointer(tmp_path, every_steps=5)
    assert sorted(tmp_path.rglob("*")) == before
    ckpt.convert(tmp_path / "step-5", tmp_path / "new/step-5", to="ckpt")
    state = {"w": torch.zeros(2)}
    with ckpt.Checkpointer(tmp_path / "new", every_steps=5) as run:
        assert run.restore(state) == 5
    assert state["w"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["step_20", "step-00020", "checkpoint-20", "20"])
@pytest.mark.parametrize("library", ["ckpt", "dcp"])
def test_a_run_does_not_begin_anew_beside_checkpoints_with_other_names(
    tmp_path: Path, name: str, library: str
) -> None:
    state = {"w": torch.full((2,), 3.0)}
    if library == "ckpt":
        ckpt.save(tmp_path / "old" / name, state)
    else:
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(state, checkpoint_id=tmp_path / "old" / name)
    with pytest.raises(ckpt.ExistsError, match=rf"its {name} is a checkpoint.*start_from\('"):
        ckpt.Checkpointer(tmp_path / "old")
    target = {"w": torch.zeros(2)}
    with ckpt.Checkpointer(tmp_path / "new", every_steps=1) as run:
        run.start_from(f"{tmp_path}/old/{name}", target)
    assert target["w"].tolist() == [3.0, 3.0]
    ckpt.save(tmp_path / "old" / "step-7", state)
    with ckpt.Checkpointer(tmp_path / "old") as run:  # which has steps of its own
        assert run.restore(target) == 7


def test_steps_have_to_rise_and_a_closed_run_saves_nothing(tmp_path: Path) -> None:
    run = ckpt.Checkpointer(tmp_path, every_steps=1)
    assert run.save(5, state_of(5))
    assert not run.save(5, state_of(5))
    with pytest.raises(ValueError, match="step 4 comes after step 5"):
        run.save(4, state_of(4))
    run.close()
    run.close()
    for force in (False, True):
        with pytest.raises(ckpt.ClosedError, match="closed"):
            run.save(6, state_of(6), force=force)


@pytest.mark.parametrize("step", [-5, 10**18, 5.0, "5", None])
def test_a_step_that_no_listing_would_find_is_refused(tmp_path: Path, step: Any) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        for call in (run.should_save, lambda at: run.save(at, state_of(1), force=True)):
            with pytest.raises(ckpt.ArgumentError, match=f"step is {step!r}"):
                call(step)
    assert not list(tmp_path.iterdir())


def test_a_step_of_numpy_or_torch_is_a_step(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        assert run.save(np.int64(4), state_of(4))  # type: ignore[arg-type]
        assert run.save(torch.tensor(5), state_of(5))  # type: ignore[arg-type]
        run.wait_until_finished()
        assert run.all_steps() == [5, 4]


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"loss": torch.ones(2)}, "is a Tensor"),
        ({"loss": np.ones(3)}, "is a ndarray"),
        ({"loss": torch.ones((), device="meta")}, "is a Tensor"),
        ({"loss": 10**400}, "above all floats"),
        ({"loss": 1 << 1000}, "above all floats"),
        ({"loss": True}, "is a bool"),
        ({"loss": np.bool_(True)}, "is a bool"),
        ({"loss": 0.5, 1: 0.5}, "the name 1"),
    ],
)
def test_a_metric_that_is_no_number_by_name_is_refused(metrics: Any, told: str) -> None:
    with pytest.raises(ckpt.ArgumentTypeError, match=told):
        metrics_text(metrics)
    with pytest.raises(ckpt.ArgumentTypeError, match="metrics is a float"):
        metrics_text(0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("deadline", [0, -1.0, "60", float("nan")])
def test_a_deadline_is_checked_before_a_signal_comes(tmp_path: Path, deadline: Any) -> None:
    with pytest.raises(ckpt.ArgumentError, match=f"deadline={deadline!r}"):
        ckpt.Checkpointer(tmp_path, deadline=deadline)


@pytest.mark.parametrize("key", ["step", "metrics", "run", "began", "hosts"])
def test_metadata_under_a_key_of_the_run_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ckpt.ArgumentError, match=f"metadata has the key '{key}'"):
        ckpt.Checkpointer(tmp_path, metadata={key: "mine", "other": "kept"})


def test_each_save_may_have_metadata_of_its_own(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1, metadata={"note": "all", "data": "v1"}) as run:
        assert run.save(1, state_of(1))
        assert run.save(2, state_of(2), metadata={"data": "v2", "lr": "0.1"})
        for wrong in ({"step": "9"}, {"order": "1.1"}, {"lr": 0.1}, "lr"):
            with pytest.raises(ckpt.CkptError, match="metadata"):
                run.save(3, state_of(3), metadata=wrong)  # type: ignore[arg-type]
        assert run.save(3, state_of(3))
    told = []
    for step in (1, 2):
        with ckpt.open(tmp_path / f"step-{step}") as checkpoint:
            told.append(
                {key: checkpoint.metadata.get(key) for key in ("step", "note", "data", "lr")}
            )
    assert told[0] == {"step": "1", "note": "all", "data": "v1", "lr": None}
    assert told[1] == {"step": "2", "note": "all", "data": "v2", "lr": "0.1"}


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        train(run, state_of(0), range(1, 4))
    for file in (tmp_path / "step-3").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    state = state_of(0)
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        with pytest.warns(ckpt.FallbackWarning, match="step-3"):
            assert run.restore(state) == 2
        assert state["seen"] == 2
        with pytest.raises(ckpt.CorruptError, match="step-3"):
            run.restore(state, step=3)
        with pytest.raises(ckpt.NotACheckpointError, match="step-9"):
            run.restore(state, step=9)


def test_a_restore_logs_the_step_that_it_took_or_that_there_was_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "ckpt.run"), ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        assert run.restore(state_of(0)) is None
        run.save(1, state_of(1))
        assert run.restore(state_of(0)) == 1
    assert caplog.messages == [
        f"{tmp_path}: no checkpoint to restore, the run begins",
        f"{tmp_path}: restored step 1 from {tmp_path}/step-1",
    ]


def test_a_base_stays_while_another_checkpoint_refers_to_it(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "step-1", state_of(1))
    ckpt.save(tmp_path / "step-2", state_of(1), base=tmp_path / "step-1")
    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=ckpt.Keep(last=2)) as run:
        run.restore(state_of(0))
        run.save(3, state_of(3))
        run.wait_until_finished()
        assert run.all_steps() == [3, 2, 1]  # step 2 is one of the last two, and needs step 1
        run.save(4, state_of(4))
        run.wait_until_finished()
        assert run.all_steps() == [4, 3]


def everything_in(folder: Path) -> dict[Path, bytes]:
    return {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("can_link", [True, False])
def test_a_branch_of_links_reads_old_steps_makes_new_ones_real_and_changes_no_other_run(
    tmp_path: Path, can_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpt.Checkpointer(tmp_path / "a", every_steps=10) as run:
        train(run, state_of(0), range(1, 51))
    (tmp_path / "b").mkdir()
    for step in (10, 20, 30, 40, 60):  # the last one leads nowhere
        (tmp_path / "b" / f"step-{step}").symlink_to(f"../a/step-{step}")
    before = everything_in(tmp_path / "a")
    if not can_link:

        def no_link(*_: object, **__: object) -> None:
            raise OSError(errno.EXDEV, "another disk")

        monkeypatch.setattr(os, "link", no_link)
        monkeypatch.setattr(local_store, "NO_HARD_LINKS", (errno.EXDEV,))
    state = state_of(0)
    with ckpt.Checkpointer(tmp_path / "b", every_steps=10, keep=ckpt.Keep(last=3)) as run:
        assert run.restore(state, step=20) == 20
        assert state["seen"] == 20
        for step in range(21, 71):
            state["seen"] = -step
            run.save(step, state)
            run.wait_until_finished()
            assert everything_in(tmp_path / "a") == before
        assert run.all_steps() == [70, 60, 50]
    there = sorted((tmp_path / "b").glob("step-*"))
    assert not any(one.is_symlink() for one in there)
    assert [one.name for one in there] == ["step-50", "step-60", "step-70"]
    assert [ckpt.read(one)["seen"] for one in there] == [-50, -60, -70]  # type: ignore[index]


def test_a_link_to_a_step_stays_readable_if_the_save_in_its_place_fails(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "a", every_steps=10) as run:
        train(run, state_of(0), range(1, 21))
    (tmp_path / "b").mkdir()
    for step in (10, 20):
        (tmp_path / "b" / f"step-{step}").symlink_to(f"../a/step-{step}")
    before = everything_in(tmp_path / "a")
    with ckpt.Checkpointer(tmp_path / "b", every_steps=10) as run:
        run.restore(state_of(0), step=10)
        run.delete(10)
        assert run.all_steps() == [20]
        with pytest.raises(ckpt.StateError):
            run.save(20, {"w": object()})
    assert ckpt.verify(tmp_path / "b" / "step-20").sound
    assert ckpt.read(tmp_path / "b" / "step-20")["seen"] == 20  # type: ignore[index]
    assert everything_in(tmp_path / "a") == before


def test_folders_that_are_no_steps_are_left_alone(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "final", state_of(1))
    (tmp_path / "step-5").mkdir()
    ckpt.save(tmp_path / "step-7", state_of(7))
    ckpt.save(tmp_path / "step-007", state_of(1))
    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=ckpt.Keep(last=1)) as run:
        assert run.restore(state_of(0)) == 7
        train(run, state_of(0), range(8, 11))
        run.wait_until_finished()
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["final", "step-007", "step-10", "step-5"]
    assert [step_of(name) for name in names] == [None, None, 10, 5]


def test_the_program_of_a_run_is_written_into_its_checkpoints(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert git_revision(str(tmp_path)) == ""  # no commit yet
    with ckpt.Checkpointer(tmp_path / "run", every_steps=1, metadata={"note": "a try"}) as run:
        run.save(1, state_of(1), {"loss": 1})
    with ckpt.open(tmp_path / "run" / "step-1") as checkpoint:
        told = dict(checkpoint.metadata)
    assert told["step"] == "1"
    assert told["note"] == "a try"
    assert told["metrics"] == metrics_text({"loss": 1}) == '{"loss": 1.0}'
    [one] = ckpt.run_steps(tmp_path / "run")
    assert {"command", "python", "torch", "hosts", "host_count"} <= one.program.keys()


def test_long_metadata_hide_no_metrics(tmp_path: Path) -> None:
    keep = ckpt.Keep(best=1, metric="loss")
    more = {"note": "x" * 10_000}
    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=keep, metadata=more) as run:
        for step, loss in enumerate((0.1, 0.9, 0.8), 1):
            run.save(step, state_of(step), {"loss": loss})
        run.wait_until_finished()
        assert run.all_steps() == [3, 1]


def test_a_damaged_manifest_takes_nobody_s_place_and_stays(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=ckpt.Keep(last=2)) as run:
        train(run, state_of(0), range(1, 3))
        run.wait_until_finished()
        (tmp_path / "step-2" / "manifest.json").write_bytes(b"{}")
        assert run.all_steps() == [1]
        train(run, state_of(0), range(3, 4))
        run.wait_until_finished()
        assert run.all_steps() == [3, 1]
        assert (tmp_path / "step-2").exists()
    (tmp_path / "step-3" / "manifest.json").write_bytes(b"{}")
    later = time.time() + 10  # a file's time is all that tells of it
    os.utime(tmp_path / "step-3" / "manifest.json", (later, later))
    run = ckpt.Checkpointer(tmp_path, every_steps=1)
    with run, pytest.warns(ckpt.FallbackWarning, match="step-3"):
        assert run.restore(state_of(0)) == 1


def test_a_handler_of_the_user_still_gets_its_signal_and_the_save_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with ckpt.Checkpointer(tmp_path) as run:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert run.save(1, state_of(1))
            assert run.reached_preemption()
            assert run.latest_step() == 1
            assert caplog.messages == [f"{tmp_path}: step 1 is saved after SIGUSR1"]
            assert not run.save(2, state_of(2))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_run_that_cannot_begin_leaves_no_handler_of_a_signal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ckpt.ArgumentError, match="belong together"):
        ckpt.Checkpointer(tmp_path, local=tmp_path / "near")
    with pytest.raises(ckpt.ArgumentError, match="no program can handle"):
        ckpt.Checkpointer(tmp_path, signals=(signal.SIGUSR1, signal.SIGKILL))
    assert signal.getsignal(signal.SIGUSR1) is before


def test_runs_that_close_in_any_order_leave_no_handler_of_a_signal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    runs = [ckpt.Checkpointer(tmp_path / name) for name in "abc"]
    for run in runs:
        run.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_that_is_given_twice_is_noted_once(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, signals=(signal.SIGUSR1, signal.SIGUSR1)) as run:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert run.save(1, state_of(1))
        assert run.reached_preemption()


def interrupted(folder: str, told: int) -> tuple[int, list[int]]:
    """The step at which the ranks end, where one of them gets a signal at step 5."""
    rank = dist.get_rank()
    with ckpt.Checkpointer(folder, every_steps=1_000, keep=ckpt.Keep(last=1)) as run:
        for step in range(1, 100):
            if step == 5 and rank == told:
                os.kill(os.getpid(), signal.SIGTERM)
            saved = run.save(step, {"w": torch.full((3,), float(step)), "step": step})
            if run.reached_preemption():
                assert saved
                return step, run.all_steps()
    raise AssertionError("nobody was told of the signal")


@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_any_rank_is_a_checkpoint_of_one_step_on_all(
    clusters: Callable[[int], Any], tmp_path: Path, told: int
) -> None:
    answers = clusters(2).run(interrupted, str(tmp_path), told)
    assert answers[0] == answers[1]
    step, steps = answers[0]
    assert 5 <= step < 20
    assert steps == [step]
    assert ckpt.read(tmp_path / f"step-{step}")["step"] == step  # type: ignore[index]


def failing_loop(
    folder: str, error: BaseException, place: str, is_here: bool = True, **options: Any
) -> tuple[list[float], str]:
    """A loop that an error ends in step 4: the weights after step 3, and the error that came out.

    Each rank has a copy of the model. Without `is_here` this rank leaves the loop without an error.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optim = torch.optim.Adam(model.parameters())
    state = {"model": model, "optim": optim, "step": 0}
    after: list[float] = []
    try:
        with ckpt.Checkpointer(folder, save_on_exception=True, **options) as run:
            for step in range(1, 10):
                if step == 4 and not is_here:
                    break
                model(torch.ones(2)).sum().backward()
                if step == 4 and place == "before":
                    raise error
                optim.step()
                if step == 4:
                    raise error
                state["step"] = step
                assert run.save(step, state, {"loss": step}) == (place == "saved")
                after = model.weight.flatten().tolist()
        return after, ""
    except BaseException as ended:
        return after, type(ended).__name__


@pytest.mark.parametrize("error", [ValueError("in the loop"), KeyboardInterrupt(), SystemExit(1)])
def test_an_exception_of_the_loop_saves_the_last_step_if_no_optimizer_has_begun_another(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = len(optimizer._global_optimizer_pre_hooks)
    weights, ended = failing_loop(str(tmp_path / "a"), error, "before")
    assert ended == type(error).__name__
    model = torch.nn.Linear(2, 1)
    state = {"model": model, "optim": torch.optim.Adam(model.parameters()), "step": 0}
    with ckpt.Checkpointer(tmp_path / "a") as run:
        assert run.restore(state) == 3
    assert (state["step"], model.weight.flatten().tolist()) == (3, weights)
    assert ckpt.run_steps(tmp_path / "a")[0].metrics == {"loss": 3.0}
    assert f"step 3 is saved after {ended}" in caplog.text
    assert failing_loop(str(tmp_path / "b"), error, "after")[1] == ended
    assert f"step 3 is not saved after {ended}: the next one had begun" in caplog.text
    assert not (tmp_path / "b").exists()
    assert failing_loop(str(tmp_path / "c"), error, "saved", every_steps=1)[1] == ended
    assert [one.step for one in ckpt.run_steps(tmp_path / "c")] == [3, 2, 1]
    assert len(optimizer._global_optimizer_pre_hooks) == hooks


def test_an_optimizer_whose_steps_nobody_hears_of_is_not_saved_after_an_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.step = lambda closure=None: None  # type: ignore[method-assign, assignment]

    def loop() -> None:
        with ckpt.Checkpointer(tmp_path, save_on_exception=True) as run:
            run.save(1, {"model": model, "optim": optim})
            raise ValueError("in the loop")

    with pytest.raises(ValueError, match="in the loop"):
        loop()
    assert "step 1 is not saved" in caplog.text
    assert ckpt.run_steps(tmp_path) == []


def fail_on(folder: str, ranks: list[int]) -> tuple[list[float], str, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        is_here = dist.get_rank() in ranks
        weights, ended = failing_loop(folder, ValueError(), "before", is_here, deadline=0.5)
    dist.barrier()
    if not is_here:  # this rank hears of it in its next call
        with pytest.raises(ckpt.RankError, match="agreeing after an exception"):
            ckpt.Checkpointer(folder)
    return weights, ended, [str(one.message) for one in told]


def test_an_exception_on_all_ranks_saves_and_one_on_a_single_rank_waits_for_none(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    answers = clusters(2).run(fail_on, str(tmp_path / "all"), [0, 1])
    assert [answer[1:] for answer in answers] == [("ValueError", [])] * 2
    assert [one.step for one in ckpt.run_steps(tmp_path / "all")] == [3]
    assert ckpt.read(tmp_path / "all" / "step-3")["step"] == 3  # type: ignore[index]
    (_, fine, _), (_, ended, told) = clusters(2).run(fail_on, str(tmp_path / "one"), [1])
    assert (fine, ended) == ("", "ValueError")
    assert len(told) == 1
    assert "rank 0" in told[0]
    assert ckpt.run_steps(tmp_path / "one") == []


def unasked(folder: str, told: int) -> None:
    """A loop that does not ask for the signal that one rank gets at step 5."""
    with ckpt.Checkpointer(folder, every_steps=1_000) as run:
        for step in range(1, 1_000):
            if step == 5 and dist.get_rank() == told:
                os.kill(os.getpid(), signal.SIGTERM)
            run.save(step, {"w": torch.full((3,), float(step)), "step": step})


@pytest.mark.thorough
@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_that_the_loop_does_not_ask_about_ends_all_ranks_after_its_save(
    doomed_cluster: Callable[[int], Any], tmp_path: Path, told: int
) -> None:
    with pytest.raises(RankDied) as error:
        doomed_cluster(2).run(unasked, str(tmp_path), told)
    assert sorted(error.value.dead) == [0, 1]
    [place] = tmp_path.glob("step-*")
    assert ckpt.read(place)["step"] == int(place.name.removeprefix("step-")) < 20  # type: ignore[index]


UNASKED = """
import os, signal, sys, warnings
import ckpt, torch
from ckpt.run import saves
saves.SAME_SECONDS = 0
saves.EXCHANGE_SECONDS = 0  # each step looks for signals, also on a busy machine
folder, before, again = sys.argv[1:]
if before == "own":
    signal.signal(signal.SIGTERM, lambda *given: print("own handler", flush=True))
else:
    signal.signal(signal.SIGTERM, getattr(signal, before))
with ckpt.Checkpointer(folder, every_steps=1000) as run:
    for step in range(1, 9):
        if step in (3, 8):
            os.kill(os.getpid(), signal.SIGTERM)
            if again == "twice":
                os.kill(os.getpid(), signal.SIGTERM)
        run.save(step, {"step": step})
        print(step, flush=True)
print("after the loop", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "again", "status", "saved"),
    [
        ("SIG_DFL", "once", -signal.SIGTERM, ["step-3"]),
        ("SIG_DFL", "twice", -signal.SIGTERM, []),
        ("SIG_IGN", "once", 0, ["step-3"]),
        ("own", "once", 0, ["step-3"]),
    ],
)
def test_a_signal_has_its_usual_effect_after_its_save_and_at_once_the_second_time(
    programs: Callable[..., Any],
    tmp_path: Path,
    before: str,
    again: str,
    status: int,
    saved: list[str],
) -> None:
    program = programs(UNASKED, tmp_path / "run", before, again)
    out, err = program.communicate()
    assert program.returncode == status, err
    assert sorted(one.name for one in (tmp_path / "run").glob("step-*")) == saved
    assert ("after the loop" in out) == (status == 0)
    assert out.count("own handler") == (2 if before == "own" else 0)
    lines = [line for line in err.splitlines() if "SIGTERM ends the process" in line]
    assert len(lines) == (1 if status and again == "once" else 0)


AT_THE_END = """
import os, signal, sys
import ckpt
with ckpt.Checkpointer(sys.argv[1], every_steps=1) as run:
    run.save(1, {"step": 1})
    os.kill(os.getpid(), signal.SIGTERM)
print("after the loop", flush=True)
"""


def test_a_signal_after_the_last_step_ends_the_program(
    programs: Callable[..., Any], tmp_path: Path
) -> None:
    program = programs(AT_THE_END, tmp_path / "run")
    out, err = program.communicate()
    assert (program.returncode, out) == (-signal.SIGTERM, ""), err
    assert ckpt.read(tmp_path / "run" / "step-1") == {"step": 1}


def test_a_forked_child_has_the_handlers_of_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with (
        ckpt.Checkpointer(tmp_path / "a") as one,
        ckpt.Checkpointer(tmp_path / "b", signals=(signal.SIGTERM,)),
    ):
        child = os.fork()
        if child == 0:
            now = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
            os._exit(0 if now == before else 1)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert one.save(1, state_of(1))
        assert one.reached_preemption()


def unlike(folder: str) -> list[str]:
    """What ranks that differ are told."""
    rank, told = dist.get_rank(), []
    with pytest.raises(ValueError, match="other arguments") as error:
        ckpt.Checkpointer(folder, every_steps=1 + rank)
    told.append(str(error.value))
    with ckpt.Checkpointer(folder) as run:
        with pytest.raises(ValueError, match="same steps") as error:
            run.save(7 + rank, {"w": torch.ones(2)})
        told.append(str(error.value))
    return told


def test_ranks_that_differ_in_arguments_or_steps_are_told(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    answers = clusters(2).run(unlike, str(tmp_path))
    assert answers[0] == answers[1]
    assert "rank 1" in answers[0][0]


def fails_once(folder: str) -> tuple[int, list[int], int]:
    """The failures of a run that cannot save at step 2, its steps, and this rank's warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with ckpt.Checkpointer(folder, every_steps=2) as run:
            for step in range(1, 7):
                run.save(step, {"w": torch.full((3,), float(step)), "step": step})
            run.wait_until_finished()
            steps = run.all_steps()
    kinds = [one for one in told if one.category is ckpt.SaveFailedWarning]
    return run.failures, steps, len(kinds)


def test_a_failure_is_counted_on_all_ranks_and_told_by_one(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    (tmp_path / "step-2").write_text("a file where a folder has to be")
    (failures, steps, told), (others, same, untold) = clusters(2).run(fails_once, str(tmp_path))
    assert failures == others == told == 1
    assert untold == 0
    assert steps == same
    assert 2 not in steps
    assert 6 in steps


def test_an_object_in_which_something_goes_on_is_neither_copied_nor_pickled(
    tmp_path: Path,
) -> None:
    handle = ckpt.save(tmp_path / "a", state_of(1), blocking=False)
    handle.wait()
    run = ckpt.Checkpointer(tmp_path / "run", every_steps=1)
    with run, ckpt.open(tmp_path / "a") as opened:
        for one in (run, handle, opened):
            for do in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(ckpt.MisuseError, match="cannot be copied or pickled"):
                    do(one)
        assert run.save(1, state_of(1))


SHORT = """
import errno, os, resource, subprocess, sys, threading, torch, ckpt
from ckpt.errors import SaveFailedWarning
folder, kind = sys.argv[1:]
state = {"w": torch.zeros(300_000), "n": 0}
with ckpt.Checkpointer(f"{folder}/first", every_steps=1, keep=ckpt.Keep(last=1), signals=()) as run:
    run.restore(state)  # imports need descriptors too
    run.save(1, state)
ckpt.read(f"{folder}/first/step-1")
from ckpt.saving.writers import arena_writer
arena_writer().close()
def limit_files(most):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
def none_left(*arguments, **options):
    if kind == "thread":
        raise RuntimeError("can't start new thread")
    raise BlockingIOError(errno.EAGAIN, "no process")
if kind == "descriptor":
    most = max(map(int, os.listdir("/proc/self/fd")))
    while os.open(os.devnull, os.O_RDONLY) <= most:
        pass
    limit_files(most + 5)
elif kind == "thread":
    threading.Thread.start = none_left
else:
    subprocess.Popen.__init__ = none_left
with ckpt.Checkpointer(f"{folder}/run", every_steps=1, keep=ckpt.Keep(last=1), signals=()) as run:
    for n in (1, 2, 3):
        state["w"].fill_(n)
        state["n"] = n
        assert run.save(n, state)
limit_files(999)
steps = [one.step for one in ckpt.run_steps(f"{folder}/run")]
found = ckpt.read(ckpt.latest(f"{folder}/run")) if steps else None
assert found is None or bool((found["w"] == found["n"]).all())
print(run.failures, steps)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["thread", "process", "descriptor"])
def test_without_a_thread_a_process_or_descriptors_a_run_saves_in_another_way(
    programs: Callable[..., Program], tmp_path: Path, kind: str
) -> None:
    out, err = programs(SHORT, tmp_path, kind).communicate()
    assert out == "0 [3]\n", err
    assert not err
