"""The contract of stores for local disks, memory and real servers, and more than the contract.

To add a store, add how to make a place in it to `places`.
"""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt.checking.doctor import examine
from ckpt.checking.report import Outcome
from ckpt.errors import ExistsError
from ckpt.removing.progress_files import Watch
from ckpt.stores.store import Store, is_file, split_url
from ckpt.testing import CONTENT, StoreContract, content_of, put
from tests.stores.places import KINDS, LOCAL, S3, STRONG, Place, place_at
from tests.stores.racers import race
from tests.stores.server import Server, s3_client

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


class TestEveryStore(StoreContract):
    """With the place of each test from the fixture of this module, on every kind of store."""

    @pytest.fixture
    def place(self, place: Place) -> Place:
        return place


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with place.open() as opened:
        yield opened


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


@pytest.mark.thorough
def test_a_file_being_written_is_listed_as_unfinished_and_can_be_let_go_of(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_STORE_DEADLINE", "1")  # moto says that it is moto's fault
    if place.kind not in STRONG or place.kind == "gcs":
        pytest.skip("drivers have no word for unfinished files here")
    with place.open() as store, place.open() as other:
        assert store.list_unfinished() == []
        began = time.time() - 60
        with pytest.raises(OSError), store.create("data") as file:  # noqa: PT012
            while not (some := other.list_unfinished()):  # what is on its way is not listed yet
                file.write([LARGE])
            [found] = some
            assert found.name == "data"
            # moto's clock stands still, in 2010
            assert (0 if place.kind == "moto" else began) < found.started < time.time() + 60
            other.abort(found)
            while other.list_unfinished():  # Azure's begins anew with a part that was on its way
                other.abort(found)
            other.abort(found)
        assert store.names() == []


@pytest.mark.thorough
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


@pytest.mark.thorough
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
    assert store.list_unfinished() == []


def test_a_stream_that_cannot_change_its_start_says_so(place: Place, store: Store) -> None:
    if place.kind in LOCAL:
        pytest.skip("a local file can always be rewritten")
    with store.create("data") as file:
        file.write([b"12345"])
        with pytest.raises(OSError, match="create the file rewritable"):
            file.rewrite_start(b"abc")


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


def test_a_path_or_url_of_one_file_is_known_from_a_folder(place: Place, store: Store) -> None:
    put(store, "model.pt", b"x")
    assert is_file(f"{place.url}/model.pt", place.options)
    assert not is_file(place.url, place.options)
    assert not is_file(f"{place.url}/absent", place.options)
    assert split_url(f"{place.url}/model.pt") == (place.url, "model.pt")


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
    assert store.list_unfinished() == []
    if place.kind in S3:
        assert place.server is not None
        pending = s3_client(place.server).list_multipart_uploads(Bucket=place.server.bucket)
        assert not pending.get("Uploads")


@pytest.mark.thorough
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
