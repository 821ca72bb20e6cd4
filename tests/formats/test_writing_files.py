"""What stands between the writers of foreign formats and a file: gathered writes, and zips."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from formats import zip_writer
from formats.gathered import GATHER_BYTES, LARGE_BYTES, Gathered
from formats.storage import Buffer
from formats.zip_writer import ZipWriter
from tests.selection import examples


class Memory:
    """A file in memory that keeps every write apart."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, buffers: Iterable[Buffer]) -> None:
        self.writes.append(b"".join(bytes(buffer) for buffer in buffers))

    def rewrite_start(self, data: Buffer) -> None:
        start = b"".join(self.writes)
        self.writes = [bytes(data) + start[len(data) :]]

    @property
    def content(self) -> bytes:
        return b"".join(self.writes)


SIZES = st.sampled_from([0, 1, 3, 4096, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 5])


@settings(max_examples=examples(30))
@given(sizes=st.lists(SIZES, max_size=12))
def test_what_is_gathered_arrives_in_order_and_in_large_writes(sizes: list[int]) -> None:
    memory, expected = Memory(), b""
    gathered = Gathered(memory)
    buffer = bytearray(LARGE_BYTES + 5)
    for number, size in enumerate(sizes):
        buffer[:size] = bytes([number]) * size
        gathered.write([memoryview(buffer)[:size]])
        expected += bytes([number]) * size
        buffer[:size] = b"\xee" * size  # may be reused at once
        assert gathered.total == len(expected)
    gathered.flush()
    assert memory.content == expected
    assert all(len(write) >= LARGE_BYTES for write in memory.writes[:-1])


def test_the_start_of_gathered_writes_can_be_rewritten() -> None:
    memory = Memory()
    gathered = Gathered(memory)
    gathered.write([b"abc", b"def"])
    gathered.rewrite_start(b"xy")
    gathered.write([b"ghi"])
    gathered.flush()
    assert memory.content == b"xycdefghi"


def test_many_small_buffers_make_few_writes() -> None:
    memory = Memory()
    gathered = Gathered(memory)
    for _ in range(20_000):
        gathered.write([bytes(1000)])
    gathered.flush()
    assert len(memory.writes) == -(-20_000_000 // (GATHER_BYTES // 1000 * 1000))


@settings(max_examples=examples(30))
@given(
    records=st.lists(st.lists(SIZES, max_size=3), max_size=6),
    align=st.sampled_from([1, 64]),
    before=st.integers(0, 100),
    wide_bytes=st.sampled_from([1, LARGE_BYTES, 1 << 30]),
)
def test_a_streamed_zip_is_one_that_zipfile_reads(
    records: list[list[int]], align: int, before: int, wide_bytes: int
) -> None:
    memory = Memory()
    gathered = Gathered(memory)
    gathered.write([bytes(before)])
    blocks = [[bytes([7 + i]) * size for i, size in enumerate(sizes)] for sizes in records]
    saved = zip_writer.ZIP64_BYTES
    zip_writer.ZIP64_BYTES = wide_bytes
    try:
        with ZipWriter(gathered) as archive:
            for number, parts in enumerate(blocks):
                nbytes = sum(map(len, parts))
                views = map(memoryview, parts)
                assert archive.add(f"folder/{number}", nbytes, views, align) == nbytes
    finally:
        zip_writer.ZIP64_BYTES = saved
    gathered.flush()
    content = memory.content[before:]
    with zipfile.ZipFile(io.BytesIO(content)) as found:
        assert found.testzip() is None
        assert found.namelist() == [f"folder/{number}" for number in range(len(blocks))]
        for info, parts in zip(found.infolist(), blocks, strict=True):
            data = b"".join(parts)
            assert found.read(info) == data
            head = content[info.header_offset :]
            begin = (
                30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            )
            assert head[begin : begin + len(data)] == data
            assert (info.header_offset + begin) % align == 0


def test_more_records_than_16_bits_count_are_in_the_directory() -> None:
    memory = Memory()
    gathered = Gathered(memory)
    with ZipWriter(gathered) as archive:
        for number in range(70_000):
            archive.add(str(number), 0, [])
    gathered.flush()
    with zipfile.ZipFile(io.BytesIO(memory.content)) as found:
        assert len(found.namelist()) == 70_000
