"""Versions of Python and torch below the stated range are named when a package is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sharding import supported

ROOT = Path(supported.__file__).parents[1]


def importing(name: str, path: Path) -> subprocess.CompletedProcess[str]:
    """A new Python that imports a package, with this folder before all others."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys, {name}; print('torch' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "name", ["ckpt", "ckpt.saving.save", "sharding", "sharding.wrap", "formats.dcp"]
)
def test_an_older_torch_is_named_with_the_version_needed(tmp_path: Path, name: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.5.1+cu124'\ndebug = False\n")
    ended = importing(name, tmp_path)
    last = ended.stderr.splitlines()[-1]
    assert last == "ImportError: ckpt needs torch 2.6 or later and this is torch 2.5.1+cu124", (
        ended.stderr
    )


@pytest.mark.parametrize("name", ["ckpt", "sharding"])
def test_the_check_does_not_import_torch(tmp_path: Path, name: str) -> None:
    ended = importing(name, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr


def test_an_older_python_is_named_with_the_version_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(ImportError, match=r"^ckpt needs Python 3\.10 or later and .* 3\.9\.18$"):
        supported.check_versions()


@pytest.mark.parametrize(
    ("found", "is_below"),
    [
        ("2.5.1+cu124", True),
        ("1.13.0", True),
        ("2.6.0", False),
        ("2.6.0a0+git1", False),
        ("2.13.0+cpu", False),
        ("3.0", False),
        ("2", False),
        ("unknown", False),
    ],
)
def test_versions_are_compared_as_numbers(found: str, is_below: bool) -> None:
    assert supported.is_below(found, (2, 6)) == is_below


def test_the_version_of_torch_is_read_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supported.torch_version() == torch.__version__
    monkeypatch.delitem(sys.modules, "torch")
    assert supported.torch_version() == torch.__version__


def test_the_range_is_the_one_that_is_declared() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for pattern, version in (
        (r'requires-python = ">=(\d+)\.(\d+)"', supported.PYTHON),
        (r'"torch>=(\d+)\.(\d+)"', supported.TORCH),
    ):
        found = re.search(pattern, declared)
        assert found is not None
        assert tuple(map(int, found.groups())) == version
