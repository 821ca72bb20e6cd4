"""What a rank has in memory while it reads for others: the budget, whatever is loaded."""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import ckpt
from ckpt.arguments import LEAST_BYTES, VARIABLE
from tests.stores.server import Server

Options = Mapping[str, Any]
Shapes = tuple[tuple[int, int], ...]
A_LOT_EACH = ((640, 1024),) * 8
"""Tensors of 2.5 MiB, of which two are more than a lot where the budget is 8 MiB."""
MORE = ((5120, 1024),) * 2
"""Tensors of 20 MiB."""


def held(shapes: Shapes, how: Placement | None) -> dict[str, torch.Tensor]:
    """What is to be filled, over this process group."""
    found: dict[str, torch.Tensor] = {}
    for number, shape in enumerate(shapes):
        value = torch.full(shape, -1.0)
        if how is not None:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            value = distribute_tensor(value, mesh, [how], src_data_rank=None)
        found[f"t{number}"] = value
    return found


def save(url: str, options: Options, shapes: Shapes) -> None:
    state = {f"t{number}": torch.full(shape, float(number)) for number, shape in enumerate(shapes)}
    ckpt.save(url, state, storage_options=options)


@contextmanager
def memory_made() -> Iterator[list[int]]:
    """Each time that tensors are made: the bytes of all those made here that are still there.

    What the process has says less: malloc keeps what was freed, as it likes.
    """
    empty, found = torch.empty, [0]
    there: dict[int, int] = {}

    def counting(*arguments: Any, **options: Any) -> torch.Tensor:
        made = empty(*arguments, **options)
        storage, number = made.untyped_storage(), len(found)
        there[number] = storage.nbytes()
        weakref.finalize(storage, there.pop, number)
        found.append(sum(there.values()))
        return made

    torch.empty = counting
    try:
        yield found
    finally:
        torch.empty = empty


def load(url: str, options: Options, shapes: Shapes, how: Placement | None) -> int:
    """The most memory that a load made for tensors beside its target, in bytes."""
    target = held(shapes, how)
    os.environ[VARIABLE] = str(LEAST_BYTES)
    try:
        with memory_made() as found:
            ckpt.load(url, target, storage_options=options)
    finally:
        del os.environ[VARIABLE]
    for number, value in enumerate(target.values()):
        local = value.to_local() if isinstance(value, DTensor) else value
        assert bool((local == number).all())
    return max(found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "shapes", "how"),
    [
        pytest.param(2, A_LOT_EACH, None, marks=pytest.mark.slow),
        (4, A_LOT_EACH, None),
        (2, MORE, Shard(0)),
        pytest.param(2, A_LOT_EACH, Shard(0), marks=pytest.mark.slow),
        pytest.param(4, A_LOT_EACH, Shard(0), marks=pytest.mark.slow),
        pytest.param(2, MORE, None, marks=pytest.mark.slow),
    ],
)
def test_what_ranks_read_for_one_another_keeps_to_the_budget(
    clusters: Callable,
    moto: Server,
    tmp_path: Path,
    ranks: int,
    shapes: Shapes,
    how: Placement | None,
) -> None:
    url, options = moto.url(f"{tmp_path.name}/a"), dict(moto.options)
    clusters(1).run(save, url, options, shapes)
    most = clusters(ranks).run(load, url, options, shapes, how)
    assert max(most) <= LEAST_BYTES, [nbytes / 2**20 for nbytes in most]
