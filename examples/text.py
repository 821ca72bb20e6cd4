"""The training text and its order: Python's own standard library, byte by byte.

The batch of a step is a pure function of (text, seed, step). No reader has a position that would
have to be saved, and no rank needs to know what the others did. Ranks take consecutive shares of
the same global batch, so the order of the data is the same on any number of ranks.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TEXT_BYTES = 4_000_000


def standard_library(limit_bytes: int = TEXT_BYTES) -> bytes:
    """The sources of the standard library's top-level modules, sorted by name, cut at the limit.

    Raises:
        FileNotFoundError: this Python came without the sources of its library.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) >= limit_bytes:
            break
        text += path.read_bytes()
    if not text:
        raise FileNotFoundError(f"{folder}: no *.py there; this Python has no library sources")
    return bytes(text[:limit_bytes])


def digest(text: bytes) -> str:
    """A short name of a text, for telling texts apart."""
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Batches:
    """The global batches of a training run."""

    text: bytes
    seed: int
    context: int = 64
    """Bytes a sequence is predicted from."""
    sequences: int = 12
    """Sequences in a global batch: 1, 2, 3, 4, 6 or 12 ranks take equal shares."""

    def __post_init__(self) -> None:
        if len(self.text) <= self.context:
            raise ValueError(
                f"a text of {len(self.text)} bytes has no sequence of {self.context + 1}"
            )

    def share(self, step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        """One rank's part of the batch of a step: inputs and the bytes that follow each.

        Both are int64 of shape (sequences / world, context). The shares of all ranks in order are
        the whole batch, which is what rank 0 of a world of 1 gets.

        Raises:
            ValueError: the ranks cannot have equal shares.
        """
        if self.sequences % world:
            raise ValueError(
                f"{self.sequences} sequences cannot be shared equally by {world} ranks; "
                f"use a number of ranks that divides {self.sequences}"
            )
        draw = random.Random(f"seed {self.seed}, step {step}")
        starts = [draw.randrange(len(self.text) - self.context) for _ in range(self.sequences)]
        count = self.sequences // world
        rows = [
            list(self.text[start : start + self.context + 1])
            for start in starts[rank * count : (rank + 1) * count]
        ]
        windows = torch.tensor(rows, dtype=torch.int64)
        return windows[:, :-1], windows[:, 1:]
