"""What docs/dcp.md says is other than in torch: values, failures, several saves at once."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed._shard import sharded_tensor as st
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
import ckpt.dcp as dcp
import sharding
from tests.old_torch import needs

alone = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of many kinds


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizer_without_a_step_gets_its_state(tmp_path: Path) -> None:
    model, optimizer = trained()
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path)
    other = nn.Linear(3, 2)
    fresh = torch.optim.Adam(other.parameters())
    dcp.load({"model": other, "optim": fresh}, checkpoint_id=tmp_path)
    wanted = optimizer.state_dict()["state"]
    found = fresh.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for number, state in wanted.items():
        for name, value in state.items():
            assert torch.equal(found[number][name], value)


@alone
@pytest.mark.parametrize("save", [dcp.save, torch_dcp.save])
def test_a_value_lands_under_the_key_that_the_state_has(tmp_path: Path, save: Any) -> None:
    save({"state": {0: {"momentum": None, "count": 3}}}, checkpoint_id=tmp_path)
    target = {"state": {0: {"momentum": 1, "count": 0}}}
    dcp.load(target, checkpoint_id=tmp_path)
    assert target == {"state": {0: {"momentum": None, "count": 3}}}


class Unknown:
    """Something that only a pickle could hold."""


class Evil:
    """Whose pickle would write a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


@alone
def test_what_only_a_pickle_could_hold_is_refused_by_its_key(tmp_path: Path) -> None:
    for planner in (None, type("Own", (dcp.DefaultSavePlanner,), {})()):
        with pytest.raises(ckpt.StateError, match=r"a\W+deep|a\.deep"):
            dcp.save({"a": {"deep": Unknown()}}, checkpoint_id=tmp_path / "x", planner=planner)
    assert not list(tmp_path.glob("x/*"))


class OtherBytes(dcp.DefaultSavePlanner):
    """Not known to store what DCP's own planner stores."""

    def transform_object(self, write_item: Any, value: Any) -> Any:
        return super().transform_object(write_item, value)


@alone
def test_nothing_that_a_folder_says_is_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    torch_dcp.save({"w": torch.ones(2), "bad": Evil(touched)}, checkpoint_id=tmp_path / "a")
    state = {"w": torch.zeros(2)}
    for planner in (None, type("Own", (dcp.DefaultLoadPlanner,), {})()):
        with pytest.raises(ckpt.CkptError):
            dcp.load(state, checkpoint_id=tmp_path / "a", planner=planner)
    with pytest.raises(ckpt.StateError, match="no pickle is stored"):
        dcp.save({"bad": Evil(touched)}, checkpoint_id=tmp_path / "c", planner=OtherBytes())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".metadata").write_bytes(pickle.dumps(Evil(touched)))
    with pytest.raises(ckpt.HostileError):
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "b"))
    assert not touched.exists()


def test_a_save_that_fails_in_the_background_is_told_by_its_future_or_the_next_save(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    state = {"w": torch.ones(2)}
    future: Any = dcp.async_save(state, checkpoint_id=tmp_path / "file" / "x")
    with pytest.raises(ckpt.StoreError):
        future.result()
    dcp.async_save(state, checkpoint_id=tmp_path / "a").result()  # type: ignore[union-attr]
    future = dcp.async_save(state, checkpoint_id=tmp_path / "file" / "x")
    future.handle.finished()
    with pytest.raises(ckpt.BackgroundError):
        dcp.save(state, checkpoint_id=tmp_path / "b")
    assert isinstance(future.exception(), ckpt.StoreError)
    dcp.save(state, checkpoint_id=tmp_path / "b")


def test_a_future_calls_back_when_the_checkpoint_is_there(tmp_path: Path) -> None:
    seen: list[bool] = []
    called = threading.Event()

    def call(done: Any) -> None:
        seen.append((tmp_path / "a" / "manifest.json").exists())
        called.set()

    future: Any = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    future.add_done_callback(call)
    assert sorted(future.result(60).state_dict_metadata) == ["w"]
    assert future.done()
    assert not future.cancel()
    assert called.wait(60)
    future.handle.when_finished(lambda error: seen.append(error is None))
    assert seen == [True, True]


def stages(folder: str) -> None:
    """Ranks with different names, as the stages of a pipeline have, and replicas that differ."""
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = {f"stage{rank}": torch.full((3,), float(rank)), "same": torch.full((2,), rank)}
        dcp.save(state, checkpoint_id=folder)
    assert [w.category for w in told] == ([ckpt.ReplicasWarning] if rank == 0 else [])
    other = {f"stage{1 - rank}": torch.zeros(3), "same": torch.ones(2, dtype=torch.int64)}
    dcp.load(other, checkpoint_id=folder)
    assert other[f"stage{1 - rank}"].tolist() == [1.0 - rank] * 3
    assert other["same"].tolist() == [0, 0]
    empty = {"same": torch.empty(2, dtype=torch.int64, device="meta")}
    dcp.load(empty, checkpoint_id=folder)
    assert empty["same"].tolist() == [0, 0]
    mesh = init_device_mesh("cpu", (2,))
    divided = {"w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}
    dcp.save(divided, checkpoint_id=f"{folder}/divided")
    again = {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}
    dcp.load(again, checkpoint_id=f"{folder}/divided", no_dist=True)  # each rank by itself
    assert torch.equal(again["w"].full_tensor(), torch.arange(4.0))


def test_ranks_may_have_names_of_their_own(clusters: Callable[[int], Any], tmp_path: Path) -> None:
    clusters(2).run(stages, str(tmp_path))


def train_while_saving(folder: str) -> list[float]:
    """Saves by the default group, whose collectives go on meanwhile."""
    value, futures = torch.zeros(1 << 16), []
    for number in range(4):
        value += dist.get_rank() + 1
        dist.all_reduce(value)
        state = {"w": value, "n": number}
        futures.append(dcp.async_save(state, checkpoint_id=f"{folder}/{number}"))
    for future in futures:
        future.result()  # type: ignore[union-attr]
    return [ckpt.open(f"{folder}/{number}")["w"][0].item() for number in range(4)]


def test_saves_in_the_background_leave_the_collectives_of_the_training_alone(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    found = clusters(2).run(train_while_saving, str(tmp_path))
    assert found[0] == found[1] == [3.0, 9.0, 21.0, 45.0]


class Failing:
    """Stateful, and fails on one rank: in one of the two methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_dict", {"n": 1})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_dict", state)

    def _call(self, method: str, state: dict[str, Any]) -> dict[str, Any]:
        if method == self.method and dist.get_rank() == 1:
            raise ZeroDivisionError("the program's own")
        return state


def fail_in_methods(folder: str) -> list[str]:
    found = []
    dcp.save({"one": Failing("")}, checkpoint_id=folder)

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except (ZeroDivisionError, ckpt.CkptError) as error:
            found.append(str(error))

    attempt(lambda: dcp.save({"one": Failing("state_dict")}, checkpoint_id=folder))
    attempt(lambda: dcp.load({"one": Failing("state_dict")}, checkpoint_id=folder))
    attempt(lambda: dcp.load({"one": Failing("load_state_dict")}, checkpoint_id=folder))
    attempt(lambda: dcp.save({}, checkpoint_id=folder if dist.get_rank() else ""))
    own = type("Own", (dcp.DefaultSavePlanner,), {})() if dist.get_rank() else None
    attempt(lambda: dcp.save({"n": 1}, checkpoint_id=folder, planner=own))
    return found


def test_what_fails_on_one_rank_fails_on_all_at_once(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    first, second = clusters(2).run(fail_in_methods, str(tmp_path))
    told = "failed on rank 1 with ZeroDivisionError: the program's own"
    names = ("ckpt.dcp.save", "ckpt.dcp.load", "ckpt.dcp.load")
    assert first[:3] == [f"{name} {told}" for name in names]
    assert second[:3] == ["the program's own"] * 3
    assert "no checkpoint_id" in first[3]
    assert "failed on rank 0 with ArgumentError" in second[3]
    assert "planners, stagers or storage of different kinds" in first[4]
    assert second[4] == first[4]


class Summing:
    """Stateful, with a collective of its own size in each of the two methods."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        total = torch.ones(self.count)
        dist.all_reduce(total)
        return {"total": total.sum()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict()


def load_in_other_orders(folder: str, package: str) -> list[str]:
    dcp = import_module(package)
    state = {"long": Summing(1000), "short": Summing(3)}
    dcp.save(state, checkpoint_id=folder)
    order = sorted(state, reverse=dist.get_rank() == 1)
    dcp.load({key: state[key] for key in order}, checkpoint_id=folder)
    return order


@pytest.mark.parametrize("package", ["torch.distributed.checkpoint", "ckpt.dcp"])
def test_a_load_calls_the_entries_in_one_order_on_all_ranks(
    clusters: Callable[[int], Any], tmp_path: Path, package: str
) -> None:
    first, second = clusters(2).run(load_in_other_orders, str(tmp_path), package)
    assert first == second[::-1]


class Counter:
    """Stateful, with a tensor that is made when it is loaded."""

    def __init__(self, count: int) -> None:
        self.state: dict[str, Any] = {"count": count, "seen": torch.full((2,), count)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_stateful_objects_deep_in_a_nest_are_filled_and_stay_themselves(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"deep": {"one": Counter(5), "model": model, "optim": optimizer, "list": [Counter(6)]}}
    dcp.save(state, checkpoint_id=tmp_path)
    torch.manual_seed(1)
    other = nn.Linear(3, 2)
    deep = {
        "one": Counter(0),
        "model": other,
        "optim": torch.optim.Adam(other.parameters()),
        "list": [Counter(0)],
    }
    target = {"deep": {**deep}}
    dcp.load(target, checkpoint_id=tmp_path)
    assert all(target["deep"][name] is deep[name] for name in deep if name != "list")
    assert [c.state["count"] for c in (deep["one"], *target["deep"]["list"])] == [5, 6]  # type: ignore[attr-defined, misc]
    assert torch.equal(other.weight, model.weight)
    found, wanted = (each.state_dict()["state"] for each in (deep["optim"], optimizer))  # type: ignore[attr-defined]
    assert torch.equal(found[0]["exp_avg"], wanted[0]["exp_avg"])


@alone
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("save", [dcp.save, torch_dcp.save])
def test_the_flags_of_the_default_planners_mean_what_they_mean(
    tmp_path: Path, save: Any, flat: bool
) -> None:
    state = {"w": torch.ones(2), "nest": {"a": [1, 2], "t": torch.arange(3)}, "one": Counter(5)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=flat, dedup_save_to_lowest_rank=True)
    save(state, checkpoint_id=tmp_path, planner=planner)
    target = {
        "w": torch.zeros(2),
        "nest": {"a": None, "t": torch.zeros(3, dtype=torch.int64)},
        "one": Counter(0),
    }
    dcp.load(
        target,
        checkpoint_id=tmp_path,
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=flat),
    )
    assert target["w"].tolist() == [1, 1]  # type: ignore[attr-defined]
    assert target["nest"]["a"] == [1, 2]  # type: ignore[index]
    assert target["nest"]["t"].tolist() == [0, 1, 2]  # type: ignore[index]
    assert target["one"].state["count"] == 5  # type: ignore[attr-defined]
    assert target["one"].state["seen"].tolist() == [5, 5]  # type: ignore[attr-defined]


@alone
@pytest.mark.parametrize("save", [dcp.save, torch_dcp.save])
def test_arrays_and_numbers_are_loaded_in_their_types(tmp_path: Path, save: Any) -> None:
    save({"w": torch.ones(2), "n": {"x": 2.0}}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"w": torch.zeros(2), "n": {"x": np.float32(0)}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["w"].tolist() == [1, 1]
    assert type(state["n"]["x"]) is np.float32
    for wrong in ({"w": torch.zeros(2, device="meta")}, {"a.b": 1, "a": {"b": 1}}):
        with pytest.raises(ckpt.StateError, match="cannot flatten the state dict"):
            dcp.load(wrong, checkpoint_id=tmp_path)
    dcp.save({"array": np.arange(3.0)}, checkpoint_id=tmp_path / "arrays")
    target = {"array": np.zeros(3)}
    dcp.load(target, checkpoint_id=tmp_path / "arrays")
    assert isinstance(target["array"], np.ndarray)
    assert target["array"].tolist() == [0, 1, 2]


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    tensor = torch.ones(1 << 12)
    dcp.save({"a": tensor, "b": tensor}, checkpoint_id=tmp_path)
    with ckpt.open(tmp_path) as found:
        assert found.catalog.aliases == {"b": "a"}


@needs((2, 7), "process-based saves came with torch 2.7")
def test_both_kinds_of_background_are_one(tmp_path: Path) -> None:
    from ckpt.dcp.state_dict_saver import AsyncCheckpointerType

    for kind in AsyncCheckpointerType:
        future: Any = dcp.async_save(
            {"n": 1}, checkpoint_id=tmp_path / kind.value, async_checkpointer_type=kind
        )
        future.result(60)
        assert ckpt.read(tmp_path / kind.value) == {"n": 1}


def test_torch_s_conversions_take_every_format(tmp_path: Path) -> None:
    from ckpt.dcp.format_utils import dcp_to_torch_save, torch_save_to_dcp

    dcp.save({"a": {"w": torch.ones(2)}, "n": 1}, checkpoint_id=tmp_path / "a")
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["n"] == 1
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "b")
    target = {"a": {"w": torch.zeros(2)}, "n": 0}
    dcp.load(target, checkpoint_id=tmp_path / "b")
    assert target["n"] == 1
    assert torch.equal(target["a"]["w"], torch.ones(2))  # type: ignore[index]


@alone
def test_storage_is_at_any_url(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/step"
    state: dict[str, Any] = {"w": torch.arange(4.0), "n": 1}
    for save in (dcp.save, torch_dcp.save):
        save(state, storage_writer=dcp.CkptStorageWriter(url))
        for load in (dcp.load, torch_dcp.load):
            target: dict[str, Any] = {"w": torch.zeros(4), "n": 0}
            load(target, storage_reader=dcp.CkptStorageReader(url))
            assert target["n"] == 1
            assert torch.equal(target["w"], state["w"])


@alone
@pytest.mark.parametrize("save", [dcp.save, torch_dcp.save])
def test_a_tensor_is_no_place_for_a_value(tmp_path: Path, save: Any) -> None:
    save({"step": 3, "w": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(ckpt.MismatchError, match="step: is 3 in the checkpoint, a tensor"):
        dcp.load({"step": torch.tensor(0)}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"w": None}
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["w"], torch.ones(2))


SAVED: dict[str, Any] = {
    "w": torch.arange(1.0, 4.0),
    "v": torch.ones(3),
    "n": 3,
    "keys": {0: {"n": 3}},
    "size": torch.Size([2]),
}
LOADED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a key that is no text": (
        {"keys": {0: {"n": 0}}},
        "{'keys': {0: {'n': 0}, '0': {'n': 3}}}",
        "{'keys': {0: {'n': 3}}}",
    ),
    "a tensor for a value": ({"n": torch.zeros(1)}, "{'n': 3}", "MismatchError"),
    "a value for a tensor": ({"v": 0}, "CheckpointException", "{'v': tensor([1., 1., 1.])}"),
    "a value for a dict": ({"keys": 0}, "CheckpointException", "{'keys': {0: {'n': 3}}}"),
    "an empty dict": ({"keys": {}}, "{'keys': {}}", "{'keys': {0: {'n': 3}}}"),
    "a size": ({"size": None}, "{'size': torch.Size([2])}", "{'size': (2,)}"),
    "one memory for two": (
        dict.fromkeys("wv", torch.zeros(3)),
        "{'w': tensor([1., 2., 3.]), 'v': tensor([1., 2., 3.])}",
        "MismatchError",
    ),
    "a flipped bit": (
        {"w": torch.zeros(3)},
        "{'w': tensor([1.0000, 2.0000, 3.5000])}",
        "DamagedLoadError",
    ),
}


WITHOUT_COPY = needs((2, 8), "torch 2.6 reads both names into the one memory")


def loaded(library: Any, target: dict[str, Any], place: Path) -> str:
    """What a load makes of a copy of a target, or its error."""
    state = copy.deepcopy(target)
    try:
        library.load(state, checkpoint_id=place)
    except (torch_dcp.CheckpointException, ckpt.CkptError) as error:
        return type(error).__name__
    return repr(state)


@alone
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[WITHOUT_COPY] if row == "one memory for two" else [])
        for row in LOADED
    ],
)
def test_loads_differ_from_torch_s_as_the_table_says(tmp_path: Path, row: str) -> None:
    target, *wanted = LOADED[row]
    for library, expected in zip((torch_dcp, dcp), wanted, strict=True):
        place = tmp_path / library.__name__
        library.save(SAVED, checkpoint_id=place)
        if row == "a flipped bit":
            [file] = [p for p in place.iterdir() if p.suffix in (".distcp", ".safetensors")]
            data = file.read_bytes()
            file.write_bytes(
                data.replace(*(torch.tensor([x]).numpy().tobytes() for x in (3.0, 3.5)))
            )
        assert loaded(library, target, place) == expected


@alone
def test_a_link_to_a_checkpoint_is_refused_where_torch_writes_through_it(tmp_path: Path) -> None:
    for library in (torch_dcp, dcp):
        real, link = tmp_path / library.__name__, tmp_path / f"link to {library.__name__}"
        library.save({"w": torch.zeros(2)}, checkpoint_id=real)
        link.symlink_to(real)
        refused = pytest.raises(ckpt.ExistsError, match=re.escape(str(real)))
        with refused if library is dcp else nullcontext():
            library.save({"w": torch.ones(2)}, checkpoint_id=link)
        found = {"w": torch.full((2,), 5.0)}
        library.load(found, checkpoint_id=real)
        assert found["w"].tolist() == [1.0 - (library is dcp)] * 2


def test_a_missing_name_is_told_with_the_arguments_of_torch_that_help(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"w": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ckpt.MismatchError, match=r"allow_partial_load=True\)"):
        dcp.load(state, checkpoint_id=tmp_path)
    partly = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path, planner=partly)
    assert state["w"].tolist() == [1, 1]
    with pytest.raises(ckpt.MismatchError, match=r"Call ckpt\.load, which takes strict=False"):
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path)


def every_cut_of_a_sharded_tensor(folder: str) -> None:
    """Each is saved and loaded by ckpt, by torch, and into another cut than that of the save."""
    both = ["rank:0/cpu", "rank:1/cpu"]
    specs: dict[str, Any] = {
        "rows": ChunkShardingSpec(dim=0, placements=both),
        "rows in another order": ChunkShardingSpec(dim=0, placements=both[::-1]),
        "columns": ChunkShardingSpec(dim=1, placements=both),
        "two shards of each rank": EnumerableShardingSpec(
            [ShardMetadata([5 * i, 0], [5, 8], both[i % 2]) for i in range(4)]
        ),
        "uneven rows": EnumerableShardingSpec(
            [ShardMetadata([0, 0], [3, 8], both[0]), ShardMetadata([3, 0], [17, 8], both[1])]
        ),
    }
    for name, spec in specs.items():
        made = st.rand(spec, 20, 8)
        for library in (torch_dcp, dcp):
            place = os.path.join(folder, f"{library.__name__} {name}")
            state = {"deep": {"t": made}, "n": 1}
            if library is dcp and name == "uneven rows":
                with pytest.raises(ckpt.CkptError, match=r"deep\.t"):  # a row of docs/dcp.md
                    library.save(state, checkpoint_id=place)
                continue
            library.save(state, checkpoint_id=place)
            again: Any = {"deep": {"t": st.zeros(spec, 20, 8)}, "n": 0}
            library.load(again, checkpoint_id=place)
            other: Any = {"deep": {"t": st.zeros(specs["columns"], 20, 8)}}
            library.load(other, checkpoint_id=place)
            pairs = zip(made.local_shards(), again["deep"]["t"].local_shards(), strict=True)
            assert all(torch.equal(mine.tensor, found.tensor) for mine, found in pairs), name
            assert again["n"] == 1
            mine = whole_of(made)
            [part] = other["deep"]["t"].local_shards()
            at = part.metadata.shard_offsets[1]
            assert torch.equal(part.tensor, mine[:, at : at + 4]), name


def whole_of(tensor: Any) -> torch.Tensor:
    """All elements of a ShardedTensor, on every rank."""
    shards: list[Any] = [None, None]
    parts = [(s.metadata.shard_offsets, s.tensor) for s in tensor.local_shards()]
    dist.all_gather_object(shards, parts)
    made = torch.full(tuple(tensor.size()), torch.nan)
    for (row, column), part in (each for rank in shards for each in rank):
        made[row : row + part.shape[0], column : column + part.shape[1]] = part
    return made


def test_sharded_tensors_of_every_cut_come_back_as_with_torch(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    clusters(2).run(every_cut_of_a_sharded_tensor, str(tmp_path))


@needs((2, 8), "dcp.save of torch 2.6 has no no_dist=")
@alone
def test_a_file_in_memory_comes_back_as_with_torch(tmp_path: Path) -> None:
    for save in (torch_dcp, dcp):
        for load in (save, dcp):
            place = tmp_path / f"{save.__name__} {load.__name__}"
            file = io.BytesIO()
            torch.save(torch.arange(3.0), file)
            file.seek(0)
            save.save({"app": {"file": file}}, checkpoint_id=place, no_dist=True)
            found = {"app": {"file": io.BytesIO()}}
            load.load(found, checkpoint_id=place, no_dist=True)
            assert torch.equal(torch.load(found["app"]["file"]), torch.arange(3.0))


def over_a_descending_mesh(folder: str) -> tuple[list[float], list[float]]:
    """What ckpt.dcp gives back of a DTensor over the ranks [1, 0], whole and placed."""
    mesh = DeviceMesh("cpu", [1, 0])
    whole = torch.arange(8.0)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder)
    plain, placed = torch.zeros(8), distribute_tensor(torch.zeros(8), mesh, [Shard(0)])
    dcp.load({"w": plain}, checkpoint_id=folder)
    dcp.load({"w": placed}, checkpoint_id=folder)
    return plain.tolist(), placed.full_tensor().tolist()


def test_the_chunks_of_a_descending_mesh_are_in_the_order_of_its_group(
    clusters: Callable, tmp_path: Path
) -> None:
    for found in clusters(2).run(over_a_descending_mesh, str(tmp_path)):
        assert found == ([*range(8)], [*range(8)])


def local_states(folder: str) -> None:
    """The local state dict of a model comes into another, as the whole state dict and in a nest."""

    def made(seed: int, original: bool) -> Any:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        module[1].running_mean = torch.rand(4)
        return sharding.FullyShardedDataParallel(module, use_orig_params=original)

    local = sharding.StateDictType.LOCAL_STATE_DICT
    for original in (False, True):
        one = made(1, original)
        for nested in (False, True):
            other, place = made(2, original), f"{folder}/{original}{nested}"
            with one.state_dict_type(one, local), other.state_dict_type(other, local):
                state, target = one.state_dict(), other.state_dict()
                dcp.save({"m": state} if nested else state, checkpoint_id=place)
                dcp.load({"m": target} if nested else target, checkpoint_id=place)
                assert target.keys() == state.keys()
                other.load_state_dict(target)
            wanted = one.state_dict()
            found, stored = other.state_dict(), ckpt.read(place)
            stored = stored["m"] if nested else stored  # type: ignore[index, call-overload]
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor), name
                assert torch.equal(stored[name], tensor), name  # type: ignore[index, call-overload]


def test_local_state_dicts_of_our_runtime_are_stored_by_their_parameters(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    clusters(2).run(local_states, str(tmp_path))
