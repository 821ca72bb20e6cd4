"""The `Range` of a request for a file."""

from __future__ import annotations

import re

from ckpt.live.http_server import Content, HttpAnswer
from ckpt.live.protocol import RefusedError

_RANGE = re.compile(r"bytes=([0-9]{0,20})-([0-9]{0,20})")


def byte_range(header: str, size: int) -> tuple[int, int]:
    """Returns the half-open range that a header asks for. Raises RefusedError unless it is one.

    >>> byte_range("bytes=2-5", 10), byte_range("bytes=7-", 10), byte_range("bytes=-2", 10)
    ((2, 6), (7, 10), (8, 10))
    """
    found = _RANGE.fullmatch(header.strip())
    if found is None or found.groups() == ("", ""):
        raise RefusedError(
            "range", f"Range: {header:.80}: give one range, as bytes=0-99", size=size
        )
    first, last = found.groups()
    if first:
        lo, hi = int(first), min(int(last) + 1 if last else size, size)
    else:
        lo, hi = max(size - int(last), 0), size
    if lo >= hi:
        raise RefusedError("range", f"Range: {header:.80}: the file has {size} bytes", size=size)
    return lo, hi


def file_answer(
    content: Content, header: str | None, headers: tuple[tuple[str, str], ...] = ()
) -> HttpAnswer:
    """Returns the answer with a file, or with the wanted range of it."""
    size = content.nbytes
    told = (("accept-ranges", "bytes"), ("content-type", "application/octet-stream"), *headers)
    if header is None:
        return HttpAnswer(headers=told, content=content, lo=0, hi=size)
    lo, hi = byte_range(header, size)
    told += (("content-range", f"bytes {lo}-{hi - 1}/{size}"),)
    return HttpAnswer(status=206, headers=told, content=content, lo=lo, hi=hi)
