"""Tests that need a GPU: `make test-gpu`. One GPU is enough, and nothing is downloaded.

Rules:

1. A test that takes `device` runs twice: on "cpu" with all other tests, or with the slow ones where
   the module says so; and on "cuda" with the mark `gpu`. The first tries the test's own logic on
   every machine. A test of what the CPU does not have has the mark alone.
2. Without a GPU the tests are skipped. `make test-gpu` sets `CKPT_GPU_REQUIRED`: then the run ends
   with an error that says so.
3. NCCL refuses two ranks on one GPU, so with it there is one rank. Several ranks use gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Cluster, RankServer

REQUIRED = "CKPT_GPU_REQUIRED"


def lacking() -> str:
    """Why there is no GPU; empty where there is one."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"there is no GPU for these tests: torch {torch.__version__} is built without CUDA"
    return f"there is no GPU for these tests: torch {torch.__version__} finds no CUDA device"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Rule 1."""
    if "device" in metafunc.fixturenames:
        marks = [pytest.mark.slow] if getattr(metafunc.module, "SLOW_ON_CPU", False) else []
        cpu = pytest.param("cpu", marks=marks)
        metafunc.parametrize("device", [cpu, pytest.param("cuda", marks=pytest.mark.gpu)])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Rule 2."""
    if item.get_closest_marker("gpu") is not None and lacking():
        if os.environ.get(REQUIRED):
            pytest.exit(lacking(), returncode=1)
        pytest.skip(lacking())


def use_nccl() -> None:
    """The rank's default group has NCCL for CUDA tensors from now on."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="module")
def one_rank(rank_servers: list[RankServer]) -> Iterator[Callable[[str], Cluster]]:
    """A function from a device to one rank: with NCCL for "cuda", with gloo for "cpu"."""
    started: dict[str, Cluster] = {}

    def cluster(device: str) -> Cluster:
        if device not in started or not started[device].alive:
            started[device] = Cluster(rank_servers, 1)
            if device == "cuda":
                started[device].run(use_nccl)
        return started[device]

    yield cluster
    for each in started.values():
        each.close()


@pytest.fixture
def ranks(one_rank: Callable[[str], Cluster], clusters: Callable[[int], Cluster]) -> Any:
    """A function from a device and a number of ranks to a cluster (rule 3)."""
    return lambda device, count: one_rank(device) if count == 1 else clusters(count)
