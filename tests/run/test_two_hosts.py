"""A run on two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ckpt
from tests.namespaces import command_on, connect, environment, lose, two_hosts
from tests.run.two_hosts_worker import SHARED_EVERY

WORKER = Path(__file__).with_name("two_hosts_worker.py")
RANKS = {"ckpt-one": 2, "ckpt-two": 1}
"""Of each host."""
ADDRESSES = {"ckpt-one": "10.213.7.1", "ckpt-two": "10.213.7.2"}
WAIT_SECONDS = 120
FOREVER = 1_000_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """Two namespaces with a pair of virtual network devices between them."""
    with two_hosts(ADDRESSES):
        yield


@dataclass
class Job:
    """The agents of torchrun on hosts, and the lines that the workers print."""

    agents: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    readers: list[threading.Thread] = field(default_factory=list)
    lines: queue.Queue[str] = field(default_factory=queue.Queue)

    def line(self, pattern: str) -> re.Match[str]:
        """The next line of that form. Fails after WAIT_SECONDS without a line."""
        while True:
            found = re.search(pattern, self.lines.get(timeout=WAIT_SECONDS))
            if found:
                return found

    def ended(self) -> list[int]:
        """The exit codes of the agents."""
        return [agent.wait(WAIT_SECONDS) for agent in self.agents.values()]

    def output(self) -> str:
        """All lines that nobody has read."""
        return "\n".join(self.lines.get() for _ in range(self.lines.qsize()))


@contextmanager
def run(
    folder: Path, steps: int, hosts: Sequence[str] = tuple(RANKS), near: str = ""
) -> Iterator[Job]:
    """The run in `folder`, on all ranks of these hosts. The first host has the rendezvous."""
    job = start(folder, steps, hosts, near)
    try:
        yield job
    finally:
        for host in hosts:
            lose(host)
        job.ended()
        for reader in job.readers:
            reader.join(WAIT_SECONDS)


def start(folder: Path, steps: int, hosts: Sequence[str], near: str) -> Job:
    """Starts an agent on each host, with its workers and a reader of their output."""
    connect(*hosts)
    job = Job()
    for number, host in enumerate(hosts):
        agent = [sys.executable, "-m", "torch.distributed.run"]
        agent += ["--nnodes", str(len(hosts)), "--node-rank", str(number)]
        agent += ["--nproc-per-node", str(RANKS[host]), "--max-restarts", "0"]
        agent += ["--master-addr", ADDRESSES[hosts[0]], "--master-port", "29511"]
        agent += ["--local-addr", ADDRESSES[host]]
        agent += [str(WORKER), str(folder / "shared"), near or str(folder / host), str(steps)]
        job.agents[host] = process = subprocess.Popen(
            command_on(host, agent),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        job.readers.append(threading.Thread(target=_collect, args=(process, job.lines)))
        job.readers[-1].start()
    return job


def _collect(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put(line.rstrip())


@pytest.mark.usefixtures("network")
def test_the_ranks_of_a_host_that_lives_end_when_another_host_is_lost(tmp_path: Path) -> None:
    with run(tmp_path, FOREVER) as job:
        job.line(f"step {SHARED_EVERY + 2}$")
        lose("ckpt-two")
        assert job.agents["ckpt-one"].wait(WAIT_SECONDS) != 0
        assert re.search(r"rank 2\b", job.output())
    with run(tmp_path, 2 * SHARED_EVERY, ["ckpt-one"]) as alone:
        assert alone.line(r"restored (\d+) on 2 ranks")[1] == str(SHARED_EVERY)
        assert alone.ended() == [0]
    with run(tmp_path, 3 * SHARED_EVERY) as replaced:
        assert replaced.line(r"restored (\d+) on 3 ranks")[1] == str(2 * SHARED_EVERY)
        assert replaced.ended() == [0, 0]
    newest = ckpt.run_steps(tmp_path / "shared")[0]
    assert newest.program["hosts"] == list(RANKS)


@pytest.mark.usefixtures("network")
def test_hosts_that_come_back_go_on_from_their_own_folders(tmp_path: Path) -> None:
    steps = SHARED_EVERY + 3
    with run(tmp_path, steps) as first:
        assert first.ended() == [0, 0]
    with run(tmp_path, steps + 1) as back:
        assert back.line(r"restored (\d+) on 3 ranks")[1] == str(steps)
        assert back.ended() == [0, 0]
    shutil.rmtree(tmp_path / "ckpt-two")
    with run(tmp_path, SHARED_EVERY) as replaced:
        assert replaced.line(r"restored (\d+) on 3 ranks")[1] == str(SHARED_EVERY)
        assert replaced.ended() == [0, 0]


@pytest.mark.usefixtures("network")
def test_the_host_that_lives_goes_on_from_its_copies_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "runtime"))
    with run(tmp_path, FOREVER, near="memory") as job:
        job.line(f"step {SHARED_EVERY + 3}$")
        lose("ckpt-two")
        assert job.agents["ckpt-one"].wait(WAIT_SECONDS) != 0
        # The servers of the host that lives still run.
        with run(tmp_path, 4 * SHARED_EVERY, ["ckpt-one"], near="memory") as alone:
            restored = int(alone.line(r"restored (\d+) on 2 ranks")[1])
            assert restored >= SHARED_EVERY + 3
            assert alone.ended() == [0]
