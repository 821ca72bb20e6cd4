"""Two ranks over gloo, and the values that they write, for the scripts below this folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from zlib import crc32

RANKS = 2
DATA = Path(__file__).parent


def elements(shape: Sequence[int], name: str) -> list[float]:
    """The row-major elements of the tensor with this name."""
    first = crc32(name.encode()) % 16
    return [(first + at) / 8 for at in range(prod(shape))]


def write_on_two_ranks(
    module: str, write: Callable[[Path], None], environment: Mapping[str, str] | None = None
) -> None:
    """Runs `module` again on each rank, which calls `write` with the folder of the command line."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / module.split(".")[-2]
    if "RANK" in os.environ:
        write(folder)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    told |= {"OMP_NUM_THREADS": "1", **(environment or {})}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder), *sys.argv[2:]],
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]
    codes = [rank.wait(timeout=500) for rank in ranks]
    if any(codes):
        raise SystemExit("a rank failed")
