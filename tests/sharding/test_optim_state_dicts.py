"""Optimizers' state by the names of parameters, and back: every kind, form and wrapping.

All ranks train on the same batch, so every form's optimizer keeps what that of the plain module
does; that, and the module itself, is what everything is compared with.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Adam, AdamW

import sharding
from sharding import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from sharding.describe.members import LocalPart
from tests.networks import Block
from tests.sharding.state_dict_forms import (
    FLAT_FORMS,
    FULL,
    LOCAL,
    SHARDED,
    WIDTH,
    in_form,
    whole,
)

FSDP = FullyShardedDataParallel
FORMS = (*FLAT_FORMS, "fully_shard")


class Network(nn.Module):
    """Tied ends, two blocks, a frozen layer, a number, a layer that is never used, one ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList([Block(3, WIDTH), Block(4, WIDTH)])
        self.turn = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.idle = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.tensor(0.75))
        self.outside = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.outside(self.turn(x))) * self.gain


def wrapped(form: str, seed: int = 0, **arguments: Any) -> nn.Module:
    """A network as it is, or in a form of the runtime; each block a unit, `outside` ignored."""
    torch.manual_seed(seed)
    model = Network()
    return model if form == "plain" else in_form(form, model, **arguments)


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses on the batches of these steps, the same on all ranks."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(7, (3, 4), generator=generator)
        loss = model(tokens).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


def plain_state(make: Callable[[Any], torch.optim.Optimizer], steps: int = 2) -> dict[str, Any]:
    """The plain module's optimizer's state by names, after some steps."""
    model = wrapped("plain")
    optim = make(model.parameters())
    train(model, optim, range(steps))
    return FSDP.rekey_optim_state_dict(
        optim.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optim
    )


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any], form: str) -> None:
    """The same entries of the same names; a flat parameter has zeros for what was not used."""
    names = {name for name in found["state"] if found["state"][name]}
    unused = ("idle.weight", "idle.bias") if form == "flat" else ()
    assert names == {*wanted["state"], *unused}
    for name, entries in wanted["state"].items():
        assert set(found["state"][name]) == set(entries), name
        for key, value in entries.items():
            mine = whole(found["state"][name][key])
            torch.testing.assert_close(
                mine, value, msg=lambda text, n=name, k=key: f"{n}.{k} {text}"
            )
    for name in unused:
        assert not whole(found["state"][name]["exp_avg"]).any()


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.01, weight_decay=0.1, amsgrad=True)


def every_kind(form: str, world: int) -> None:
    model = wrapped(form)
    optim = adamw(model.parameters())
    losses = train(model, optim, range(2))
    wanted = plain_state(adamw)
    names = {p for group in wanted["param_groups"] for p in group["params"]}
    for kind in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, kind):
            state = FSDP.optim_state_dict(model, optim)
            assert set(state["param_groups"][0]["params"]) == names
            if kind is not LOCAL:
                assert_same_state(state, wanted, form)
        check_resume(form, model, optim, kind, state)
    assert len(losses) == 2


def check_resume(form: str, model: nn.Module, optim: Any, kind: Any, state: Any) -> None:
    """A fresh optimizer that loads the state goes on exactly as the one that saved it."""
    before = copy.deepcopy(optim.state_dict())
    again = adamw(model.parameters())
    with FSDP.state_dict_type(model, kind):
        given = copy.deepcopy(state) if kind is not LOCAL else state
        FSDP.optim_state_dict_to_load(model, again, state, load_directly=True)
    after = again.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert {k for k, v in before["state"].items() if v} == set(after["state"])
    for key, entries in after["state"].items():
        for entry, value in entries.items():
            mine = before["state"][key][entry]
            if isinstance(value, DTensor):
                value, mine = value.to_local(), mine.to_local()
            assert torch.equal(value, mine), (key, entry)
    assert given.keys() == state.keys()


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_state_of_every_kind_is_the_plain_optimizers_and_loads_again(
    clusters: Any, form: str, world_size: int
) -> None:
    clusters(world_size).run(every_kind, form, world_size)


# --- From one form to another ---------------------------------------------------------------------


def grouped(model: nn.Module) -> AdamW:
    """Two groups of other options, with blocks in the second, whatever parameters are called."""
    inner = [p for n, p in model.named_parameters() if "blocks" in n]
    outer = [p for n, p in model.named_parameters() if "blocks" not in n]
    groups = [
        {"params": outer, "lr": torch.tensor(0.02), "betas": (0.8, 0.9)},
        {"params": inner, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=0.01, weight_decay=0.1)


def save_full(form: str) -> tuple[bytes, list[float]]:
    """The whole state of model and optimizer after two steps, and the losses of two more."""
    model = wrapped(form)
    optim = grouped(model)
    train(model, optim, range(2))
    state = {name: whole(value).detach().clone() for name, value in model.state_dict().items()}
    saved = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    file = io.BytesIO()
    torch.save((state, saved), file)
    return file.getvalue(), train(model, optim, range(2, 4))


def load_full(form: str, stored: bytes, first_only: bool) -> list[float]:
    state, saved = torch.load(io.BytesIO(stored), weights_only=True)
    assert isinstance(saved["param_groups"][0]["lr"], torch.Tensor)
    assert saved["param_groups"][1]["weight_decay"] == 0.0
    if form == "fully_shard":  # it is sharded once it has loaded
        plain = wrapped("plain", seed=1)
        plain.load_state_dict(state)
        model = in_form(form, plain)
    else:
        model = wrapped(form, seed=1)
        model.load_state_dict(state)
    optim = grouped(model)
    given = copy.deepcopy(saved)
    if first_only:
        loaded = FSDP.scatter_full_optim_state_dict(
            given if dist.get_rank() == 0 else None, model, optim=optim
        )
    else:
        loaded = FSDP.shard_full_optim_state_dict(given, model, optim=optim)
    optim.load_state_dict(loaded)
    for name, entries in saved["state"].items():
        for key, value in entries.items():
            assert torch.equal(given["state"][name][key], value)
    return train(model, optim, range(2, 4))


@pytest.fixture(scope="module")
def saved_full(clusters: Any) -> Callable[[str], tuple[bytes, list[float]]]:
    """What two ranks of a form give by `save_full`, run when it is first asked for."""
    return cache(lambda form: clusters(2).run(save_full, form)[0])


@pytest.mark.wide
@pytest.mark.thorough
@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("target", FORMS)
def test_whole_state_of_any_form_goes_on_in_any_other_on_other_ranks(
    clusters: Any,
    saved_full: Callable[[str], tuple[bytes, list[float]]],
    target: str,
    first_only: bool,
) -> None:
    for source in FORMS:
        stored, wanted = saved_full(source)
        for losses in clusters(3).run(load_full, target, stored, first_only):
            assert losses == pytest.approx(wanted, rel=1e-6)


def other_groups(form: str) -> list[str]:
    """Loading into an optimizer of the same groups in another order keeps each one's options."""
    model = wrapped(form)
    optim = grouped(model)
    train(model, optim, range(2))
    saved = FSDP.optim_state_dict(model, optim)
    groups = list(reversed(optim.param_groups))
    again = AdamW([{"params": group["params"]} for group in groups], lr=7.0)
    FSDP.optim_state_dict_to_load(model, again, saved, load_directly=True)
    for mine, theirs in zip(groups, again.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }
        for parameter in mine["params"]:
            before, after = optim.state.get(parameter, {}), again.state.get(parameter, {})
            assert before.keys() == after.keys()
            for key, value in before.items():
                assert torch.equal(whole(value), whole(after[key]))
    return saved["param_groups"][0]["params"]


@pytest.mark.parametrize("form", FORMS)
def test_groups_are_found_by_their_parameters_wherever_they_stand(clusters: Any, form: str) -> None:
    for names in clusters(2).run(other_groups, form):
        assert not any("blocks" in name for name in names)


def added_later(form: str) -> None:
    """A group that came after the first steps, whose parameters have no state yet."""
    for steps in (0, 1):
        model = wrapped(form)
        inner = [p for n, p in model.named_parameters() if "blocks" in n]
        outer = [p for n, p in model.named_parameters() if "blocks" not in n]
        optim = Adam(outer, lr=0.01)
        train(model, optim, range(2))
        optim.add_param_group({"params": inner, "lr": 0.5})
        train(model, optim, range(2, 2 + steps))
        saved = FSDP.optim_state_dict(model, optim)
        assert saved["param_groups"][1]["lr"] == 0.5
        assert ("blocks.0.up.weight" in saved["state"]) == (steps > 0)
        if steps:
            assert saved["state"]["blocks.0.up.weight"]["step"].item() == 1
            assert saved["state"]["head.bias"]["step"].item() == 3
        again = Adam(outer, lr=0.3)
        again.add_param_group({"params": inner})
        again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, saved))
        assert [group["lr"] for group in again.param_groups] == [0.01, 0.5]
        assert len(again.state) == len(optim.state)


@pytest.mark.parametrize("form", FORMS)
def test_a_group_may_be_added_later_and_have_no_state(clusters: Any, form: str) -> None:
    clusters(2).run(added_later, form)


def for_some_of_a_flat_parameter() -> None:
    """What has no state in a flat parameter has zeros there, and the number of the others."""
    model = wrapped("flat")
    optim = Adam(model.parameters(), lr=0.01)
    saved = plain_state(lambda parameters: Adam(parameters, lr=0.01))
    del saved["state"]["blocks.0.up.weight"]
    optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, saved))
    found = FSDP.full_optim_state_dict(model, optim, rank0_only=False)["state"]
    for name, entries in saved["state"].items():
        for key, value in entries.items():
            assert torch.equal(found[name][key], value)
    assert not found["blocks.0.up.weight"]["exp_avg"].any()
    assert found["blocks.0.up.weight"]["step"].item() == 2


def test_state_may_be_there_for_some_parameters_of_a_flat_one(clusters: Any) -> None:
    clusters(2).run(for_some_of_a_flat_parameter)


def resume(form: str, kind: str) -> None:
    """Saved, loaded into fresh objects, and trained on: as if nothing had happened, to the bit."""
    model = wrapped(form)
    optim = grouped(model)
    train(model, optim, range(2))
    again = wrapped(form, seed=1)
    other = grouped(again)
    for each in (model, again):
        FSDP.set_state_dict_type(each, StateDictType[f"{kind}_STATE_DICT"])
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(FSDP.optim_state_dict(model, optim))
    again.load_state_dict(saved[0])
    FSDP.optim_state_dict_to_load(again, other, saved[1], load_directly=True)
    assert train(again, other, range(2, 5)) == train(model, optim, range(2, 5))


@pytest.mark.wide
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("form", FLAT_FORMS)
def test_training_goes_on_exactly_from_every_kind(clusters: Any, form: str, kind: str) -> None:
    clusters(3).run(resume, form, kind)


# --- torch's names and results --------------------------------------------------------------------


def small(runtime: Any, **arguments: Any) -> Any:
    """Three layers, one a unit of its own, in torch's wrapper or ours."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 3)), nn.Linear(3, 2))
    policy = runtime.wrap.ModuleWrapPolicy({nn.Sequential})
    return runtime.FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **arguments
    )


def against_torch(use_orig_params: bool, kind: str) -> None:
    found = []
    for runtime in (torch_fsdp, sharding):
        model = small(runtime, use_orig_params=use_orig_params)
        optim = Adam([{"params": list(model.parameters())[:-1]}], lr=0.1)
        optim.add_param_group({"params": list(model.parameters())[-1:], "lr": 0.2})
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(4, 5, generator=generator)).square().mean().backward()
            optim.step()
            optim.zero_grad()
        wrapper = runtime.FullyShardedDataParallel
        config = getattr(runtime, f"{kind.title()}OptimStateDictConfig")(offload_to_cpu=False)
        kind_ = runtime.StateDictType[f"{kind}_STATE_DICT"]
        with wrapper.state_dict_type(model, kind_, None, config):
            state = wrapper.optim_state_dict(model, optim)
            loaded = wrapper.optim_state_dict_to_load(model, optim, copy.copy(state))
        found.append((state, loaded, model))
    (theirs, their_load, _), (mine, my_load, model) = found
    assert mine.keys() == theirs.keys()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for name, entries in theirs["state"].items():
        assert mine["state"][name].keys() == entries.keys()
        for key, value in entries.items():
            if kind == "SHARDED" and value.ndim:
                rows = mine["state"][name][key].to_local()
                shards = value.local_shards()
                assert torch.equal(shards[0].tensor, rows) if shards else not rows.numel()
            else:
                torch.testing.assert_close(mine["state"][name][key], value)
    assert my_load["param_groups"] == their_load["param_groups"]
    for key, entries in their_load["state"].items():
        if use_orig_params:  # torch pads between original parameters, and cuts them elsewhere
            continue
        assert my_load["state"][key].keys() == entries.keys()
        for entry, value in entries.items():
            torch.testing.assert_close(my_load["state"][key][entry], value)
    with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        optim = Adam([{"params": list(model.parameters())[:-1]}], lr=0.1)
        optim.add_param_group({"params": list(model.parameters())[-1:], "lr": 0.2})
        crossed = FSDP.optim_state_dict_to_load(model, optim, theirs)
    for key, entries in my_load["state"].items():
        for entry, value in entries.items():
            torch.testing.assert_close(crossed["state"][key][entry], value)


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_names_groups_and_values_are_torchs_and_its_own_state_loads(
    clusters: Any, use_orig_params: bool, kind: str
) -> None:
    clusters(2).run(against_torch, use_orig_params, kind)


def first_rank_only(form: str) -> list[Any]:
    model = wrapped(form)
    optim = Adam(model.parameters(), lr=0.01)
    train(model, optim, range(2))
    with FSDP.state_dict_type(
        model, FULL, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)
    ):
        state = FSDP.optim_state_dict(model, optim)
        legacy = FSDP.full_optim_state_dict(model, optim)
        again = Adam(model.parameters(), lr=0.5)
        FSDP.optim_state_dict_to_load(model, again, state, load_directly=True)
    for parameter, entries in optim.state.items():
        for key, value in entries.items():
            mine = again.state[parameter][key]
            assert torch.equal(whole(mine), whole(value))
    assert again.param_groups[0]["lr"] == 0.01
    sharded = FSDP.sharded_optim_state_dict(model, optim)
    back = FSDP.flatten_sharded_optim_state_dict(sharded, model, optim)
    assert back["state"].keys() == optim.state_dict()["state"].keys()
    moments = [e["exp_avg"] for e in state.get("state", {}).values()]
    squares = [e["exp_avg_sq"] for e in state.get("state", {}).values()]
    assert all(not torch.equal(a, b) or not a.any() for a, b in zip(moments, squares, strict=True))
    return [sorted(state), sorted(legacy), len(moments)]


@pytest.mark.parametrize("form", FORMS)
def test_on_the_first_rank_alone_the_others_have_an_empty_dict(clusters: Any, form: str) -> None:
    first, second = clusters(2).run(first_rank_only, form)
    assert first[:2] == [["param_groups", "state"]] * 2
    assert first[2] > 0
    assert second == [[], [], 0]


def test_rekeying_is_torchs() -> None:
    torch.manual_seed(0)
    model = wrapped("plain")
    optim = grouped(model)
    train(model, optim, range(1))
    state = optim.state_dict()
    named = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model, optim=optim)
    theirs = torch_fsdp.FullyShardedDataParallel.rekey_optim_state_dict(
        state, torch_fsdp.OptimStateKeyType.PARAM_NAME, model, optim=optim
    )
    assert named["state"].keys() == theirs["state"].keys()
    assert named["param_groups"] == theirs["param_groups"]
    assert FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_NAME, model) is named
    for given in (OptimStateKeyType.PARAM_ID, torch_fsdp.OptimStateKeyType.PARAM_ID):
        back = FSDP.rekey_optim_state_dict(named, given, model, optim=optim)
        assert back["state"].keys() == state["state"].keys()
        assert [sorted(g["params"]) for g in back["param_groups"]] == [
            sorted(g["params"]) for g in state["param_groups"]
        ]
    groups = [{"params": group["params"]} for group in optim.param_groups]
    by_input = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model, groups)
    assert by_input["state"].keys() == named["state"].keys()
    mixed = {**state, "state": {0: {}, "head.bias": {}}}
    with pytest.raises(ValueError, match="Invalid parameter keys"):
        FSDP.rekey_optim_state_dict(mixed, OptimStateKeyType.PARAM_ID, model, optim=optim)
    other = {**named, "state": {**named["state"], "another.weight": {}}}
    with pytest.raises(ValueError, match=r"has another\.weight, which the module"):
        FSDP.rekey_optim_state_dict(other, OptimStateKeyType.PARAM_ID, model, optim=optim)


def named_optimizer(form: str) -> None:
    """An optimizer that keys its state by the names that parameters have now."""
    model = wrapped(form)
    optim = Adam(model.parameters(), lr=0.01)
    train(model, optim, range(2))
    names = {id(p): n for n, p in reversed(list(model.named_parameters()))}
    keyed = FSDP.optim_state_dict(model, optim)
    by_name = {
        "state": {names[id(p)]: entries for p, entries in optim.state.items()},
        "param_groups": [
            {**g, "params": [names[id(p)] for p in g["params"]]} for g in optim.param_groups
        ],
    }
    found = FSDP.optim_state_dict(model, optim, by_name)
    assert found["state"].keys() == keyed["state"].keys()
    assert found["param_groups"][0]["params"] == keyed["param_groups"][0]["params"]
    loaded = FSDP.optim_state_dict_to_load(model, optim, found, is_named_optimizer=True)
    assert loaded["state"].keys() == by_name["state"].keys()
    assert loaded["param_groups"][0]["params"] == by_name["param_groups"][0]["params"]


@pytest.mark.parametrize("form", FORMS)
def test_optimizers_may_key_their_state_by_names(clusters: Any, form: str) -> None:
    clusters(2).run(named_optimizer, form)


# --- Local state, grids, ranks that differ --------------------------------------------------------


def local_alone(form: str) -> int:
    """One rank asks for its local state; the other is not there to answer."""
    model = wrapped(form)
    optim = Adam(model.parameters(), lr=0.01)
    train(model, optim, range(1))
    if dist.get_rank() == 0:
        return 0
    with FSDP.state_dict_type(model, LOCAL):
        state = FSDP.optim_state_dict(model, optim)
    memory = {v["exp_avg"].untyped_storage().data_ptr() for v in optim.state.values()}
    parts = [e["exp_avg"] for e in state["state"].values() if isinstance(e["exp_avg"], LocalPart)]
    assert all(part.local.untyped_storage().data_ptr() in memory for part in parts)
    return len(parts)


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_local_state_is_the_optimizers_memory_and_asks_nobody(clusters: Any, form: str) -> None:
    assert clusters(2).run(local_alone, form)[1] >= 10


def on_a_grid(form: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    if form == "composable":
        groups = (mesh.get_group(1), mesh.get_group(0))
        model = wrapped(form, strategy=strategy, process_group=groups)
    else:
        model = wrapped(form, sharding_strategy=strategy, device_mesh=mesh)
    optim = adamw(model.parameters())
    train(model, optim, range(2))
    wanted = plain_state(adamw)
    for kind in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, kind):
            state = FSDP.optim_state_dict(model, optim)
            if kind is not LOCAL:
                assert_same_state(state, wanted, form)
            if kind is SHARDED:
                value = state["state"]["head.bias"]["exp_avg"]
                assert value.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
        check_resume(form, model, optim, kind, state)


@pytest.mark.thorough
@pytest.mark.parametrize("form", FLAT_FORMS)
def test_hybrid_state_is_over_both_dimensions_and_loads_again(clusters: Any, form: str) -> None:
    clusters(4).run(on_a_grid, form)


def after_tensor_parallelism(use_orig_params: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    model: Any = copy.deepcopy(plain)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    model = FSDP(model, use_orig_params=use_orig_params, device_mesh=mesh["data"])
    states = []
    for each in (plain, model):
        optim = adamw(each.parameters())
        for step in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            each(x).square().mean().backward()
            optim.step()
            optim.zero_grad()
        states.append(optim.state_dict())
    wanted = FSDP.rekey_optim_state_dict(states[0], OptimStateKeyType.PARAM_NAME, plain)
    for kind in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, kind):
            state = FSDP.optim_state_dict(model, optim)
        if kind is not LOCAL:
            for name, entries in wanted["state"].items():
                for key, value in entries.items():
                    mine = whole(state["state"][name][key])
                    torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-7)
        check_resume("", model, optim, kind, state)


@pytest.mark.thorough
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_over_tensor_parallelism_state_is_gathered_over_the_grid(
    clusters: Any, use_orig_params: bool
) -> None:
    clusters(4).run(after_tensor_parallelism, use_orig_params)


def where_nothing_is(form: str) -> None:
    """An optimizer that keeps no state for parameters of which this rank has nothing."""
    model = wrapped(form)
    optim = adamw(model.parameters())
    train(model, optim, range(2))
    wanted = plain_state(adamw)
    empty = [p for p in optim.state if p.numel() == 0]
    for parameter in empty:
        del optim.state[parameter]
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            assert_same_state(FSDP.optim_state_dict(model, optim), wanted, form)


@pytest.mark.parametrize("form", ["original", "composable"])
def test_a_rank_may_have_no_state_where_it_has_no_elements(clusters: Any, form: str) -> None:
    clusters(3).run(where_nothing_is, form)


def names_in_groups() -> None:
    """An optimizer that was made with names keeps the names that parameters have under it."""
    model, plain = wrapped("flat"), wrapped("plain")
    optim = Adam(model.named_parameters(), lr=0.01)
    train(model, optim, range(1))
    names = optim.param_groups[0]["param_names"]
    state = FSDP.optim_state_dict(model, optim)
    assert "param_names" not in state["param_groups"][0]
    loaded = FSDP.optim_state_dict_to_load(model, optim, state)
    assert loaded["param_groups"][0]["param_names"] == names
    other = Adam(plain.named_parameters(), lr=0.5)
    by_position = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain, optim=other)
    other.load_state_dict(by_position)
    assert other.param_groups[0]["param_names"] == [name for name, _ in plain.named_parameters()]
    assert other.param_groups[0]["lr"] == 0.01


def test_groups_that_name_their_parameters_keep_their_own_names(clusters: Any) -> None:
    clusters(2).run(names_in_groups)


def extra_state() -> None:
    model = wrapped("flat")
    optim = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optim, range(1))
    given = optim.state_dict()
    given["state"]["mine"] = {"seen": 3}
    state = FSDP.optim_state_dict(model, optim, given)
    assert state["state"]["mine"] == {"seen": 3}
    loaded = FSDP.optim_state_dict_to_load(model, optim, state)
    assert loaded["state"]["mine"] == {"seen": 3}
    state.pop("param_groups")
    assert set(FSDP.optim_state_dict_to_load(model, optim, state)) == {"state"}


def test_state_of_no_parameter_is_passed_through(clusters: Any) -> None:
    clusters(2).run(extra_state)


def here(value: Any) -> Any:
    """This rank's elements: no exchange, whose order would be that of the optimizer."""
    return value.to_local() if isinstance(value, DTensor) else value


def in_another_order(form: str) -> None:
    """Odd ranks give their optimizers the parameters reversed, in every group."""
    model = wrapped(form)
    mine = list(model.parameters())
    optim = adamw(mine[::-1] if dist.get_rank() % 2 else mine)
    train(model, optim, range(2))
    wanted = plain_state(adamw)
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            state = FSDP.optim_state_dict(model, optim)
            names: list[Any] = [None, None]
            dist.all_gather_object(names, list(state["state"]))
            assert names[0] == names[1]  # else DTensors that are gathered one by one would be mixed
            assert_same_state(state, wanted, form)
            loaded = FSDP.optim_state_dict_to_load(model, optim, state)
        for key, entries in optim.state_dict()["state"].items():
            for entry, value in entries.items():
                mine = loaded["state"][key][entry]
                assert torch.equal(here(mine), here(value)), (key, entry)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_may_give_their_optimizers_the_parameters_in_another_order(
    clusters: Any, form: str
) -> None:
    clusters(2).run(in_another_order, form)


def over_a_subgroup(form: str, members: list[int]) -> None:
    """Only the ranks of a group have the model; the others go on, and wait for nobody."""
    group = dist.new_group(members)
    if dist.get_rank() in members:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        if form == "fully_shard":
            mesh = DeviceMesh.from_group(group, "cpu")
            sharding.fully_shard(model, mesh=mesh)
        elif form == "composable":
            sharding.composable.fully_shard(model, process_group=group)
        else:
            model = FSDP(model, process_group=group, use_orig_params=form == "original")
        optim = Adam(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        full = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        assert full["state"]["0.weight"]["exp_avg"].shape == (3, 4)
        sharded = FSDP.sharded_optim_state_dict(model, optim)
        first = FSDP.full_optim_state_dict(model, optim)
        assert bool(first) == (dist.get_rank(group) == 0)
        results = [
            FSDP.shard_full_optim_state_dict(full, model, optim=optim),
            FSDP.scatter_full_optim_state_dict(first, model, optim=optim),
            FSDP.flatten_sharded_optim_state_dict(sharded, model, optim),
        ]
        for kind in (FULL, SHARDED):
            with FSDP.state_dict_type(model, kind):
                state = FSDP.optim_state_dict(model, optim)
                results.append(FSDP.optim_state_dict_to_load(model, optim, state))
                model.load_state_dict(model.state_dict())
        for result in results:
            for key, entries in optim.state_dict()["state"].items():
                for entry, value in entries.items():
                    assert torch.equal(whole(result["state"][key][entry]), whole(value))
        with FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
            assert bool(model.state_dict()) == (dist.get_rank(group) == 0)
    dist.barrier()


@pytest.mark.parametrize("members", [[1], [1, 2]], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_only_the_ranks_of_the_models_group_wait_for_each_other(
    clusters: Any, form: str, members: list[int]
) -> None:
    clusters(3).run(over_a_subgroup, form, members)


def unmanaged(library: Any, arguments: dict[str, Any]) -> list[Any]:
    """What a library loads into an optimizer that has a parameter more, outside all instances."""
    cls = library.FullyShardedDataParallel
    configs = library.FullStateDictConfig(), library.FullOptimStateDictConfig(offload_to_cpu=False)
    models: list[Any] = []
    for extra in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(cls(nn.Linear(4, 4), **arguments) for _ in range(2)))
        if extra:
            model.insert(1, nn.Linear(4, 4, bias=False))
        cls.set_state_dict_type(model, library.StateDictType.FULL_STATE_DICT, *configs)
        models.append((model, Adam(model.parameters(), lr=0.1)))
    (model, optim), (larger, more) = models
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    saved = cls.optim_state_dict(model, optim)
    for name in [*saved["state"]]:  # the second instance is the third module of the larger model
        if name.startswith("1."):
            saved["state"]["2" + name[1:]] = saved["state"].pop(name)
    [group] = saved["param_groups"]
    group["params"] = [name.replace("1.", "2.") for name in group["params"]]
    found = cls.optim_state_dict_to_load(larger, more, saved)
    return [found["param_groups"], sorted(found["state"])]


def as_torch_leaves_out() -> None:
    theirs = unmanaged(torch_fsdp, {"device_id": torch.device("cpu")})
    assert unmanaged(sharding, {}) == theirs
    assert theirs[0][0]["params"] == theirs[1] == [0, 2]


def test_parameters_of_no_unit_may_be_lacking_in_a_state_as_in_torch(clusters: Any) -> None:
    clusters(2).run(as_torch_leaves_out)


# --- Bad input ------------------------------------------------------------------------------------


def spoiled(saved: dict[str, Any], how: str) -> Any:
    """A whole state with something wrong."""
    saved = copy.deepcopy(saved)
    state, groups = saved["state"], saved["param_groups"]
    if how == "no optimizer's":
        return {"model": state}
    if how == "another architecture":
        state["blocks.2.up.weight"] = state.pop("blocks.1.up.weight")
        groups[0]["params"] = [n.replace("blocks.1.up", "blocks.2.up") for n in groups[0]["params"]]
    elif how == "another shape":
        state["head.bias"]["exp_avg"] = torch.zeros(9)
    elif how == "a missing entry":
        del state["blocks.1.up.weight"]["exp_avg_sq"]
    elif how == "a missing parameter":
        groups[0]["params"].remove("blocks.1.up.weight")
    elif how == "other groups":
        groups.append({**groups[0], "params": ["blocks.1.up.weight"]})
        groups[0]["params"].remove("blocks.1.up.weight")
    elif how == "positions":
        names = list(state)
        return {"state": {names.index(n): v for n, v in state.items()}, "param_groups": groups}
    return saved


SAYS = {
    "no optimizer's": "must have the key",
    "another architecture": "are of parameters that the module does not have",
    "another shape": "head.bias",
    "a missing entry": "exp_avg_sq",
    "a missing parameter": "blocks.1.up.weight are lacking",
    "other groups": "several groups",
}


def refused(form: str, how: str, first_only: bool, one_rank: bool) -> tuple[str, str]:
    model = wrapped(form)
    optim = Adam(model.parameters(), lr=0.01)
    train(model, optim, range(2))
    saved = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    before = copy.deepcopy(optim.state_dict())
    given = saved
    if not one_rank or dist.get_rank() == 1:
        given = spoiled(saved, how)
    try:
        if first_only:
            FSDP.scatter_full_optim_state_dict(given, model, optim=optim)
        else:
            FSDP.optim_state_dict_to_load(model, optim, given, load_directly=True)
    except Exception as error:
        found = type(error).__name__, f"{isinstance(error, ValueError)} {error}"
    after = optim.state_dict()
    for key, entries in before["state"].items():
        for entry, value in entries.items():
            assert torch.equal(whole(after["state"][key][entry]), whole(value))
    return found


@pytest.mark.parametrize("how", SAYS)
@pytest.mark.parametrize("form", ["flat", "original"])
def test_bad_state_is_an_error_on_all_ranks_that_names_what_is_wrong(
    clusters: Any, form: str, how: str
) -> None:
    for first_only in (False, True):
        for _, message in clusters(2).run(refused, form, how, first_only, False):
            assert SAYS[how] in message
            if not first_only or "key" not in SAYS[how]:
                assert message.startswith("True")
    (first, told), (second, said) = clusters(2).run(refused, form, how, False, True)
    assert first == "RankError"
    assert SAYS[how] in told
    assert second in ("OptimizerMismatchError", "ArgumentError")
    assert SAYS[how] in said


def without_values(form: str) -> list[str]:
    """The errors of states of which rank 1 has a moment without values."""
    model = wrapped(form)
    optim = Adam(model.parameters(), lr=0.01)
    train(model, optim, range(1))
    found = []
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            saved = FSDP.optim_state_dict(model, optim)
            if dist.get_rank() == 1:
                moment = saved["state"]["blocks.1.up.weight"]["exp_avg"]
                if isinstance(moment, DTensor):
                    moment._local_tensor = moment._local_tensor.to("meta")
                else:
                    saved["state"]["blocks.1.up.weight"]["exp_avg"] = moment.to("meta")
            with pytest.raises(Exception, match=r"up.weight.exp_avg: rank 1 has its") as caught:
                FSDP.optim_state_dict_to_load(model, optim, saved)
        found.append(type(caught.value).__name__)
        dist.barrier()  # no message is left behind
    return found


def test_state_without_values_on_one_rank_is_an_error_on_all_that_names_the_rank(
    clusters: Any,
) -> None:
    for form in ("flat", "original"):
        first, second = clusters(2).run(without_values, form)
        assert first == ["RankError"] * 2
        assert second == ["ShardingError"] * 2


def strange_optimizers() -> list[str]:
    model = wrapped("flat")
    other = Adam(wrapped("flat").parameters(), lr=0.01)
    found = []
    rows = Adam(model.parameters(), lr=0.01)
    train(model, rows, range(1))
    if dist.get_rank() == 1:
        first = next(iter(rows.state))
        rows.state[first]["row"] = torch.zeros(3)
    steps = Adam(model.parameters(), lr=0.01)
    train(model, steps, range(1))
    first = next(iter(steps.state))
    steps.state[first]["step"] += dist.get_rank()
    nothing = Adam(model.parameters(), lr=0.01)
    train(model, nothing, range(1))
    if dist.get_rank() == 1:
        del nothing.state[next(iter(nothing.state))]
    for optim in (other, rows, steps, nothing):
        for kind in (FULL, SHARDED):
            try:
                with FSDP.state_dict_type(model, kind):
                    FSDP.optim_state_dict(model, optim)
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_an_optimizer_whose_state_cannot_be_divided_is_an_error_on_all_ranks(clusters: Any) -> None:
    first, second = clusters(2).run(strange_optimizers)
    for found in (first, second):
        assert all("parameter 0 of the optimizer" in message for message in found[:2])
        assert all("'row' has a tensor of shape (3,)" in message for message in found[2:4])
        assert all("take every step together" in message for message in found[4:6])
        assert all("has no state" in message for message in found[6:8])
    assert {message.partition(":")[0] for message in first} <= {
        "RankError",
        "OptimizerMismatchError",
    }


def of_different_kinds(form: str, rank0_only: bool) -> str:
    model = wrapped(form)
    optim = Adam(model.parameters(), lr=0.01)
    train(model, optim, range(1))
    is_second = dist.get_rank() == 1
    try:
        if rank0_only:
            FSDP.full_optim_state_dict(model, optim, rank0_only=is_second)
        else:
            with FSDP.state_dict_type(model, SHARDED if is_second else FULL):
                FSDP.optim_state_dict(model, optim)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("form", ["flat", "original"])
def test_ranks_that_ask_for_different_kinds_are_told_so(
    clusters: Any, form: str, rank0_only: bool
) -> None:
    for said in clusters(2).run(of_different_kinds, form, rank0_only):
        assert said.startswith("OptimizerMismatchError")
        assert "different state dicts" in said


def state_that_cannot_travel() -> str:
    model = wrapped("flat")
    optim = Adam(model.parameters(), lr=0.01)
    train(model, optim, range(1))
    saved = FSDP.full_optim_state_dict(model, optim)
    if dist.get_rank() == 0:
        saved["param_groups"][0]["schedule"] = lambda step: step
    try:
        FSDP.scatter_full_optim_state_dict(saved, model, optim=optim)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_state_of_the_first_rank_that_cannot_be_sent_is_an_error_on_all(clusters: Any) -> None:
    first, second = clusters(2).run(state_that_cannot_travel)
    assert "state_that_cannot_travel.<locals>.<lambda>" in first
    assert second.startswith("RankError")
    assert first.partition(": ")[2] in second
