"""Publishers on the ranks of a cluster, and what they leave on this machine."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt

SECONDS = 60
RUNTIME = "CKPT_RUNTIME_DIR"

_live: dict[str, ckpt.LiveState] = {}
"""The live states of this rank, by name. Tests run the functions of this file only: a rank has a
module for each file of functions."""
_states: dict[str, Any] = {}


def long_of(value: float) -> torch.Tensor:
    return torch.arange(300.0 * 100).reshape(300, 100) + value


def whole_state(size: int, value: float) -> dict[str, Any]:
    """What a reader finds that `size` ranks have published."""
    long = long_of(value)
    own = {f"own{rank}": torch.full((2,), value + rank) for rank in range(size)}
    return {"plain": long, "sharded": long, "mixed": long.to(torch.bfloat16), "step": value, **own}


def rank_state(value: float) -> dict[str, Any]:
    """The same on a rank: a replica, shards in two dtypes, and what one rank has."""
    whole = whole_state(dist.get_world_size(), value)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(whole["sharded"], mesh, [Shard(0)])
    mixed = distribute_tensor(whole["mixed"], mesh, [Replicate()])
    mine = f"own{dist.get_rank()}"
    return {
        "plain": whole["plain"],
        "sharded": sharded,
        "mixed": mixed,
        "step": value,
        mine: whole[mine],
    }


def begin(runtime: str, name: str, hosts: int = 1) -> str:
    """Publish version 1, with the value 1; returns the URL. A host is a folder for sockets."""
    host = dist.get_rank() * hosts // dist.get_world_size()
    os.environ[RUNTIME] = runtime if hosts == 1 else f"{runtime}/host{host}"
    _states[name] = rank_state(1.0)
    _live[name] = ckpt.publish(_states[name], name)
    return _live[name].url


def update(name: str, value: float, version: int | None = None) -> int:
    """Make a new version; returns its number."""
    _states[name].update(rank_state(value))
    _live[name].update(version).wait(SECONDS)
    return _live[name].version


def update_fails(name: str) -> str:
    """What an update raises."""
    with pytest.raises(ckpt.CkptError) as raised:
        _live[name].update().wait(SECONDS)
    return f"{type(raised.value).__name__}: {raised.value}"


def server_of_rank(name: str) -> int:
    """The process of the server that this rank leads; 0 if it leads none."""
    server = _live[name].hosts.server
    return 0 if server is None else server.pid


def end(name: str) -> None:
    _live.pop(name).close()


def refused(name: str, version: object) -> str:
    """What an update to this version, or to another one on rank 1, says."""
    mine = version[dist.get_rank()] if isinstance(version, list) else version
    with pytest.raises(ckpt.CkptError) as raised:
        _live[name].update(mine)
    return str(raised.value)


def fails_on_a_rank(name: str) -> str:
    """What an update says whose state cannot be stored on rank 1."""
    state = _states[name]
    if dist.get_rank() == 1:
        state["bad"] = threading.Lock()
    with pytest.raises(ckpt.CkptError) as raised:
        _live[name].update()
    state.pop("bad", None)
    return f"{type(raised.value).__name__}: {raised.value}"


def same(found: Any, wanted: dict[str, Any]) -> bool:
    """Whether a state that was read is this one."""
    return found.keys() == wanted.keys() and all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in wanted.items()
    )


def left_in(runtime: Path) -> list[str]:
    """The files, processes and memory that live states with this runtime folder have."""
    found = [path.name for path in runtime.iterdir() if path.name != "lock"]
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes()
            if f"{RUNTIME}={runtime}".encode() in environment and b"host_process" in command:
                found.append(f"process {process.name}")
        except OSError:
            continue
    return found


def wait_until_nothing_is_left(runtime: Path, seconds: float = SECONDS) -> None:
    """Return once nothing is left there. Raises AssertionError with the rest after two leases."""
    until = time.monotonic() + seconds
    while left := left_in(runtime):
        assert time.monotonic() < until, left
        time.sleep(0.05)
