"""Publishers that are killed: readers keep the last version, and nothing stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.live.publishers import RUNTIME, SECONDS, wait_until_nothing_is_left

VALUES = 50_000
PUBLISHER = """
import os, signal, sys, torch, ckpt
from ckpt.live import publish

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

state = {"w": torch.ones(50_000)}
live = ckpt.publish(state, "policy", lease_seconds=60.0)
state["w"] += 1
live.update().wait()
print(live.url, flush=True)
sys.stdin.readline()
if sys.argv[1]:
    setattr(publish._Version, sys.argv[1], die)
state["w"] += 1
live.update().wait()
die()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["arena_writer", "write", "end", "_commit", ""])
def test_a_publisher_killed_in_an_update_leaves_the_last_version_to_its_readers(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Callable[..., Any]
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv(RUNTIME, str(runtime))
    program = programs(PUBLISHER, moment)
    url = program.stdout.readline().strip()
    with ckpt.open(url) as checkpoint:
        program.communicate("go\n", SECONDS)
        assert program.returncode == -signal.SIGKILL
        # A lease of before the end goes on; it is longer than a slow machine needs for the end.
        assert torch.equal(checkpoint["w"][:], torch.full((VALUES,), 2.0))
        with pytest.raises(ckpt.NotACheckpointError):
            ckpt.read(url)
    wait_until_nothing_is_left(runtime)
    with pytest.raises(ckpt.UnreachableError):
        ckpt.read(url)


@pytest.mark.thorough
@pytest.mark.parametrize("versions", [1, 2, 3])
def test_a_server_that_is_killed_fails_the_update_by_name_and_a_new_publisher_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: int
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv(RUNTIME, str(runtime))
    state = {"w": torch.ones(VALUES)}
    live = ckpt.publish(state, "policy")
    for _ in range(versions - 1):
        live.update().wait(SECONDS)
    server = live.hosts.server
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ckpt.UnreachableError, match="policy"):
        live.update().wait(SECONDS)
    with pytest.raises(ckpt.UnreachableError):
        ckpt.read(live.url)
    live.close()
    state["w"] += 1
    with ckpt.publish(state, "policy") as again:
        assert torch.equal(ckpt.read(again.url)["w"], state["w"])  # type: ignore[index]
    wait_until_nothing_is_left(runtime)
