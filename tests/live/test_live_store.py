"""A live state is read like the folder of a disk: by descriptors on its host, by HTTP elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.live.store import LiveStore
from ckpt.stores.store import join_url, open_store, split_url
from formats.storage import LOCAL_READ_BYTES, REMOTE_READ_BYTES
from tests.ckpt.test_reshard import load_every_way, placements
from tests.ckpt.test_reshard import save as save_every_way
from tests.garbage import collect_garbage
from tests.live.offered import RUNTIME, Offer, offered
from tools.main import main

PLACES = ("here", "elsewhere")


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The folder of the servers' sockets, and an empty one, as of another host."""
    found = {place: str(tmp_path_factory.mktemp(place)) for place in PLACES}
    for folder in found.values():
        os.chmod(folder, 0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNTIME, found["here"])
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with small and large tensors and plain values."""
    place = tmp_path_factory.mktemp("saved") / "step-1"
    state = {
        "w": torch.arange(300_000.0).reshape(300, 1000),
        "b": [torch.ones(3, dtype=torch.bfloat16), torch.zeros(0)],
        "step": 7,
    }
    ckpt.save(place, state)
    return place


@pytest.fixture(scope="module")
def offer(folder: Path, sockets: dict[str, str]) -> Iterator[Offer]:
    """The checkpoint, as version 3 of a live state."""
    with offered(folder, version=3) as one:
        yield one


@pytest.fixture(params=PLACES)
def url(
    request: pytest.FixtureRequest,
    offer: Offer,
    sockets: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The address, for a reader on the host of the server, and for one elsewhere."""
    monkeypatch.setenv(RUNTIME, sockets[request.param])
    return offer.url


def descriptors() -> list[str]:
    """The open files and sockets of this process, without those of garbage."""
    collect_garbage()
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sorted(one.partition(":")[0] for one in found)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_every_range_of_every_file_is_that_of_the_disk(
    url: str, folder: Path, data: st.DataObject
) -> None:
    with open_store(url) as store, open_store(folder) as disk:
        assert store.sizes() == disk.sizes()
        name = data.draw(st.sampled_from(store.names()))
        size = disk.size(name)
        ends = data.draw(st.lists(st.integers(0, size), min_size=2, max_size=6).map(sorted))
        buffers = [bytearray(hi - lo) for lo, hi in pairwise(ends)]
        store.read_into(name, ends[0], *map(memoryview, buffers))
        assert b"".join(buffers) == disk.read(name, ends[0], ends[-1] - ends[0])


def test_the_listing_is_that_of_the_disk(url: str, folder: Path) -> None:
    with open_store(url) as store, open_store(folder) as disk:
        assert store.names() == disk.names() == store.entries()
        assert store.folders() == ["3"]
        assert store.entries("3") == store.names()
        manifest = store.read_whole("manifest.json", 1 << 20)
        assert manifest == disk.read_whole("manifest.json", 1 << 20)
        assert manifest == store.read_whole("3/manifest.json", 1 << 20)
        assert store.exists("manifest.json")
        assert not store.exists("other")
        shard = store.names()[0]
        assert store.read_end(shard, disk.size(shard), 9) == disk.read_end(
            shard, disk.size(shard), 9
        )
        with pytest.raises(ckpt.CorruptError, match="truncated"):
            store.read(shard, disk.size(shard) - 1, 2)
        with pytest.raises(ckpt.GoneError):
            store.read("other", 0, 1)
        with pytest.raises(ckpt.TooLargeError):
            store.read_whole("manifest.json", 10)
        with pytest.raises(ckpt.SizeError):
            store.read_end(shard, disk.size(shard) + 1, 9)


def test_a_reader_on_the_host_reads_in_the_steps_of_a_disk(
    offer: Offer, sockets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(offer.url) as store:
        assert store.read_bytes == LOCAL_READ_BYTES
    monkeypatch.setenv(RUNTIME, sockets["elsewhere"])
    with open_store(offer.url) as store:
        assert store.read_bytes == REMOTE_READ_BYTES


def test_every_call_that_reads_a_folder_reads_a_live_state(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ckpt.read(folder)
    target = {"w": torch.zeros(300, 1000), "b": [torch.zeros(3).bfloat16(), torch.zeros(0)]}
    loaded = ckpt.load(url, {**target, "step": 0})
    assert torch.equal(loaded["w"], saved["w"])
    assert loaded["step"] == 7
    assert torch.equal(ckpt.read(url)["w"], saved["w"])
    with ckpt.open(url) as checkpoint:
        assert torch.equal(checkpoint["w"][5:8, 3], saved["w"][5:8, 3])
    assert ckpt.diff(url, folder).equal
    assert ckpt.verify(url).sound
    assert ckpt.latest(url) == join_url(url, "3")
    ckpt.convert(url, tmp_path / "w.safetensors")
    assert torch.equal(ckpt.read(tmp_path / "w.safetensors")["w"], saved["w"])
    for command in ("inspect", "verify", "ls", "latest"):
        capsys.readouterr()
        assert main([command, url]) == 0, capsys.readouterr()
        assert capsys.readouterr().out


def test_nothing_can_be_written(url: str) -> None:
    with open_store(url) as store:
        with pytest.raises(ckpt.StoreError, match="only read"):
            store.commit("manifest.json", b"", replace=True)
        with pytest.raises(ckpt.StoreError, match="only read"), store.create("a"):
            pass
        with pytest.raises(ckpt.StoreError, match="only read"):
            store.delete("manifest.json")


@pytest.mark.parametrize("version", ["", "3", "77"])
@pytest.mark.parametrize(
    "call",
    [
        ckpt.delete,
        partial(ckpt.delete, missing_ok=True),
        ckpt.gc,
        partial(ckpt.save, state={"w": torch.ones(2)}),
        partial(ckpt.save, state={"w": torch.ones(2)}, overwrite=True),
        partial(ckpt.save, state={"w": torch.ones(2)}, blocking=False),
    ],
)
def test_a_call_that_writes_says_that_a_live_state_is_only_read(
    call: Callable[[str], object], url: str, version: str
) -> None:
    with pytest.raises(ckpt.StoreError, match=r"a live state, which is only read; ckpt\.publish"):
        call(join_url(url, version) if version else url)


def test_a_conversion_to_a_live_state_says_that_it_is_only_read(url: str, folder: Path) -> None:
    with pytest.raises(ckpt.StoreError, match="a live state, which is only read"):
        ckpt.convert(folder, url)


def test_a_live_state_at_an_address_of_ipv6_is_read(sockets: dict[str, str]) -> None:
    with ckpt.publish({"step": 7}, "at-ipv6", address="::1") as live:
        assert live.url.startswith("live://[::1]:")
        assert ckpt.load(live.url, {"step": 0}) == {"step": 7}


@pytest.mark.thorough
def test_a_closed_store_leaves_no_descriptor_and_no_lease(url: str, offer: Offer) -> None:
    ckpt.load(url, {"step": 0}, include="step")
    before = descriptors()
    for _ in range(3):
        ckpt.load(url, {"w": torch.zeros(300, 1000)}, include="w")
        with open_store(url) as store:
            store.read("manifest.json", 0, 5)
    assert descriptors() == before


def test_a_reader_gives_its_lease_back(folder: Path, sockets: dict[str, str]) -> None:
    for place in PLACES:
        with offered(folder, name=f"leased-{place}") as one, pytest.MonkeyPatch.context() as patch:
            patch.setenv(RUNTIME, sockets[place])
            ckpt.load(one.url, {"w": torch.zeros(300, 1000)}, include="w")
            patch.setenv(RUNTIME, sockets["here"])
            one.publish(2, folder)
            assert not one.retire(1, wait_seconds=60)  # returns at once: no reader is left


def test_the_token_is_in_no_message(url: str) -> None:
    token = url.partition("=")[2]
    with open_store(url) as store:
        assert token not in store.url + str(store) + repr(store)
        with pytest.raises(ckpt.GoneError) as raised:
            store.read("other", 0, 1)
        assert token not in str(raised.value)
    with pytest.raises(ckpt.MismatchError) as differs:
        ckpt.load(url, {"w": torch.zeros(3)}, include="w")
    assert token not in str(differs.value)


@pytest.mark.parametrize("given_by", ["option", "environment"])
def test_the_token_need_not_be_in_the_address(
    url: str, offer: Offer, given_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare, options = url.partition("?")[0], {}
    if given_by == "option":
        options = {"token": offer.token}
    else:
        monkeypatch.setenv("CKPT_TOKEN", offer.token)
    loaded = ckpt.load(bare, {"step": 0}, include="step", storage_options=options)
    assert loaded["step"] == 7
    assert ckpt.verify(bare, storage_options=options).sound


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokn": "a"}, "'tokn'"),
        ({"timeout": 0}, "timeout"),
        ({"token": "a\nb"}, "token"),
        ({"certificate": 3}, "certificate"),
    ],
)
def test_an_option_that_is_no_option_is_an_error(
    offer: Offer, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ckpt.ArgumentError, match=message):
        open_store(offer.url, options)


def test_addresses_are_split_and_joined_around_the_token() -> None:
    url = "live://host:4000/policy/12?token=abc"
    assert split_url(url) == ("live://host:4000/policy?token=abc", "12")
    assert join_url(*split_url(url)) == url
    assert join_url("live://host:4000/policy", "12") == "live://host:4000/policy/12"


def test_the_store_of_a_version_has_no_folders(offer: Offer, folder: Path) -> None:
    with LiveStore(offer.at(3), {}) as store:
        assert store.folders() == []
        with pytest.raises(FileNotFoundError):
            store.size("../3/manifest.json")


def load_from(url: str, sockets: str, names: list[str]) -> int:
    """On each rank: loads into every placement, from a server here or elsewhere."""
    os.environ[RUNTIME] = sockets
    return load_every_way(url, names)


@pytest.mark.wide
@pytest.mark.thorough
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("saving", [1, 3])
@pytest.mark.parametrize("loading", [1, 2, 4])
def test_every_layout_of_a_live_state_loads_into_every_layout(
    clusters: Callable,
    tmp_path: Path,
    sockets: dict[str, str],
    saving: int,
    loading: int,
    place: str,
) -> None:
    clusters(saving).run(save_every_way, str(tmp_path / "saved"), False)
    with offered(tmp_path / "saved", name=f"layouts-{saving}-{loading}-{place}") as one:
        names = list(placements(saving))
        assert min(clusters(loading).run(load_from, one.url, sockets[place], names)) > 20
