from pathlib import Path

import pytest

import ckpt
from tools.exit_codes import ExitCode


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
