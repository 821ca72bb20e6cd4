"""The process group of a command that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group


@contextmanager
def ranks_of_torchrun() -> Iterator[tuple[Group, bool]]:
    """Returns the group of all processes that torchrun has started, and whether this is rank 0.

    Without torchrun the group is this process alone.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield "self", True
        return
    import torch.distributed as dist  # a second of start-up, which one process does not need

    dist.init_process_group("gloo")
    try:
        yield None, dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
