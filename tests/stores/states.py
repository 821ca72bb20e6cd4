"""A state that ranks share, and what they do with it at a store: run by the tests in every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt

ROWS, COLUMNS = 1025, 512
"""2 MiB: several chunks, and rows that no number of ranks divides."""
Options = Mapping[str, Any] | None


def whole(seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a state, undivided; seeds differ in every tensor but one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(ROWS, COLUMNS, generator=generator),
        "half": torch.randn(ROWS, 8, generator=generator).to(torch.bfloat16),
        "bias": torch.randn(COLUMNS, generator=generator),
        "frozen": torch.arange(4096.0).reshape(64, 64),
    }


def state(seed: int | None) -> dict[str, Any]:
    """The state on this rank: rows divided, one tensor everywhere; blank without a seed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = whole(seed or 0)
    if seed is None:
        tensors = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
    placed = {
        name: distribute_tensor(
            tensor, mesh, [Replicate() if name == "bias" else Shard(0)], src_data_rank=None
        )
        for name, tensor in tensors.items()
    }
    return {"model": placed, "step": -1 if seed is None else seed}


def assert_same(found: Mapping[str, Any], seed: int) -> None:
    """Raises unless a state of undivided tensors is a seed's."""
    assert found["step"] == seed
    for name, tensor in whole(seed).items():
        assert torch.equal(found["model"][name], tensor), name


def check(found: dict[str, Any], seed: int) -> None:
    """Raises unless every bit of this rank's part is that of the seed."""
    assert found["step"] == seed
    expected = state(seed)["model"]
    for name, tensor in found["model"].items():
        assert isinstance(tensor, DTensor)
        mine, theirs = tensor.to_local(), expected[name].to_local()
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name


def save(url: str, options: Options, seed: int, how: Mapping[str, Any]) -> None:
    """Save a seed's state, with these keywords, and wait for it where it is in the background."""
    handle = ckpt.save(url, state(seed), storage_options=options, **how)
    if handle is not None:
        handle.wait()


def load(url: str, options: Options, seed: int) -> None:
    """Load into a blank state, and check that it is a seed's."""
    target = state(None)
    ckpt.load(url, target, storage_options=options)
    check(target, seed)


def tried(
    job: str, url: str, options: Options, seed: int, deadline: float, how: Mapping[str, Any]
) -> tuple[str | None, float]:
    """The error that `save` or `load` ends with where a store gives up after as many seconds.

    And how long it took. Raises AssertionError when what was loaded is wrong.
    """
    before = os.environ.get("CKPT_STORE_DEADLINE")
    os.environ["CKPT_STORE_DEADLINE"] = str(deadline)
    start = time.monotonic()
    error = None
    try:
        if job == "save":
            save(url, options, seed, how)
        else:
            load(url, options, seed)
    except (ckpt.CkptError, ckpt.FormatError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        os.environ.pop("CKPT_STORE_DEADLINE")
        if before is not None:
            os.environ["CKPT_STORE_DEADLINE"] = before
    return error, time.monotonic() - start


def save_and_load_by_environment(url: str, environment: Mapping[str, str], seed: int) -> None:
    """The same without options: the driver finds everything in the environment."""
    with environment_of(url, environment):
        save(url, None, seed, {})
        load(url, None, seed)


@contextmanager
def environment_of(url: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Inside, the environment has these variables and the driver has forgotten the last ones."""
    import fsspec

    driver = fsspec.get_filesystem_class(url.partition("://")[0])
    before = {name: os.environ.get(name) for name in environment}
    driver.clear_instance_cache()
    os.environ.update(environment)
    try:
        yield
    finally:
        driver.clear_instance_cache()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
