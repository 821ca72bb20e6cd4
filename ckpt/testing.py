"""Contracts for tests of other packages: what `ckpt` expects of a store, and of a readable format.

A class of tests inherits a contract and says where the store or the checkpoint is. This module
needs pytest, which `ckpt` itself does not.

    import ckpt.testing
    import pytest

    class TestMyBucket(ckpt.testing.StoreContract):
        @pytest.fixture
        def place(self):
            yield ckpt.testing.StorePlace("mine://bucket/a-new-folder", {"key": "value"})
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import CkptError, CorruptError, ExistsError, HostileError, MisuseError
from ckpt.stores.store import Store, open_store
from formats.storage import BESIDE

CONTENT = random.Random(0).randbytes(1000)
ODD_NAMES = (
    *("a b", "a+b", "a%20b", "100%", "ü-日本", "a=b&c", "it's", "a~b", ".hidden", "a@b:c"),
    "x" * 200,
)
"""Names that URLs and signatures have to encode. (No store need take `/`, `?`, `#`, `*` or `[`.)"""


def put(store: Store, name: str, *parts: bytes) -> None:
    """Writes a file of a store, whole."""
    with store.create(name) as file:
        file.write(parts)


def fail_to_put(store: Store, name: str, rewritable: bool, error: BaseException) -> None:
    """Begins to write a file, and raises `error`."""
    with store.create(name, rewritable=rewritable) as file:
        file.write([b"the first part"])
        raise error


def content_of(store: Store, name: str) -> bytes:
    """Returns a file of a store, whole."""
    return store.read(name, 0, store.size(name))


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A folder of a store, in which nothing is yet."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The `storage_options` of the URL."""

    def open(self, folder: str = "") -> Store:
        """Returns the opened folder, or one below it."""
        return open_store(f"{self.url}/{folder}" if folder else self.url, self.options)


class StoreContract:
    """Each behaviour that `ckpt` needs of a store, for subclasses with a fixture `place`.

    What a store need not do is skipped with the reason. `ckpt doctor URL` says what `ckpt` may
    promise on a store.
    """

    @pytest.fixture
    def place(self) -> Iterator[StorePlace]:
        """The folder of one test. A subclass gives another one to each test."""
        raise MisuseError("a subclass of StoreContract has a fixture `place`")

    @pytest.fixture
    def store(self, place: StorePlace) -> Iterator[Store]:
        """The opened folder, which is emptied after the test."""
        with place.open() as opened:
            yield opened
            for name in opened.names():
                opened.delete(name)

    def test_reading_gives_exactly_the_bytes_asked_for(self, store: Store) -> None:
        put(store, "data", CONTENT)
        assert store.size("data") == len(CONTENT)
        chance = random.Random(1)
        for _ in range(30):
            lo, hi = sorted(chance.choices(range(len(CONTENT) + 1), k=2))
            assert store.read("data", lo, hi - lo) == CONTENT[lo:hi]
            target = bytearray(b"\xff" * (hi - lo + 2))
            store.read_into("data", lo, memoryview(target)[1:-1])
            assert target == b"\xff" + CONTENT[lo:hi] + b"\xff"

    def test_a_buffer_of_any_element_type_is_filled_as_bytes(self, store: Store) -> None:
        put(store, "data", CONTENT)
        matrix = np.zeros((5, 4), dtype=np.float64)
        store.read_into("data", 7, matrix.data)
        assert matrix.tobytes() == CONTENT[7 : 7 + matrix.nbytes]

    @pytest.mark.parametrize(("offset", "length"), [(990, 11), (1000, 1), (5000, 3), (0, 1001)])
    def test_reading_past_the_end_is_an_error_with_the_numbers(
        self, store: Store, offset: int, length: int
    ) -> None:
        put(store, "data", CONTENT)
        for read in (
            lambda: store.read("data", offset, length),
            lambda: store.read_into("data", offset, memoryview(bytearray(length))),
        ):
            with pytest.raises(CorruptError) as caught:
                read()
            message = str(caught.value)
            assert "/data: " in message
            assert f"bytes {offset}:{offset + length} are needed" in message
            assert "ends at 1000" in message

    def test_a_missing_file_is_an_error_that_names_it(self, store: Store) -> None:
        put(store, "another", b"x")
        assert not store.exists("absent")
        with pytest.raises(FileNotFoundError, match="absent"):
            store.size("absent")

    def test_bytes_of_a_missing_file_are_wanted_where_it_was_deleted_meanwhile(
        self, store: Store
    ) -> None:
        put(store, "another", b"x")
        for read in (
            lambda: store.read("absent", 0, 1),
            lambda: store.read_into("absent", 0, memoryview(bytearray(1))),
        ):
            with pytest.raises(CorruptError, match="/absent: the file is missing: it was deleted"):
                read()

    def test_a_small_file_is_read_whole_and_a_large_one_refused(self, store: Store) -> None:
        put(store, "data", CONTENT)
        put(store, "empty", b"")
        assert store.read_whole("data", len(CONTENT)) == CONTENT
        assert store.read_whole("empty", 0) == b""
        with pytest.raises(HostileError, match="/data: the file has 1000 bytes"):
            store.read_whole("data", len(CONTENT) - 1)
        with pytest.raises(FileNotFoundError, match="absent"):
            store.read_whole("absent", 1)

    def test_nothing_is_listed_where_nothing_is(self, store: Store) -> None:
        assert store.names() == []
        assert store.sizes() == {}
        assert store.folders() == []
        assert not store.exists("data")

    def test_files_and_folders_are_listed_apart_and_sorted(
        self, place: StorePlace, store: Store
    ) -> None:
        for name in ("b", "c", "a", "B.x", "0"):
            put(store, name, b"")
        inner = [place.open(folder) for folder in ("z", "y")]
        for below in inner:
            put(below, "deep", b"")
        assert store.names() == ["0", "B.x", "a", "b", "c"]
        assert store.folders() == ["y", "z"]
        assert not store.exists("y")  # a folder is not a file
        for below in inner:
            assert below.names() == ["deep"]
            below.delete("deep")

    def test_writing_appends_buffers_of_all_kinds_in_order(self, store: Store) -> None:
        numbers = np.arange(12, dtype=np.uint16).reshape(3, 4)
        many = [bytes([i % 251]) * (i % 5) for i in range(2 * 1024 + 100)]
        with store.create("data") as file:
            file.write([b"abc", bytearray(b"de"), b"", memoryview(b"f"), numbers.data])
            file.write(iter(many))
            file.write([b""] * 20)
        assert content_of(store, "data") == b"abcdef" + numbers.tobytes() + b"".join(many)

    def test_a_written_buffer_may_be_reused_at_once(self, store: Store) -> None:
        buffer = bytearray(64)
        with store.create("data") as file:
            for value in range(200):
                buffer[:] = bytes([value]) * len(buffer)
                file.write([buffer])
        assert content_of(store, "data") == b"".join(bytes([value]) * 64 for value in range(200))

    def test_a_file_is_invisible_until_it_is_complete(
        self, place: StorePlace, store: Store
    ) -> None:
        if not store.capabilities.hides_unfinished:
            pytest.skip("this store shows what is written so far")
        with place.open() as other, store.create("data") as file:
            file.write([CONTENT])
            assert not other.exists("data")
            assert "data" not in other.names()
            with pytest.raises(FileNotFoundError):
                other.size("data")
        assert store.names() == ["data"]

    @pytest.mark.parametrize("rewritable", [False, True])
    def test_a_file_whose_writing_fails_is_absent(
        self, place: StorePlace, store: Store, rewritable: bool
    ) -> None:
        if not rewritable and not store.capabilities.hides_unfinished:
            pytest.skip("this store keeps what was written so far")
        with pytest.raises(KeyboardInterrupt):
            fail_to_put(store, "data", rewritable, KeyboardInterrupt())
        assert store.names() == []
        assert not store.exists("data")

    @pytest.mark.parametrize("rewritable", [False, True])
    def test_a_file_whose_replacing_fails_stays_as_it_was(
        self, place: StorePlace, store: Store, rewritable: bool
    ) -> None:
        if not rewritable and not store.capabilities.hides_unfinished:
            pytest.skip("this store empties a file when it is opened for writing")
        put(store, "data", CONTENT)
        with pytest.raises(ZeroDivisionError):
            fail_to_put(store, "data", rewritable, ZeroDivisionError())
        assert content_of(store, "data") == CONTENT

    def test_a_file_can_be_replaced_by_a_new_one(self, store: Store) -> None:
        put(store, "data", CONTENT)
        assert content_of(store, "data") == CONTENT  # and is perhaps kept open
        put(store, "data", b"a new one")
        assert content_of(store, "data") == b"a new one"

    @pytest.mark.parametrize("rewritable", [False, True])
    def test_a_file_that_is_to_be_new_is_not_written_over_another(
        self, store: Store, rewritable: bool
    ) -> None:
        with store.create("data", rewritable, replace=False) as file:
            file.write([CONTENT])
        with (
            pytest.raises(ExistsError, match="/data exists already"),
            store.create("data", rewritable, replace=False) as file,
        ):
            file.write([b"a new one"])
        assert content_of(store, "data") == CONTENT
        assert store.names() == ["data"]

    def test_the_start_of_a_rewritable_file_can_be_filled_in_last(self, store: Store) -> None:
        with store.create("data", rewritable=True) as file:
            file.write([b"........", CONTENT])
            file.rewrite_start(b"12345")
            file.write([b"end"])
            file.rewrite_start(memoryview(b"ab"))
        assert content_of(store, "data") == b"ab345..." + CONTENT + b"end"

    @pytest.mark.parametrize("replace", [False, True])
    def test_commit_writes_a_file_where_there_was_nothing(
        self, store: Store, replace: bool
    ) -> None:
        store.commit("manifest", CONTENT, replace=replace)
        assert store.names() == ["manifest"]
        assert content_of(store, "manifest") == CONTENT

    def test_commit_refuses_a_file_that_exists_and_leaves_it(self, store: Store) -> None:
        store.commit("manifest", b"first", replace=False)
        with pytest.raises(ExistsError, match="manifest exists already"):
            store.commit("manifest", b"second", replace=False)
        assert content_of(store, "manifest") == b"first"
        assert store.names() == ["manifest"]

    def test_commit_replaces_when_it_is_told_to(self, store: Store) -> None:
        store.commit("manifest", b"first", replace=False)
        assert content_of(store, "manifest") == b"first"
        store.commit("manifest", b"the second", replace=True)
        assert content_of(store, "manifest") == b"the second"
        assert store.names() == ["manifest"]

    def test_deleting_twice_is_deleting_once(self, store: Store) -> None:
        store.delete("data")  # not even the folder exists
        put(store, "data", CONTENT)
        put(store, "other", b"x")
        assert store.read("data", 0, 1) == CONTENT[:1]
        store.delete("data")
        store.delete("data")
        assert store.names() == ["other"]
        with pytest.raises(CorruptError, match="is missing"):
            store.read("data", 0, 1)

    def test_many_files_are_deleted_also_where_some_are_missing(self, store: Store) -> None:
        names = [f"step-{number}/data" for number in range(5)]
        for name in names:
            put(store, name, CONTENT)
        put(store, "other", CONTENT)
        store.delete_all([*names, "step-9/data"])
        assert not any(store.exists(name) for name in names)
        assert store.names() == ["other"]

    def test_many_threads_read_what_each_of_them_asks_for(self, store: Store) -> None:
        files = {f"f{i}": random.Random(i).randbytes(500) for i in range(20)}
        for name, content in files.items():
            put(store, name, content)

        def read(seed: int) -> bool:
            chance = random.Random(seed)
            for _ in range(15):
                name = chance.choice(list(files))
                lo, hi = sorted(chance.choices(range(501), k=2))
                if store.read(name, lo, hi - lo) != files[name][lo:hi]:
                    return False
            return True

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(8)))

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_name_may_have_what_urls_must_encode(self, store: Store, name: str) -> None:
        put(store, name, CONTENT)
        store.commit(f"{name}.json", b"{}", replace=False)
        assert store.sizes() == dict(sorted({name: 1000, f"{name}.json": 2}.items()))
        assert content_of(store, name) == CONTENT
        assert store.exists(name)
        store.delete(name)
        store.delete(f"{name}.json")
        assert store.names() == []

    def test_a_folder_may_have_what_urls_must_encode(self, place: StorePlace) -> None:
        for folder in ("100% +ü", "a=b&c/it's"):
            with place.open(folder) as below:
                put(below, "data", CONTENT)
                assert below.names() == ["data"]
                assert content_of(below, "data") == CONTENT
                below.delete("data")

    def test_a_file_in_a_folder_beside_is_read(self, place: StorePlace, store: Store) -> None:
        with place.open("base") as base, place.open("borrower") as borrower:
            put(base, "data", CONTENT)
            put(borrower, "own", b"x")  # a disk's folder is there from the first file on
            assert borrower.size(f"{BESIDE}base/data") == len(CONTENT)
            assert borrower.read(f"{BESIDE}base/data", 10, 20) == CONTENT[10:30]
            target = bytearray(30)
            borrower.read_into(
                f"{BESIDE}base/data", 5, memoryview(target)[:10], memoryview(target)[10:]
            )
            assert target == CONTENT[5:35]
            base.delete("data")

    def test_several_buffers_are_filled_end_to_end(self, store: Store) -> None:
        put(store, "data", CONTENT)
        targets = [bytearray(n) for n in (1, 0, 300, 17)]
        store.read_into("data", 100, *[memoryview(target) for target in targets])
        assert b"".join(targets) == CONTENT[100:418]

    def test_an_empty_file_is_a_file(self, store: Store) -> None:
        with store.create("nothing"):
            pass
        with store.create("nothing rewritable", rewritable=True) as file:
            file.write([b""] * 20)
        assert store.sizes() == {"nothing": 0, "nothing rewritable": 0}
        assert store.read("nothing", 0, 0) == b""
        store.read_into("nothing", 0)
        with pytest.raises(CorruptError):
            store.read("nothing", 0, 1)


class FormatContract:
    """Each behaviour that `ckpt` expects of a format it reads, for subclasses with `written`."""

    @pytest.fixture
    def written(self, tmp_path: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        """A checkpoint of the format below `tmp_path`, and all its tensors by their names."""
        raise MisuseError("a subclass of FormatContract has a fixture `written`")

    def test_every_tensor_is_read_to_the_bit(
        self, written: tuple[Path, Mapping[str, torch.Tensor]]
    ) -> None:
        path, expected = written
        _check_equal(path, expected)

    def test_rows_are_read_alone(self, written: tuple[Path, Mapping[str, torch.Tensor]]) -> None:
        path, expected = written
        with ckpt.open(path) as opened:
            for name, tensor in expected.items():
                if tensor.dim():
                    middle = tensor.shape[0] // 2
                    assert torch.equal(_bits(opened[name][middle:]), _bits(tensor[middle:])), name

    def test_a_load_fills_a_target_in_place(
        self, written: tuple[Path, Mapping[str, torch.Tensor]]
    ) -> None:
        path, expected = written
        target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        ckpt.load(path, target, strict=False)
        for name, tensor in expected.items():
            assert torch.equal(_bits(target[name]), _bits(tensor)), name

    def test_a_conversion_has_every_tensor(
        self, written: tuple[Path, Mapping[str, torch.Tensor]], tmp_path: Path
    ) -> None:
        path, expected = written
        ckpt.convert(path, tmp_path / "converted", to="ckpt", select="")
        _check_equal(tmp_path / "converted", expected)
        assert ckpt.diff(path, tmp_path / "converted", values=False).equal

    def test_a_file_that_ends_early_is_an_error_or_not_needed(
        self, written: tuple[Path, Mapping[str, torch.Tensor]]
    ) -> None:
        path, expected = written
        for file in _files(path):
            whole = file.read_bytes()
            for kept in sorted({0, 1, 9, len(whole) // 2, len(whole) - 1} - {len(whole)}):
                file.write_bytes(whole[: max(0, kept)])
                with suppress(CkptError):
                    _check_equal(path, expected)
            file.write_bytes(whole)
        _check_equal(path, expected)

    def test_a_changed_byte_is_an_error_or_a_changed_value(
        self, written: tuple[Path, Mapping[str, torch.Tensor]]
    ) -> None:
        """Nothing is raised but `CkptError`: no number of a file sizes memory or ends a process."""
        path, expected = written
        chance = random.Random(0)
        for file in _files(path):
            whole = file.read_bytes()
            for _ in range(50 if whole else 0):
                changed = bytearray(whole)
                changed[chance.randrange(min(len(whole), 2000))] ^= 1 << chance.randrange(8)
                file.write_bytes(changed)
                with suppress(CkptError):
                    ckpt.read(path)
            file.write_bytes(whole)
        _check_equal(path, expected)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, so that NaN equals itself and -0 is not 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _check_equal(path: Path, expected: Mapping[str, torch.Tensor]) -> None:
    with ckpt.open(path) as opened:
        assert sorted(opened) == sorted(expected)
        for name, tensor in expected.items():
            found = opened[name][...]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(_bits(found), _bits(tensor)), name
