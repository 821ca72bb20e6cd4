"""All that the library does with a checkpoint, done on servers over HTTP."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.stores import object_store
from ckpt.stores.store import open_store
from tests.stores import states
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import Fault, Request
from tests.stores.places import S3, SERVERS, Place, place_at
from tests.stores.server import Server, s3_client
from tools.main import main


@pytest.fixture(
    params=["moto", *(pytest.param(name, marks=pytest.mark.slow) for name in SERVERS[1:])]
)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, servers: Callable[[str], Server]
) -> Iterator[Place]:
    place = place_at(request.param, tmp_path, servers)
    yield place
    nothing_pends(place)


def nothing_pends(place: Place) -> None:
    """No part of an upload that was given up is left in the bucket."""
    if place.kind in S3:
        assert place.server is not None
        pending = s3_client(place.server).list_multipart_uploads(Bucket=place.server.bucket)
        assert not pending.get("Uploads")


def saved(clusters: Callable, place: Place, folder: str, seed: int = 1, **how: Any) -> str:
    """The URL of a seed's state, saved by two ranks."""
    url = f"{place.url}/{folder}"
    clusters(2).run(states.save, url, place.options, seed, how)
    return url


def read(url: str, options: Any) -> dict[str, Any]:
    """The state as plain tensors."""
    found = ckpt.read(url, storage_options=options)
    assert isinstance(found, dict)
    return found


def assert_is(url: str, options: Any, seed: int) -> None:
    """Everything at the URL is a seed's."""
    states.assert_same(read(url, options), seed)


def flip(place: Place, folder: str, name: str, at: int) -> None:
    """Flip one bit of a stored file."""
    with place.open(folder) as store:
        content = bytearray(store.read(name, 0, store.size(name)))
        content[at] ^= 1
        store.commit(name, bytes(content), replace=True)


def arguments(place: Place) -> list[str]:
    """A place's options, as the command takes them."""
    found = []
    for key, value in place.options.items():
        found += ["-o", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return found


@pytest.mark.thorough
def test_what_two_ranks_saved_is_loaded_by_two_four_and_one(
    clusters: Callable, place: Place
) -> None:
    url = saved(clusters, place, "step-1")
    for world_size in (2, 4, 1):
        clusters(world_size).run(states.load, url, place.options, 1)
    assert_is(url, place.options, 1)


@pytest.mark.thorough
def test_a_driver_finds_server_and_credentials_in_the_environment(
    clusters: Callable, place: Place
) -> None:
    assert place.server is not None
    url, environment = f"{place.url}/step-1", dict(place.server.environment)
    clusters(2).run(states.save_and_load_by_environment, url, environment, 1)
    with states.environment_of(url, environment):
        assert ckpt.verify(url).sound


@pytest.mark.thorough
def test_a_save_in_the_background_is_whole_when_its_handle_says_so(
    clusters: Callable, place: Place
) -> None:
    first = saved(clusters, place, "step-1", 1, blocking=False)
    second = saved(clusters, place, "step-2", 2, blocking=False)
    clusters(2).run(states.load, first, place.options, 1)
    clusters(2).run(states.load, second, place.options, 2)


@pytest.mark.thorough
def test_a_save_replaces_only_when_it_is_told_to(clusters: Callable, place: Place) -> None:
    url = saved(clusters, place, "step")
    with pytest.raises(Exception, match="overwrite=True"):
        saved(clusters, place, "step", 2)
    assert_is(url, place.options, 1)
    saved(clusters, place, "step", 2, overwrite=True)
    clusters(4).run(states.load, url, place.options, 2)
    with place.open("step") as store:
        assert len(store.names()) == 3  # the files of the first are gone


@pytest.mark.thorough
def test_compressed_borrowing_and_delta_checkpoints_come_back(
    clusters: Callable, place: Place
) -> None:
    base = saved(clusters, place, "step-1", 1)
    later = saved(clusters, place, "step-2", 2, base=base)
    packed = saved(clusters, place, "step-3", 3, compress=True)
    delta = saved(clusters, place, "step-4", 4, base=packed, compress="delta")
    for url, seed in ((base, 1), (later, 2), (packed, 3), (delta, 4)):
        clusters(2).run(states.load, url, place.options, seed)
    with pytest.raises(ckpt.InUseError, match="step-2"):
        ckpt.delete(base, storage_options=place.options)


def test_a_slice_is_read_lazily(clusters: Callable, place: Place) -> None:
    url = saved(clusters, place, "step-1")
    with ckpt.open(url, storage_options=place.options) as checkpoint:
        assert torch.equal(
            checkpoint["model.weight"][500:520, 3:7], states.whole(1)["weight"][500:520, 3:7]
        )


def test_verify_names_the_tensor_of_a_flipped_bit_and_load_refuses_it(
    clusters: Callable, place: Place
) -> None:
    url = saved(clusters, place, "step-1")
    assert ckpt.verify(url, storage_options=place.options).sound
    with place.open("step-1") as store:
        shard = store.names()[0]
        middle = store.size(shard) // 2
    flip(place, "step-1", shard, middle)
    report = ckpt.verify(url, storage_options=place.options)
    assert [problem.tensor for problem in report.problems] == ["model.weight"]
    with pytest.raises(ckpt.CorruptError, match=shard):
        read(url, place.options)


@pytest.mark.thorough
def test_two_checkpoints_are_compared(clusters: Callable, place: Place) -> None:
    one, same = saved(clusters, place, "step-1"), saved(clusters, place, "step-1-again")
    other = saved(clusters, place, "step-2", 2)
    options = {"storage_options": place.options, "b_storage_options": place.options}
    assert ckpt.diff(one, same, **options).equal
    changed = {difference.name for difference in ckpt.diff(one, other, **options).tensors}
    assert changed == {"model.weight", "model.half", "model.bias"}


@pytest.mark.thorough
def test_a_checkpoint_is_converted_to_a_disk_and_back(
    clusters: Callable, place: Place, tmp_path: Path
) -> None:
    url = saved(clusters, place, "step-1")
    single, back = tmp_path / "model.safetensors", f"{place.url}/back"
    ckpt.convert(url, single, storage_options=place.options)
    ckpt.convert(single, back, to="ckpt", dst_storage_options=place.options)
    found = ckpt.read(back, storage_options=place.options)
    assert isinstance(found, dict)
    flat = found if "model.weight" in found else found["model"]
    for name, tensor in states.whole(1).items():
        assert torch.equal(flat.get(f"model.{name}", flat.get(name)), tensor)
    there = f"{place.url}/model.safetensors"
    both = {"storage_options": place.options, "dst_storage_options": place.options}
    ckpt.convert(url, there, **both)
    with open_store(place.url, place.options) as store:
        assert store.read("model.safetensors", 0, 8) == single.read_bytes()[:8]


def test_nothing_is_left_of_a_deleted_checkpoint(clusters: Callable, place: Place) -> None:
    url = saved(clusters, place, "step-1")
    ckpt.delete(url, storage_options=place.options)
    with place.open("step-1") as store:
        assert store.names() == []
    with pytest.raises(ckpt.NotACheckpointError):
        ckpt.read(url, storage_options=place.options)


def test_the_newest_checkpoint_is_found_and_leftovers_are_listed(
    clusters: Callable, place: Place
) -> None:
    saved(clusters, place, "run/step-1", 1)
    newest = saved(clusters, place, "run/step-2", 2)
    with place.open("run/step-2") as store:
        stray = "0123456789abcdef-00000.safetensors"
        store.commit(stray, b"of a save that was killed", replace=False)
    folder = f"{place.url}/run"
    assert ckpt.latest(folder, storage_options=place.options) == newest
    left = ckpt.gc(folder, storage_options=place.options)
    assert [one.name.rsplit("/")[-1] for one in left] == [stray]
    ckpt.gc(folder, delete=True, older_than=0, storage_options=place.options)
    with place.open("run/step-2") as store:
        assert stray not in store.names()
    assert_is(newest, place.options, 2)


def test_the_command_takes_urls_and_options(
    clusters: Callable, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, options = saved(clusters, place, "run/step-1"), arguments(place)
    assert main(["ls", f"{place.url}/run", *options]) == 0
    assert main(["inspect", url, "model.weight", *options]) == 0
    assert main(["verify", url, *options]) == 0
    assert "1025" in capsys.readouterr().out
    assert main(["convert", url, str(tmp_path / "one.safetensors"), *options]) == 0
    assert main(["diff", url, url, *options]) == 0
    assert main(["rm", url, *options]) == 0
    with place.open("run/step-1") as store:
        assert store.names() == []
    said = capsys.readouterr()
    for secret in place.options.values():
        assert str(secret) not in said.out + said.err


def test_a_rank_that_fails_leaves_no_checkpoint_and_no_upload(
    clusters: Callable, place: Place
) -> None:
    with pytest.raises(Exception, match="rank 1"):
        clusters(2).run(save_with_a_rank_that_fails, f"{place.url}/step-1", place.options)
    with place.open("step-1") as store:
        assert "manifest.json" not in store.names()
    saved(clusters, place, "step-1", 2)
    assert_is(f"{place.url}/step-1", place.options, 2)


def save_with_a_rank_that_fails(url: str, options: Any) -> None:
    import torch.distributed as dist

    def progress(*_: object) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("rank 1 has had enough")

    ckpt.save(url, states.state(1), storage_options=options, progress=progress)


def in_long_runs() -> dict[str, torch.Tensor]:
    return {name: torch.arange(3 << 20, dtype=torch.int32) for name in "abc"}  # 12 MiB each


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["moto", *(pytest.param(name, marks=pytest.mark.slow) for name in SERVERS[1:3])]
)
def test_a_conversion_leaves_unchanged_bytes_on_their_server_with_their_checksums(
    servers: Callable[[str], Server], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "TRIAL_SECONDS", 0.2)
    with FaultProxy(servers(kind)) as proxy:
        server = proxy.server
        source, options = server.url(f"{tmp_path.name}/a"), server.options
        ckpt.save(source, in_long_runs(), storage_options=options)
        copies = []
        for number, fault in enumerate((None, Fault.DENIED, Fault.BROKEN)):
            proxy.clear()
            proxy.schedule = lambda one: fault if is_copy(one) else None  # noqa: B023
            copies.append(server.url(f"{tmp_path.name}/copy {number}"))
            ckpt.convert(source, copies[-1], storage_options=options)
            copied = [one.request for one in proxy.seen if is_copy(one.request)]
            moved = proxy.sent_bytes + proxy.received_bytes
            if fault is not Fault.BROKEN:
                assert len(copied) == (1 if fault else 2)  # the first one tries whether it may
            assert moved > 75e6 if fault else moved < 45e6
        proxy.schedule = lambda one: None
        for copy in copies:
            found = read(copy, options)
            assert all(torch.equal(found[name], one) for name, one in in_long_runs().items())
            assert ckpt.verify(copy, storage_options=options).problems == ()
        # Damage goes along with the checksum that tells of it.
        with open_store(source, options) as store:
            (name,) = [name for name in store.names() if name.endswith(".safetensors")]
            content = bytearray(store.read(name, 0, store.size(name)))
            content[len(content) // 2] ^= 1
            store.commit(name, bytes(content), replace=True)
        damaged = server.url(f"{tmp_path.name}/damaged")
        ckpt.convert(source, damaged, storage_options=options)
        assert [one.kind for one in ckpt.verify(damaged, storage_options=options).problems]
        with pytest.raises(ckpt.CorruptError):
            ckpt.load(damaged, in_long_runs(), storage_options=options)
        with pytest.raises(ckpt.CorruptError):
            ckpt.convert(source, f"{damaged}2", verify=True, storage_options=options)
        # A thread that still reads would ask for damaged bytes again, also of a gone server.
        assert not [one for one in threading.enumerate() if one.name.startswith("ckpt-ahead")]


def is_copy(request: Request) -> bool:
    is_part = "partNumber" in request.target or "comp=block&" in f"{request.target}&"
    return request.method == "PUT" and not request.length and is_part
