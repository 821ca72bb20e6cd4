import json
import os
import shutil
import sys
import time
from itertools import permutations
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.removing import gc as collecting
from tools.exit_codes import ExitCode
from tools.main import main


@pytest.mark.parametrize("ending", ["", "/", "/.", "/.//"])
def test_a_link_is_refused_and_what_it_points_to_stays(run, saved: Path, ending: str):
    link = saved.parent / "newest"
    link.symlink_to(saved.name)
    for url in (f"{link}{ending}", f"file://{link}{ending}"):
        ended = run("rm", url)
        assert (ended.code, ended.out) == (ExitCode.USAGE, "")
        assert ended.err.startswith(f"ckpt: {link}: a link to {saved}, which was not deleted; ")
    assert link.is_symlink()
    assert ckpt.verify(saved).sound


def test_a_checkpoint_below_a_link_is_deleted(run, saved: Path, tmp_path: Path):
    (tmp_path / "runs").symlink_to(saved.parent)
    ended = run("rm", tmp_path / "runs" / saved.name)
    assert (ended.code, ended.out) == (ExitCode.FINE, f"deleted {tmp_path}/runs/{saved.name}\n")
    assert not saved.exists()


def test_a_missing_checkpoint_is_an_error_unless_it_may_be_missing(run, saved: Path):
    gone = saved.parent / "step-2"
    assert run("rm", gone, saved).code == ExitCode.NOT_A_CHECKPOINT
    assert saved.exists()
    ended = run("rm", "--missing-ok", gone, saved)
    assert ended.code == ExitCode.FINE
    assert ended.out == f"not there {gone}\ndeleted {saved}\n"
    assert not saved.exists()


def test_a_delete_that_was_interrupted_can_be_repeated(saved: Path):
    (saved / "manifest.json").unlink()
    with pytest.raises(ckpt.NotACheckpointError):
        ckpt.delete(saved)
    ckpt.delete(saved, missing_ok=True)
    assert list(saved.iterdir())  # its files are `ckpt gc`'s


def test_left_overs_of_killed_saves_go_with_their_step_once_no_save_needs_them(
    run, saved: Path, monkeypatch: pytest.MonkeyPatch
):
    left = saved / "00000000000000af-00000.safetensors"
    left.write_bytes(b"killed")
    ended = run("rm", saved)
    assert ended.code == ExitCode.FINE
    assert f"note: 1 file of no checkpoint left in {saved}: {left.name}" in ended.out
    assert [*saved.iterdir()] == [left]
    ckpt.save(saved, {"w": torch.zeros(4)})
    monkeypatch.setattr(collecting, "now", lambda: time.time() + collecting.OLD_SECONDS + 9)
    assert run("rm", saved).out == f"deleted {saved}\n"
    assert not saved.exists()


def test_a_dry_run_has_the_results_and_the_errors_of_a_delete(run, saved: Path):
    base, link = saved.parent / "base", saved.parent / "link"
    ckpt.save(base, {"w": torch.zeros(100_000)})
    ckpt.save(saved.parent / "top", {"w": torch.zeros(100_000)}, base=base)
    link.symlink_to(saved.name)
    exported = saved.parent / "model.safetensors"
    assert run("convert", saved, exported, "--select", "model").code == ExitCode.FINE
    refused = (saved / "manifest.json", link, base, exported, saved.parent / "none")
    for more in ([], ["--missing-ok"]):
        for place in refused:
            ended = run("rm", "-n", *more, place)
            assert ended == run("rm", *more, place)
            assert more or ended.code != ExitCode.FINE
    dry = run("rm", "-n", saved)
    assert saved.exists()
    assert dry.out.replace("would delete", "deleted") == run("rm", saved).out


def test_a_dry_run_of_a_chain_has_the_results_of_a_delete_in_any_order(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights = {"w": torch.zeros(100_000)}
    ckpt.save(tmp_path / "whole" / "a", weights)
    ckpt.save(tmp_path / "whole" / "b", weights, base=tmp_path / "whole" / "a")
    ckpt.save(tmp_path / "whole" / "c", weights, base=tmp_path / "whole" / "b")
    endings = set()
    for order in [*permutations("abc"), *permutations("abc", 2)]:
        copy = tmp_path / "".join(order)
        shutil.copytree(tmp_path / "whole", copy)
        monkeypatch.chdir(copy)
        dry = run("rm", "-n", *order)
        ended = run("rm", *order)
        assert (dry.code, dry.out.replace("would delete", "deleted")) == (ended.code, ended.out)
        assert dry.err == ended.err
        endings.add(ended.code)
    assert endings == {ExitCode.FINE, ExitCode.EXISTS}


def test_a_dry_run_knows_that_an_earlier_argument_deletes_a_checkpoint(run, saved: Path):
    twice = (saved, f"{saved.parent}/./{saved.name}/")
    dry = run("rm", "-n", "--missing-ok", *twice)
    assert dry.out == f"would delete {twice[0]}\nnot there {twice[1]}\n"
    dry = run("rm", "-n", *twice)
    assert "an earlier argument deletes the checkpoint here" in dry.err
    ended = run("rm", *twice)
    assert (dry.code, dry.out.replace("would delete", "deleted")) == (ended.code, ended.out)


def test_files_and_checkpoints_of_other_formats_are_no_missing_checkpoints(run, saved: Path):
    file, folder = saved.parent / "model.safetensors", saved.parent / "exported"
    assert run("convert", saved, file, "--select", "model").code == ExitCode.FINE
    folder.mkdir()
    (folder / file.name).write_bytes(file.read_bytes())
    for url in (file, folder):
        with pytest.raises(ckpt.NotACheckpointError):
            ckpt.delete(url, missing_ok=True)
    assert file.exists()
    assert (folder / file.name).exists()


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run of six steps; step 5 borrows from step 4, and beside them lies what is no step."""
    folder = tmp_path / "trained"
    weights = {"w": torch.arange(100_000.0), "step": torch.zeros(1)}
    ckpt.save(folder / "final", weights)
    for step in range(1, 7):
        base = folder / "step-4" if step == 5 else None
        weights["step"] += 1
        ckpt.save(
            folder / f"step-{step}",
            weights,
            base=base,
            metadata={"step": str(step), "metrics": f'{{"loss": {abs(step - 2)}}}'},
        )
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_policy_removes_what_no_rule_keeps_and_no_base(run, trained: Path):
    ended = run("rm", trained, "--keep", "last=2,every=3")
    assert ended.code == ExitCode.FINE
    lines = ended.out.splitlines()
    assert lines[0].startswith(f"kept {trained}/step-4: ")
    assert "step-5" in lines[0]
    assert lines[1:] == [
        f"deleted {trained}/step-2",
        f"deleted {trained}/step-1",
        f"{trained}: 4 of 6 checkpoints stay",
    ]
    assert names(trained) == ["final", "step-3", "step-4", "step-5", "step-6"]
    assert run("rm", trained, "--keep", "last=1").code == ExitCode.FINE  # the borrower goes first
    assert names(trained) == ["final", "step-6"]


def test_a_dry_run_tells_the_same_and_deletes_nothing(run, trained: Path):
    before = names(trained)
    for rules in ("best=2,metric=loss", "younger_than=1h", "last=2,every=3", "last=1"):
        assert run("rm", trained, "--keep", rules, "-n").code == ExitCode.FINE
        assert names(trained) == before
    for rules in ("last=2,every=3", "last=1"):
        told = run("rm", trained, "--keep", rules, "--dry-run").out
        assert told.replace("would delete", "deleted") == run("rm", trained, "--keep", rules).out
    assert run("rm", "-n", trained / "step-6").out == f"would delete {trained}/step-6\n"
    assert names(trained) == ["final", "step-6"]


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        (["step-6"], "step-6 is the newest of its folder? [y/N] "),
        (["step-1", "step-2"], "delete 2 checkpoints (step-1, step-2)? [y/N] "),
        ([".", "--keep", "last=2"], "delete 3 checkpoints (./step-3, ./step-2, ./step-1)? [y/N] "),
        (["step-6", "-y"], ""),
        (["step-1"], ""),
    ],
)
def test_a_terminal_is_asked_before_several_or_the_newest_are_deleted(
    run, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys, arguments, question
):
    monkeypatch.chdir(trained)
    before = names(trained)
    for answer in ("n\n", "", "yes\n"):
        ours, theirs = os.openpty()
        os.write(ours, (answer or "\x04").encode())
        with os.fdopen(theirs, "r") as terminal, capsys.disabled():
            monkeypatch.setattr("sys.stdin", terminal)
            monkeypatch.setattr("sys.stderr", os.fdopen(os.dup(theirs), "w"))
            code = main(["rm", "-q", *arguments])
            sys.stderr.close()
            shown = ""
            while question not in shown:
                shown += os.read(ours, 4096).decode()
        os.close(ours)
        monkeypatch.undo()
        monkeypatch.chdir(trained)
        if not question:
            break
        if answer != "yes\n":
            assert (code, names(trained)) == (ExitCode.USAGE, before)
    assert code == ExitCode.FINE
    assert len(names(trained)) < len(before)


def test_json_has_the_deleted_and_the_kept(run, trained: Path):
    found = json.loads(run("rm", trained, "--keep", "last=2,every=3", "--json", "-n").out)
    assert found == {
        "deleted": [f"{trained}/step-2", f"{trained}/step-1"],
        "kept": [f"{trained}/step-4"],
        "not_there": [],
        "dry_run": True,
    }
    assert run("rm", "-q", trained / "step-1").out == ""
    assert not (trained / "step-1").exists()


def test_the_best_stay_by_their_metric(run, trained: Path):
    run("rm", trained, "--keep", "best=2,metric=loss,mode=max")
    assert names(trained) == ["final", "step-4", "step-5", "step-6"]  # step-5 needs step-4


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ("last", "is no rule; there are last=, every="),
        ("last=2,last=3", "each once"),
        ("newest=2", "is no rule"),
        ("last=two", "is no whole number"),
        ("best=2", "metric= belong together"),
        ("younger_than=soon", "is no time"),
        ("mode=max", "keeps every checkpoint"),
    ],
)
def test_rules_that_mean_nothing_are_told(run, trained: Path, rules: str, told: str):
    ended = run("rm", trained, "--keep", rules)
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert told in ended.err
    assert len(names(trained)) == 7


def test_a_folder_without_steps_is_no_run(run, saved: Path):
    assert run("rm", saved, "--keep", "last=1").code == ExitCode.NOT_A_CHECKPOINT
    assert run("rm", saved.parent / "none", "--keep", "last=1").code == ExitCode.NOT_A_CHECKPOINT
    assert ckpt.verify(saved).sound
