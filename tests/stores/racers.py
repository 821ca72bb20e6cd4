"""Writers of several processes and threads that commit one file at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from ckpt.errors import ExistsError
from ckpt.stores.store import open_store

THREADS = 2
START_SECONDS = 60


def race(url: str, options: Mapping[str, Any], name: str) -> list[int]:
    """The numbers of this rank's writers whose commit succeeded.

    Each rank has two writers. Each writes its number a thousand times. All ranks call it.
    """
    first = THREADS * dist.get_rank()
    began = threading.Barrier(THREADS)

    def commit(number: int) -> bool:
        with open_store(url, options) as store:
            if number == first:
                dist.barrier()
            began.wait(START_SECONDS)
            try:
                store.commit(name, bytes([number]) * 1000, replace=False)
            except ExistsError:
                return False
            return True

    numbers = range(first, first + THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        won = list(pool.map(commit, numbers))
    return [number for number, succeeded in zip(numbers, won, strict=True) if succeeded]
