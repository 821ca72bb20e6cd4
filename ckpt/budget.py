"""How much memory loading and converting may take beside what they fill.

One number for a process, 64 MiB unless the environment variable `CKPT_MEMORY_BUDGET` says another:
buffers that files are read through, tensors on their way to another type or device, messages
between ranks. A checksummed chunk, and a row of a tensor that is cast, are never divided.
"""

from __future__ import annotations

import os

from formats.sizes import parse_size
from sharding.errors import ArgumentError

VARIABLE = "CKPT_MEMORY_BUDGET"
DEFAULT_BYTES = 64 << 20
LEAST_BYTES = 8 << 20
"""With less, reads would be so small that nothing else would matter."""
MOST_BYTES = 1 << 60


def memory_budget() -> int:
    """The bytes that the environment allows.

    Raises ArgumentError for text that is no size.
    """
    text = os.environ.get(VARIABLE, "").strip()
    return parsed(text) if text else DEFAULT_BYTES


def parsed(text: str) -> int:
    """The bytes that a text says.

    >>> parsed("64MiB"), parsed("100000000")
    (67108864, 100000000)
    """
    try:
        nbytes = parse_size(text)
    except ArgumentError:
        nbytes = 0
    if not LEAST_BYTES <= nbytes <= MOST_BYTES:
        raise ArgumentError(
            f"{VARIABLE} is {text!r}: it takes a number of bytes, like 64MiB, 1GB or 100000000, "
            f"and at least {LEAST_BYTES >> 20}MiB"
        )
    return nbytes
