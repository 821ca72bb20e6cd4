"""Records with one CRC-32 for all their bytes: compared when all of one is read, told when not."""

import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.plan.read_plan import Limits, ReadRequest, requests_for
from ckpt.stores.local_store import LocalStore
from ckpt.transfer import read as transferring
from ckpt.transfer.read import RangeReader, ReadPolicy, Targets, bytes_of, read_requests
from ckpt.transfer.record_sums import RecordSums, Verify
from formats.catalog import Extent, PieceTable, StoredPiece, TensorRecord
from formats.dtypes import BY_NAME
from formats.errors import CorruptError
from sharding.layout import Box, Piece, row_major
from tests.selection import examples

LIMITS = Limits(read_bytes=96, direct_bytes=160, scratch_bytes=64, gap_bytes=16)
"""Limits by which a record of some hundred bytes is cut into many reads."""
POLICY = ReadPolicy(2, LIMITS)
SKIPPED = 7
"""Bytes of a file before its record."""


def extent_of(data: bytes) -> Extent:
    return Extent("file", SKIPPED, len(data), crc32=zlib.crc32(data))


def request_of(extent: Extent) -> ReadRequest:
    """All of an extent, as bytes."""
    stored = StoredPiece(Piece.packed(Box((0,), (extent.nbytes,))), extent)
    record = TensorRecord("w", (extent.nbytes,), BY_NAME["U8"], PieceTable([stored]))
    (request,) = requests_for(record, [Piece.packed(Box((0,), (extent.nbytes,)))])
    return request


@given(data=st.data(), size=st.integers(1, 60))
def test_ranges_that_come_in_any_order_are_compared_when_they_are_the_whole(
    data: st.DataObject, size: int
) -> None:
    content = random.Random(size).randbytes(size)
    given_bytes = bytearray(content)
    if data.draw(st.booleans()):
        given_bytes[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    bounds = st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted)
    ranges = [(lo, hi) for lo, hi in data.draw(st.lists(bounds, max_size=12)) if lo < hi]
    sums, request = RecordSums(), request_of(extent_of(content))
    found, read = [], set()
    for lo, hi in ranges:
        part = sums.part(request, SKIPPED + lo, SKIPPED + hi)
        is_new = not read >= set(range(lo, hi))
        assert (part is not None) == is_new
        read |= set(range(lo, hi))
        if part is not None:
            middle = data.draw(st.integers(lo, hi))
            for start, stop in ((lo, middle), (middle, hi)):
                part.take(SKIPPED + start, memoryview(given_bytes)[start:stop])
            found.append(sums.wrong(part))
    is_whole = len(read) == size
    assert sums.unverified == (("w",) if read and not is_whole else ())
    wrong = [value for value in found if value is not None]
    expected = zlib.crc32(given_bytes)
    assert wrong == ([expected] if is_whole and given_bytes != content else [])


def view_of(
    extent: Extent, shape: tuple[int, int], at: int, steps: tuple[int, int]
) -> TensorRecord:
    stored = StoredPiece(Piece(Box.whole(shape), at, steps), extent)
    return TensorRecord(f"view at {at}", shape, BY_NAME["U8"], PieceTable([stored]))


@st.composite
def views(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, int], int, tuple[int, int]]]]:
    """The bytes of a record, and tensors that lie in it: shapes, first bytes, strides."""
    size, found = draw(st.integers(1, 400)), []
    for _ in range(draw(st.integers(1, 3))):
        shape = (draw(st.integers(1, 20)), draw(st.integers(1, 20)))
        steps = draw(st.sampled_from([row_major(shape), (1, shape[0]), (shape[1] + 3, 1), (0, 1)]))
        last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if last < size:
            found.append((shape, draw(st.integers(0, size - 1 - last)), steps))
    return size, found


@settings(max_examples=examples(150))
@given(
    case=views(),
    flip=st.integers(0, 400 * 8 - 1),
    verify=st.sampled_from([True, "all"]),
    whole=st.booleans(),
)
def test_no_flip_is_silent_where_not_told_and_none_at_all_with_all(
    case: tuple[int, list[tuple[tuple[int, int], int, tuple[int, int]]]],
    flip: int,
    verify: Verify,
    whole: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    size, tensors = case
    content = random.Random(flip).randbytes(size)
    extent, flip = extent_of(content), flip % (8 * size)
    harmed = bytearray(content)
    harmed[flip // 8] ^= 1 << flip % 8
    records = [view_of(extent, *tensor) for tensor in tensors]
    if whole:
        records.append(view_of(extent, (1, size), 0, (size, 1)))
    folder = tmp_path_factory.mktemp("case")
    for data, is_sound in ((content, True), (harmed, False)):
        (folder / "file").write_bytes(bytes(SKIPPED) + data)
        requests, arrays = [], []
        for record in records:
            arrays.append(np.zeros(record.nbytes, np.uint8))
            whole_record = [Piece.packed(Box.whole(record.shape))]
            requests += requests_for(record, whole_record, len(arrays) - 1)
        with LocalStore(folder) as store:
            targets = list(map(bytes_of, arrays))
            assert read_requests(store, requests, targets, False, policy=POLICY) == ()
            found = what_is_told(store, requests, targets, verify)
        if isinstance(found, str):
            assert not is_sound
            assert f"{folder}/file: view at " in found
            assert f"bytes {SKIPPED}:{SKIPPED + size} have the CRC-32 " in found
        else:
            assert is_sound or not records or (verify is True and not whole and found)
            assert verify is True or found == ()


def what_is_told(
    store: LocalStore, requests: list[ReadRequest], targets: Targets, verify: Verify
) -> str | tuple[str, ...]:
    """The error, or the tensors that could not be verified."""
    try:
        return read_requests(store, requests, targets, verify, policy=POLICY)
    except CorruptError as error:
        return str(error)


@pytest.mark.parametrize("flipped", [None, 0, 700, 3999])
def test_several_threads_read_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flipped: int | None
) -> None:
    monkeypatch.setattr(transferring, "THREAD_BYTES", 0)
    content = bytearray(random.Random(1).randbytes(4000))
    extent = extent_of(content)
    if flipped is not None:
        content[flipped] ^= 64
    (tmp_path / "file").write_bytes(bytes(SKIPPED) + content)
    with LocalStore(tmp_path) as store:
        sums = RecordSums()
        ranges = RangeReader(store, sums, ReadPolicy(4, LIMITS))
        target = bytes_of(np.zeros(4000, np.uint8))
        if flipped is None:
            ranges.run([request_of(extent)], [target])
            assert sums.unverified == ()
        else:
            with pytest.raises(CorruptError, match="file: w: bytes 7:4007 have the CRC-32"):
                ranges.run([request_of(extent)], [target])


class Counting(LocalStore):
    """Counts what is read at once and in all."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sizes: list[int] = []

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        self.sizes.append(sum(map(len, targets)))
        super().read_into(name, offset, *targets)


def reading(
    folder: Path, content: bytes, box: Box, verify: Verify
) -> tuple[Counting, tuple[str, ...]]:
    """Read a box of a record's bytes."""
    (folder / "file").write_bytes(bytes(SKIPPED) + content)
    extent = extent_of(content)
    stored = StoredPiece(Piece.packed(Box((0,), (len(content),))), extent)
    record = TensorRecord("w", (len(content),), BY_NAME["U8"], PieceTable([stored]))
    array = np.zeros(box.numel, np.uint8)
    with Counting(folder) as store:
        requests = requests_for(record, [Piece.packed(box)])
        told = read_requests(store, requests, [bytes_of(array)], verify, policy=POLICY)
    assert array.tobytes() == content[box.lo[0] : box.hi[0]]
    return store, told


@pytest.mark.parametrize("verify", [True, "all"])
def test_a_record_larger_than_the_scratch_memory_is_read_once_and_bit_by_bit(
    tmp_path: Path, verify: Verify
) -> None:
    content = random.Random(2).randbytes(100 * LIMITS.scratch_bytes)
    whole = Box((0,), (len(content),))
    store, told = reading(tmp_path, content, whole, verify)
    assert told == ()
    assert sum(store.sizes) == len(content)
    store, told = reading(tmp_path, content, Box((700,), (900,)), verify)
    assert max(store.sizes) <= LIMITS.direct_bytes
    assert (told, sum(store.sizes)) == (("w",), 200) if verify is True else ((), len(content))


def test_the_rest_of_a_small_record_is_read_with_the_part_that_is_wanted(tmp_path: Path) -> None:
    content = random.Random(3).randbytes(LIMITS.gap_bytes)
    store, told = reading(tmp_path, content, Box((3,), (5,)), True)
    assert told == ()
    assert store.sizes == [len(content)]
    store, told = reading(tmp_path, content, Box((3,), (5,)), False)
    assert store.sizes == [2]


def test_what_has_many_gaps_is_read_once_more_and_not_gap_by_gap(tmp_path: Path) -> None:
    content = random.Random(4).randbytes(300 * 40)
    (tmp_path / "file").write_bytes(bytes(SKIPPED) + content)
    record = view_of(extent_of(content), (300, 2), 0, (40, 1))
    requests = requests_for(record, [Piece.packed(Box.whole((300, 2)))])
    target = bytes_of(np.zeros(600, np.uint8))
    with Counting(tmp_path) as store:
        assert read_requests(store, requests, [target], "all", policy=POLICY) == ()
    assert len(store.sizes) <= 300 + -(-len(content) // LIMITS.scratch_bytes)


@pytest.mark.parametrize("verify", ["every", None, 1, "True"])
def test_a_verify_that_is_none_is_refused(verify: Verify) -> None:
    with pytest.raises(ValueError, match=r"verify is .*; give True, False or 'all'"):
        RecordSums(verify)
