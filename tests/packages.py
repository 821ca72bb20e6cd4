"""Builds the wheel and the source distribution, and uses the wheel where nothing else is installed.

    python tests/packages.py

Exits with 1 if a file of the repository is missing in the wheel, if the source distribution builds
another wheel, or if a program cannot use what was installed. `make package` runs this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from versions import ROOT

PACKAGES = ("ckpt", "formats", "sharding", "tools")
PROGRAM = """
import os, subprocess, sys
import ckpt, formats, sharding, tools
import torch

home = os.path.dirname(os.path.dirname(ckpt.__file__))
assert home.startswith(sys.prefix), home
model = torch.nn.Linear(8, 4)
ckpt.save("a", {"model": model, "step": 3})
assert ckpt.load("a", {"model": torch.nn.Linear(8, 4), "step": 0})["step"] == 3
ckpt.convert("a", "a.safetensors", select="model")
ckpt.convert("a", "dcp")
for command in (
    ["inspect", "a", "--html", "a.html"],
    ["verify", "a", "dcp", "a.safetensors"],
    ["diff", "a", "dcp"],
    ["plan", "a", "--world-size", "4"],
    ["convert", "a", "other.npz", "--select", "model"],
):
    subprocess.run(["ckpt", *command], check=True, stdout=subprocess.DEVNULL)
assert "application/json" in open("a.html").read()
sharding.fully_shard  # the runtime
print("installed:", ckpt.__version__)
"""


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


def _missing(wheel: Path) -> list[str]:
    """The files of the packages that only the repository or only the wheel has."""
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True
    )
    there = {name for name in _files(wheel) if ".dist-info/" not in name}
    wanted = set(listed.stdout.split())
    return [
        *(f"the wheel lacks {name}" for name in sorted(wanted - there)),
        *(f"the wheel has {name}, which git does not" for name in sorted(there - wanted)),
    ]


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
    """Installs the wheel with its own dependencies alone, and runs the program."""
    uv, home = shutil.which("uv"), folder / "venv"
    python = home / "bin" / "python"
    pins = ["-c", str(ROOT / "constraints.txt")]
    if uv is None:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
    else:
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(home)], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([*install, *pins, str(wheel)], check=True)
    work = folder / "work"
    work.mkdir()
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**kept, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    subprocess.run([str(python), "-c", PROGRAM], cwd=work, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
