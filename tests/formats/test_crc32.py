"""Checksums put together are those of the bytes put together."""

from collections.abc import Callable
from functools import reduce
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.zip_plan import combine, combine_in_python

Combine = Callable[[int, int, int], int]
both = pytest.mark.parametrize("combine", [combine, combine_in_python])
"""The function of zlib-ng and, without that library, our own."""


@both
@given(parts=st.lists(st.binary(max_size=300), max_size=8))
def test_the_checksum_of_a_whole_is_that_of_its_parts_put_together(
    combine: Combine, parts: list[bytes]
) -> None:
    sums = [(crc32(part), len(part)) for part in parts]
    found = reduce(lambda whole, part: combine(whole, *part), sums, crc32(b""))
    assert found == crc32(b"".join(parts))


@both
@given(
    first=st.binary(max_size=40),
    zeros=st.sampled_from([1, 255, 65_537, (1 << 20) - 1, 1 << 20, 5_000_001]),
    last=st.binary(max_size=40),
)
def test_what_follows_may_be_of_any_length(
    combine: Combine, first: bytes, zeros: int, last: bytes
) -> None:
    second = bytes(zeros) + last
    assert combine(crc32(first), crc32(second), len(second)) == crc32(first + second)
