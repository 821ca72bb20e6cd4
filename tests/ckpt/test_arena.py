"""The memory that states are staged in."""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.saving import arena as arena_module
from ckpt.saving.arena import (
    GENERATION,
    HEAD_BYTES,
    NO_DATA,
    REMEMBERED,
    TOUCH_BYTES,
    Arena,
    get_progress,
    map_memory,
    set_progress,
)

PAGE, HUGE = 4096, 2 << 20


@given(st.lists(st.integers(0, 40 * PAGE), max_size=12), st.booleans())
def test_it_has_room_for_each_save_and_not_twice_what_the_last_ones_needed(
    needs: list[int], is_sealed: bool
) -> None:
    arena = Arena(is_sealed=is_sealed)
    generations = set()
    try:
        for index, need in enumerate(needs):
            data = arena.reserve(need)
            assert len(data) == need
            assert arena.touched <= arena.size
            data[:] = bytes([index % 251]) * need
            del data
            generations.add(bytes(arena.head()[GENERATION]))
            most = max(needs[max(0, index + 1 - REMEMBERED) : index + 1])
            assert most <= arena.size <= 2 * most + PAGE
            assert os.fstat(arena.descriptor).st_size == HEAD_BYTES + arena.size
        assert len(generations) == len(needs)
        assert NO_DATA not in generations
    finally:
        arena.close()


def held_bytes(descriptor: int) -> int:
    """The memory that the system has given to a file in memory."""
    return os.fstat(descriptor).st_blocks * 512


def shrinks(arena: Arena) -> None:
    arena.reserve(1)
    arena.close()


@pytest.mark.parametrize("gives_up", [Arena.discard, shrinks])
def test_memory_that_others_map_never_shrinks_and_is_given_back_all_the_same(
    gives_up: Callable[[Arena], object],
) -> None:
    arena = Arena(is_sealed=True)
    data = arena.reserve(100 * PAGE)
    data[:] = b"x" * len(data)
    del data
    descriptor = os.dup(arena.descriptor)
    other = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    for size in (0, HEAD_BYTES, len(other) - 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert held_bytes(descriptor) == len(other)
    for _ in range(REMEMBERED - 1):
        arena.reserve(1)
    assert other[-1:] == b"x"
    gives_up(arena)
    assert held_bytes(descriptor) == 0
    assert other[GENERATION] == NO_DATA
    assert other[-1:] == b"\0"  # no access to it ends the process
    other.close()
    os.close(descriptor)


@pytest.mark.parametrize("is_touched", [False, True])
def test_what_is_filled_is_there_whether_its_memory_was_or_not(is_touched: bool) -> None:
    arena = Arena()
    nbytes = TOUCH_BYTES + 3 * PAGE + 7
    data = arena.reserve(nbytes)
    assert arena.touched in (0, (HEAD_BYTES + nbytes) // HUGE * HUGE - HEAD_BYTES)
    if is_touched:
        arena.touch(2)
    content = os.urandom(nbytes)
    source = ctypes.create_string_buffer(content, nbytes)
    for lo, hi in ((0, 5), (5, PAGE), (PAGE, nbytes)):
        arena.fill(lo, ctypes.addressof(source) + lo, hi - lo)
    arena.touch(3)
    assert nbytes <= arena.touched <= arena.size
    assert data == content
    del data
    arena.close()


def test_memory_that_cannot_be_read_is_an_error_and_no_crash() -> None:
    arena = Arena()
    arena.reserve(PAGE)
    with pytest.raises(OSError, match="for 8 bytes of shared memory"):
        arena.fill(0, 1, 8)
    arena.close()


def test_a_copy_that_a_signal_interrupts_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = arena_module._pwrite, [errno.EINTR]

    def pwrite(*arguments: int) -> int:
        if left:
            ctypes.set_errno(left.pop())
            return -1
        return int(real(*arguments))

    arena, source = Arena(), ctypes.create_string_buffer(b"12345678", 8)
    data = arena.reserve(8)
    monkeypatch.setattr(arena_module, "_pwrite", pwrite)
    arena.fill(0, ctypes.addressof(source), 8)
    assert data == b"12345678"
    del data
    arena.close()


def test_what_one_maps_the_other_sees_and_keeps_while_it_grows() -> None:
    arena = Arena()
    arena.reserve(3)[:] = b"one"
    other = map_memory(arena.descriptor)
    assert other[HEAD_BYTES : HEAD_BYTES + 3] == b"one"
    set_progress(other, 1 << 40)
    assert arena.progress() == 1 << 40
    arena.reserve(10 * PAGE)
    assert (arena.progress(), get_progress(other)) == (0, 0)
    assert other[HEAD_BYTES : HEAD_BYTES + 3] == b"one"
    arena.close()
