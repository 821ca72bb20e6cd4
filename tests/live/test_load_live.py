"""Jobs of several ranks load one version of a live state, with other names and dtypes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from ckpt.opening.sources import TRIES
from tests.kept_groups import kept
from tests.live.hosts import until
from tests.live.offered import RUNTIME, Offer, offered

ROWS, COLUMNS = 13, 5


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The folder of the servers' sockets, and an empty one, as of another host."""
    found = {place: str(tmp_path_factory.mktemp(place)) for place in ("here", "elsewhere")}
    for folder in found.values():
        os.chmod(folder, 0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNTIME, found["here"])
        yield found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints by version: all elements differ by the version."""
    found = []
    for version in range(TRIES + 1):
        found.append(tmp_path_factory.mktemp("saved") / "c")
        ckpt.save(found[-1], {"model.w": whole(version), "step": version})
    return found


@pytest.fixture
def offer(folders: list[Path], sockets: dict[str, str]) -> Iterator[Offer]:
    with offered(folders[1], name="loaded") as one:
        yield one


def whole(version: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + version


@kept
def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shards(dtype: torch.dtype) -> DTensor:
    """The target of this rank: its columns, and none of the values."""
    empty = torch.full((ROWS, COLUMNS), -1.0, dtype=dtype)
    return distribute_tensor(empty, mesh(), [Shard(1)], src_data_rank=None)


def loads(url: str, sockets: str, count: int) -> list[int]:
    """On each rank: the versions of so many loads of the newest one, each of them whole."""
    os.environ[RUNTIME] = sockets
    found = []
    for _ in range(count):
        state = ckpt.load(url, {"w": shards(torch.float32), "step": -1}, rename={"model": ""})
        expected = distribute_tensor(whole(state["step"]), mesh(), [Shard(1)], src_data_rank=None)
        assert torch.equal(state["w"].to_local(), expected.to_local())
        found.append(state["step"])
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_all_ranks_load_the_same_version_while_others_come(
    clusters: Callable[[int], Any],
    offer: Offer,
    folders: list[Path],
    sockets: dict[str, str],
    place: str,
) -> None:
    def publish() -> None:  # fewer versions than a load has tries: the last try succeeds
        for version in range(2, TRIES + 1):
            offer.publish(version, folders[version])
            offer.retire(version - 1, wait_seconds=60)

    later = Thread(target=publish)
    later.start()
    found = clusters(3).run(loads, offer.url, sockets[place], 6)
    later.join()
    assert found[0] == found[1] == found[2]
    assert found[0] == sorted(found[0])


class _Waiting(os.PathLike[str]):
    """An address that is known once a path is there."""

    def __init__(self, url: str, path: str) -> None:
        self.url, self.path = url, path

    def __fspath__(self) -> str:
        until(lambda: os.path.exists(self.path))
        return self.url


def loads_late(url: str, sockets: str, opened: str, published: str) -> int:
    """On each rank: the version of a load that rank 1 begins after rank 0 has its lease."""
    os.environ[RUNTIME] = sockets
    state = {"model": {"w": shards(torch.float32)}, "step": -1}
    is_first = dist.get_rank() == 0

    def renamed(name: str) -> str:  # asked once the checkpoint is open
        if is_first:
            Path(opened).touch()
        return name

    ckpt.load(url if is_first else _Waiting(url, published), state, rename=renamed)
    expected = distribute_tensor(whole(state["step"]), mesh(), [Shard(1)], src_data_rank=None)
    assert torch.equal(state["model"]["w"].to_local(), expected.to_local())
    return state["step"]


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_a_rank_that_opens_a_newer_version_loads_the_one_of_rank_0(
    clusters: Callable[[int], Any],
    offer: Offer,
    folders: list[Path],
    sockets: dict[str, str],
    place: str,
    tmp_path: Path,
) -> None:
    opened, published = tmp_path / "opened", tmp_path / "published"

    def publish() -> None:
        until(opened.exists)
        offer.publish(2, folders[2])
        published.touch()

    later = Thread(target=publish)
    later.start()
    found = clusters(2).run(loads_late, offer.url, sockets[place], str(opened), str(published))
    later.join()
    assert found == [1, 1]


def errors_of_columns(url: str, sockets: str) -> str:
    """On each rank: the class of the error of a load of a matrix by columns."""
    os.environ[RUNTIME] = sockets
    empty = distribute_tensor(torch.zeros(64, 4100), mesh(), [Shard(1)], src_data_rank=None)
    try:
        ckpt.load(url, {"w": empty})
    except ckpt.CkptError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(("place", "finders"), [("here", 1), ("elsewhere", None)])
def test_damage_that_one_rank_finds_is_an_error_on_all(
    clusters: Callable[[int], Any],
    sockets: dict[str, str],
    place: str,
    finders: int | None,
    tmp_path: Path,
) -> None:
    ckpt.save(tmp_path / "c", {"w": torch.rand(64, 4100)})
    with offered(tmp_path / "c", name=f"damaged-{place}") as one:
        assert clusters(3).run(errors_of_columns, one.url, sockets[place]) == ["", "", ""]
        (shard,) = (at for file, at in one.memory[1].items() if file.endswith(".safetensors"))
        for chunk in range(4):  # each rank finds one, and the first of them another one
            at = os.fstat(shard).st_size // 2 + chunk * (64 << 10)
            byte = os.pread(shard, 1, at)
            os.pwrite(shard, bytes([byte[0] ^ 1]), at)
            found = clusters(3).run(errors_of_columns, one.url, sockets[place])
            os.pwrite(shard, byte, at)
            assert set(found) <= {"DamagedLoadError", "RankError"}, found
            assert finders is None or found.count("DamagedLoadError") == finders


def cast(url: str, sockets: str) -> bool:
    """On each rank: whether a load into bfloat16 by another name is that of the disk."""
    os.environ[RUNTIME] = sockets
    state = {"net": {"weight": shards(torch.bfloat16)}}
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(url, state, rename={"model.w": "net.weight"}, include="net.*")
    assert "dtype" in error.value.reason
    ckpt.load(
        url, state, rename={"model.w": "net.weight"}, include="net.*", dtype="target", verify="all"
    )
    expected = distribute_tensor(whole(1).bfloat16(), mesh(), [Shard(1)], src_data_rank=None)
    return torch.equal(state["net"]["weight"].to_local(), expected.to_local())


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_an_engine_with_other_names_and_dtypes_loads_by_name(
    clusters: Callable[[int], Any], offer: Offer, sockets: dict[str, str], place: str
) -> None:
    assert clusters(3).run(cast, offer.url, sockets[place]) == [True, True, True]


def no_version_yet(url: str, sockets: str) -> str:
    """On each rank: the error of a load before the first version."""
    os.environ[RUNTIME] = sockets
    try:
        ckpt.load(url, {"step": 0})
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_state_without_a_version_is_an_error_on_all_ranks(
    clusters: Callable[[int], Any], sockets: dict[str, str]
) -> None:
    one = Offer("empty")
    try:
        errors = clusters(2).run(no_version_yet, one.url, sockets["here"])
    finally:
        one.close()
    assert all("NotACheckpointError" in error for error in errors), errors
    assert all("has no version yet" in error for error in errors), errors
