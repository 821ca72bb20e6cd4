"""Kill workers and hosts of an elastic run, and compare its losses with an undisturbed run's.

    python examples/elastic_kills.py --kills 10 --seed 1

Two agents of torchrun stand for two hosts: one with two workers, one with one. Each round either
gets a random worker of either SIGKILL, at a random moment, or the second host is lost with all that
runs on it, or comes back. The run is never told: torchrun starts the workers anew, on two or three
ranks, and they go on from the last checkpoint. At the end every loss that any rank 0 has logged is
compared with that of the same step of one process that nobody disturbed. Exit code 1 if one
differs by more than the tolerance of `demo.py`, or if the run does not end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from demo import TOLERANCE

EXAMPLES = Path(__file__).resolve().parent
WAIT_SECONDS = 240
"""For a line of a run, however slow the machine."""
WORKERS = {"first": 2, "second": 1}
"""Of each host; the first has the rendezvous."""

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    # Agents may count restarts differently: a failure counts, a host that joins does not. In the
    # store that agents share, their workers would then use different keys, and wait for ever.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Run:
    """Two hosts, and all lines that their workers have printed."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the run
        self.hosts: dict[str, subprocess.Popen[str]] = {}
        self.workers: dict[int, str] = {}
        """The host of each worker that has said its process id."""
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def start(self, host: str) -> None:
        """Begin an agent with its workers."""
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
        agent += ["--nproc-per-node", str(WORKERS[host]), "--max-restarts", "100"]
        agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}"]
        agent += ["--rdzv-id", "elastic", "--rdzv-conf"]
        # Otherwise the agent that comes first has the store, and the run may end with that host.
        conf = f"is_host={host == 'first'},last_call_timeout=2"
        agent += [f"{conf},keep_alive_interval=1,keep_alive_max_attempt=3"]
        agent += [str(EXAMPLES / "elastic.py"), "--folder", str(self._folder)]
        process = subprocess.Popen(
            [*agent, "--steps", str(self._steps)],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env=ENVIRONMENT,
        )
        self.hosts[host] = process
        threading.Thread(target=self._read, args=(host, process), daemon=True).start()

    def _read(self, host: str, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            with self._changed:
                self.lines.append(line.rstrip())
                found = re.search(r"rank \d+ of \d+ is process (\d+)", line)
                if found:
                    self.workers[int(found[1])] = host
                self._changed.notify_all()

    def wait_for(self, pattern: str, times: int = 1) -> str:
        """Return the line that matches, after so many matches from now on.

        Raises TimeoutError with the last lines.
        """
        with self._changed:
            begin = len(self.lines)

            def found() -> list[str]:
                return [line for line in self.lines[begin:] if re.search(pattern, line)]

            first = self.hosts["first"]
            self._changed.wait_for(
                lambda: len(found()) >= times or first.poll() is not None, WAIT_SECONDS
            )
            if len(found()) < times:
                raise TimeoutError(f"no line like {pattern!r}: {self.lines[-20:]}")
            return found()[times - 1]

    def alive(self, host: str | None = None) -> list[int]:
        """The workers that run, of one host or of all: children of an agent that runs."""
        agents = {agent.pid: name for name, agent in self.hosts.items()}
        found = ((pid, agents.get(_parent(pid))) for pid in sorted(self.workers))
        return [pid for pid, of in found if of is not None and host in (None, of)]

    def lose(self, host: str) -> None:
        """Kill an agent and all its workers at once."""
        for pid in [self.hosts[host].pid, *self.alive(host)]:
            _kill(pid)
        self.hosts.pop(host).wait()

    def close(self) -> str:
        """Leave nothing running; what the agents have told of errors comes back."""
        for host in list(self.hosts):
            self.lose(host)
        with self._errors:
            self._errors.seek(0)
            return self._errors.read()


def _parent(pid: int) -> int:
    """The parent of a process that runs; 0 where it has ended. Numbers are used again."""
    with suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return 0 if state == "Z" else int(parent)
    return 0


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def disturb(run: Run, kills: int, draw: random.Random, tell: Callable[[str], None]) -> None:
    """Kill a worker so many times; now and then a host is lost, or comes back."""
    for kill in range(1, kills + 1):
        run.wait_for(r"^step ", draw.randint(1, 6))
        time.sleep(draw.random() * 0.3)
        if kill % 3 == 0 and "second" in run.hosts:
            tell(f"kill {kill}: the second host and all that runs on it")
            run.lose("second")
        else:
            worker = draw.choice(run.alive())
            tell(f"kill {kill}: worker {worker} of the {run.workers[worker]} host")
            _kill(worker)
        tell(f"         {run.wait_for('go on at step')}")
        if "second" not in run.hosts and kill % 3 == 1:
            run.start("second")
            tell(f"         the second host is back: {run.wait_for('go on at step')}")


def losses_of(folder: Path) -> list[dict[str, float]]:
    """What all rank 0s have logged, also of steps that were made twice."""
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """The loss of each step of one process."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
    ]
    command += [str(EXAMPLES / "elastic.py"), "--folder", str(folder), "--steps", str(steps)]
    folder.mkdir()
    subprocess.run(command, check=True, env=ENVIRONMENT, capture_output=True)
    return {int(line["step"]): line["loss"] for line in losses_of(folder)}


def main() -> int:
    """Run, kill, compare, tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        folder.mkdir()
        want = undisturbed(Path(place) / "undisturbed", options.steps)
        run = Run(folder, options.steps)
        try:
            for host in WORKERS:
                run.start(host)
            disturb(run, options.kills, random.Random(options.seed), print)
            run.hosts["first"].wait(WAIT_SECONDS)
        except BaseException:
            print(run.close()[-5000:], file=sys.stderr)
            raise
        run.close()
        found = losses_of(folder)
    worst = max(abs(line["loss"] / want[int(line["step"])] - 1) for line in found)
    worlds = sorted({int(line["ranks"]) for line in found})
    print(
        f"{options.kills} kills, {len(found)} steps logged for {options.steps}, on {worlds} ranks"
    )
    print(f"largest relative difference of a loss: {worst:.1e} (tolerance {TOLERANCE:.0e})")
    is_whole = {int(line["step"]) for line in found} == set(want)
    return 0 if is_whole and worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
