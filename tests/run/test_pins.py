"""Steps that a user pins or deletes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from tools.exit_codes import ExitCode
from tools.main import main


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((4,), value), "seen": int(value)}


def train(run: ckpt.Checkpointer, steps: range) -> None:
    for step in steps:
        assert run.save(step, state_of(step))


def test_a_pinned_step_stays_until_it_is_unpinned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = ckpt.Keep(last=1)
    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=keep) as run:
        train(run, range(1, 3))
        run.pin(2, "release-1.0")
        run.pin(2, "a")
        run.pin(2, "a")
        train(run, range(3, 6))
        run.wait_until_finished()
        assert run.all_steps() == [5, 2]
    assert [one.pins for one in ckpt.run_steps(tmp_path)] == [(), ("a", "release-1.0")]
    assert main(["rm", str(tmp_path), "--keep", "last=1"]) == 0
    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=keep) as run:
        assert run.restore(state_of(0)) == 5
        train(run, range(6, 8))
        run.wait_until_finished()
        assert run.all_steps() == [7, 2]
        capsys.readouterr()
        assert main(["ls", str(tmp_path)]) == 0
        assert "complete, pinned: a, release-1.0" in capsys.readouterr().out
        assert main(["ls", str(tmp_path), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["checkpoints"]
        assert {row["step"]: row["pins"] for row in rows} == {2: ["a", "release-1.0"], 7: []}
        run.unpin(2, "a")
        train(run, range(8, 9))
        run.wait_until_finished()
        assert run.all_steps() == [8, 2]
        run.unpin(2, "release-1.0")
        train(run, range(9, 10))
        run.wait_until_finished()
        assert run.all_steps() == [9]


@pytest.mark.parametrize("name", ["", ".", "-a", "a/b", "ä", "a" * 65, "a\n", None])
def test_a_pin_needs_a_step_and_the_name_of_a_file(tmp_path: Path, name: Any) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        train(run, range(1, 2))
        with pytest.raises(ckpt.ArgumentError, match="letters, digits"):
            run.pin(1, name)
        with pytest.raises(ckpt.NotACheckpointError, match="step-7"):
            run.pin(7, "a")
        with pytest.raises(ckpt.NotACheckpointError, match="not pinned as 'a'"):
            run.unpin(1, "a")
        with ckpt.Checkpointer(tmp_path, read_only=True) as reader:
            for call in (reader.pin, reader.unpin):
                with pytest.raises(ckpt.MisuseError, match="read_only"):
                    call(1, "a")
            with pytest.raises(ckpt.MisuseError, match="read_only"):
                reader.delete(1)
    assert [one.pins for one in ckpt.run_steps(tmp_path)] == [()]


def test_a_deleted_step_is_gone_and_pinned_or_borrowed_ones_are_not_deleted(
    tmp_path: Path,
) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        train(run, range(1, 5))
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        with pytest.raises(ckpt.ExistsError, match=r"restore\(state\)"):
            run.delete(4)
        assert run.restore(state_of(0)) == 4
        run.pin(3, "a")
        pinned = rf"pinned as 'a', .*`ckpt pin --remove {tmp_path}/step-3 a` or Checkpointer.unpin"
        for delete in (lambda: run.delete(3), lambda: ckpt.delete(tmp_path / "step-3")):
            with pytest.raises(ckpt.InUseError, match=pinned):
                delete()
        assert main(["rm", str(tmp_path / "step-3")]) == ExitCode.EXISTS
        with pytest.raises(ckpt.NotACheckpointError, match="step-9"):
            run.delete(9)
        ckpt.save(tmp_path / "other", state_of(2), base=tmp_path / "step-2")
        with pytest.raises(ckpt.InUseError, match="other"):
            run.delete(2)
        run.delete(4)
        run.delete(1)
        assert run.all_steps() == [3, 2]
        assert run.restore(state_of(0)) == 3
        train(run, range(4, 6))
        run.delete(5)  # also one whose save is in flight
        assert run.all_steps() == [4, 3, 2]


def test_a_job_that_has_lost_its_run_deletes_nothing(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1, blocking=True) as old:
        train(old, range(1, 3))
        with ckpt.Checkpointer(tmp_path, every_steps=1, blocking=True) as new:
            assert new.restore(state_of(0)) == 2
            train(new, range(3, 4))
            with pytest.raises(ckpt.NotOwnerError):
                old.delete(3)
            assert new.all_steps() == [3, 2, 1]


def deletes(folder: str, local: str) -> list[object]:
    """The steps that are left, and the errors, of ranks that delete steps of both tiers."""
    told: list[object] = []
    state = {"w": torch.full((2,), float(dist.get_rank()))}
    with ckpt.Checkpointer(
        folder, every_steps=2, local=local, local_every_steps=1, blocking=True
    ) as run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ckpt.ReplicasWarning)
            for step in range(1, 6):
                run.save(step, state)
        for step in (5, 9, 4):
            try:
                run.delete(step)
                told.append(run.restore(state))
            except ckpt.NotACheckpointError as error:
                told.append(str(error))
            except ckpt.RankError as error:
                told.append(error.error)
    return told


def test_all_ranks_delete_a_step_of_both_tiers(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    first, second = clusters(2).run(deletes, str(tmp_path / "run"), str(tmp_path / "near"))
    assert [first[0], first[2]] == [second[0], second[2]] == [4, 3]
    assert "step-9" in first[1]
    assert second[1] == "NotACheckpointError" or "step-9" in second[1]
