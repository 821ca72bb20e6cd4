"""Process groups of a rank: those that end with the job which made them, and those that stay."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import debug

T = TypeVar("T")

_kept: set[dist.ProcessGroup] = set()


def kept(make: Callable[..., T]) -> Callable[..., T]:
    """The function, called once for the same arguments; groups that it makes stay."""

    @cache
    @wraps(make)
    def made(*arguments: Hashable) -> T:
        before = {*distributed_c10d._world.pg_map}
        found = make(*arguments)
        _kept.update({*distributed_c10d._world.pg_map} - before)
        return found

    return made


def end_groups() -> None:
    """End the groups of this process but the default one and the kept ones.

    Each has three threads, which wake up 100 times a second. torch remembers what operations on
    DTensors give, by the mesh: of a mesh that is made again it would give the groups that are gone.
    Where a version of torch has no way to forget that, the groups stay.
    """
    forget = getattr(debug, "_clear_sharding_prop_cache", None)
    made = {*distributed_c10d._world.pg_map} - _kept - {dist.group.WORLD}
    if not made or forget is None:
        return
    for group in made:
        dist.destroy_process_group(group)
    forget()
    gc.collect()
