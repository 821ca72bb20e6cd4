"""State dicts in memory: any kind of any runtime into any kind, and into any other runtime.

All ranks train on the same batch, so that every wrapping computes what one process does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import AdamW

import ckpt
from sharding.describe.members import LocalPart
from sharding.kind import Kind
from sharding.layout import FlatShard, Layout, Mesh
from tests.ckpt.wrappings import flat_dict, other, state_of, train, wrapped
from tests.conftest import RankFailed
from tests.old_torch import TORCH_TRAINS_ON_CPU
from tests.traffic import received_while

KINDS = [kind.value for kind in Kind]
WAYS = ["ddp", "fsdp2", "fully_shard", "flat", "original", "composable"]
if not TORCH_TRAINS_ON_CPU:
    WAYS.remove("fsdp2")


def trained(how: str, seed: int = 0) -> dict[str, Any]:
    """A module and its optimizer after two steps."""
    state = state_of(how, seed)
    train(state, 0, 2)
    return state


def full_of(state: object) -> dict[Any, Any]:
    return ckpt.state_dict.convert(state, to="full")


def bits(model: nn.Module) -> dict[str, bytes]:
    """The bytes of what this rank's optimizer sees."""
    local = {
        name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()
    }
    return {name: tensor.detach().numpy().tobytes() for name, tensor in local.items()}


def same(found: Any, wanted: Any, exact: bool = True) -> None:
    """Two state dicts of plain tensors are equal, to the bit or but for rounding."""
    found, wanted = flat_dict(found), flat_dict(wanted)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert type(found[name]) is torch.Tensor, name
            assert found[name].dtype == value.dtype, name
            if exact:
                assert torch.equal(found[name], value), name
            else:
                torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")
        elif name.endswith("param_groups"):
            for group, other_group in zip(found[name], value, strict=True):
                assert sorted(group["params"]) == sorted(other_group["params"])
                assert {**group, "params": 0} == {**other_group, "params": 0}
        else:
            assert found[name] == value, name


def unsharded() -> dict[Any, Any]:
    """What one process has after the same steps."""
    return full_of(trained("unsharded"))


def as_unsharded(how: str) -> None:
    same(full_of(trained(how)), unsharded(), exact=False)


@pytest.mark.parametrize("how", WAYS)
def test_a_full_state_dict_is_that_of_the_model_nobody_sharded(
    clusters: Callable[[int], Any], how: str
) -> None:
    clusters(2).run(as_unsharded, how)


def through_kinds(how: str) -> None:
    """Every pair of kinds, one after the other, and back to full."""
    state = trained(how)
    wanted = full_of(state)
    for first, second in product(KINDS, KINDS):
        made = ckpt.state_dict.convert(state, to=first)
        made = ckpt.state_dict.convert(made, to=second, budget=256)
        same(full_of(made), wanted)


@pytest.mark.wide
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_pair_of_kinds_round_trips_to_the_bit(
    clusters: Callable[[int], Any], world_size: int, how: str
) -> None:
    clusters(world_size).run(through_kinds, how)


def into_others(how: str) -> list[tuple[str, str, list[float]]]:
    """One way's state dict into every other way, with a fresh optimizer: each kind in turn."""
    state = trained(how)
    wanted = full_of(state)
    found = []
    for index, target in enumerate(WAYS):
        kind = KINDS[(index + WAYS.index(how)) % len(KINDS)]
        other_state = state_of(target, seed=1)
        made = ckpt.state_dict.convert(state, to=kind)
        ckpt.state_dict.load(made, other_state)
        same(full_of(other_state), wanted)
        found.append((kind, target, train(other_state, 2, 2)))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("how", WAYS)
def test_a_state_dict_of_any_kind_loads_into_any_wrapping_which_trains_on(
    clusters: Callable[[int], Any], how: str
) -> None:
    state = trained("unsharded")
    losses = train(state, 2, 2)
    for found in clusters(2).run(into_others, how):
        for kind, target, after in found:
            assert after == pytest.approx(losses, rel=1e-6), (kind, target)


def from_rank_0() -> None:
    """A full state dict on the first rank alone, into every wrapping."""
    state = trained("fully_shard")
    wanted = full_of(state)
    made = ckpt.state_dict.convert(state, to="full", rank0_only=True, offload_to_cpu=True)
    assert bool(made) == (dist.get_rank() == 0)
    for target in WAYS:
        other_state = state_of(target, seed=1)
        ckpt.state_dict.load(made, other_state)
        same(full_of(other_state), wanted)
    same(full_of(ckpt.state_dict.convert(made, to="sharded")), wanted)


@pytest.mark.thorough
def test_what_the_first_rank_has_alone_reaches_all(clusters: Callable[[int], Any]) -> None:
    clusters(3).run(from_rank_0)


def local_costs(how: str) -> tuple[int, bool]:
    state = trained(how)
    made, moved = received_while(lambda: ckpt.state_dict.convert(state, to="local"))
    seen = [p.to_local() if isinstance(p, DTensor) else p for p in state["model"].parameters()]
    own = {p.untyped_storage().data_ptr() for p in seen if p.numel()}
    # A buffer and a frozen layer of a unit of its own lie where they always did.
    parts = [v for k, v in made["model"].items() if "scale" not in k and "calls" not in k]
    held = [part for part in parts if part.local.numel()]
    return moved, all(part.local.untyped_storage().data_ptr() in own for part in held)


@pytest.mark.parametrize("how", ["fully_shard", "flat", "original", "composable"])
def test_a_local_state_dict_costs_no_message_and_no_copy(
    clusters: Callable[[int], Any], how: str
) -> None:
    for moved, shares in clusters(2).run(local_costs, how):
        assert moved == 0
        assert shares


def over_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    state = trained("flat")
    wanted = full_of(state)
    rows = ckpt.state_dict.convert(state, to="sharded", mesh=mesh)
    weight = rows["model"]["blocks.0.up.weight"]
    assert isinstance(weight, DTensor)
    assert tuple(weight.placements) == (Replicate(), Shard(0))
    parts = ckpt.state_dict.convert(state, to="local", mesh=mesh)
    assert parts["model"]["blocks.0.up.weight"].layout.placements[-1] == FlatShard(0, 27)
    same(full_of(rows), wanted)
    same(full_of(parts), wanted)


def test_a_mesh_says_what_sharded_and_local_tensors_are_divided_over(
    clusters: Callable[[int], Any],
) -> None:
    clusters(4).run(over_a_mesh)


def stages() -> None:
    """Pipeline stages: each half of the ranks has a tensor of its own, over a mesh of its own."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage = dist.get_rank() // 2
    own = distribute_tensor(torch.arange(10.0) + stage, grid["shard"], [Shard(0)])
    state = {f"stage-{stage}": own, "both": torch.ones(3), "step": 4}
    rows = ckpt.state_dict.convert(state, to="sharded")
    assert set(rows) == {f"stage-{stage}", "both", "step"}
    assert rows[f"stage-{stage}"].device_mesh == grid["shard"]
    full = ckpt.state_dict.convert(rows, to="full")
    for number in (0, 1):
        assert torch.equal(full[f"stage-{number}"], torch.arange(10.0) + number)
    target = {f"stage-{1 - stage}": torch.zeros(10), "both": torch.zeros(3), "step": 0}
    ckpt.state_dict.load(rows, target)
    assert torch.equal(target[f"stage-{1 - stage}"], full[f"stage-{1 - stage}"])


def test_pipeline_stages_keep_what_is_theirs_and_see_what_is_the_others(
    clusters: Callable[[int], Any],
) -> None:
    clusters(4).run(stages)


def values_that_differ(names: str) -> tuple[object, object, list[str]]:
    """The converted and the loaded values, and the warnings."""
    rank = dist.get_rank()
    own = f"w{rank}" if names == "different" else "w"
    state = {own: torch.ones(4), "step": rank, "optim": {"lr": (0.1, rank), 5: float("nan")}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = ckpt.state_dict.convert(state, to="full")
        target = {own: torch.zeros(4), "step": -1, "optim": {"lr": (), 5: 0.0}}
        loaded = ckpt.state_dict.load(state, target, strict=names == "equal")
    assert torch.equal(loaded[own], torch.ones(4))  # type: ignore[arg-type]
    values = [(found["step"], found["optim"]["lr"]) for found in (made, loaded)]  # type: ignore[index]
    said = [str(each.message) for each in caught]
    return *values, [text for text in said if "whose values" in text]


@pytest.mark.parametrize("names", ["equal", "different"])
def test_of_plain_values_that_differ_all_ranks_get_those_of_the_lowest_and_the_others_warn(
    clusters: Callable[[int], Any], names: str
) -> None:
    for rank, (made, loaded, said) in enumerate(clusters(3).run(values_that_differ, names)):
        assert made == loaded == (0, (0.1, 0))
        assert len(said) == (2 if rank else 0)
        for text in said:
            assert text.startswith(f"rank {rank} has other values in the state")
            assert "whose values are taken: 'step', 'optim.lr'; give" in text


def groups() -> None:
    """Parameter groups with options of their own, one of them added late, a tensor for a rate."""
    model = wrapped("fully_shard")
    blocks = list(model.blocks.parameters())
    optim = AdamW([{"params": blocks, "lr": 0.1, "name": "blocks"}], weight_decay=0.3)
    optim.add_param_group({"params": [model.embedding.weight], "lr": torch.tensor(0.02)})
    made = ckpt.state_dict.convert({"model": model, "optim": optim}, to="sharded")
    first, second = made["optim"]["param_groups"]
    assert first["params"][:2] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert (first["lr"], first["name"], first["weight_decay"]) == (0.1, "blocks", 0.3)
    assert second["params"] == ["embedding.weight"]
    assert float(second["lr"]) == pytest.approx(0.02)
    fresh = wrapped("original", 1)
    target = AdamW([{"params": list(fresh.module.blocks.parameters())}])
    target.add_param_group({"params": [fresh.module.embedding.weight], "lr": torch.tensor(0.5)})
    ckpt.state_dict.load(made, {"model": fresh, "optim": target})
    assert [g["weight_decay"] for g in target.param_groups] == [0.3, 0.3]
    assert target.param_groups[0]["lr"] == 0.1
    assert float(target.param_groups[1]["lr"]) == pytest.approx(0.02)


def test_groups_keep_their_options_by_the_names_of_their_parameters(
    clusters: Callable[[int], Any],
) -> None:
    clusters(2).run(groups)


# What is wrong.


def truncated_in(how: str) -> tuple[str, bool]:
    """A local state dict of which one rank lost the end of a shard."""
    made = ckpt.state_dict.convert(trained(how), to="local")
    part = made["model"]["blocks.1.down.weight"]
    if dist.get_rank() == 1:
        cut = LocalPart(part.local.reshape(-1)[:-1], part.layout)
        made["model"]["blocks.1.down.weight"] = cut
    target = state_of(how, seed=1)
    before = bits(target["model"])
    try:
        ckpt.state_dict.load(made, target)
    except Exception as error:
        return f"{type(error).__name__}: {error}", bits(target["model"]) == before
    return "", False


@pytest.mark.parametrize("how", ["flat", "original"])
def test_a_truncated_shard_is_an_error_on_all_ranks_before_anything_is_written(
    clusters: Callable[[int], Any], how: str
) -> None:
    first, second = clusters(2).run(truncated_in, how)
    assert second[0].startswith("LocalShapeError: model.blocks.1.down.weight: rank 1 has")
    assert first[0].startswith("RankError")
    assert "model.blocks.1.down.weight: rank 1 has" in first[0]
    assert first[1]
    assert second[1]


def of_another_world() -> None:
    layout = Layout((8,), Mesh.grid(("dp",), (4,)), (FlatShard(0, 2),))
    ckpt.state_dict.convert({"w": LocalPart(torch.zeros(2), layout)}, to="full")


def test_a_local_shard_of_another_world_size_is_an_error_that_names_the_ranks(
    clusters: Callable[[int], Any],
) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(of_another_world)
    for name, message, _ in failed.value.errors.values():
        assert name == "StateError"
        assert "w: sharded over the ranks [0, 1, 2, 3], of which [2, 3]" in message


def misfit(how: str) -> tuple[list[tuple[str, str]], bool]:
    state = {"model": wrapped(how, 1, other)}
    before = bits(state["model"])
    try:
        ckpt.state_dict.load({"model": full_of(trained("ddp")["model"])}, state)
    except ckpt.MismatchError as error:
        found = sorted((d.name, d.problem) for d in error.differences)
        return found, bits(state["model"]) == before
    return [], False


@pytest.mark.parametrize("how", ["flat", "original", "fully_shard"])
def test_another_architecture_is_an_error_that_lists_all_differences(
    clusters: Callable[[int], Any], how: str
) -> None:
    for differences, untouched in clusters(2).run(misfit, how):
        assert differences == [
            ("model.blocks.1.down.weight", "shape"),
            ("model.blocks.1.up.bias", "shape"),
            ("model.blocks.1.up.weight", "shape"),
            ("model.extra.bias", "missing"),
            ("model.extra.weight", "missing"),
        ]
        assert untouched


def groups_that_differ(how: str) -> tuple[str, bool]:
    """The saved optimizer had one group where this one has two, which were no group together."""
    made = full_of(trained("ddp"))
    one, two = made["optim"]["param_groups"][0], dict(made["optim"]["param_groups"][0])
    one["params"], two["params"] = one["params"][:3], two["params"][3:]
    made["optim"]["param_groups"].append(two)
    target = state_of(how, seed=1)
    before = bits(target["model"])
    try:
        ckpt.state_dict.load(made, target)
    except ckpt.MismatchError as error:
        return error.reason, bits(target["model"]) == before and not target["optim"].state
    return "", False


@pytest.mark.parametrize("how", ["original", "fully_shard"])
def test_a_parameter_group_mismatch_is_an_error_that_names_the_group(
    clusters: Callable[[int], Any], how: str
) -> None:
    for message, untouched in clusters(2).run(groups_that_differ, how):
        assert "param_groups.0" in message
        assert "give the optimizer the same groups" in message
        assert untouched


def beyond_the_range_on_rank_1() -> tuple[str, float]:
    """What a load says whose first batch has a number for rank 1 that float16 has not.

    Also the sum of ones over the ranks, which shows that the group still works.
    """
    mesh, n = init_device_mesh("cpu", (2,)), 256
    held = {f"w{at}": torch.zeros(n, n) for at in range(8)}
    held["w0"][:, -1] = 1e30
    source = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in held.items()}
    target = {
        name: distribute_tensor(one.half().fill_(0), mesh, [Shard(1)]) for name, one in held.items()
    }
    with pytest.raises(ckpt.CkptError) as caught:
        ckpt.state_dict.load(source, target, dtype="target", budget=n * n * 8, timeout=20)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return f"{type(caught.value).__name__}: {caught.value}", float(ones)


def test_a_number_beyond_its_range_is_an_error_after_the_last_batch(
    clusters: Callable[[int], Any],
) -> None:
    first, second = clusters(2).run(beyond_the_range_on_rank_1)
    assert first[0].startswith("RankError: moving tensors failed on rank 1")
    assert "beyond the range of" in second[0]
    assert first[1] == second[1] == 2.0


def wrong_on_one_rank(what: str) -> None:
    """Arguments that only one rank gets wrong."""
    mine = dist.get_rank() == (0 if what == "first budget" else 1)
    if what == "first budget":
        ckpt.state_dict.convert({"w": torch.ones(2)}, to="full", budget="many" if mine else 8)
    elif what == "kind":
        ckpt.state_dict.convert({"w": torch.ones(2)}, to="flat" if mine else "full")
    elif what == "other kind":
        ckpt.state_dict.convert({"w": torch.ones(2)}, to="sharded" if mine else "full")
    elif what == "budget":
        ckpt.state_dict.convert({"w": torch.ones(2)}, to="full", budget=0 if mine else 8)
    else:
        dtype = "float32" if mine else None
        ckpt.state_dict.load({"w": torch.ones(2)}, {"w": torch.ones(2)}, dtype=dtype)


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("kind", "RankError", "ArgumentError"),
        ("other kind", "StateError", "StateError"),
        ("budget", "RankError", "ArgumentError"),
        ("first budget", "ArgumentError", "RankError"),
        ("dtype", "RankError", "ArgumentError"),
    ],
)
def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all(
    clusters: Callable[[int], Any], what: str, first: str, second: str
) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(wrong_on_one_rank, what)
    assert {rank: error[0] for rank, error in failed.value.errors.items()} == {0: first, 1: second}


def budgets_that_differ() -> None:
    state = trained("flat")
    made = ckpt.state_dict.convert(state, to="sharded", budget=64 << dist.get_rank())
    same(full_of(made), full_of(state))


def test_budgets_may_differ_between_ranks(clusters: Callable[[int], Any]) -> None:
    clusters(3).run(budgets_that_differ)


def test_tensors_that_are_exchanged_within_one_memory_are_exchanged() -> None:
    memory = torch.arange(6.0)
    target = {"a": memory[:3], "b": memory[3:]}
    ckpt.state_dict.load({"a": memory[3:], "b": memory[:3]}, target)
    assert memory.tolist() == [3, 4, 5, 0, 1, 2]
    swap = {"a": "b", "b": "a"}
    ckpt.state_dict.load(ckpt.state_dict.convert(target, to="local"), target, rename=swap)
    assert memory.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_kind_that_there_is_not_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="full, sharded, local"):
        ckpt.state_dict.convert({"w": torch.zeros(1)}, to="flat")


def test_one_process_needs_no_group() -> None:
    tied = torch.arange(3.0)
    state = {"a": tied, "b": tied, "n": [1, (2, None)], "dtype": torch.int8}
    made = ckpt.state_dict.convert(state, to="local")
    assert made["a"] is made["b"]
    assert made["n"] == [1, (2, None)]
    assert made["dtype"] is torch.int8
    back = ckpt.state_dict.convert(made, to="full")
    assert torch.equal(back["a"], tied)
    assert back["a"] is back["b"]
