"""Runs of a program's `main` by several ranks, forked from a process that has imported it.

Each has the environment that torchrun would give it. To import such a library takes seconds of
processor time, which every rank that is started anew would take.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

SECONDS = 240


def as_torchrun(
    world_size: int, main: Callable[[Sequence[str]], None], arguments: Sequence[str], folder: str
) -> None:
    """Run `main` by so many ranks; rank N writes to the file `rankN` in `folder`.

    Raises RuntimeError with all that was written where a rank fails, or does not end in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [Path(folder) / f"rank{rank}" for rank in range(world_size)]
    ranks: list[int] = []
    for rank, file in enumerate(files):
        child = os.fork()
        if child == 0:
            _run(rank, world_size, port, main, arguments, file)
        ranks.append(child)
    statuses = _wait(ranks)
    if any(statuses):
        told = "\n".join(f"{file.name}: {file.read_text()}" for file in files)
        raise RuntimeError(f"the ranks of {main.__module__} ended with {statuses}\n{told}")


def _run(
    rank: int,
    world_size: int,
    port: int,
    main: Callable[[Sequence[str]], None],
    arguments: Sequence[str],
    file: Path,
) -> None:
    status = 1
    try:
        out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="none",
            OMP_NUM_THREADS="1",
        )
        main(arguments)
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(ranks: list[int]) -> list[int]:
    """The statuses of processes that have ended, or were killed because the time was over."""
    end, statuses = time.monotonic() + SECONDS, dict[int, int]()
    while len(statuses) < len(ranks) and time.monotonic() < end:
        for rank in ranks:
            if rank not in statuses:
                found, status = os.waitpid(rank, os.WNOHANG)
                if found:
                    statuses[rank] = status
        if any(statuses.values()):
            break
        time.sleep(0.05)
    for rank in ranks:
        if rank not in statuses:
            with suppress(ProcessLookupError):
                os.kill(rank, 9)
            statuses[rank] = os.waitpid(rank, 0)[1]
    return [statuses[rank] for rank in ranks]
