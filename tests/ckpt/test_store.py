"""One contract for every store. To add a store, add its name and how to make a place in it."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.errors import ExistsError
from ckpt.local_store import IO_VECTORS, NO_HARD_LINKS, OPEN_FILES, LocalStore
from ckpt.store import Store, is_file, open_store, split_url
from formats.errors import CorruptError, HostileError

PLACES: dict[str, Callable[[Path], str]] = {
    "path": lambda folder: f"{folder}/run/step 1",
    "file": lambda folder: f"file://{folder}/run/step 1",
    "memory": lambda folder: f"memory://{folder.name}/run/step 1",
}
LOCAL = ("path", "file")
CONTENT = random.Random(0).randbytes(1000)


@dataclass(frozen=True)
class Place:
    """Somewhere to open a store, as often as a test likes; nothing is there yet."""

    kind: str
    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> Store:
        return open_store(self.url, self.options)

    @property
    def hides_unfinished_files(self) -> bool:
        """False where a file is seen while it is written: fsspec's memory has no other way."""
        return self.kind != "memory"


@pytest.fixture(params=[*PLACES, "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "s3":
        server = request.getfixturevalue("moto")
        place = Place("s3", server.url(f"{tmp_path.name}/run/step 1"), server.options)
    else:
        place = Place(request.param, PLACES[request.param](tmp_path))
    yield place
    with place.open() as store:
        for name in store.names():
            store.delete(name)


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with place.open() as opened:
        yield opened


def put(store: Store, name: str, *parts: bytes) -> None:
    with store.create(name) as file:
        file.write(parts)


def fail_to_put(store: Store, name: str, rewritable: bool, error: BaseException) -> None:
    """Begin to write a file, and raise."""
    with store.create(name, rewritable=rewritable) as file:
        file.write([b"the first part"])
        raise error


def content_of(store: Store, name: str) -> bytes:
    return store.read(name, 0, store.size(name))


def test_reading_gives_exactly_the_bytes_asked_for(store: Store) -> None:
    put(store, "data", CONTENT)
    assert store.size("data") == len(CONTENT)
    chance = random.Random(1)
    for _ in range(100):
        lo, hi = sorted(chance.choices(range(len(CONTENT) + 1), k=2))
        assert store.read("data", lo, hi - lo) == CONTENT[lo:hi]
        target = bytearray(b"\xff" * (hi - lo + 2))
        store.read_into("data", lo, memoryview(target)[1:-1])
        assert target == b"\xff" + CONTENT[lo:hi] + b"\xff"


def test_a_buffer_of_any_element_type_is_filled_as_bytes(store: Store) -> None:
    put(store, "data", CONTENT)
    matrix = np.zeros((5, 4), dtype=np.float64)
    store.read_into("data", 7, matrix.data)
    assert matrix.tobytes() == CONTENT[7 : 7 + matrix.nbytes]


@pytest.mark.parametrize(("offset", "length"), [(990, 11), (1000, 1), (5000, 3), (0, 1001)])
def test_reading_past_the_end_is_an_error_with_the_numbers(
    store: Store, offset: int, length: int
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
        assert f"bytes {offset}:{offset + length} are wanted" in message
        assert "ends at 1000" in message


def test_a_missing_file_is_an_error_that_names_it(store: Store) -> None:
    put(store, "another", b"x")
    assert not store.exists("absent")
    for read in (
        lambda: store.size("absent"),
        lambda: store.read("absent", 0, 1),
        lambda: store.read_into("absent", 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(FileNotFoundError, match="absent"):
            read()


def test_a_small_file_is_read_whole_and_a_large_one_refused(store: Store) -> None:
    put(store, "data", CONTENT)
    put(store, "empty", b"")
    assert store.read_whole("data", len(CONTENT)) == CONTENT
    assert store.read_whole("empty", 0) == b""
    with pytest.raises(HostileError, match="/data: it has 1000 bytes"):
        store.read_whole("data", len(CONTENT) - 1)
    with pytest.raises(FileNotFoundError, match="absent"):
        store.read_whole("absent", 1)


def test_a_listing_has_the_sizes_of_the_files_and_their_times(store: Store) -> None:
    began = time.time() - 60
    for name, nbytes in (("b", 5), ("a", 0), ("c d", 1000)):
        put(store, name, CONTENT[:nbytes])
    assert store.sizes() == {"a": 0, "b": 5, "c d": 1000}
    assert began < store.modified("b") < time.time() + 60
    with pytest.raises(FileNotFoundError, match="absent"):
        store.modified("absent")


def test_a_file_being_written_is_listed_as_unfinished_and_can_be_let_go_of(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_STORE_DEADLINE", "1")  # moto says that it is moto's fault
    store = place.open()
    assert store.unfinished() == []
    if not place.hides_unfinished_files:
        pytest.skip("fsspec has no word for unfinished files")
    began = time.time() - 60
    with pytest.raises(OSError), store.create("data") as file:  # noqa: PT012
        for _ in range(17 if place.kind == "s3" else 1):  # MiB: a part has to be full
            file.write([CONTENT, bytes((1 << 20) - len(CONTENT))])
        with place.open() as other:
            [found] = other.unfinished()
            assert found.name == "data"
            # moto's clock stands still, in 2010
            assert (began if place.kind in LOCAL else 0) < found.started < time.time() + 60
            other.abort(found)
            other.abort(found)
            assert other.unfinished() == []
    assert store.names() == []


def test_a_store_says_what_it_promises(place: Place, store: Store) -> None:
    if place.kind == "s3":
        store.commit("manifest", CONTENT, replace=False)  # what a server does is found out so
    assert store.promises.put_if_absent == (place.kind != "memory")
    assert store.promises.hides_unfinished == place.hides_unfinished_files


def test_nothing_is_listed_where_nothing_is(store: Store) -> None:
    assert store.names() == []
    assert store.sizes() == {}
    assert store.folders() == []
    assert not store.exists("data")


def test_files_and_folders_are_listed_apart_and_sorted(place: Place, store: Store) -> None:
    for name in ("b", "c", "a", "B.x", "0"):
        put(store, name, b"")
    inner = [open_store(f"{place.url}/{folder}", place.options) for folder in ("z", "y")]
    for below in inner:
        put(below, "deep", b"")
    assert store.names() == ["0", "B.x", "a", "b", "c"]
    assert store.folders() == ["y", "z"]
    assert not store.exists("y")  # a folder is not a file
    for below in inner:
        assert below.names() == ["deep"]
        below.delete("deep")


def test_writing_appends_buffers_of_all_kinds_in_order(store: Store) -> None:
    numbers = np.arange(12, dtype=np.uint16).reshape(3, 4)
    many = [bytes([i % 251]) * (i % 5) for i in range(2 * IO_VECTORS + 100)]
    with store.create("data") as file:
        file.write([b"abc", bytearray(b"de"), b"", memoryview(b"f"), numbers.data])
        file.write(iter(many))
        file.write([])
    assert content_of(store, "data") == b"abcdef" + numbers.tobytes() + b"".join(many)


def test_a_written_buffer_may_be_reused_at_once(store: Store) -> None:
    buffer = bytearray(64)
    with store.create("data") as file:
        for value in range(200):
            buffer[:] = bytes([value]) * len(buffer)
            file.write([buffer])
    assert content_of(store, "data") == b"".join(bytes([value]) * 64 for value in range(200))


def test_a_file_is_invisible_until_it_is_complete(place: Place, store: Store) -> None:
    if not place.hides_unfinished_files:
        pytest.skip("fsspec's memory shows what is written so far")
    with place.open() as other, store.create("data") as file:
        file.write([CONTENT])
        assert not other.exists("data")
        assert "data" not in other.names()
        with pytest.raises(FileNotFoundError):
            other.size("data")
    assert store.names() == ["data"]


@pytest.mark.parametrize("rewritable", [False, True])
def test_a_file_whose_writing_fails_is_absent(place: Place, store: Store, rewritable: bool) -> None:
    if not rewritable and not place.hides_unfinished_files:
        pytest.skip("fsspec's memory keeps what was written so far")
    with pytest.raises(KeyboardInterrupt):
        fail_to_put(store, "data", rewritable, KeyboardInterrupt())
    assert store.names() == []
    assert not store.exists("data")


@pytest.mark.parametrize("rewritable", [False, True])
def test_a_file_whose_replacing_fails_stays_as_it_was(
    place: Place, store: Store, rewritable: bool
) -> None:
    if not rewritable and not place.hides_unfinished_files:
        pytest.skip("fsspec's memory empties a file when it is opened for writing")
    put(store, "data", CONTENT)
    with pytest.raises(ZeroDivisionError):
        fail_to_put(store, "data", rewritable, ZeroDivisionError())
    assert content_of(store, "data") == CONTENT


def test_a_file_can_be_replaced_by_a_new_one(store: Store) -> None:
    put(store, "data", CONTENT)
    assert content_of(store, "data") == CONTENT  # and is perhaps kept open
    put(store, "data", b"a new one")
    assert content_of(store, "data") == b"a new one"


def test_the_start_of_a_rewritable_file_can_be_filled_in_last(store: Store) -> None:
    with store.create("data", rewritable=True) as file:
        file.write([b"........", CONTENT])
        file.rewrite_start(b"12345")
        file.write([b"end"])
        file.rewrite_start(memoryview(b"ab"))
    assert content_of(store, "data") == b"ab345..." + CONTENT + b"end"


def test_a_stream_that_cannot_change_its_start_says_so(place: Place, store: Store) -> None:
    if place.kind in LOCAL:
        pytest.skip("a local file can always be rewritten")
    with store.create("data") as file:
        file.write([b"12345"])
        with pytest.raises(OSError, match="create it rewritable"):
            file.rewrite_start(b"abc")


@pytest.mark.parametrize("replace", [False, True])
def test_commit_writes_a_file_where_there_was_nothing(store: Store, replace: bool) -> None:
    store.commit("manifest", CONTENT, replace=replace)
    assert store.names() == ["manifest"]
    assert content_of(store, "manifest") == CONTENT


def test_commit_refuses_a_file_that_exists_and_leaves_it(store: Store) -> None:
    store.commit("manifest", b"first", replace=False)
    with pytest.raises(ExistsError, match="manifest exists already"):
        store.commit("manifest", b"second", replace=False)
    assert content_of(store, "manifest") == b"first"
    assert store.names() == ["manifest"]


def test_commit_replaces_when_it_is_told_to(store: Store) -> None:
    store.commit("manifest", b"first", replace=False)
    assert content_of(store, "manifest") == b"first"
    store.commit("manifest", b"the second", replace=True)
    assert content_of(store, "manifest") == b"the second"
    assert store.names() == ["manifest"]


def test_deleting_twice_is_deleting_once(store: Store) -> None:
    store.delete("data")  # not even the folder exists
    put(store, "data", CONTENT)
    put(store, "other", b"x")
    assert store.read("data", 0, 1) == CONTENT[:1]
    store.delete("data")
    store.delete("data")
    assert store.names() == ["other"]
    with pytest.raises(FileNotFoundError):
        store.read("data", 0, 1)


def test_many_threads_read_what_each_of_them_asks_for(store: Store) -> None:
    files = {f"f{i}": random.Random(i).randbytes(500) for i in range(20)}
    for name, content in files.items():
        put(store, name, content)

    def read(seed: int) -> bool:
        chance = random.Random(seed)
        for _ in range(100):
            name = chance.choice(list(files))
            lo, hi = sorted(chance.choices(range(501), k=2))
            if store.read(name, lo, hi - lo) != files[name][lo:hi]:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(8)))


def test_a_path_or_url_of_one_file_is_known_from_a_folder(place: Place, store: Store) -> None:
    put(store, "model.pt", b"x")
    assert is_file(f"{place.url}/model.pt", place.options)
    assert not is_file(place.url, place.options)
    assert not is_file(f"{place.url}/absent", place.options)
    assert split_url(f"{place.url}/model.pt") == (place.url, "model.pt")


# What only a local disk promises.


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStore]:
    with LocalStore(tmp_path / "store") as opened:
        yield opened


def raced(folder: Path, writers: int) -> tuple[list[int], bytes]:
    """The threads whose commit succeeded, of many at once, and what is there afterwards."""
    start = threading.Barrier(writers)

    def commit(number: int) -> bool:
        with LocalStore(folder) as store:
            start.wait()
            try:
                store.commit("manifest", bytes([number]) * 1000, replace=False)
            except ExistsError:
                return False
            return True

    with ThreadPoolExecutor(writers) as pool:
        won = list(pool.map(commit, range(writers)))
    with LocalStore(folder) as store:
        assert store.names() == ["manifest"]
        return [number for number, first in enumerate(won) if first], content_of(store, "manifest")


def test_of_several_commits_at_once_exactly_one_succeeds(tmp_path: Path) -> None:
    for attempt in range(20):
        winners, content = raced(tmp_path / str(attempt), 6)
        assert len(winners) == 1
        assert content == bytes(winners) * 1000


def test_a_concurrent_reader_sees_the_old_commit_or_the_new(tmp_path: Path) -> None:
    contents = [bytes([i]) * (100 + 37 * i) for i in range(40)]
    with LocalStore(tmp_path) as writer:
        writer.commit("manifest", contents[0], replace=False)
        finished = threading.Event()

        def write() -> None:
            for content in contents * 3:
                writer.commit("manifest", content, replace=True)
            finished.set()

        thread = threading.Thread(target=write)
        thread.start()
        seen = set()
        while not finished.is_set():
            with LocalStore(tmp_path) as reader:
                seen.add(content_of(reader, "manifest"))
        thread.join()
    assert len(seen) > 1
    assert seen <= set(contents)


def test_a_file_is_read_as_it_was_when_its_size_was_asked(local: LocalStore) -> None:
    local.commit("manifest", b"the old one", replace=False)
    with LocalStore(local.url) as other:
        size = other.size("manifest")
        local.commit("manifest", b"new", replace=True)
        assert other.read("manifest", 0, size) == b"the old one"


def test_a_file_replaced_during_a_read_is_read_anew_afterwards(local: LocalStore) -> None:
    put(local, "data", b"old")
    with local._reading("data"):  # a read that takes its time, in another thread
        put(local, "data", b"new")
    assert local.read("data", 0, 3) == b"new"


def test_closing_a_store_during_a_read_leaves_nothing_open(local: LocalStore) -> None:
    put(local, "data", b"old")
    with local._reading("data"):
        local.close()
    assert open_below(local) == 0


def open_below(store: LocalStore) -> int:
    """How many of this process' descriptors are files of the store."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # closed since, or the listing's own
            continue
        count += path.startswith(store.url)
    return count


def test_the_number_of_open_files_is_bounded_and_none_leak(local: LocalStore) -> None:
    files, threads = 200, 4
    for i in range(files):
        put(local, f"f{i}", i.to_bytes(4, "little"))
    assert open_below(local) == 0
    most = [0] * threads

    def read(thread: int) -> bool:
        order = list(range(files))
        random.Random(thread).shuffle(order)
        for i in order:
            if local.read(f"f{i}", 0, 4) != i.to_bytes(4, "little"):
                return False
            most[thread] = max(most[thread], open_below(local))
        return True

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(read, range(threads)))
    assert max(most) <= OPEN_FILES + threads  # what is kept, and one being read by each thread
    assert open_below(local) <= OPEN_FILES
    local.close()
    assert open_below(local) == 0


def test_failures_leave_no_file_open_and_none_behind(local: LocalStore) -> None:
    put(local, "data", CONTENT)
    for _ in range(50):
        with pytest.raises(CorruptError):
            local.read("data", 990, 20)
        with pytest.raises(FileNotFoundError):
            local.read("absent", 0, 1)
        with pytest.raises(ZeroDivisionError):
            fail_to_put(local, "new", False, ZeroDivisionError())
        with pytest.raises(ExistsError):
            local.commit("data", b"", replace=False)
    assert open_below(local) <= 1
    assert os.listdir(local.url) == ["data"]


@pytest.mark.parametrize("code", NO_HARD_LINKS, ids=lambda code: errno.errorcode[code])
def test_a_file_system_without_hard_links_still_refuses_what_exists(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    local.commit("manifest", b"first", replace=False)
    with pytest.raises(ExistsError, match="manifest exists already"):
        local.commit("manifest", b"second", replace=False)
    assert content_of(local, "manifest") == b"first"
    assert os.listdir(local.url) == ["manifest"]


def test_a_disk_that_fails_to_link_is_not_taken_for_one_without_links(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        local.commit("manifest", b"first", replace=False)
    assert os.listdir(local.url) == []


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_files_have_the_permissions_the_user_asked_for(local: LocalStore, mask: int) -> None:
    before = os.umask(mask)
    try:
        put(local, "data", b"x")
        local.commit("manifest", b"x", replace=False)
        local.commit("other", b"x", replace=True)
    finally:
        os.umask(before)
    for name in local.names():
        assert os.stat(f"{local.url}/{name}").st_mode & 0o777 == 0o666 & ~mask, name


def test_of_two_writers_of_one_name_the_last_to_finish_wins_whole(local: LocalStore) -> None:
    with local.create("data") as outer:
        outer.write([b"outer " * 10])
        put(local, "data", b"inner")
        assert content_of(local, "data") == b"inner"
        outer.write([b"end"])
    assert content_of(local, "data") == b"outer " * 10 + b"end"
    assert os.listdir(local.url) == ["data"]
