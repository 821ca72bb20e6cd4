"""One contract for every store: local disks, memory, and what real servers make of it over HTTP.

To add a store, add how to make a place in it to `places`.
"""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.checking.doctor import Outcome, examine
from ckpt.errors import ExistsError
from ckpt.removing.progress_files import Watch
from ckpt.stores.local_files import IO_VECTORS
from ckpt.stores.store import Store, is_file, split_url
from formats.errors import CorruptError, HostileError
from formats.storage import BESIDE
from tests.stores.contents import content_of, fail_to_put, put
from tests.stores.places import KINDS, LOCAL, S3, STRONG, Place, place_at
from tests.stores.racers import race
from tests.stores.server import Server, s3_client

CONTENT = random.Random(0).randbytes(1000)
LARGE = random.Random(1).randbytes(1 << 20) * 37 + b"the end"
"""More than servers take, or drivers send, in one piece."""


@pytest.fixture(params=KINDS)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, servers: Callable[[str], Server]
) -> Iterator[Place]:
    place = place_at(request.param, tmp_path, servers)
    yield place
    with place.open() as store:
        for name in store.names():
            store.delete(name)


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with place.open() as opened:
        yield opened


def test_reading_gives_exactly_the_bytes_asked_for(store: Store) -> None:
    put(store, "data", CONTENT)
    assert store.size("data") == len(CONTENT)
    chance = random.Random(1)
    for _ in range(30):
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
        assert f"bytes {offset}:{offset + length} are needed" in message
        assert "ends at 1000" in message


def test_a_missing_file_is_an_error_that_names_it(store: Store) -> None:
    put(store, "another", b"x")
    assert not store.exists("absent")
    with pytest.raises(FileNotFoundError, match="absent"):
        store.size("absent")


def test_bytes_of_a_missing_file_are_wanted_where_it_was_deleted_meanwhile(store: Store) -> None:
    put(store, "another", b"x")
    for read in (
        lambda: store.read("absent", 0, 1),
        lambda: store.read_into("absent", 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(CorruptError, match="/absent: the file is missing: it was deleted"):
            read()


def test_a_small_file_is_read_whole_and_a_large_one_refused(store: Store) -> None:
    put(store, "data", CONTENT)
    put(store, "empty", b"")
    assert store.read_whole("data", len(CONTENT)) == CONTENT
    assert store.read_whole("empty", 0) == b""
    with pytest.raises(HostileError, match="/data: the file has 1000 bytes"):
        store.read_whole("data", len(CONTENT) - 1)
    with pytest.raises(FileNotFoundError, match="absent"):
        store.read_whole("absent", 1)


def test_a_listing_has_the_sizes_of_the_files_and_their_times(store: Store) -> None:
    began = time.time() - 60
    for name, nbytes in (("b", 5), ("a", 0), ("c d", 1000)):
        put(store, name, CONTENT[:nbytes])
    assert store.sizes() == {"a": 0, "b": 5, "c d": 1000}
    assert began < store.modified("b") < time.time() + 60
    arrivals = store.arrivals()
    assert {*arrivals} - {""} == {"a", "b", "c d"}
    assert all(began < moment < time.time() + 60 for moment in arrivals.values())
    with pytest.raises(FileNotFoundError, match="absent"):
        store.modified("absent")


def test_a_file_being_written_is_listed_as_unfinished_and_can_be_let_go_of(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_STORE_DEADLINE", "1")  # moto says that it is moto's fault
    if place.kind not in STRONG:
        pytest.skip("drivers have no word for unfinished files here")
    with place.open() as store, place.open() as other:
        assert store.unfinished() == []
        began = time.time() - 60
        with pytest.raises(OSError), store.create("data") as file:  # noqa: PT012
            while not (some := other.unfinished()):  # what is on its way is not listed yet
                file.write([LARGE])
            [found] = some
            assert found.name == "data"
            # moto's clock stands still, in 2010
            assert (0 if place.kind == "moto" else began) < found.started < time.time() + 60
            other.abort(found)
            while other.unfinished():  # Azure's begins anew with a part that was on its way
                other.abort(found)
            other.abort(found)
        assert store.names() == []


def test_a_watch_sees_the_file_of_a_rank_on_its_way_and_then_complete(place: Place) -> None:
    if place.kind not in (*LOCAL, *S3):
        pytest.skip("a folder with nothing but an upload is not listed here")
    watch, name = Watch(place.url, place.options), "0123456789abcdef-00003.safetensors"
    with place.open("step-1") as store:
        with store.create(name) as file:
            written = 0
            while not (found := watch.look()):  # what is on its way is not listed yet
                file.write([LARGE])
                written += len(LARGE)
            phases = {one.phase for one in found[0].files}
            assert phases == ({"writing"} if place.kind in LOCAL else {"uploading"})
        [after] = watch.look()
        for one in (found[0], after):
            assert (one.name, one.attempt, one.files[0].rank) == ("step-1", name[:16], 3)
        assert (after.files[0].phase, after.files[0].nbytes) == ("written", written)
        store.delete(name)
    assert watch.look() == []


def test_a_store_says_what_it_capabilities(place: Place, store: Store) -> None:
    store.commit("manifest", CONTENT, replace=False)  # what a server does is found out so
    assert store.capabilities.put_if_absent == (place.kind in STRONG)
    assert store.capabilities.hides_unfinished == (place.kind in STRONG)


def test_nothing_is_listed_where_nothing_is(store: Store) -> None:
    assert store.names() == []
    assert store.sizes() == {}
    assert store.folders() == []
    assert not store.exists("data")


def test_files_and_folders_are_listed_apart_and_sorted(place: Place, store: Store) -> None:
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


def test_writing_appends_buffers_of_all_kinds_in_order(store: Store) -> None:
    numbers = np.arange(12, dtype=np.uint16).reshape(3, 4)
    many = [bytes([i % 251]) * (i % 5) for i in range(2 * IO_VECTORS + 100)]
    with store.create("data") as file:
        file.write([b"abc", bytearray(b"de"), b"", memoryview(b"f"), numbers.data])
        file.write(iter(many))
        file.write([b""] * 20)
    assert content_of(store, "data") == b"abcdef" + numbers.tobytes() + b"".join(many)


def test_a_written_buffer_may_be_reused_at_once(store: Store) -> None:
    buffer = bytearray(64)
    with store.create("data") as file:
        for value in range(200):
            buffer[:] = bytes([value]) * len(buffer)
            file.write([buffer])
    assert content_of(store, "data") == b"".join(bytes([value]) * 64 for value in range(200))


def test_a_file_is_invisible_until_it_is_complete(place: Place, store: Store) -> None:
    if not store.capabilities.hides_unfinished:
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
    if not rewritable and not store.capabilities.hides_unfinished:
        pytest.skip("fsspec's memory keeps what was written so far")
    with pytest.raises(KeyboardInterrupt):
        fail_to_put(store, "data", rewritable, KeyboardInterrupt())
    assert store.names() == []
    assert not store.exists("data")


@pytest.mark.parametrize("rewritable", [False, True])
def test_a_file_whose_replacing_fails_stays_as_it_was(
    place: Place, store: Store, rewritable: bool
) -> None:
    if not rewritable and not store.capabilities.hides_unfinished:
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


@pytest.mark.parametrize("rewritable", [False, True])
def test_a_file_that_is_to_be_new_is_not_written_over_another(
    store: Store, rewritable: bool
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


@pytest.mark.parametrize("content", [CONTENT, LARGE], ids=["small", "large"])
def test_a_file_that_is_to_be_new_is_not_written_over_one_that_has_come_meanwhile(
    place: Place, store: Store, content: bytes
) -> None:
    if not store.capabilities.hides_unfinished:
        pytest.skip("fsspec's memory shows what is written so far")
    with (  # noqa: PT012
        pytest.raises(ExistsError, match="/data exists already"),
        place.open() as other,
        store.create("data", replace=False) as file,
    ):
        file.write([content])
        put(other, "data", b"it came first")
    assert content_of(store, "data") == b"it came first"
    assert store.names() == ["data"]
    assert store.unfinished() == []


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
        with pytest.raises(OSError, match="create the file rewritable"):
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
    with pytest.raises(CorruptError, match="is missing"):
        store.read("data", 0, 1)


def test_many_files_are_deleted_also_where_some_are_missing(store: Store) -> None:
    names = [f"step-{number}/data" for number in range(5)]
    for name in names:
        put(store, name, CONTENT)
    put(store, "other", CONTENT)
    store.delete_all([*names, "step-9/data"])
    assert not any(store.exists(name) for name in names)
    assert store.names() == ["other"]


def test_the_start_of_a_file_comes_with_its_size_and_the_tag_that_a_listing_of_all_has(
    store: Store,
) -> None:
    put(store, "step 1/data", CONTENT)
    put(store, "mine", CONTENT[:10])
    for length in (10, 5000):
        start = store.read_start("step 1/data", length)
        assert (start.data, start.size) == (CONTENT[:length], len(CONTENT))
    assert store.read_start("mine", 10).data == CONTENT[:10]
    with pytest.raises(FileNotFoundError):
        store.read_start("missing", 10)
    below = store.below()
    if below is None:  # a disk, for one
        return
    assert {name: one.nbytes for name, one in below.items()} == {"step 1/data": 1000, "mine": 10}
    assert below["step 1/data"].tag == start.tag != below["mine"].tag
    put(store, "step 1/data", CONTENT[::-1])
    assert (store.below() or {})["step 1/data"].tag != start.tag


def test_many_threads_read_what_each_of_them_asks_for(store: Store) -> None:
    files = {f"f{i}": random.Random(i).randbytes(500) for i in range(20)}
    for name, content in files.items():
        put(store, name, content)

    def read(seed: int) -> bool:
        chance = random.Random(seed)
        for _ in range(30):
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


ODD_NAMES = [
    "a b",
    "a+b",
    "a%20b",
    "100%",
    "ü-日本",
    "a=b&c",
    "it's",
    "a~b",
    ".hidden",
    "a@b:c",
    "x" * 200,
]
"""Names that URLs and signatures have to encode. (No store need take `/`, `?`, `#`, `*` or `[`.)"""


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_may_have_what_urls_must_encode(store: Store, name: str) -> None:
    put(store, name, CONTENT)
    store.commit(f"{name}.json", b"{}", replace=False)
    assert store.sizes() == dict(sorted({name: 1000, f"{name}.json": 2}.items()))
    assert content_of(store, name) == CONTENT
    assert store.exists(name)
    store.delete(name)
    store.delete(f"{name}.json")
    assert store.names() == []


def test_a_folder_may_have_what_urls_must_encode(place: Place) -> None:
    for folder in ("100% +ü", "a=b&c/it's"):
        with place.open(folder) as below:
            put(below, "data", CONTENT)
            assert below.names() == ["data"]
            assert content_of(below, "data") == CONTENT
            below.delete("data")


def test_a_file_in_a_folder_beside_is_read(place: Place, store: Store) -> None:
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


def test_several_buffers_are_filled_end_to_end(store: Store) -> None:
    put(store, "data", CONTENT)
    targets = [bytearray(n) for n in (1, 0, 300, 17)]
    store.read_into("data", 100, *map(memoryview, targets))
    assert b"".join(targets) == CONTENT[100:418]


def test_an_empty_file_is_a_file(store: Store) -> None:
    with store.create("nothing"):
        pass
    with store.create("nothing rewritable", rewritable=True) as file:
        file.write([b""] * 20)
    assert store.sizes() == {"nothing": 0, "nothing rewritable": 0}
    assert store.read("nothing", 0, 0) == b""
    store.read_into("nothing", 0)
    with pytest.raises(CorruptError):
        store.read("nothing", 0, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("rewritable", [False, True])
def test_a_file_of_many_parts_is_whole(store: Store, rewritable: bool) -> None:
    chance, at = random.Random(2), 0
    with store.create("large", rewritable=rewritable) as file:
        while at < len(LARGE):
            end = min(at + chance.randrange(1 << 22), len(LARGE))
            file.write([memoryview(LARGE)[at:end]])
            at = end
        if rewritable:
            file.rewrite_start(b"the start")
    expected = b"the start" + LARGE[9:] if rewritable else LARGE
    assert store.size("large") == len(LARGE)
    for lo, hi in [(0, 100), (5 << 20, 9 << 20), (len(LARGE) - 50, len(LARGE)), (0, len(LARGE))]:
        assert store.read("large", lo, hi - lo) == expected[lo:hi]


@pytest.mark.thorough
@pytest.mark.parametrize("rewritable", [False, True])
@pytest.mark.parametrize("nbytes", [1000, len(LARGE)])
def test_nothing_is_left_of_a_file_whose_writing_fails(
    place: Place, store: Store, rewritable: bool, nbytes: int
) -> None:
    if not store.capabilities.hides_unfinished:
        pytest.skip("here a file is seen while it is written")
    with pytest.raises(ZeroDivisionError), store.create("data", rewritable) as file:  # noqa: PT012
        file.write([LARGE[:nbytes]])
        raise ZeroDivisionError
    assert store.names() == []
    assert store.unfinished() == []
    if place.kind in S3:
        assert place.server is not None
        pending = s3_client(place.server).list_multipart_uploads(Bucket=place.server.bucket)
        assert not pending.get("Uploads")


def test_of_eight_commits_at_once_by_threads_and_processes_one_succeeds(
    place: Place, clusters: Callable[[int], Any]
) -> None:
    if place.kind not in STRONG:
        pytest.skip("this store has no condition for a commit")
    for number in range(5):
        ranks = clusters(4).run(race, place.url, place.options, f"manifest-{number}")
        winners = [winner for rank in ranks for winner in rank]
        assert len(winners) == 1
        with place.open() as store:
            assert content_of(store, f"manifest-{number}") == bytes(winners) * 1000


def test_what_another_client_writes_is_seen_at_once(place: Place, store: Store) -> None:
    assert store.names() == []
    assert not store.exists("data")
    with place.open() as other:
        put(other, "data", b"old")
        assert store.sizes() == {"data": 3}
        assert content_of(store, "data") == b"old"
        other.commit("data", b"a new one", replace=True)
        assert store.size("data") == 9 or place.kind in LOCAL  # a disk's files stay as opened
        other.delete("data")
        assert store.names() == []


@pytest.mark.slow
def test_a_listing_of_more_files_than_a_page_has_is_complete(place: Place, store: Store) -> None:
    names = [f"shard-{number:05d}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda name: store.commit(name, b"x", replace=True), names):
            pass
    assert store.names() == names


def test_the_doctor_finds_the_promises_that_the_contract_tests(place: Place) -> None:
    examination = examine(place.url, storage_options=place.options)
    missing = {one.name for one in examination.promises if one.outcome is Outcome.MISSING}
    late = {"a late request does nothing"}
    weak = {
        "one of several simultaneous commits succeeds; a run has one owner",
        "an unfinished file is invisible",
    }
    assert missing - {"acknowledged data is durable"} == {
        "memory": late | weak,
        "radosgw": late,
    }.get(place.kind, set())
    assert examination.left_over == ()
    with place.open() as store:
        assert store.entries() == []
