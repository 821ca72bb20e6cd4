"""Memory that the processes of a host share: mappings of any size, and huge pages in them."""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.saving import arena
from ckpt.saving.arena import (
    address_of,
    is_sealed,
    map_memory,
    new_memory,
    populate,
    remove,
    take_huge_pages,
)

NAME = "ckpt-test-memory"
HUGE = 2 << 20


@contextmanager
def memory_of(nbytes: int, sealed: bool = False) -> Iterator[int]:
    """New memory of so many bytes."""
    descriptor = new_memory(NAME, sealed)
    try:
        os.ftruncate(descriptor, nbytes)
        yield descriptor
    finally:
        os.close(descriptor)


def mappings() -> list[tuple[int, int]]:
    """The first and last address of each mapping of such memory in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if f"/memfd:{NAME}" in line]
    return [(int(lo, 16), int(hi, 16)) for lo, hi in ends]


@given(st.integers(2, 3 * HUGE), st.booleans())
@example(HUGE - 1, True)
@example(HUGE, True)
@example(HUGE, False)
def test_a_mapping_has_all_bytes_and_ends_with_its_last_view(nbytes: int, writable: bool) -> None:
    with memory_of(nbytes) as descriptor:
        os.pwrite(descriptor, b"a", 0)
        os.pwrite(descriptor, b"z", nbytes - 1)
        memory = map_memory(descriptor, writable)
        assert (len(memory), memory.format, memory.readonly) == (nbytes, "B", not writable)
        assert (memory[:1], memory[-1:]) == (b"a", b"z")
        (found,) = mappings()
        if nbytes >= HUGE:
            assert found[0] % HUGE == 0
        if writable:
            assert address_of(memory) == found[0]
            memory[-1:] = b"!"
            assert os.pread(descriptor, 1, nbytes - 1) == b"!"
        part = memory[:1]
        del memory
        assert mappings() == [found]
        assert len(bytes(part)) == 1
        del part
        assert mappings() == []


def test_the_room_of_a_mapping_is_given_back() -> None:
    def total() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ends = [line.split()[0].split("-") for line in lines]
        return sum(int(hi, 16) - int(lo, 16) for lo, hi in ends)

    with memory_of(64 * HUGE) as descriptor:
        map_memory(descriptor)
        before = total()
        for _ in range(20):
            map_memory(descriptor)
        assert total() < before + 64 * HUGE


@pytest.mark.thorough
def test_huge_pages_keep_the_bytes_that_are_there_and_those_that_come() -> None:
    size = 8 * HUGE + 3 * mmap.PAGESIZE
    old = os.urandom(size // 2)
    new = os.urandom(size - size // 2)
    with memory_of(size) as descriptor:
        os.pwrite(descriptor, old, 0)
        memory = map_memory(descriptor)

        def write() -> None:
            for at in range(0, len(new), mmap.PAGESIZE):
                os.pwrite(descriptor, new[at : at + mmap.PAGESIZE], len(old) + at)

        writer = threading.Thread(target=write)
        writer.start()
        taken = take_huge_pages(memory)
        writer.join()
        assert 0 <= taken <= size
        assert taken % HUGE == 0
        assert populate(memory, 0, size)
        assert memory == old + new
        assert take_huge_pages(memory[mmap.PAGESIZE :]) == 0  # not at such an address
        remove(memory)
        assert os.fstat(descriptor).st_blocks == 0
        assert not any(memory)


def test_huge_pages_are_not_taken_where_they_cost_more_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with memory_of(64 * HUGE) as descriptor:
        monkeypatch.setattr(arena, "SLACK_SECONDS", -1.0)
        assert take_huge_pages(map_memory(descriptor)) == 0
        assert os.fstat(descriptor).st_blocks == 0


def test_a_system_without_huge_pages_maps_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_huge_bytes", lambda: 0)
    with memory_of(2 * HUGE) as descriptor:
        memory = map_memory(descriptor)
        assert take_huge_pages(memory) == 0
        memory[:3] = b"abc"
        assert os.pread(descriptor, 4, 0) == b"abc\0"
        del memory
        assert mappings() == []


def test_only_sealed_memory_never_becomes_shorter(tmp_path: Path) -> None:
    with memory_of(HUGE) as plain, (tmp_path / "file").open("wb") as file:
        assert not is_sealed(plain)
        assert not is_sealed(file.fileno())
    with memory_of(HUGE, sealed=True) as descriptor:
        assert is_sealed(descriptor)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, HUGE - 1)
        os.ftruncate(descriptor, 2 * HUGE)


def test_no_room_for_a_mapping_is_an_error() -> None:
    with memory_of(1 << 60) as descriptor, pytest.raises(OSError, match="for a mapping of"):
        map_memory(descriptor)
    assert mappings() == []
