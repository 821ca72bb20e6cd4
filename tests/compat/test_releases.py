"""The last release and this code take turns in one folder: each reads what the other has written.

The last release comes from the history of the repository, so a copy without it skips the test.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LAST_RELEASE = "580d224"
"""The commit of version 0.2.0."""
ACTIONS = 40

PROGRAM = """
import json, sys
import ckpt, torch

def state(value):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    wide = torch.arange(40_000, dtype=torch.float32)
    wide[: value + 1] = -float(value)
    return {"model": model, "wide": wide, "step": value, "words": ["a", (value, None)]}

def load(url):
    target = state(0)
    ckpt.load(url, target)
    value = target["step"]
    assert target["words"] == ["a", (value, None)]
    expected = state(value)
    for name in ("weight", "bias"):
        found = getattr(target["model"], name)
        assert torch.equal(found, getattr(expected["model"], name)), name
    assert torch.equal(target["wide"], expected["wide"])
    return value

CALLS = {
    "save": lambda url, value, **more: ckpt.save(url, state(value), **more),
    "load": load,
    "verify": lambda url: ckpt.verify(url).sound,
    "delete": ckpt.delete,
    "gc": lambda url: len(ckpt.gc(url, delete=True)),
    "latest": lambda url: str(ckpt.latest(url)),
    "version": lambda: ckpt.__version__,
}
for line in sys.stdin:
    name, args, more = json.loads(line)
    try:
        answer = [None, CALLS[name](*args, **more)]
    except ckpt.CkptError as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps(answer), flush=True)
"""


class Release:
    """A process with the code of one release."""

    def __init__(self, code: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env=environment,
            cwd=code,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, name: str, *args: object, **more: object) -> Any:
        """Return the result of a call; raise AssertionError for its error."""
        error, answer = self.try_to(name, *args, **more)
        assert error is None, (name, args, more, error, answer)
        return answer

    def try_to(self, name: str, *args: object, **more: object) -> tuple[str | None, Any]:
        """Return the name of the call's error, and its text; or None and its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, args, more]), file=self._process.stdin, flush=True)
        error, answer = json.loads(self._process.stdout.readline())
        return error, answer

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Release, Release]]:
    """The last release, and this code."""
    packed = subprocess.run(
        ["git", "archive", LAST_RELEASE], cwd=ROOT, capture_output=True, check=False
    )
    if packed.returncode:
        pytest.skip(f"the history of this copy lacks {LAST_RELEASE}")
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    both = Release(folder), Release(ROOT)
    assert both[0]("version") == "0.2.0"
    yield both
    for one in both:
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_releases_take_turns_in_one_folder_and_lose_nothing(
    seed: int, tmp_path: Path, releases: tuple[Release, Release]
) -> None:
    chance = random.Random(seed)
    there: dict[str, int] = {}
    for number in range(ACTIONS):
        one = chance.choice(releases)
        action = chance.choice(["save", "save", "borrow", "overwrite", "delete", "gc", "look"])
        step = chance.choice(sorted(there)) if there else None
        new = f"{tmp_path}/step-{number + 1}"
        compress = chance.choice([False, True])
        if action == "borrow" and step is not None:
            one("save", new, number, base=step, compress=chance.choice([True, "delta"]))
            there[new] = number
        elif action == "overwrite" and step is not None:
            error, _ = one.try_to("save", step, number, overwrite=True, compress=compress)
            assert error in (None, "InUseError")
            there[step] = number if error is None else there[step]
        elif action == "delete" and step is not None:
            error, _ = one.try_to("delete", step)
            assert error in (None, "InUseError")
            if error is None:
                del there[step]
        elif action == "gc":
            one("gc", str(tmp_path))
        elif action in ("save", "borrow"):
            one("save", new, number, compress=compress)
            there[new] = number
        for reader in releases:
            if there:
                assert reader("latest", str(tmp_path)) in there
                url = chance.choice(sorted(there))
                assert reader("load", url) == there[url]
    for url, value in there.items():
        for reader in releases:
            assert reader("load", url) == value
            assert reader("verify", url)
