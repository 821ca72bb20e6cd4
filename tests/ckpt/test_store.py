"""What only a store on a local disk promises; what every store does is in tests/stores."""

import errno
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import ExistsError
from ckpt.stores.local_files import OPEN_FILES
from ckpt.stores.local_store import NO_HARD_LINKS, LocalStore
from ckpt.testing import content_of, fail_to_put, put
from formats.errors import CorruptError

CONTENT = random.Random(0).randbytes(1000)


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


@pytest.mark.thorough
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
    with local._files.reading("data"):  # a read that takes its time, in another thread
        put(local, "data", b"new")
    assert local.read("data", 0, 3) == b"new"


def test_closing_a_store_during_a_read_leaves_nothing_open(local: LocalStore) -> None:
    put(local, "data", b"old")
    with local._files.reading("data"):
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


@pytest.mark.thorough
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
        with pytest.raises(CorruptError, match="/absent: the file is missing"):
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


@pytest.mark.parametrize("call", ["close", "unlink"])
def test_a_file_that_is_there_is_no_failure_whatever_a_close_or_an_unlink_says(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)

    def failing(*given: Any, **options: Any) -> None:
        real(*given, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with LocalStore(tmp_path / "run") as store, monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with store.create("a") as writer:
            writer.write([b"1"])
        store.commit("b", b"2", replace=False)
        store.commit("b", b"3", replace=True)
    assert {one.name: one.read_bytes() for one in (tmp_path / "run").iterdir()} == {
        "a": b"1",
        "b": b"3",
    }


TOO_LARGE = """
import os, resource, sys
import ckpt, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    ckpt.save(sys.argv[1], {"w": torch.zeros(1_000_000)})
except ckpt.StoreError as error:
    print(os.strerror(error.errno), error)
"""


def test_a_save_that_fails_leaves_no_folder(programs: Callable[..., Any], tmp_path: Path) -> None:
    out, err = programs(TOO_LARGE, tmp_path / "step-1").communicate()
    assert re.match(r"File too large .*step-1/\S+: writing it failed: File too large; ", out), err
    assert list(tmp_path.iterdir()) == []
