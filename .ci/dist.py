"""Leaves a release in dist/: wheel, source distribution, list of components, checksums.

    python .ci/dist.py

The source distribution is installed where nothing else is, with its own dependencies alone, and
used; the list (CycloneDX) has what was installed there. Exits with 1 if the wheel has no py.typed,
or if CHANGELOG.md or CITATION.cff does not name the version. `make package` runs this after
tests/packages.py, which tries the wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PROGRAM = """
import ckpt, sys, torch

assert ckpt.__file__.startswith(sys.prefix), ckpt.__file__
ckpt.save("a", {"model": torch.nn.Linear(8, 4), "step": 3})
assert ckpt.load("a", {"model": torch.nn.Linear(8, 4), "step": 0})["step"] == 3
"""


def main() -> int:
    """Builds, uses and lists; prints the checksums, and what is wrong."""
    shutil.rmtree(DIST, ignore_errors=True)
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(DIST)]
    subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = DIST.glob("*.whl")
    (source,) = DIST.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    listed = DIST / f"ckpt-{version}.cdx.json"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _install(folder / "empty", str(source))
        _use(folder / "empty", folder)
        _install(folder / "cyclonedx", "cyclonedx-bom")
        _list(folder, listed, version)
    parts = (wheel, source, listed)
    sums = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    wrong = list(_wrong(wheel, version))
    print("dist/\n", *sums, *(f"wrong: {line}\n" for line in wrong), sep="", end="")
    return 1 if wrong else 0


def _wrong(wheel: Path, version: str) -> Iterator[str]:
    """Yields what must not be released."""
    with zipfile.ZipFile(wheel) as found:
        if "ckpt/py.typed" not in found.namelist():
            yield f"{wheel.name} has no ckpt/py.typed"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if newest is None or newest[1] != version:
        yield f"CHANGELOG.md does not begin with version {version}"
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        yield f"CITATION.cff does not name version {version}"


def _install(home: Path, package: str) -> None:
    """Makes an environment that has a package and its dependencies, and no other."""
    uv, python = shutil.which("uv"), str(home / "bin" / "python")
    made = [uv, "venv", "--quiet", "--python", sys.executable, str(home)]
    install = [uv, "pip", "install", "--quiet", "--python", python]
    if uv is None:
        made = [sys.executable, "-m", "venv", str(home)]
        install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run(made, check=True)
    subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), package], check=True)


def _use(home: Path, work: Path) -> None:
    """Runs the program, and the command on its checkpoint."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command in (["python", "-c", PROGRAM], ["ckpt", "verify", "a"]):
        program = str(home / "bin" / command[0])
        subprocess.run([program, *command[1:]], cwd=work, env=kept, check=True)


def _list(folder: Path, target: Path, version: str) -> None:
    """Writes the CycloneDX list of the empty environment."""
    command = [str(folder / "cyclonedx" / "bin" / "cyclonedx-py"), "environment"]
    command += ["--output-reproducible", "--mc-type", "library"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "-o", str(target)]
    subprocess.run([*command, str(folder / "empty" / "bin" / "python")], check=True)
    components = json.loads(target.read_text())
    components["metadata"]["component"]["version"] = version  # pyproject.toml does not have it
    target.write_text(json.dumps(components, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
