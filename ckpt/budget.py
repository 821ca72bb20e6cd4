"""How much memory loading and converting may take beside what they fill.

One number for a process, 64 MiB unless the environment variable `CKPT_MEMORY_BUDGET` says another:
buffers that files are read through, tensors on their way to another type or device, messages
between ranks. A checksummed chunk, and a row of a tensor that is cast, are never divided.
"""

from __future__ import annotations

import os
import re

from sharding.errors import ArgumentError

VARIABLE = "CKPT_MEMORY_BUDGET"
DEFAULT_BYTES = 64 << 20
LEAST_BYTES = 8 << 20
"""With less, reads would be so small that nothing else would matter."""

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


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
    found = re.fullmatch(r"([0-9]{1,15}) ?(KiB|MiB|GiB)?", text)
    nbytes = int(found[1]) * _UNITS[found[2] or ""] if found is not None else 0
    if nbytes < LEAST_BYTES:
        raise ArgumentError(
            f"{VARIABLE} is {text!r}: it takes a number of bytes, like 64MiB, 1GiB or 100000000, "
            f"and at least {LEAST_BYTES >> 20}MiB"
        )
    return nbytes
