"""Writers of several processes and threads that commit one file at the same moment."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from ckpt.errors import ExistsError
from ckpt.stores.store import open_store

PROCESSES = 4
THREADS = 2
START_SECONDS = 60
_barrier: Any = None


class Racers:
    """Eight writers: two threads in each of four processes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(PROCESSES * THREADS)
        self._pool = ProcessPoolExecutor(PROCESSES, context, _begin, (barrier,))

    def race(self, url: str, options: Mapping[str, Any], name: str) -> list[int]:
        """The numbers of those whose commit succeeded; each writes its number a thousand times."""
        arguments = [(url, dict(options), name, first * THREADS) for first in range(PROCESSES)]
        running = [self._pool.submit(_commit_by_threads, *one) for one in arguments]
        return [winner for future in running for winner in future.result()]

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()


def _begin(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _commit_by_threads(url: str, options: Mapping[str, Any], name: str, first: int) -> list[int]:
    def commit(number: int) -> bool:
        with open_store(url, options) as store:
            _barrier.wait(START_SECONDS)
            try:
                store.commit(name, bytes([number]) * 1000, replace=False)
            except ExistsError:
                return False
            return True

    with ThreadPoolExecutor(THREADS) as pool:
        won = list(pool.map(commit, range(first, first + THREADS)))
    return [first + index for index, succeeded in enumerate(won) if succeeded]
