"""A live state goes through a folder or bucket: whole versions, and deltas between them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
import zstandard

import ckpt
from ckpt.live.chain import FRAME_BYTES, LIVE_VERSION
from ckpt.live.stored_version import StoredVersion
from ckpt.loading import agreement
from ckpt.stores.local_store import LocalStore
from ckpt.stores.store import open_store
from ckpt.transfer.live_deltas import Area
from tests.live.layouts import spread
from tests.live.offered import RUNTIME
from tests.selection import thorough

pytestmark = pytest.mark.thorough

SECONDS = 60
ROWS, COLUMNS = 700, 1024
"""More than one frame, and rows that do not divide evenly."""
EVERY = 3


def whole(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version: a hundredth of most differs from the one before."""
    source = torch.Generator().manual_seed(5)
    state = {
        "matrix": torch.randn(ROWS, COLUMNS, generator=source).bfloat16(),
        "moments": torch.randn(301, COLUMNS, generator=source),
        "bias": torch.randn(301, generator=source),
        "fixed": torch.randn(64, 64, generator=source),
        "flags": torch.arange(5001) % 2 == 0,
        "count": torch.tensor(0),
    }
    for number in range(2, version + 1):
        state["count"] += 1
        state["flags"][number] ^= True
        for name in ("matrix", "moments", "bias"):
            flat = state[name].reshape(-1)
            count = max(1, len(flat) // 100)
            flat[torch.randint(len(flat), (count,), generator=source)] += number
    return state


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in whole(1).items()}


def copy(state: dict[str, Any], version: int, dim: int | None) -> None:
    for name, tensor in spread(whole(version), dim).items():
        state[name].to_local().copy_(tensor.to_local())


_live: dict[str, Any] = {}


def begin(runtime: str, url: str) -> None:
    os.environ[RUNTIME] = runtime
    state = spread(whole(1), 0)
    name = f"through-{os.path.basename(url)}"
    _live[url] = ckpt.publish(state, name, through=url, full_every=EVERY), state


def update(url: str, version: int) -> None:
    live, state = _live[url]
    copy(state, version, 0)
    live.update().wait(SECONDS)


def end(url: str) -> None:
    _live.pop(url)[0].close()


_followed: dict[str, Any] = {}


def follow(url: str) -> None:
    versions = ckpt.follow(url, timeout=SECONDS, look_seconds=0)
    _followed[url] = versions, {dim: spread(zeros(), dim) for dim in LAYOUTS}


def load_next(url: str, version: int) -> float:
    """Loads the newest version in each layout; returns the largest part of its bytes that came."""
    versions, states = _followed[url]
    found, parts = next(versions), []
    assert found.number == version
    for dim, state in states.items():
        with counted() as came:
            ckpt.load(found.url, state)
        expected = spread(whole(version), dim)
        for name, tensor in expected.items():
            assert torch.equal(state[name].to_local(), tensor.to_local()), (name, dim)
        parts.append(sum(came) / sum(tensor.to_local().nbytes for tensor in expected.values()))
    return max(parts)


def change(url: str) -> None:
    for state in _followed[url][1].values():
        for name in ("matrix", "moments", "bias"):
            state[name].to_local().reshape(-1)[:1] += 1


def end_following(url: str) -> None:
    _followed.pop(url)[0].close()


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yields the list of the bytes that this process reads from files."""
    came: list[int] = []
    read_into, read = LocalStore.read_into, LocalStore.read

    def filled(self: LocalStore, name: str, offset: int, *targets: memoryview) -> None:
        came.append(sum(target.nbytes for target in targets))
        read_into(self, name, offset, *targets)

    def given(self: LocalStore, name: str, offset: int, length: int) -> bytes:
        came.append(length)
        return read(self, name, offset, length)

    with patch.object(LocalStore, "read_into", filled), patch.object(LocalStore, "read", given):
        yield came


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the servers' sockets."""
    found = tmp_path_factory.mktemp("sockets")
    found.chmod(0o700)
    return str(found)


@pytest.fixture
def published(
    clusters: Callable[[int], Any], runtime: str, tmp_path: Path
) -> Iterator[Callable[[int], None]]:
    """Version 1 of two ranks in `chain`; a call publishes up to another version."""
    url, two = str(tmp_path / "chain"), clusters(2)
    two.run(begin, runtime, url)
    newest = 1

    def publish_up_to(version: int) -> None:
        nonlocal newest
        for number in range(newest + 1, version + 1):
            two.run(update, url, number)
        newest = version

    yield publish_up_to
    two.run(end, url)


LAYOUTS = (0, 1, None)
"""Rows, columns and replicas."""


def test_a_follower_of_any_layout_reads_the_deltas_alone(
    clusters: Callable[[int], Any], published: Callable[[int], None], tmp_path: Path
) -> None:
    url, three = str(tmp_path / "chain"), clusters(3)
    three.run(follow, url)
    assert min(three.run(load_next, url, 1)) >= 1
    for version in (2, 4, 6):  # 4 is a whole version too, and two are missed
        published(version)
        assert max(three.run(load_next, url, version)) < 1 / 3, version
    three.run(change, url)
    published(7)
    three.run(load_next, url, 7)  # right, however many bytes
    three.run(end_following, url)


@pytest.mark.parametrize("where", ["memory of one process", thorough("folder of two ranks")])
def test_a_version_is_a_checkpoint_for_every_reader(
    request: pytest.FixtureRequest, tmp_path: Path, where: str
) -> None:
    if where == "folder of two ranks":
        chain = str(tmp_path / "chain")
        request.getfixturevalue("published")(3)
    else:
        chain = "memory://for-every-reader"
        request.getfixturevalue("alone")
        publish(chain, "for-every-reader", 3)
    url = f"{chain}/version-00000003"
    expected = whole(3)
    assert all(torch.equal(found, expected[name]) for name, found in ckpt.read(url).items())
    with ckpt.open(url) as one:
        assert torch.equal(one["matrix"][500:502, 3:5], expected["matrix"][500:502, 3:5])
        assert one.version == 3
    assert ckpt.verify(url).sound
    ckpt.convert(url, tmp_path / "plain", to="ckpt")
    assert ckpt.diff(url, tmp_path / "plain").equal
    state = zeros()
    ckpt.load(url, state)
    assert torch.equal(state["matrix"], expected["matrix"])
    with pytest.raises(ckpt.NotACheckpointError, match=r"such as .*version-00000003"):
        ckpt.load(chain, state)


def data_by_the_page(chain: Path, number: int) -> bytes:
    """The bytes of a version's only shard file, read as docs/format.md says, without ckpt."""
    text = (chain / f"version-{number:08d}" / "live-version.json").read_bytes()
    told = json.loads(text)
    assert text.startswith(b'{"digest":"' + told["digest"].encode() + b'",')
    assert xxhash.xxh3_128_hexdigest(b"{" + text[45:]) == told["digest"]
    name, _, size, header_bytes, table_bytes, _ = json.loads(told["manifest"])["files"][0]
    if told["whole"] == number:
        return (chain / f"full-{number:08d}" / name).read_bytes()
    data = bytearray(data_by_the_page(chain, told["before"])[: size - table_bytes])
    [[delta_bytes, width, digest]] = told["deltas"]
    delta = (chain / f"version-{number:08d}" / f"{name}.delta").read_bytes()
    assert len(delta) == delta_bytes
    index = delta[len(delta) - 12 * -(-len(data) // 2**20) :]
    assert xxhash.xxh3_128_hexdigest(index) == digest
    head, table = delta[:header_bytes], delta[header_bytes : header_bytes + table_bytes]
    at = header_bytes + table_bytes
    for frame, (length, check) in enumerate(struct.iter_unpack("<IQ", index)):
        part = delta[at : at + length]
        at += length
        assert xxhash.xxh3_64_intdigest(part) == check
        lo, hi = frame * 2**20, min((frame + 1) * 2**20, len(data))
        each = width if (hi - lo) % width == 0 else 1
        old = np.frombuffer(bytes(data[lo:hi]), f"<u{each}").copy()
        data[lo:hi] = frame_by_the_page(part, old, each).tobytes()
    assert data.startswith(head)
    return bytes(data) + table


def frame_by_the_page(part: bytes, found: Any, each: int) -> Any:
    numbers = zstandard.ZstdDecompressor().decompress(part)
    (count,) = struct.unpack_from("<I", numbers)

    def planes(at: int, length: int, width: int) -> Any:
        planes = np.frombuffer(numbers, "u1", length * width, at).reshape(width, length)
        return np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1)

    if count == 2**32 - 1:
        return found ^ planes(4, len(found), each)
    place, values = -1, planes(4 + 4 * count, count, each)
    for distance, value in zip(planes(4, count, 4).tolist(), values, strict=True):
        place += distance + 1
        found[place] ^= value
    return found


@pytest.mark.thorough
def test_the_page_of_the_format_says_all_that_a_reader_needs(alone: None, tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(1)
    state = {"w": torch.randn(700_001, generator=source), "b": torch.ones(333).bfloat16()}
    with ckpt.publish(state, "by-the-page", through=tmp_path) as live:
        for part in (0.01, 0.4, 1.0):
            mask = torch.rand(700_001, generator=source) < part
            state["w"][mask] = torch.randn(int(mask.sum()), generator=source)
            state["w"][:300_000] *= 1.0001  # which compresses
            live.update().wait(SECONDS)
            with open_store(live.url) as store:
                [name] = [one for one in store.names() if one.endswith(".safetensors")]
                assert data_by_the_page(tmp_path, live.version) == store.read_whole(name, 10**8)


@pytest.mark.thorough
def test_old_versions_go_and_a_late_reader_is_told(
    published: Callable[[int], None], tmp_path: Path
) -> None:
    chain = tmp_path / "chain"
    published(3)
    opened = ckpt.open(chain / "version-00000003")
    published(8)  # whole are 1, 4 and 7
    names = sorted(path.name for path in chain.iterdir())
    kept = [*(f"full-{n:08d}" for n in (4, 7)), *(f"version-{n:08d}" for n in range(4, 9))]
    assert names == kept
    with pytest.raises(ckpt.ReplacedError, match="was deleted while it was read"):
        opened["matrix"][...]
    opened.close()
    with pytest.raises(ckpt.NotACheckpointError):
        ckpt.load(chain / "version-00000003", zeros())
    version = next(ckpt.follow(chain))
    assert version.number == 8
    assert torch.equal(ckpt.load(version.url, zeros())["matrix"], whole(8)["matrix"])


def publish_unlike(runtime: str, url: str) -> None:
    os.environ[RUNTIME] = runtime
    mine = url if dist.get_rank() == 0 else None
    with pytest.raises(ckpt.ArgumentError, match="different through= or full_every="):
        ckpt.publish({"w": torch.ones(3)}, "unlike", through=mine)


def test_ranks_that_give_different_folders_are_told_so(
    clusters: Callable[[int], Any], runtime: str, tmp_path: Path
) -> None:
    clusters(2).run(publish_unlike, runtime, str(tmp_path / "chain"))


@pytest.fixture
def alone(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME, runtime)


def publish(url: object, name: str, last: int, **how: Any) -> None:
    """Publishes the versions 1 to `last` of one process."""
    state = whole(1)
    with ckpt.publish(state, name, through=url, **how) as live:
        for version in range(2, last + 1):
            for key, tensor in whole(version).items():
                state[key].copy_(tensor)
            live.update().wait(SECONDS)


@pytest.mark.thorough
def test_no_damage_of_a_chain_is_loaded(alone: None, tmp_path: Path) -> None:
    publish(tmp_path / "chain", "damaged", 3)
    url, expected = tmp_path / "chain" / "version-00000003", whole(3)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    needed = [path for path in files if path.parent.name != "version-00000001"]
    source, refused = random.Random(3), 0
    for path in needed * 8:
        data = bytearray(path.read_bytes())
        if not data:
            continue
        saved = bytes(data)
        at = source.randrange(len(data))
        data[at] ^= 1 << source.randrange(8)
        for before in (2, 0):
            path.write_bytes(saved)
            state = whole(2) if before else zeros()
            path.write_bytes(data)
            try:
                ckpt.load(url, state)
            except (ckpt.CkptError, OSError):
                refused += 1
            else:
                for name, tensor in expected.items():
                    assert torch.equal(state[name], tensor), (path, at, before)
        path.write_bytes(saved)
    assert refused > len(needed)
    for path in needed:  # and none that is missing or short
        saved = path.read_bytes()
        path.write_bytes(saved[: len(saved) // 2])
        with suppress(ckpt.CkptError, OSError):
            state = ckpt.load(url, zeros())
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        path.write_bytes(saved)


@pytest.mark.thorough
def test_what_a_killed_publisher_left_is_no_version_and_its_successor_goes_on(
    alone: None, tmp_path: Path
) -> None:
    chain = tmp_path / "chain"
    publish(chain, "first", 2)
    (chain / "version-00000003").mkdir()
    shutil.copy(*[next((chain / "version-00000002").glob("*.delta")), chain / "version-00000003"])
    assert next(ckpt.follow(chain)).number == 2
    publish(chain, "second", 2)
    versions = [one.number for one in islice(ckpt.follow(chain), 1)]
    assert versions == [5]  # it began with 4, a whole one
    told = json.loads((chain / "version-00000004" / LIVE_VERSION).read_text())
    assert (told["whole"], told["before"]) == (4, None)
    assert torch.equal(ckpt.read(chain / "version-00000005")["matrix"], whole(2)["matrix"])


@pytest.mark.slow
def test_two_publishers_of_one_folder_do_not_mix(alone: None, tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    with (
        ckpt.publish({"w": torch.ones(3)}, "one", through=chain) as one,
        ckpt.publish({"w": torch.zeros(3)}, "other", through=chain) as other,
    ):
        assert (one.version, other.version) == (1, 2)
        with pytest.raises(ckpt.ExistsError, match="another job publishes through"):
            one.update().wait(SECONDS)
        assert ckpt.load(one.url, {"w": torch.zeros(3)})["w"].tolist() == [1, 1, 1]
    assert ckpt.read(chain / "version-00000002")["w"].tolist() == [0, 0, 0]


@pytest.mark.slow
def test_a_state_that_has_changed_its_tensors_is_a_whole_version(
    alone: None, tmp_path: Path
) -> None:
    chain, state = tmp_path / "chain", {"w": torch.ones(5000)}
    with ckpt.publish(state, "changed", through=chain) as live:
        state["v"] = torch.ones(7)
        live.update().wait(SECONDS)
        state["w"] += 1
        live.update().wait(SECONDS)
    told = [json.loads((chain / f"version-{n:08d}" / LIVE_VERSION).read_text()) for n in (1, 2, 3)]
    assert [(one["whole"], one["before"]) for one in told] == [(1, None), (2, None), (2, 2)]
    assert ckpt.read(chain / "version-00000003")["w"].unique().tolist() == [2.0]


@pytest.mark.thorough
def test_a_folder_that_fails_leaves_the_live_state_and_the_next_version_is_whole(
    alone: None, tmp_path: Path
) -> None:
    chain, state = tmp_path / "chain", {"w": torch.ones(5000)}
    with ckpt.publish(state, "failing", through=chain) as live:
        state["w"] += 1
        (tmp_path / "chain").rename(tmp_path / "away")
        (tmp_path / "chain").write_text("no folder")
        with pytest.raises(ckpt.StoreError, match="chain"):
            live.update().wait(SECONDS)
        assert ckpt.load(live.url, {"w": torch.zeros(5000)})["w"].unique().tolist() == [2.0]
        (tmp_path / "chain").unlink()
        (tmp_path / "away").rename(tmp_path / "chain")
        state["w"] += 1
        live.update().wait(SECONDS)
    told = json.loads((chain / "version-00000003" / LIVE_VERSION).read_text())
    assert (told["whole"], told["before"]) == (3, None)


@pytest.mark.thorough
def test_in_memory_of_this_process_a_thread_writes_the_chain(alone: None) -> None:
    url = "memory://a-chain"
    publish(url, "in-memory", 3)
    version = next(ckpt.follow(url))
    assert version.number == 3
    assert torch.equal(ckpt.load(version.url, zeros())["matrix"], whole(3)["matrix"])


def test_a_follower_of_a_folder_matches_names_once(alone: None, tmp_path: Path) -> None:
    state, versions = zeros(), ckpt.follow(tmp_path, timeout=SECONDS, look_seconds=0)
    with patch.object(agreement, "match", side_effect=agreement.match) as matched:
        for version in (1, 2):
            publish(tmp_path, f"match-{version}", 1)
            ckpt.load(next(versions).url, state)
    assert matched.call_count == 1
    assert torch.equal(state["matrix"], whole(1)["matrix"])


def test_neighbouring_frames_come_together_from_a_store_that_takes_time(alone: None) -> None:
    state, url = whole(1), "memory://far-chain"
    with ckpt.publish(state, "far", through=url) as live:
        for name, tensor in whole(2).items():
            state[name].copy_(tensor)
        live.update().wait(SECONDS)
    with open_store(f"{url}/version-00000002") as store, StoredVersion(store) as version:
        (name,) = version._places
        nbytes = version._newest.end(0)
        kind = type(store)
        with patch.object(kind, "read", autospec=True, side_effect=kind.read) as reads:
            areas = [
                Area(at, 1, (min(FRAME_BYTES, nbytes - at),), (1,), False)
                for at in range(0, nbytes, FRAME_BYTES)
            ]
            delta = version.delta(name, areas)
            assert delta is not None
            assert delta.nbytes > 0
            for area in areas:
                assert delta.apply(area, np.zeros(area.shape, "u1"))
        assert nbytes > 2 * FRAME_BYTES
        assert reads.call_count == 1


@pytest.mark.parametrize(
    "how", [{"full_every": 0}, {"full_every": 1.5}, {"through": "live://h:1/x"}, {"through": 5}]
)
def test_wrong_arguments_are_refused_before_a_server_begins(
    alone: None, tmp_path: Path, how: dict[str, Any]
) -> None:
    with pytest.raises(ckpt.CkptError):
        ckpt.publish({"w": torch.ones(3)}, "wrong", **{"through": tmp_path / "c", **how})
    with ckpt.publish({"w": torch.ones(3)}, "wrong"):
        pass


PUBLISHER = """
import sys, torch, ckpt
state = {"w": torch.zeros(400_000)}
with ckpt.publish(state, "killed", through=sys.argv[1], full_every=4) as live:
    print("begun", flush=True)
    while True:
        state["w"] += 1
        live.update().wait(60)
"""


@pytest.mark.thorough
def test_a_publisher_that_is_killed_leaves_no_version_but_whole_ones(
    alone: None, tmp_path: Path, programs: Callable[..., Any]
) -> None:
    for round_number in range(3):
        running = programs(PUBLISHER, tmp_path / "chain")
        try:
            assert running.stdout.readline() == "begun\n"
            state = {"w": torch.zeros(400_000)}
            for version in islice(ckpt.follow(tmp_path / "chain", timeout=60, look_seconds=0), 3):
                with suppress(ckpt.ReplacedError, ckpt.NotACheckpointError):
                    ckpt.load(version.url, state)
                    assert len(state["w"].unique()) == 1
        finally:
            os.kill(running.pid, signal.SIGKILL)
            running.communicate()
        found = next(ckpt.follow(tmp_path / "chain", timeout=60))
        assert len(ckpt.read(found.url)["w"].unique()) == 1, round_number
