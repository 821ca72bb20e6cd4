"""Our StorageWriter and StorageReader under torch's own `save` and `load`."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
import ckpt.dcp as dcp
import ckpt.dcp.arguments as dcp_arguments
from tests.conftest import RankDied
from tests.dcp.programs import AppState, build, step, whole
from tests.old_torch import needs

pytestmark = needs((2, 8), "no_dist= and FSDP2 on a CPU came with torch 2.8")
alone = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of many kinds


def arrays(value: Any) -> Any:
    """A nest with numpy's arrays for tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    return {key: arrays(item) for key, item in value.items()} if isinstance(value, dict) else value


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_equal(found, wanted)


def save_with_torch(folder: str) -> Any:
    model, optimizer = build(0)
    step(model, optimizer, 0)
    app = AppState(model, optimizer)
    state = {"app": app, "step": 2, "pair": (1, torch.ones(2)), "set": {1, 2}}
    torch_dcp.save(state, storage_writer=dcp.CkptStorageWriter(folder, metadata={"run": "a"}))
    return arrays(whole(app.state_dict()))


def load_with_torch(folder: str) -> Any:
    model, optimizer = build(1)
    app = AppState(model, optimizer)
    state = {"app": app, "step": 0, "pair": None, "set": None}
    torch_dcp.load(state, storage_reader=dcp.CkptStorageReader(folder))
    assert state["pair"][0] == 1
    assert torch.equal(state["pair"][1], torch.ones(2))
    assert (state["step"], state["set"]) == (2, {1, 2})
    return arrays(whole(app.state_dict()))


def load_with_ckpt(folder: str) -> Any:
    model, optimizer = build(1)
    ckpt.load(folder, {"app": {"model": model, "optim": optimizer}}, strict=False)
    return arrays(whole(AppState(model, optimizer).state_dict()))


@pytest.mark.thorough
@pytest.mark.parametrize("loading", [1, 3])
def test_what_torch_saves_by_our_writer_is_read_at_another_world_size(
    clusters: Callable[[int], Any], tmp_path: Path, loading: int
) -> None:
    saved = clusters(2).run(save_with_torch, str(tmp_path))[0]
    assert not ckpt.verify(tmp_path).problems
    with ckpt.open(tmp_path) as found:
        assert found.catalog.format == "ckpt"
        assert found.metadata["run"] == "a"
        assert found.metadata["world_size"] == "2"
    for loaded in clusters(loading).run(load_with_torch, str(tmp_path)):
        same(loaded, saved)
    for loaded in clusters(loading).run(load_with_ckpt, str(tmp_path)):
        same(loaded, saved)


SHAPES = {"even": (8, 4), "uneven": (7, 3), "few": (2, 3), "empty": (0, 3), "wide": (3, 9)}
PLACED = [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(1),) * 2]


def divided(seed: float) -> dict[str, DTensor]:
    """Tensors of awkward shapes, divided by a mesh of 2 × (world size / 2) in all ways."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    found = {}
    for name, shape in SHAPES.items():
        tensor = torch.arange(float(np.prod(shape))).reshape(shape) * seed
        for number, placements in enumerate(PLACED):
            found[f"{name}{number}"] = distribute_tensor(tensor, mesh, placements)
    return found


def save_divided(folder: str) -> None:
    torch_dcp.save(divided(1.0), storage_writer=dcp.CkptStorageWriter(folder, compress=True))


def load_divided(folder: str) -> None:
    state = divided(0.0)
    torch_dcp.load(state, storage_reader=dcp.CkptStorageReader(folder))
    for name, wanted in divided(1.0).items():
        assert torch.equal(state[name].full_tensor(), wanted.full_tensor()), name


def test_every_division_of_a_mesh_is_stored_and_read_back(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    clusters(4).run(save_divided, str(tmp_path))
    clusters(2).run(load_divided, str(tmp_path))
    read: Any = ckpt.read(tmp_path)
    for name, shape in SHAPES.items():
        for number in range(len(PLACED)):
            wanted = torch.arange(float(np.prod(shape))).reshape(shape)
            assert torch.equal(read[f"{name}{number}"], wanted)


class FailingPlanner(torch_dcp.DefaultSavePlanner):
    """Cannot give one tensor on rank 1."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the memory is gone")
        return super().resolve_data(write_item)


def fail_on_one_rank(folder: str) -> tuple[str, str, list[str]]:
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)]), "n": 1}
    dcp.save(state, checkpoint_id=folder)
    before = sorted(os.listdir(folder))
    dist.barrier()
    state["n"] = 2
    try:
        torch_dcp.save(
            state, storage_writer=dcp.CkptStorageWriter(folder), planner=FailingPlanner()
        )
    except torch_dcp.CheckpointException as error:
        told = str(error)
    with pytest.raises(ckpt.RankError) as caught:
        dcp.save(state, checkpoint_id=folder, planner=FailingPlanner())
    return told, str(caught.value), before


def test_a_rank_that_fails_leaves_the_earlier_checkpoint(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    for told, ours, before in clusters(2).run(fail_on_one_rank, str(tmp_path)):
        assert "the memory is gone" in told
        assert ours == "write failed on rank 1 with OSError: the memory is gone"
        assert set(before) <= set(os.listdir(tmp_path))
    assert ckpt.read(tmp_path)["n"] == 1  # type: ignore[index]
    assert not ckpt.verify(tmp_path).problems


class DyingPlanner(torch_dcp.DefaultSavePlanner):
    """Its process is killed on rank 1, when half of the items are written."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def die_on_one_rank(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)]), "n": 1}
    dcp.save(state, checkpoint_id=folder)
    torch_dcp.save(
        {"w": state["w"], "n": 2},
        storage_writer=dcp.CkptStorageWriter(folder),
        planner=DyingPlanner(),
    )


def test_a_rank_that_is_killed_leaves_the_earlier_checkpoint(
    doomed_cluster: Callable[[int], Any], tmp_path: Path
) -> None:
    with pytest.raises(RankDied):
        doomed_cluster(2).run(die_on_one_rank, str(tmp_path))
    assert ckpt.read(tmp_path)["n"] == 1  # type: ignore[index]
    assert not ckpt.verify(tmp_path).problems


class Cached(torch_dcp.DefaultSavePlanner):
    """Plans once, and keeps the plan for the saves that follow."""


def save_by_one_plan(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for number in range(3):
        state = {"w": distribute_tensor(torch.full((5,), number), mesh, [Shard(0)]), "n": number}
        dcp.save(
            state, checkpoint_id=f"{folder}/{number}", planner=Cached(enable_plan_caching=True)
        )


def test_a_planner_may_keep_its_plan_for_the_saves_that_follow(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    clusters(2).run(save_by_one_plan, str(tmp_path))
    for number in range(3):
        read: Any = ckpt.read(tmp_path / str(number))
        assert (read["n"], read["w"].tolist()) == (number, [number] * 5)


def save_what_exists(folder: str) -> list[str]:
    writer = dcp.FileSystemWriter(folder, overwrite=False)
    dcp.save({"n": 1}, storage_writer=writer, planner=dcp.DefaultSavePlanner())
    found = []
    for planner in (None, FailingPlanner()):
        try:
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner)
        except ckpt.CkptError as error:
            found.append(error.kind)
    return found


@alone
def test_a_save_writes_no_file_of_the_checkpoint_that_it_replaces(tmp_path: Path) -> None:
    writer, files = dcp.FileSystemWriter(tmp_path / "c"), []
    for value in (1.0, 2.0):
        torch_dcp.save({"w": torch.full((4,), value)}, storage_writer=writer)
        files.append({file.name for file in (tmp_path / "c").glob("*.safetensors")})
    assert [len(names) for names in files] == [1, 1]
    assert not files[0] & files[1]


def test_a_writer_that_may_not_overwrite_refuses_on_all_ranks(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    found = clusters(2).run(save_what_exists, str(tmp_path))
    assert found == [["exists", "exists"], ["rank", "rank"]]
    assert os.listdir(tmp_path) == ["manifest.json"]  # nothing was written
    assert ckpt.read(tmp_path) == {"n": 1}


STATE = {"a": {"w": torch.arange(6.0).reshape(2, 3)}, "b": torch.arange(4, dtype=torch.int32)}


@alone
@pytest.mark.parametrize("form", ["ckpt", "safetensors", "hf", "torch", "dcp"])
def test_every_format_is_read_by_both_loads(tmp_path: Path, form: str) -> None:
    ckpt.save(tmp_path / "native", STATE)
    place = tmp_path / ("found.safetensors" if form == "safetensors" else "found")
    ckpt.convert(tmp_path / "native", place, to=form, include="*")  # type: ignore[arg-type]

    def target() -> dict[str, Any]:
        return {"a": {"w": torch.zeros(2, 3)}, "b": torch.zeros(4)}

    metadata = dcp.CkptStorageReader(place).read_metadata()
    assert metadata.state_dict_metadata["b"].properties.dtype == torch.int32
    states = [target() for _ in range(4)]
    dcp.load(states[0], checkpoint_id=place)
    torch_dcp.load(states[1], storage_reader=dcp.CkptStorageReader(place))
    dcp.load(states[2], storage_reader=dcp.FileSystemReader(place), planner=Planner())
    dcp.load(states[3], storage_reader=dcp.HuggingFaceStorageReader(str(place)))
    for state in states:
        assert torch.equal(state["a"]["w"], STATE["a"]["w"])  # type: ignore[index]
        assert torch.equal(state["b"], torch.arange(4.0))


class Planner(dcp.DefaultLoadPlanner):
    """A planner that is not DCP's own class, and does the same."""


class Halves(dcp.DefaultSavePlanner):
    """Stores float16 in the place of float32, as torch's documents have it."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found.half() if isinstance(found, torch.Tensor) else found


class Objects(dcp.DefaultSavePlanner):
    """Stores other bytes than DCP's own planner does."""

    def transform_object(self, write_item: Any, value: Any) -> Any:
        found = super().transform_object(write_item, value)
        if write_item.index.fqn == "bad":
            found.seek(0)
            found.truncate(3)
        return found


@alone
def test_planners_of_ones_own_decide_what_is_stored(tmp_path: Path) -> None:
    state = {"w": torch.linspace(0, 1, 5), "n": {"deep": [1, 2]}}
    dcp.save(state, checkpoint_id=tmp_path / "half", planner=Halves())
    with ckpt.open(tmp_path / "half") as found:
        assert found["w"].dtype == torch.float16
        assert torch.equal(found["w"][...], state["w"].half())  # type: ignore[union-attr]
    dcp.save(state, checkpoint_id=tmp_path / "objects", planner=Objects())
    assert ckpt.read(tmp_path / "objects")["n"] == {"deep": [1, 2]}  # type: ignore[index]
    with pytest.raises(ckpt.StateError, match="bad: the planner's bytes hold no plain value"):
        dcp.save({"bad": 1}, checkpoint_id=tmp_path / "bad", planner=Objects())
    for planner in (dcp.DefaultSavePlanner(), Objects(), Halves()):
        with pytest.raises(ckpt.StateError, match="store its indices and values"):
            dcp.save({"s": state["w"].to_sparse()}, checkpoint_id=tmp_path / "bad", planner=planner)
    assert not (tmp_path / "bad").exists() or not os.listdir(tmp_path / "bad")


class Forgets(dcp.DefaultSavePlanner):
    """Leaves an item out of all plans, but not out of the Metadata."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        left = [[one for one in plan.items if one.index.fqn != self.name] for plan in plans]
        return [
            replace(plan, items=found) for plan, found in zip(plans, left, strict=True)
        ], metadata


@alone
@pytest.mark.parametrize("name", ["w", "scalar", "n"])
def test_an_item_that_no_rank_has_written_is_named(tmp_path: Path, name: str) -> None:
    state = {"w": torch.ones(5), "scalar": torch.tensor(1.0), "n": 1}
    with pytest.raises(ckpt.StateError, match=f"^{name}: .* no rank has written it"):
        dcp.save(state, checkpoint_id=tmp_path, planner=Forgets(name))
    assert not os.listdir(tmp_path)


class Rows(dcp.DefaultSavePlanner):
    """Gives a tensor in parts of the lengths that were asked for."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.lengths = lengths

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        [item] = plan.items
        parts, lo = [], 0
        for length in self.lengths:
            size = torch.Size((length, 2))
            chunk = dcp.ChunkStorageMetadata(torch.Size((lo, 0)), size)
            data = type(item.tensor_data)(chunk, item.tensor_data.properties, torch.Size((5, 2)))
            index = type(item.index)("w", chunk.offsets)
            parts.append(type(item)(index, item.type.SHARD, tensor_data=data))
            lo += length
        return SavePlan(parts, planner_data=plan.planner_data)

    def lookup_object(self, index: Any) -> Any:
        lo = index.offset[0]
        at = [sum(self.lengths[:i]) for i in range(len(self.lengths))].index(lo)
        return self.state_dict[index.fqn][lo : lo + self.lengths[at]]


@alone
def test_parts_of_one_rank_are_stored_where_a_layout_has_them(tmp_path: Path) -> None:
    state = {"w": torch.arange(10.0).reshape(5, 2)}
    dcp.save(state, checkpoint_id=tmp_path / "good", planner=Rows((2, 2, 1)))
    assert torch.equal(ckpt.read(tmp_path / "good")["w"], state["w"])  # type: ignore[index]
    assert not ckpt.verify(tmp_path / "good").problems
    with pytest.raises(ckpt.UnsupportedError, match=r"w: it is divided into 3 parts"):
        dcp.save(state, checkpoint_id=tmp_path / "bad", planner=Rows((1, 3, 1)))
    assert not os.listdir(tmp_path / "bad")


def load_what_is_too_short(folder: str) -> tuple[str, str]:
    with pytest.raises(ckpt.CorruptError) as ours:
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=folder, planner=Planner())
    with pytest.raises(torch_dcp.CheckpointException) as theirs:
        torch_dcp.load({"w": torch.zeros(2)}, storage_reader=dcp.CkptStorageReader(folder))
    return str(ours.value), str(theirs.value)


def test_every_error_comes_through_torch_s_messages(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    ckpt.save(tmp_path, {"w": torch.ones(2)})
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    for found in clusters(2).run(load_what_is_too_short, str(tmp_path)):
        assert all("it was truncated" in each for each in found)


def save_and_load_by_torch(folder: str, is_async: bool) -> list[str]:
    """Returns the lines of the log on this rank."""
    dcp_arguments._log_torch_s.cache_clear()
    said: list[str] = []
    logger, handler = logging.getLogger("ckpt.dcp"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for step in (1, 2):
            place = f"{folder}/{step}"
            writer, reader = torch_dcp.FileSystemWriter(place), torch_dcp.FileSystemReader(place)
            if is_async:
                dcp.async_save({"w": torch.ones(2)}, storage_writer=writer).result()
            else:
                dcp.save({"w": torch.ones(2)}, storage_writer=writer)
            dcp.load({"w": torch.zeros(2)}, storage_reader=reader)
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.parametrize("is_async", [False, True])
def test_storage_of_torch_in_a_call_of_ours_is_logged_once_by_rank_0(
    clusters: Callable[[int], Any], tmp_path: Path, is_async: bool
) -> None:
    first, second = clusters(2).run(save_and_load_by_torch, str(tmp_path), is_async)
    assert [line.partition(" serves")[0] for line in first] == [
        "torch's FileSystemWriter",
        "torch's FileSystemReader",
    ]
    assert all("import FileSystem" in line for line in first)
    assert second == []


class NoDisk:
    """Methods of a user's storage, which fails on one rank."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise FileNotFoundError("no disk")
        return super().write_data(*args, **kwargs)  # type: ignore[misc]

    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise FileNotFoundError("no disk")
        return super().read_data(*args, **kwargs)  # type: ignore[misc]


def use_a_failing_storage(folder: str) -> list[str]:
    found = []
    for kind in (torch_dcp.FileSystemWriter, dcp.FileSystemWriter, dcp.CkptStorageWriter):
        writer: Any = type("Own", (NoDisk, kind), {})(folder)
        with pytest.raises(ckpt.RankError) as caught:
            dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        found.append(str(caught.value))
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder)
    reader: Any = type("Own", (NoDisk, dcp.FileSystemReader), {})(folder)
    with pytest.raises(ckpt.RankError) as caught:
        dcp.load({"w": torch.zeros(2)}, storage_reader=reader)
    return [*found, str(caught.value)]


def test_an_error_of_a_user_s_storage_is_a_rank_error_on_all_ranks(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    told = "failed on rank 1 with FileNotFoundError: no disk"
    for found in clusters(2).run(use_a_failing_storage, str(tmp_path)):
        assert found == [f"write {told}"] * 3 + [f"read {told}"]


@alone
def test_the_storage_has_ids_of_a_save_and_a_load_as_torch_s(tmp_path: Path) -> None:
    writer, reader = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)
    assert writer.storage_meta().save_id == writer.save_id
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    found = reader.read_metadata().storage_meta
    reader.close()
    assert found is not None
    assert (str(found.checkpoint_id), found.load_id) == (str(tmp_path), reader.load_id)
    assert found.save_id is None
    before = writer.save_id, reader.load_id
    writer.reset()
    reader.reset()
    assert (writer.save_id, reader.load_id) != before


class Wrong(dcp.DefaultLoadPlanner):
    """Wants a tensor that the checkpoint lacks."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        name = plan.items[0].storage_index
        object.__setattr__(name, "fqn", "other")
        return plan


@alone
def test_errors_of_the_reader_are_ours(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(ckpt.StateError, match="no 'other'"):
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "a", planner=Wrong())
    shard = next((tmp_path / "a").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    at = data.index(np.ones(2, "float32").tobytes())
    data[at] ^= 1
    shard.write_bytes(data)
    for planner in (None, Planner()):
        with pytest.raises(ckpt.CorruptError):
            dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "a", planner=planner)
    shard.write_bytes(data[:-1])
    with pytest.raises(ckpt.CkptError):
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "a", planner=Planner())


@alone
def test_memory_of_any_kind_is_filled(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(12.0).reshape(3, 4)}, checkpoint_id=tmp_path)
    made = (torch.zeros(4, 3).t(), torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.float64))
    for target in made:
        version = target._version
        dcp.load({"w": target}, checkpoint_id=tmp_path, planner=Planner())
        assert torch.equal(target.float(), torch.arange(12.0).reshape(3, 4))
        assert target._version > version


@alone
@needs((2, 10), "stagers with options came later")
def test_async_save_of_torch_takes_our_writer_and_async_save_of_ours_takes_a_stager(
    tmp_path: Path,
) -> None:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    state = {"model": nn.Linear(2, 2), "n": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        future = torch_dcp.async_save(state, storage_writer=dcp.CkptStorageWriter(tmp_path / "a"))
        future.result()
        stager = DefaultStager(StagingOptions(False, False, True, False))
        response = dcp.async_save(state, checkpoint_id=tmp_path / "b", async_stager=stager)
        response.staging_completion.result()  # type: ignore[union-attr]
        response.upload_completion.result()  # type: ignore[union-attr]
        stager.close()
    for name in ("a", "b"):
        read: Any = ckpt.read(tmp_path / name)
        assert torch.equal(read["model"]["weight"], state["model"].weight)  # type: ignore[attr-defined]
