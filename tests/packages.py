"""Builds the wheel and the source distribution, and uses the wheel where nothing else is installed.

    python tests/packages.py

Exits with 1 if a file of the repository is missing in the wheel, if the source distribution builds
another wheel, or if a program cannot use the installed package beside packages and folders named
formats, sharding and tools, or breaks them. `make package` runs this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path

from versions import ROOT

INSIDE = ("formats", "sharding", "tools")
"""The packages of the repository that lie in `ckpt` in the wheel."""
THEIRS = "THEIRS = True\n"
"""The content of the packages of others."""
PROGRAM = """
import pickle, sys
import ckpt, formats, sharding, tools
import torch

assert formats.THEIRS and sharding.THEIRS and tools.THEIRS
assert ckpt.__file__.startswith(sys.prefix), ckpt.__file__
model = torch.nn.Linear(8, 4)
ckpt.save("a", {"model": model, "step": 3})
assert ckpt.load("a", {"model": torch.nn.Linear(8, 4), "step": 0})["step"] == 3
ckpt.convert("a", "a.safetensors", select="model")
ckpt.convert("a", "dcp")
ckpt.sharding.fully_shard  # the runtime
policy = ckpt.sharding.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
assert pickle.loads(pickle.dumps(policy)) == policy
print("installed:", ckpt.__version__)
"""
COMMANDS = (
    "ckpt --version",
    "ckpt inspect a --html a.html",
    "ckpt verify a dcp a.safetensors",
    "ckpt diff a dcp",
    "ckpt plan a --world-size 4",
    "ckpt convert a other.npz --select model",
    "python -m ckpt inspect a",
    "torchrun --nproc-per-node 2 -m ckpt convert a together.safetensors --select model",
    "torchrun --nproc-per-node 2 train.py two",
    "torchrun --nproc-per-node 3 train.py three two-background",
    "ckpt diff two three",
    "ckpt verify two three three-background",
    "mypy --strict --warn-unused-ignores typed.py",
)
TOOLS = ("hypothesis", "mypy", "pytest", "pytest-timeout")
"""What checks the installed package, beside its own dependencies."""
TESTS = (
    *("tests/layout/test_box.py", "tests/layout/test_layout.py", "tests/layout/test_mesh.py"),
    *("tests/ckpt/test_lazy.py", "tests/ckpt/test_state.py"),
    *("tests/formats/test_folder_readers.py", "tests/formats/test_torch_save.py"),
    "tests/sharding/test_wrap_policies.py",
)
"""Tests of one process that run with the installed package, their imports moved."""

moved = run_path(str(ROOT / ".ci" / "wheel.py"))["moved"]


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment, and a folder in which programs run."""

    home: Path
    work: Path

    def install(self, *packages: str) -> None:
        """Installs packages with the versions of constraints.txt."""
        pins, python = ["-c", str(ROOT / "constraints.txt")], str(self.home / "bin" / "python")
        uv = shutil.which("uv")
        installer = [uv, "pip", "install", "--python", python]
        if uv is None:
            installer = [python, "-m", "pip", "install"]
        subprocess.run([*installer, "--quiet", *pins, *packages], check=True)

    def run(self, *command: str, folder: Path | None = None) -> None:
        """Runs a command, with the folder on Python's path first as for a script in it."""
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment = {**kept, "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}"}
        program = shutil.which(command[0], path=environment["PATH"]) or command[0]
        print("package:", " ".join(command)[:100].strip(), flush=True)
        subprocess.run(
            [program, *command[1:]], cwd=folder or self.work, env=environment, check=True
        )


def main() -> int:
    """Builds, compares, installs and runs; prints each step that is wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        built = folder / "built"
        _build(ROOT, built, ["-t", "wheel", "-t", "sdist"])
        (wheel,) = built.glob("*.whl")
        (source,) = built.glob("*.tar.gz")
        wrong = [*_missing(wheel), *_other_wheel(source, wheel, folder)]
        for line in wrong:
            print(line, file=sys.stderr)
        _use(wheel, folder)
    print(f"package: {wheel.name}, {source.name}")
    return 1 if wrong else 0


def _build(project: Path, target: Path, kinds: list[str]) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *kinds]
    subprocess.run(command, cwd=project, check=True, stdout=subprocess.DEVNULL)


def _files(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, without its record."""
    with zipfile.ZipFile(wheel) as found:
        return {name: found.read(name) for name in found.namelist() if "RECORD" not in name}


def _missing(wheel: Path) -> Iterator[str]:
    """Yields the files of the packages that only the repository or only the wheel has."""
    listed = subprocess.run(
        ["git", "ls-files", "ckpt", *INSIDE], cwd=ROOT, check=True, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.split() if not name.startswith("ckpt/sharding/")]
    wanted = {name if name.startswith("ckpt/") else f"ckpt/{name}" for name in names}
    there = {name for name in _files(wheel) if ".dist-info/" not in name}
    yield from (f"the wheel lacks {name}" for name in sorted(wanted - there))
    yield from (f"the wheel has {name}, which git does not" for name in sorted(there - wanted))


def _other_wheel(source: Path, wheel: Path, folder: Path) -> list[str]:
    """The files by which a wheel from the source distribution differs from the wheel."""
    shutil.unpack_archive(source, folder / "source", filter="data")
    (project,) = (folder / "source").iterdir()
    _build(project, folder / "again", ["-t", "wheel"])
    (other,) = (folder / "again").glob("*.whl")
    ours, theirs = _files(wheel), _files(other)
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return [f"the source distribution builds another {name}" for name in names]


def _use(wheel: Path, folder: Path) -> None:
    """Uses the wheel with its own dependencies alone, then with the tests' tools."""
    found = _environment(folder)
    found.install(str(wheel))
    shutil.copytree(ROOT / "tests" / "data" / "installed", found.work, dirs_exist_ok=True)
    found.run("python", "-c", PROGRAM)
    for command in COMMANDS:
        if command.startswith("mypy"):
            found.install(*TOOLS)
        found.run(*command.split())
    for theirs in _theirs(found):
        assert theirs.read_text() == THEIRS, f"{theirs} is another file now"
    assert "application/json" in (found.work / "a.html").read_text(encoding="utf-8")
    found.run("python", "-m", "pytest", "-q", *TESTS, folder=_tests(folder))


def _environment(folder: Path) -> Environment:
    """An environment with packages that have the names of ours, installed and beside a script."""
    found = Environment(folder / "venv", folder / "work")
    uv = shutil.which("uv")
    make = [sys.executable, "-m", "venv"]
    if uv is not None:
        make = [uv, "venv", "--quiet", "--python", sys.executable]
    subprocess.run([*make, str(found.home)], check=True)
    for path in _theirs(found):
        path.parent.mkdir(parents=True)
        path.write_text(THEIRS)
    return found


def _theirs(found: Environment) -> list[Path]:
    (packages,) = found.home.glob("lib/python3*/site-packages")
    return [place / name / "__init__.py" for place in (packages, found.work) for name in INSIDE]


def _tests(folder: Path) -> Path:
    """A folder with the tests as programs of a user: their imports name the installed package."""
    for path in (ROOT / "tests").rglob("*.py"):
        target = folder / "moved" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.write_bytes(moved(path.read_bytes(), str(path), check_strings=False))
        except SyntaxError:
            continue  # it imports a module by a dotted name, and is none of TESTS
    shutil.copy(ROOT / "pyproject.toml", folder / "moved")
    return folder / "moved"


if __name__ == "__main__":
    sys.exit(main())
