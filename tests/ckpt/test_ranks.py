"""Ranks that hold different things, ranks that fail, ranks that die."""

import json
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from tests.kept_groups import kept


def failures(cluster: Any, job: Callable, *arguments: object) -> tuple[list[int], dict[int, Any]]:
    """The ranks that died in a job, and what the others raised: (class, message, traceback)."""
    try:
        cluster.run(job, *arguments)
    except Exception as error:
        return getattr(error, "dead", []), error.errors  # type: ignore[attr-defined]
    raise AssertionError("no rank failed")


def numbers(rows: int, start: int = 0) -> torch.Tensor:
    """Rows of three, every element different."""
    return torch.arange(start, start + 3 * rows, dtype=torch.float32).reshape(rows, 3)


@kept
def mesh_of(ranks: tuple[int, ...]) -> DeviceMesh:
    """The one-dimensional mesh of these ranks, made once: to be called by all."""
    return DeviceMesh("cpu", list(ranks), mesh_dim_names=("stage",))


def spread(whole: torch.Tensor, ranks: tuple[int, ...]) -> DTensor:
    """A tensor sharded over some of the ranks."""
    return distribute_tensor(whole, mesh_of(ranks), [Shard(0)], src_data_rank=None)


def stages(world_size: int, rank: int, fill: bool) -> dict[str, Any]:
    """A pipeline of two stages, each sharded over half of the ranks, and an embedding on both."""
    half = max(1, world_size // 2)
    groups = [tuple(range(half)), tuple(range(half, world_size)) or tuple(range(half))]
    layers = [[spread(numbers(5, 100 * layer), group) for group in groups] for layer in range(4)]
    whole = {"embed": numbers(4), "head": numbers(3, 50)}
    state: dict[str, Any] = {"common": torch.tensor(3.0), "step": 7, "layers": {}}
    for stage, group in enumerate(groups):
        if rank in group:
            for layer in (2 * stage, 2 * stage + 1):
                state["layers"][str(layer)] = {"w": layers[layer][stage], "index": layer}
            state["embed"] = whole["embed"].clone()
            if stage == 1:
                state["head"] = whole["head"].clone()
    if not fill:
        for layer in state["layers"].values():
            layer["w"].to_local().zero_()
            layer["index"] = -1
        for name in ("common", "embed", "head"):
            if name in state:
                state[name].zero_()
        state["step"] = 0
    return state


def save_stages(folder: str) -> None:
    ckpt.save(folder, stages(dist.get_world_size(), dist.get_rank(), True))


def load_stages(folder: str) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    target, expected = stages(world_size, rank, False), stages(world_size, rank, True)
    ckpt.load(folder, target)
    for name in expected:
        if name == "layers":
            for layer, entry in expected["layers"].items():
                mine = target["layers"][layer]
                assert torch.equal(mine["w"].to_local(), entry["w"].to_local()), layer
                assert mine["index"] == entry["index"]
        elif name == "step":
            assert target["step"] == 7
        else:
            assert torch.equal(target[name], expected[name]), name


def test_pipeline_stages_are_one_checkpoint_for_any_other_stages(
    clusters: Callable, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    clusters(4).run(save_stages, folder)
    for loading in (4, 2, 3):
        clusters(loading).run(load_stages, folder)
    state: Any = ckpt.read(folder)
    assert state["step"] == 7
    assert state["common"] == 3
    assert torch.equal(state["embed"], numbers(4))
    assert torch.equal(state["head"], numbers(3, 50))
    for layer in range(4):
        assert torch.equal(state["layers"][str(layer)]["w"], numbers(5, 100 * layer))
        assert state["layers"][str(layer)]["index"] == layer
    with ckpt.open(folder) as checkpoint:
        assert str(checkpoint["layers.2.w"].layout) == "stage:2=S(0)"


def stage_in_training(stage: int, learning_rate: float, seed: int) -> dict[str, Any]:
    """One stage of a pipeline after a step, with the optimizer of its parameters."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({f"{stage}-{n}": torch.nn.Linear(4, 4) for n in range(stage + 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for layer in model.values():
        layer(torch.ones(4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def resume_stages_in_training(folder: str, rates: list[float]) -> list[str]:
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = stage_in_training(rank, rates[rank], 0)
        ckpt.save(folder, saved)
    dist.barrier()
    stage = dist.get_world_size() - 1 - rank  # stages go on on other ranks
    loaded = stage_in_training(stage, 7.0, 1)
    ckpt.load(folder, loaded)
    expected = stage_in_training(stage, rates[stage], 0)
    torch.testing.assert_close(
        loaded["optimizer"].state_dict(), expected["optimizer"].state_dict(), rtol=0, atol=0
    )
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("rates", [[0.1, 0.1, 0.1], [0.1, 0.2, 0.1]])
def test_the_optimizers_of_pipeline_stages_are_resumed_with_their_groups(
    clusters: Callable, tmp_path: Path, rates: list[float]
) -> None:
    assert clusters(3).run(resume_stages_in_training, str(tmp_path), rates) == [[]] * 3
    saved: Any = ckpt.read(tmp_path)
    assert [group["lr"] for group in saved["optimizer"]["param_groups"]] == sorted(set(rates))


def save_keys_of_its_own(folder: str) -> None:
    rank = dist.get_rank()
    state: dict[str, object] = {} if rank == 1 else {f"rank {rank}": torch.full((rank + 1,), 1.0)}
    ckpt.save(folder, {**state, "value": {rank: rank}})


def test_ranks_with_keys_of_their_own_and_ranks_with_no_tensor(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(3).run(save_keys_of_its_own, str(tmp_path))
    state: Any = ckpt.read(tmp_path)
    assert state["rank 0"].tolist() == [1.0]
    assert state["rank 2"].tolist() == [1.0, 1.0, 1.0]
    assert state["value"] == {0: 0, 1: 1, 2: 2}
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def save_contradiction(folder: str, what: str) -> None:
    rank = dist.get_rank()
    choices: dict[str, Any] = {
        "shapes": {"w": torch.zeros(2 + rank)},
        "dtypes": {"w": torch.zeros(2, dtype=torch.float32 if rank else torch.float64)},
        "layouts": {"w": spread(numbers(4), (0, 1, 2)) if rank else numbers(4)},
    }
    tied = torch.ones(2)
    choices["ties"] = {"a": tied, "b": tied if rank else torch.zeros(2)}
    ckpt.save(folder, choices[what])


@pytest.mark.parametrize("what", ["shapes", "dtypes", "layouts", "ties"])
def test_ranks_that_contradict_each_other_are_an_error_on_all(
    clusters: Callable, tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "checkpoint"
    _, errors = failures(clusters(3), save_contradiction, str(folder), what)
    assert [errors[rank][0] for rank in range(3)] == ["StateError"] * 3
    assert not folder.exists()


def save_object_on(folder: str, bad_rank: int) -> None:
    """Save something that cannot be stored on one rank, then, by the same ranks, what can be."""
    rank = dist.get_rank()
    state = {"w": torch.ones(4), "x": object() if rank == bad_rank else 0}
    with pytest.raises(
        ckpt.StateError if rank == bad_rank else ckpt.RankError,
        match=r"state\['x'\]: a builtins\.object",
    ) as raised:
        ckpt.save(folder, state)
    if isinstance(raised.value, ckpt.RankError):
        assert (raised.value.rank, raised.value.error) == (bad_rank, "StateError")
    ckpt.save(folder, {"w": torch.ones(4)})


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_an_error_of_one_rank_reaches_all_with_its_number(
    clusters: Callable, tmp_path: Path, bad_rank: int
) -> None:
    clusters(3).run(save_object_on, str(tmp_path), bad_rank)
    assert torch.equal(ckpt.read(tmp_path)["w"], torch.ones(4))  # type: ignore[index]


class Stubborn:
    """An object of a user's that does not give its state, or does not take one."""

    def __init__(self, refuses: str) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, object]:
        if self.refuses == "state_dict":
            raise KeyError("shuffle")
        return {"epoch": 1}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        if self.refuses == "load_state_dict":
            raise KeyError("shuffle")


def meet_a_stubborn_object(folder: str, bad_rank: int) -> None:
    """Save and load with one that fails on one rank: all are told of which entry it is."""
    rank = dist.get_rank()

    def state(refuses: str) -> dict[str, Any]:
        return {"data": {"loader": Stubborn(refuses if rank == bad_rank else "")}}

    with pytest.raises(KeyError if rank == bad_rank else ckpt.RankError) as saving:
        ckpt.save(folder, state("state_dict"))
    text = "raised by state_dict() of state['data']['loader']"
    if rank == bad_rank:
        assert saving.value.__notes__ == [text]
    else:
        assert f"'shuffle' ({text})" in str(saving.value)
    ckpt.save(folder, state(""))
    with pytest.raises(ckpt.PartialLoadError if rank == bad_rank else ckpt.RankError) as loading:
        ckpt.load(folder, state("load_state_dict"))
    assert "'shuffle' (raised by load_state_dict() of data.loader)" in str(loading.value)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_error_of_a_user_s_own_object_says_of_which_entry_on_all_ranks(
    clusters: Callable, tmp_path: Path, bad_rank: int
) -> None:
    clusters(2).run(meet_a_stubborn_object, str(tmp_path), bad_rank)


def load_misfit_on(folder: str, bad_rank: int) -> None:
    rank = dist.get_rank()
    target = {"w": torch.zeros(5 if rank == bad_rank else 4)}
    with pytest.raises(
        ckpt.MismatchError if rank == bad_rank else ckpt.RankError, match="was not touched"
    ) as raised:
        ckpt.load(folder, target)
    if isinstance(raised.value, ckpt.RankError):
        assert (raised.value.rank, raised.value.error) == (bad_rank, "MismatchError")
    assert not target["w"].any()
    ckpt.load(folder, {"w": torch.zeros(4)})


def test_a_misfit_on_one_rank_leaves_every_target_untouched(
    clusters: Callable, tmp_path: Path
) -> None:
    ckpt.save(tmp_path, {"w": torch.ones(4)})
    clusters(3).run(load_misfit_on, str(tmp_path), 1)


def load_misfits(folder: str) -> tuple[str, str, int]:
    """The text, the reason and the number of frames of an error, after pickle."""
    names = ("u", "v", "w")
    with pytest.raises((ckpt.MismatchError, ckpt.RankError)) as raised:
        ckpt.load(folder, {name: torch.zeros((4, 5, 5, 6)[dist.get_rank()]) for name in names})
    error = pickle.loads(pickle.dumps(raised.value))
    assert dist.get_rank() == 0 or [one.name for one in error.differences] == [*names]
    return str(error), error.reason, len(raised.traceback)


def test_only_the_lowest_rank_shows_the_traceback_of_an_error_that_ranks_share(
    clusters: Callable, tmp_path: Path
) -> None:
    ckpt.save(tmp_path, {name: torch.ones(4) for name in ("u", "v", "w")})
    told, first, second, other = clusters(4).run(load_misfits, str(tmp_path))
    assert "failed on rank 1" in told[0]
    assert first[0] == first[1] == second[1]
    assert second[0] == f"{first[0]}\n  Rank 1 has the same error, and its traceback."
    assert second[2] <= 3 < first[2]
    assert other[0] == other[1] != first[1]


def save_where_there_is_one(folder: str) -> None:
    with pytest.raises((ckpt.ExistsError, ckpt.RankError), match="overwrite=True"):
        ckpt.save(folder, {"w": torch.zeros(3)})
    ckpt.save(folder, {"w": torch.full((3,), 2.0)}, overwrite=True)


def test_a_checkpoint_is_overwritten_only_when_asked(clusters: Callable, tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"w": torch.ones(3)})
    clusters(2).run(save_where_there_is_one, str(tmp_path))
    assert ckpt.read(tmp_path)["w"].tolist() == [2.0, 2.0, 2.0]  # type: ignore[index]
    assert len(list(tmp_path.iterdir())) == 2  # nothing of the old one is left


def save_beside(folder: str, name: str, comes_late: bool) -> None:
    """A save to a folder in which another format's file is, or comes to be while it is written."""
    group = dist.new_group()

    def come(nbytes: int = 0) -> None:
        if dist.get_rank() == 0:
            Path(folder, name).write_bytes(b"weights")

    if not comes_late:
        come()
        dist.barrier()
    with pytest.raises((ckpt.ExistsError, ckpt.RankError), match="another format") as raised:
        ckpt.save(folder, {"w": torch.ones(8)}, group=group, progress=come if comes_late else None)
    assert raised.value.kind == "exists" or raised.value.error == "ExistsError"  # type: ignore[union-attr]


@pytest.mark.parametrize("comes_late", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        ".metadata",
    ],
)
def test_a_save_puts_no_checkpoint_of_another_format_out_of_sight_unless_asked(
    clusters: Callable, tmp_path: Path, name: str, comes_late: bool
) -> None:
    clusters(2).run(save_beside, str(tmp_path), name, comes_late)
    assert not (tmp_path / "manifest.json").exists()
    over = ckpt.gc(tmp_path, delete=True, older_than=0)
    assert not over  # a refused save removes its files
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"weights"
    ckpt.save(tmp_path, {"w": torch.ones(3)}, overwrite=True)
    assert ckpt.read(tmp_path)["w"].tolist() == [1.0, 1.0, 1.0]  # type: ignore[index]
    assert (tmp_path / name).exists()


def save_and_die(folder: str, doomed: int) -> None:
    """A save in which one rank is killed once it has written some of its file."""

    def progress(nbytes: int) -> None:
        if dist.get_rank() == doomed:
            os.kill(os.getpid(), signal.SIGKILL)

    ckpt.save(
        folder,
        {"w": torch.zeros(1 << 20), "v": torch.zeros(1 << 20)},
        overwrite=True,
        progress=progress,
    )


@pytest.mark.parametrize(("doomed", "name"), [(0, "new"), (1, "old")])
def test_a_rank_killed_in_a_save_ends_the_others_and_leaves_what_there_was(
    doomed_cluster: Callable, tmp_path: Path, doomed: int, name: str
) -> None:
    if name == "old":
        ckpt.save(tmp_path, {"w": torch.ones(1 << 10), "step": 1})
    dead, errors = failures(doomed_cluster(2), save_and_die, str(tmp_path), doomed)
    assert dead == [doomed]
    assert list(errors) == [1 - doomed]
    if name == "new":
        with pytest.raises(ckpt.NotACheckpointError, match=r"unfinished save|no checkpoint"):
            ckpt.read(tmp_path)
    else:
        state: Any = ckpt.read(tmp_path)
        assert torch.equal(state["w"], torch.ones(1 << 10))
        assert state["step"] == 1


def save_different_values(folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(folder, {"w": torch.ones(2), "rank": dist.get_rank()})
    assert {getattr(warning.message, "names", ()) for warning in caught} <= {("rank",)}
    return [str(warning.message) for warning in caught]


def test_plain_values_that_differ_are_warned_of_and_rank_0_s_are_stored(
    clusters: Callable, tmp_path: Path
) -> None:
    first, *others = clusters(3).run(save_different_values, str(tmp_path))
    assert first == []
    for rank, said in enumerate(others, 1):
        assert len(said) == 1
        assert said[0].startswith(f"rank {rank} has other values in the state")
        assert "whose values are taken: 'rank'; give" in said[0]
    assert ckpt.read(tmp_path)["rank"] == 0  # type: ignore[index]


def save_different_values_beside_other_names(folder: str) -> list[str]:
    rank = dist.get_rank()
    average = {"average": torch.full((3,), 5.0)} if rank == 1 else None
    state = {"stage": {f"w{rank}": torch.ones(2)}, "rng": rank, "step": 3, "kept": average}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(folder, state)
    return [str(warning.message) for warning in caught]


def test_values_that_differ_are_warned_of_beside_tensors_of_other_names(
    clusters: Callable, tmp_path: Path
) -> None:
    first, *others = clusters(3).run(save_different_values_beside_other_names, str(tmp_path))
    assert first == []
    for rank, said in enumerate(others, 1):
        assert len(said) == 1
        assert said[0].startswith(f"rank {rank} has other values in the state")
        assert "whose values are taken: 'rng'; give" in said[0]
    state: Any = ckpt.read(tmp_path)
    assert (state["rng"], state["step"]) == (0, 3)
    assert torch.equal(state["kept"]["average"], torch.full((3,), 5.0))


def save_a_tensor_or_a_number(folder: str) -> None:
    ckpt.save(folder, {"w": torch.ones(2) if dist.get_rank() else 0.5})


def test_a_tensor_on_one_rank_and_a_number_on_another_are_refused(
    clusters: Callable, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"w: 0\.5 on rank 0, a tensor on rank 1; give values"):
        clusters(3).run(save_a_tensor_or_a_number, str(tmp_path))
    assert not list(tmp_path.iterdir())


def save_replicated(folder: str, compress: bool) -> None:
    torch.manual_seed(0)
    sizes = [(512, 513), (4096,), (300, 77), (77,), (1024, 256), (256,), (31, 31, 31)] * 3
    state: dict[str, Any] = {f"layer {i}": torch.randn(size) for i, size in enumerate(sizes)}
    state.update({f"norm {i}": torch.randn(200) for i in range(120)})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    state["hybrid"] = distribute_tensor(
        torch.randn(640, 64), mesh, [Replicate(), Shard(0)], src_data_rank=None
    )
    ckpt.save(folder, state, compress=compress)


def test_replicas_are_written_once_and_in_balance(clusters: Callable, tmp_path: Path) -> None:
    clusters(4).run(save_replicated, str(tmp_path), False)
    with ckpt.open(tmp_path) as checkpoint:
        nbytes = checkpoint.catalog.nbytes
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) / (sum(sizes) / 4) <= 1.05
    assert nbytes <= sum(sizes) <= 1.01 * nbytes + 4 * 20_000
    data = json.loads((tmp_path / "manifest.json").read_bytes())
    assert len(data["files"]) == 4


def in_subgroup(folder: str, what: str) -> None:
    """Ranks 1 and 3 of four save and load by themselves."""
    members = (1, 3)
    group = dist.new_group(list(members))
    mesh = mesh_of(members)
    if dist.get_rank() not in members:
        with pytest.raises(ckpt.CkptError, match="not in the process group"):
            ckpt.save(folder, {}, group=group)
        return
    whole = numbers(5)
    sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    state = {"plain": numbers(3, 9), "sharded": sharded}
    if what == "stages":
        state[f"own {dist.get_rank()}"] = numbers(1, dist.get_rank())
    ckpt.save(folder, state, group=group)
    expected = sharded.to_local().clone()
    sharded.to_local().zero_()
    state["plain"].zero_()
    ckpt.load(folder, state, group=group)
    assert torch.equal(sharded.to_local(), expected)
    assert torch.equal(state["plain"], numbers(3, 9))


@pytest.mark.parametrize("what", ["same", "stages"])
def test_a_part_of_the_ranks_saves_and_loads_by_itself(
    clusters: Callable, tmp_path: Path, what: str
) -> None:
    clusters(4).run(in_subgroup, str(tmp_path), what)
    state: Any = ckpt.read(tmp_path)
    assert torch.equal(state["plain"], numbers(3, 9))
    assert torch.equal(state["sharded"], numbers(5))
    if what == "stages":
        assert torch.equal(state["own 3"], numbers(1, 3))


def unavailable(folder: str) -> None:
    ckpt.load(folder, {})


def test_all_ranks_are_told_that_there_is_no_checkpoint(clusters: Callable, tmp_path: Path) -> None:
    _, errors = failures(clusters(2), unavailable, str(tmp_path / "nowhere"))
    assert [errors[rank][0] for rank in range(2)] == ["NotACheckpointError"] * 2


def load_different(folder: str) -> list[float]:
    own = "new" if dist.get_rank() else "old"
    target = {"w": torch.zeros(3)}
    with pytest.raises(ckpt.CkptError, match="the ranks opened different checkpoints"):
        ckpt.load(f"{folder}/{own}", target)
    ckpt.load(f"{folder}/new", target)  # the group is in step
    return target["w"].tolist()


def test_ranks_that_see_different_checkpoints_do_not_load_a_mix(
    clusters: Callable, tmp_path: Path
) -> None:
    """As when one is replaced while a slow rank opens it: their names and shapes are the same."""
    for value, name in enumerate(("old", "new")):
        ckpt.save(tmp_path / name, {"w": torch.full((3,), float(value))})
    assert clusters(2).run(load_different, str(tmp_path)) == [[1.0] * 3] * 2
