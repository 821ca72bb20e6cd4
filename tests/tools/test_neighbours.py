"""A user's own folders beside train.py that have the names of our packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt

REPOSITORY = Path(ckpt.__file__).parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with packages `tools` and `formats` that are not ours."""
    for name in ("tools", "formats"):
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "__init__.py").write_text("MINE = True\n")
    return tmp_path / "project"


def python(project: Path, *arguments: str, path: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(project)}
    if not path:
        del environment["PYTHONPATH"]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("path", [True, False])
def test_the_command_works_beside_them(project, saved, path):
    ended = python(project, "-m", "ckpt", "ls", str(saved), path=path)
    assert ended.returncode == 0, ended.stderr
    assert "model.embed.weight" in ended.stdout
    assert ended.stderr == ""


def test_the_installed_script_works_beside_them(project, saved):
    script = Path(sys.executable).parent / "ckpt"
    if not script.exists():
        pytest.skip("ckpt is not installed in this environment")
    ended = python(project, str(script), "verify", str(saved))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


@pytest.mark.thorough
def test_a_command_that_needs_torch_works_beside_them(project, saved):
    target = project / "model.safetensors"
    ended = python(project, "-m", "ckpt", "convert", str(saved), str(target), "--select", "model")
    assert ended.returncode == 0, ended.stderr
    assert target.exists()


def test_importing_ckpt_beside_another_formats_is_an_error_of_one_sentence(project):
    ended = python(project, "-c", "import ckpt")
    assert ended.returncode != 0
    error = ended.stderr.strip().splitlines()[-1]
    assert error.startswith(f"ImportError: {project / 'formats'} shadows the package 'formats'")
    assert "rename it" in error


def test_importing_ckpt_beside_another_tools_is_a_warning_and_works(project):
    (project / "formats" / "__init__.py").unlink()
    (project / "formats").rmdir()
    ended = python(project, "-c", "import ckpt, tools; print(ckpt.__version__, tools.MINE)")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{ckpt.__version__} True\n"
    assert f"{project / 'tools'} shadows the package 'tools'" in ended.stderr


def test_without_such_neighbours_nothing_is_said(tmp_path):
    ended = python(tmp_path, "-W", "error", "-c", "import ckpt; print(ckpt.__version__)")
    assert ended.stdout == f"{ckpt.__version__}\n"
    assert ended.stderr == ""
