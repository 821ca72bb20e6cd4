"""The memory budget of loads and conversions, beside the tensors that they fill.

The budget is one number for a process: the environment variable `CKPT_MEMORY_BUDGET`, or 64 MiB. It
covers read buffers, tensors on their way to another dtype or device, and messages between ranks. A
checksummed chunk, and a row of a tensor that is cast, are never divided.
"""

from __future__ import annotations

import os

from formats.limits import parse_size
from sharding.errors import ArgumentError

VARIABLE = "CKPT_MEMORY_BUDGET"
DEFAULT_BYTES = 64 << 20
LEAST_BYTES = 8 << 20
"""A smaller budget would make reads so small that a load is slow."""
MOST_BYTES = 1 << 60


def memory_budget() -> int:
    """Returns the budget of the environment in bytes.

    Raises:
        ArgumentError: the variable's text is not a size, or is too small.
    """
    text = os.environ.get(VARIABLE, "").strip()
    return parsed(text) if text else DEFAULT_BYTES


def parsed(text: str) -> int:
    """Returns the bytes of a size as text. Raises as `memory_budget` does.

    >>> parsed("64MiB"), parsed("100000000")
    (67108864, 100000000)
    """
    try:
        nbytes = parse_size(text)
    except ArgumentError:
        nbytes = 0
    if not LEAST_BYTES <= nbytes <= MOST_BYTES:
        raise ArgumentError(
            f"{VARIABLE} is {text!r}; it is a number of bytes, like 64MiB, 1GB or 100000000, and "
            f"at least {LEAST_BYTES >> 20}MiB"
        )
    return nbytes
