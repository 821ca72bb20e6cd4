"""The tests on other versions of Python and torch: an environment for each pair, and a table.

    python tests/versions.py                          every pair of PAIRS
    python tests/versions.py 3.10:2.6 3.13:2.13       these
    python tests/versions.py 3.10:2.6 -- tests/sharding -k meshes -x

An environment is built once, in `.venvs/PYTHON-TORCH`; `uv` builds it where it is installed, else
`venv` and pip. `PIP_ARGS` goes to either (torch's own package index has small CPU builds). The
exit status is 1 where a test fails, and 2 where an environment cannot be built.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".venvs"
PAIRS = ("3.10:2.6", "3.11:2.8", "3.12:2.10", "3.12:2.11", "3.13:2.13", "3.11:2.14")
"""The ends of the stated range, what lies between, and what came after: each torch is met once."""
PARTS = (
    *("tests/ckpt", "tests/dcp", "tests/formats", "tests/interop", "tests/layout"),
    "tests/sharding",
    *("ckpt", "formats", "sharding"),
)
"""The tests in which torch or Python takes part. Left out: stores, faults and fuzzing, which meet
servers, disks and damaged bytes in the same way with every torch."""
OF_TORCH = re.compile(r"(torch|sympy|networkx|filelock|numpy)==")
"""Constraints that hold for the newest torch and Python only."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A Python and a torch, each by its first two numbers."""

    python: str
    torch: str

    @property
    def folder(self) -> Path:
        """The environment's."""
        return ENVIRONMENTS / f"{self.python}-{self.torch}"

    @property
    def executable(self) -> Path:
        """The environment's Python."""
        return self.folder / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests came to."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    trouble: str
    """Empty where all is well."""


def pair(text: str) -> Pair:
    """`3.10:2.6` as a pair."""
    found = re.fullmatch(r"(\d+\.\d+):(\d+\.\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not PYTHON:TORCH, such as 3.10:2.6")
    return Pair(*found.groups())


def pythons(version: str) -> Iterator[str]:
    """Programs that may be that Python: on the path, or where pyenv installs."""
    yield f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")))


def runs(python: str) -> bool:
    """Whether it is there and starts; pyenv leaves names on the path that do not."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def build(wanted: Pair) -> None:
    """The pair's environment, if it is not there. Raises LookupError or CalledProcessError."""
    python = next(filter(runs, pythons(wanted.python)), None)
    if python is None and not (wanted.folder / "installed").exists():
        raise LookupError(f"no Python {wanted.python}: put python{wanted.python} on the path")
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not OF_TORCH.match(line)
    ]
    create(wanted.folder, str(python), "\n".join([*pins, f"torch=={wanted.torch}.*", ""]), "test")


def create(folder: Path, python: str, pins: str, extras: str) -> None:
    """An environment with this package and extras of it, if it is not there.

    Raises CalledProcessError.
    """
    done = folder / "installed"
    if done.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    uv = shutil.which("uv")
    program = folder / "bin" / "python"
    if uv is None:
        subprocess.run([python, "-m", "venv", folder], check=True)
        install = [str(program), "-m", "pip", "install"]
    else:
        subprocess.run([uv, "venv", "--quiet", "--python", python, folder], check=True)
        install = [uv, "pip", "install", "--python", str(program)]
    constraints = folder / "constraints.txt"
    constraints.write_text(pins)
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    arguments = ["--quiet", *extra, "-c", str(constraints), "-e", f".[{extras}]"]
    subprocess.run([*install, *arguments], cwd=ROOT, check=True)
    done.touch()


def outcome(wanted: Pair, arguments: Sequence[str]) -> Outcome:
    """Run pytest in the pair's environment; what it says goes to `pytest.log` there."""
    report = wanted.folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        *(
            str(wanted.executable),
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--junit-xml={report}",
        ),
        *(arguments or PARTS),
    ]
    began = time.monotonic()
    with open(wanted.folder / "pytest.log", "w") as log:
        status = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    seconds = time.monotonic() - began
    if not report.exists():
        return Outcome(0, 0, 0, seconds, f"pytest ended with {status}: {log.name}")
    counts = next(ElementTree.parse(report).getroot().iter("testsuite")).attrib
    failed = int(counts["failures"]) + int(counts["errors"])
    skipped = int(counts["skipped"])
    passed = int(counts["tests"]) - failed - skipped
    return Outcome(passed, failed, skipped, seconds, "" if status == 0 else f"see {log.name}")


def main() -> int:
    """Build, run and print."""
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="*", type=pair, metavar="PYTHON:TORCH")
    parser.add_argument("--build", action="store_true", help="build the environments only")
    options = parser.parse_args(given[:end])
    status, rows = 0, []
    for wanted in options.pairs or [pair(text) for text in PAIRS]:
        try:
            build(wanted)
        except (LookupError, subprocess.CalledProcessError) as error:
            rows.append((wanted, Outcome(0, 0, 0, 0, f"cannot be built: {error}")))
            status = 2
            continue
        if options.build:
            continue
        found = outcome(wanted, given[end + 1 :])
        rows.append((wanted, found))
        print(line(wanted, found), flush=True)
        status = status or int(bool(found.trouble))
    print(f"\n{'Python':>6} {'torch':>6} {'passed':>7} {'failed':>7} {'skipped':>8} {'minutes':>8}")
    for wanted, found in rows:
        print(line(wanted, found))
    return status


def line(wanted: Pair, found: Outcome) -> str:
    """A row of the table."""
    return (
        f"{wanted.python:>6} {wanted.torch:>6} {found.passed:>7} {found.failed:>7} "
        f"{found.skipped:>8} {found.seconds / 60:>8.1f}  {found.trouble}"
    )


if __name__ == "__main__":
    sys.exit(main())
