"""The process group of a command that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group


_OF_A_RANK = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""The variables that torchrun sets for a process; together no other process has their values."""


def _is_inherited() -> bool:
    """Whether the variables of torchrun are those of the parent; False where it cannot be read."""
    try:
        told = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(os.fsencode(f"{name}={os.environ.get(name, '')}") in told for name in _OF_A_RANK)


@contextmanager
def ranks_of_torchrun() -> Iterator[tuple[Group, bool]]:
    """Returns the group of all processes that torchrun has started, and whether this is rank 0.

    Without torchrun the group is this process alone, and so it is for a command that a process of
    torchrun starts: the other ranks do not call it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _is_inherited():
        yield "self", True
        return
    import torch.distributed as dist  # a second of start-up, which one process does not need

    dist.init_process_group("gloo")
    try:
        yield None, dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
