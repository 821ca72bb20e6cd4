"""Planned zips: zipfile reads them, whatever checksums and sizes their records have."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats import zip_plan
from formats.catalog import FilePlan, Late, OutgoingTensor
from formats.dtypes import BY_NAME
from formats.zip_plan import Member, zip_parts
from tests.formats.written import bytes_of
from tests.selection import examples

SIZES = st.sampled_from([0, 1, 3, 4096, 70_000])


def tensor(data: bytes) -> OutgoingTensor:
    return OutgoingTensor("t", (len(data),), BY_NAME["U8"], lambda: iter([memoryview(data)]))


@settings(max_examples=examples(30))
@given(
    records=st.lists(st.tuples(SIZES, st.booleans()), max_size=6),
    align=st.sampled_from([1, 64]),
    before=st.integers(0, 2),
    wide_bytes=st.sampled_from([1, 4096, 1 << 30]),
)
def test_a_planned_zip_is_one_that_zipfile_reads(
    records: list[tuple[int, bool]], align: int, before: int, wide_bytes: int
) -> None:
    blocks = [bytes([7 + i]) * size for i, (size, _) in enumerate(records)]
    members = [
        Member(f"folder/{i}", tensor(blocks[i]) if is_late else blocks[i], align)
        for i, (_, is_late) in enumerate(records)
    ]
    saved = zip_plan.ZIP64_BYTES
    zip_plan.ZIP64_BYTES = wide_bytes
    try:
        others = [tensor(b"abc")] * before
        plan = FilePlan("f", [*others, *zip_parts(members, before)])
        content = b"".join(bytes_of(plan))[3 * before :]
    finally:
        zip_plan.ZIP64_BYTES = saved
    with zipfile.ZipFile(io.BytesIO(content)) as found:
        assert found.testzip() is None
        assert found.namelist() == [member.name for member in members]
        for info, data in zip(found.infolist(), blocks, strict=True):
            assert found.read(info) == data
            head = content[info.header_offset :]
            begin = (
                30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            )
            assert head[begin : begin + len(data)] == data
            assert (info.header_offset + begin) % align == 0


def test_a_zip_without_tensors_is_one_literal() -> None:
    parts = zip_parts([Member("a", b"abc"), Member("b", b"")])
    assert [type(part) for part in parts] == [bytes]
    parts = zip_parts([Member("a", b"abc"), Member("b", tensor(b"x")), Member("c", b"")])
    assert [type(part) for part in parts] == [bytes, OutgoingTensor, Late, bytes, Late]


@pytest.mark.thorough
def test_more_records_than_16_bits_count_are_in_the_directory() -> None:
    plan = FilePlan("f", zip_parts(Member(str(number), b"") for number in range(70_000)))
    with zipfile.ZipFile(io.BytesIO(b"".join(bytes_of(plan)))) as found:
        assert len(found.namelist()) == 70_000
