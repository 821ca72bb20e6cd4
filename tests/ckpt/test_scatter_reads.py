"""Loads by more ranks than saved, from a server: the same bits by few requests."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ckpt
import ckpt.stores.store
from tests.stores.fault_proxy import FaultProxy
from tests.stores.server import Server

SHAPES = ((64, 40), (7, 5), (3,), (1, 3), (0, 4), (), (301, 257), (2, 2, 2), (1 << 17,))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
Options = Mapping[str, Any]


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    with FaultProxy(moto) as opened:
        yield opened


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 251).to(dtype)


def wanted(how: tuple[Placement, ...] | None, filled: bool) -> dict[str, torch.Tensor]:
    """Tensors over this process group, as they should be or still empty."""
    found = {}
    for shape in SHAPES:
        for dtype in DTYPES:
            value = whole(shape, dtype) if filled else torch.zeros(shape, dtype=dtype)
            if how is not None and value.ndim:
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                value = distribute_tensor(value, mesh, list(how), src_data_rank=None)
            found[f"{shape} {dtype}"] = value
    return found


def save(url: str, options: Options) -> None:
    ckpt.save(url, wanted((Shard(0),), True), storage_options=options)


def load(url: str, options: Options, how: tuple[Placement, ...] | None) -> int:
    """Bytes that this rank has read, having loaded what it should."""
    read: list[int] = []
    target = wanted(how, False)
    ckpt.load(url, target, storage_options=options, progress=read.append)
    for name, value in wanted(how, True).items():
        mine, right = target[name], value
        if isinstance(mine, DTensor) and isinstance(right, DTensor):
            mine, right = mine.to_local(), right.to_local()
        assert torch.equal(mine, right), name
    return sum(read)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("saved", "loaded", "how"),
    [
        (1, 2, (Shard(0),)),
        pytest.param(2, 4, (Shard(0),), marks=pytest.mark.thorough),
        pytest.param(2, 3, (Shard(0),), marks=pytest.mark.thorough),
        pytest.param(1, 3, (Replicate(),), marks=pytest.mark.slow),
        pytest.param(3, 4, (Shard(0),), marks=pytest.mark.slow),
        pytest.param(1, 4, (Shard(0),), marks=pytest.mark.slow),
        pytest.param(2, 4, (Replicate(),), marks=pytest.mark.slow),
        pytest.param(1, 4, None, marks=pytest.mark.slow),
    ],
)
def test_what_few_ranks_saved_is_dealt_out_to_many(
    clusters: Callable,
    proxy: FaultProxy,
    tmp_path: Path,
    saved: int,
    loaded: int,
    how: tuple[Placement, ...] | None,
) -> None:
    url, options = proxy.server.url(f"{tmp_path.name}/a"), dict(proxy.server.options)
    clusters(saved).run(save, url, options)
    proxy.clear()
    read = clusters(loaded).run(load, url, options, how)
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in wanted(None, True).values())
    assert sum(read) == nbytes
    assert max(read) < 0.8 * nbytes
    # The manifest and two ends of a file for each rank, and a few runs of bytes.
    assert proxy.count() <= loaded * (1 + 2 + 5)


def save_wide(url: str, options: Options) -> None:
    ckpt.save(url, {"w": wide(True)}, storage_options=options)


def load_wide(url: str, options: Options) -> None:
    target = wide(False)
    ckpt.load(url, {"w": target}, storage_options=options)
    assert torch.equal(target.to_local(), wide(True, Shard(1)).to_local())


def wide(is_filled: bool, how: Placement | None = None) -> DTensor:
    """Rows of 1,000 numbers: by rows if they are saved, by columns if they are to be loaded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.arange(500_000.0) if is_filled else torch.zeros(500_000)
    how = (Shard(0) if is_filled else Shard(1)) if how is None else how
    return distribute_tensor(value.reshape(500, 1000), mesh, [how], src_data_rank=None)


@pytest.mark.thorough
@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 3), (3, 2)])
def test_columns_of_a_matrix_travel_from_the_server_once(
    clusters: Callable, proxy: FaultProxy, tmp_path: Path, saved: int, loaded: int
) -> None:
    url, options = proxy.server.url(f"{tmp_path.name}/w"), dict(proxy.server.options)
    clusters(saved).run(save_wide, url, options)
    proxy.clear()
    clusters(loaded).run(load_wide, url, options)
    nbytes = 4 * 500_000
    assert proxy.sent_bytes < nbytes + 250_000 * loaded  # some headers, and chunks cut in two


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_whole_tensors_of_another_format_are_dealt_out_to_many(
    clusters: Callable, proxy: FaultProxy, tmp_path: Path, to: Any
) -> None:
    url, options = proxy.server.url(f"{tmp_path.name}/b.{to}"), dict(proxy.server.options)
    ckpt.save(tmp_path / "a", wanted(None, True))
    ckpt.convert(tmp_path / "a", url, to=to, dst_storage_options=options)
    proxy.clear()
    read = clusters(2).run(load, url, options, (Shard(0),))
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in wanted(None, True).values())
    assert sum(read) == nbytes
    assert max(read) < 0.8 * nbytes
    # To find and open the file, and a run of bytes: without scattering one for each tensor.
    assert proxy.count() <= 2 * (10 + 2)


def load_what_is_damaged(url: str, options: Options) -> tuple[str, tuple[str, ...]]:
    target = wanted((Shard(0),), False)
    try:
        ckpt.load(url, target, storage_options=options)
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}", tuple(getattr(error, "touched", ()))
    return "no error", ()


def test_damage_that_one_rank_reads_for_all_is_an_error_on_all(
    clusters: Callable, moto: Server, tmp_path: Path
) -> None:
    url, options = moto.url(f"{tmp_path.name}/a"), dict(moto.options)
    clusters(1).run(save, url, options)
    with ckpt.stores.store.open_store(url, options) as store:
        (name,) = [name for name in store.names() if name.endswith(".safetensors")]
        data = bytearray(store.read_whole(name, 1 << 30))
        data[len(data) // 2] ^= 1
        store.commit(name, bytes(data), replace=True)
    found = clusters(2).run(load_what_is_damaged, url, options)
    assert sorted(text.partition(":")[0] for text, _ in found) == ["DamagedLoadError", "RankError"]
    assert all(len(touched) > 10 for _, touched in found)
