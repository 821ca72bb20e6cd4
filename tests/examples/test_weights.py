"""A trainer and a generator that live states connect: each token is that of weights from disk."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from tests.namespaces import DEVICE, command_on, connect, environment, system, two_hosts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "weights.py"
VERSIONS = 16
LIMIT_SECONDS = 950
JOBS = {"train": 2, "generate": 3}
"""The ranks of each job."""
ADDRESSES = {"ckpt-train": "10.213.8.1", "ckpt-generate": "10.213.8.2"}
"""Of the hosts of the two jobs."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]  # processes that import torch


def check(said: str) -> None:
    """Fails unless the tokens of all versions were compared, and the policy has learned."""
    assert said.count("768 tokens equal the reference") == VERSIONS, said
    rewards = [float(one) for one in re.findall(r"reward (\d\.\d\d)", said)]
    assert rewards[0] < 0.2 < 0.6 < rewards[-1], said


def test_a_generator_with_another_layout_and_dtype_writes_the_tokens_of_the_disk(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(EXAMPLE), "--versions", str(VERSIONS), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)


@pytest.fixture
def network() -> Iterator[None]:
    """The hosts of the jobs."""
    with two_hosts(ADDRESSES):
        connect(*ADDRESSES)
        yield


def started(job: str, folder: Path) -> subprocess.Popen[str]:
    """A job on its host, with its output in a file."""
    host = f"ckpt-{job}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(JOBS[job])]
    command += ["--master-addr", ADDRESSES[host], "--master-port", "29512"]
    command += ["--local-addr", ADDRESSES[host], str(EXAMPLE), "--versions", str(VERSIONS)]
    command += ["--job", job, "--folder", str(folder), "--address", "0.0.0.0"]
    with (folder / f"{job}.log").open("w") as log:
        return subprocess.Popen(
            command_on(host, command),
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )


def received_bytes(host: str) -> int:
    """The bytes that a host has received from the other one."""
    place = f"/sys/class/net/{DEVICE}/statistics/rx_bytes"
    return int(system("ip", "netns", "exec", host, "cat", place))


@pytest.mark.usefixtures("network")
def test_jobs_on_two_hosts_send_weights_and_tokens_over_the_network(tmp_path: Path) -> None:
    before = received_bytes("ckpt-generate")
    jobs = {job: started(job, tmp_path) for job in JOBS}
    codes = {job: process.wait(LIMIT_SECONDS) for job, process in jobs.items()}
    said = {job: (tmp_path / f"{job}.log").read_text() for job in JOBS}
    assert codes == dict.fromkeys(JOBS, 0), said
    check(said["generate"])
    for job in ("policy", "rollouts"):
        assert (tmp_path / job).read_text().startswith("live://10.213.8.")
    with ckpt.open(tmp_path / "version-1") as checkpoint:
        nbytes = checkpoint.catalog.nbytes
    whole = nbytes / 2  # published in bfloat16
    received = received_bytes("ckpt-generate") - before
    assert received < VERSIONS * whole / 2, (received, VERSIONS * whole)
