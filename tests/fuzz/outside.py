"""Run as a program: reads hostile checkpoints by every public way and says what it touched.

Writes JSON: what Python's audit events told of files opened, code run, modules imported, programs
started and sockets opened that is not the checkpoint's own, and calls that ended in a bug.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import ckpt
from sharding.errors import HoleError
from tests.fuzz.mutations import hostile
from tests.fuzz.seeds import seeds
from tools.exit_codes import ExitCode
from tools.main import main

WATCHED = (
    *("open", "exec", "compile", "import", "socket", "subprocess", "os.", "shutil.", "pty."),
    *("code.", "ctypes.", "marshal.", "pickle.find_class", "urllib.", "webbrowser."),
)
HARMLESS = ("os.scandir", "os.listdir", "os.walk", "os.fwalk")
MAY_FAIL = (ckpt.FormatError, ckpt.CkptError, HoleError)


class Watch:
    """What happens while it is on, apart from what is allowed."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or not event.startswith(WATCHED):
            return
        paths = [str(each) for each in arguments if isinstance(each, str | os.PathLike)]
        if event in HARMLESS or (event.startswith(("open", "os.", "shutil.")) and self._own(paths)):
            return
        self.seen.append(f"{event} {arguments!r:.200}")

    def _own(self, paths: list[str]) -> bool:
        places = [path for path in paths if path not in ("r", "w", "rb", "wb", "r+")]
        return all(
            place.startswith(self.root) or place in (".", os.devnull, "/proc/meminfo")
            for place in places
        )


def read_all(case: Path, url: str, sound: str) -> list[str]:
    """Every public call on one checkpoint; what of it was a bug."""
    bugs: list[str] = []
    target = str(case / "target")
    calls: dict[str, Any] = {
        "read": lambda: ckpt.read(url),
        "load": lambda: ckpt.load(url, ckpt.read(sound), strict=False),
        "verify": lambda: ckpt.verify(url),
        "diff": lambda: ckpt.diff(url, sound),
        **{
            f"convert to {to}": lambda to=to: ckpt.convert(url, f"{target}-{to}", to=to)
            for to in ("ckpt", "safetensors", "hf", "torch", "dcp")
        },
    }
    for name, call in calls.items():
        try:
            call()
        except MAY_FAIL:
            pass
        except Exception as error:
            bugs.append(f"{name}: {type(error).__name__}: {error}")
    for command in (
        ["inspect", "--values", "--files", url],
        ["inspect", "--json", url],
        ["ls", str(case)],
        ["ls", url],
        ["verify", url],
        ["diff", url, sound],
        ["convert", "--to", "torch", "--overwrite", url, f"{target}-torch"],
    ):
        said, complained = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            code = main(command)
        lines = [*said.getvalue().split("\n"), *complained.getvalue().split("\n")]
        if code == ExitCode.INTERNAL or not all(line.isprintable() for line in lines):
            bugs.append(f"{command[0]}: {code}: {complained.getvalue()}"[:500])
    return bugs


def run(root: Path, first: int, end: int) -> None:
    """Write what was touched by the checkpoints of these numbers."""
    watch, bugs = Watch(root), []
    "\x1b".encode("unicode_escape")  # imports its codec
    for number in range(first - len(seeds()), end):
        if number < first:  # everything is imported once, by sound checkpoints
            seed = seeds()[number - first]
            files = seed.files
        else:
            seed, files = hostile(number)
        case = root / f"case-{max(number, 0)}"
        (case / "step-2").mkdir(parents=True)
        (case / "step-1").mkdir()
        (case / "sound").mkdir()
        for name in {**files, **seed.files}:
            for place in ("step-2", "sound"):
                (case / place / name).parent.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (case / "step-2" / name).write_bytes(data)
        for name, data in seed.files.items():
            (case / "sound" / name).write_bytes(data)  # the base last: what both have beside them
        url, sound = (str(case / place / (seed.file or "")) for place in ("step-2", "sound"))
        watch.on = number >= first
        found = read_all(case, url, sound)
        watch.on = False
        bugs += [f"{number} {seed.kind}: {bug}" for bug in found]
        left = {path.name for path in case.iterdir()}
        if not left <= {"step-1", "step-2", "sound"} | {
            f"target-{to}" for to in ("ckpt", "safetensors", "hf", "torch", "dcp")
        }:
            bugs.append(f"{number} {seed.kind}: left behind {sorted(left)}")
        shutil.rmtree(case)
    sys.stdout.write(json.dumps({"touched": watch.seen, "bugs": bugs}) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
