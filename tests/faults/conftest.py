"""Processes to be killed in, one set for each trial, at the cost of a fork."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Program
from tests.faults.steps import Kill
from tests.faults.zygote import LIMIT_SECONDS, Ended, Job

ZYGOTE = "from tests.faults.zygote import main; main()"
QUIET = "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1); "
"""Nobody reads the zygote's standard output until it ends."""
START = f"import sys; sys.path[:] = sys.argv[2:]; {ZYGOTE}"

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CKPT_MEMORY_BUDGET": "20000000",  # uploads go in small parts
}


def own_process(socket: str) -> Callable[[], None]:
    """Start a fresh Python as a zygote; the function ends it."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, socket, *sys.path], env={**os.environ, **ENVIRONMENT}
    )

    def end() -> None:
        process.kill()
        process.wait()

    return end


class Jobs:
    """Runs commands on ranks of their own, and says how each ended and what steps it took."""

    def __init__(
        self, folder: str, start: Callable[[str], Callable[[], object]] = own_process
    ) -> None:
        self._folder = folder
        self._count = 0
        with Listener(f"{folder}/socket", family="AF_UNIX") as listener:
            self._end = start(f"{folder}/socket")
            self._connection: Connection = listener.accept()

    def run(
        self,
        name: str,
        folder: str,
        world_size: int = 1,
        kill: Kill | None = None,
        watched: bool = True,
        faults: tuple[int, float, bool] | None = None,
        **arguments: object,
    ) -> tuple[list[Ended], list[str]]:
        """How each rank ended, and the steps as `rank0 3 fsync NAME`, in order."""
        kind = {"kill": kill, "watched": watched, "faults": faults}
        return self._run(name, arguments, world_size, folder, **kind)

    def race(self, *what: tuple[str, dict[str, object]]) -> list[Ended]:
        """How each of several commands ended, each in a job of its own, begun at one moment."""
        arguments = {"what": what, "at": time.monotonic() + 0.03}
        return self._run("race", arguments, len(what), "/", watched=False, together=False)[0]

    def _run(
        self,
        name: str,
        arguments: dict[str, Any],
        world_size: int,
        folder: str,
        **kind: Any,
    ) -> tuple[list[Ended], list[str]]:
        self._count += 1
        scratch = Path(self._folder, str(self._count))
        scratch.mkdir()
        self._connection.send(Job(name, arguments, world_size, folder, str(scratch), **kind))
        if not self._connection.poll(LIMIT_SECONDS + 30):
            self.close()
            raise TimeoutError(f"{name}: no answer")
        ended = self._connection.recv()
        log = scratch / "steps"
        steps = log.read_text().splitlines() if log.exists() else []
        shutil.rmtree(scratch)
        return ended, steps

    def close(self) -> None:
        self._connection.close()
        self._end()


@pytest.fixture(scope="session")
def jobs(programs: Callable[..., Program]) -> Iterator[Jobs]:
    """Where commands are run to be killed."""

    def forked(socket: str) -> Callable[[], object]:
        return programs(QUIET + ZYGOTE, socket, **ENVIRONMENT).communicate

    with tempfile.TemporaryDirectory(prefix="ckpt-jobs-") as folder:
        found = Jobs(folder, forked)
        yield found
        found.close()
