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
