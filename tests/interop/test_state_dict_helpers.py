"""torch.distributed.checkpoint.state_dict on this runtime's modules, and DCP on what it gives.

All ranks train on the same batch; an unsharded model that did the same is what all is compared to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from sharding import FullyShardedDataParallel
from tests.ckpt.wrappings import state_of, train
from tests.old_torch import needs

OURS = ["fully_shard", "flat", "original", "composable", "flat NO_SHARD", "original SHARD_GRAD_OP"]
compares_fsdp2 = needs((2, 10), "torch's FSDP2 does not train rightly on a CPU")
OPTIONS = [(full, cpu) for full in (False, True) for cpu in (False, True)]


def trained(how: str, seed: int = 0) -> dict[str, Any]:
    state = state_of(how, seed)
    train(state, 0, 2)
    return state


def whole(value: Any) -> Any:
    """A value that every rank has: DTensors whole."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value


def close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            close(found[name], value)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert found[name] == value, name


def by_names(optim: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict, its groups without an order of their parameters."""
    groups = [{**group, "params": sorted(group["params"])} for group in optim["param_groups"]]
    return {"state": optim["state"], "groups": dict(enumerate(groups))}


def check_got(how: str, full: bool, cpu: bool) -> None:
    state, plain = trained(how), trained("unsharded")
    options = StateDictOptions(full_state_dict=full, cpu_offload=cpu)
    model = get_model_state_dict(state["model"], options=options)
    optim = get_optimizer_state_dict(state["model"], state["optim"], options=options)
    if full and cpu and dist.get_rank() > 0:
        assert model == {}
        assert not optim
        return
    if full:
        assert not any(isinstance(value, DTensor) for value in model.values())
    elif "NO_SHARD" not in how and dist.get_world_size() > 1:
        assert isinstance(model["blocks.0.up.weight"], DTensor)
        assert isinstance(optim["state"]["blocks.0.up.weight"]["exp_avg"], DTensor)
    close(whole(model), get_model_state_dict(plain["model"]))
    expected = get_optimizer_state_dict(plain["model"], plain["optim"])
    close(whole(by_names(optim)), by_names(expected))


@pytest.mark.parametrize(("full", "cpu"), OPTIONS)
@pytest.mark.parametrize("how", OURS)
def test_what_torch_s_getters_give_is_that_of_the_model_nobody_sharded(
    clusters: Callable[[int], Any], how: str, full: bool, cpu: bool
) -> None:
    clusters(2).run(check_got, how, full, cpu)


def check_set(source: str, target: str, full: bool) -> list[float]:
    options = StateDictOptions(full_state_dict=full)
    given, taking = trained(source), state_of(target, seed=1)
    model, optim = get_state_dict(given["model"], given["optim"], options=options)
    set_state_dict(
        taking["model"],
        taking["optim"],
        model_state_dict=model,
        optim_state_dict=optim,
        options=options,
    )
    found = train(taking, 2, 2)
    # Not `given`: torch's optimizers take over the very tensors that they are given.
    assert found == pytest.approx(train(trained(source), 2, 2), rel=1e-6)
    return found


@pytest.mark.wide
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("how", OURS)
def test_what_torch_s_setters_take_is_trained_on(
    clusters: Callable[[int], Any], how: str, full: bool
) -> None:
    clusters(2).run(check_set, how, how, full)


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.parametrize(
    ("source", "target"),
    [(ours, theirs) for ours in OURS[:4] for theirs in ("ddp", "fully_shard")]
    + [(theirs, ours) for ours in OURS[:4] for theirs in ("ddp", "flat")]
    + [
        pytest.param(*pair, marks=compares_fsdp2)
        for ours in OURS[:4]
        for pair in [(ours, "fsdp2"), ("fsdp2", ours)]
    ],
)
def test_a_full_state_moves_between_runtimes_by_torch_s_helpers(
    clusters: Callable[[int], Any], source: str, target: str
) -> None:
    clusters(2).run(check_set, source, target, True)


def check_broadcast(how: str) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    given, taking = trained("ddp"), state_of(how, seed=1)
    model = get_model_state_dict(given["model"], options=options)
    optim = get_optimizer_state_dict(given["model"], given["optim"], options=options)
    taken = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(taking["model"], model, options=taken)
    set_optimizer_state_dict(taking["model"], taking["optim"], optim, options=taken)
    assert train(taking, 2, 2) == pytest.approx(train(trained("ddp"), 2, 2), rel=1e-6)


@pytest.mark.parametrize("how", OURS[:4])
def test_the_first_rank_s_state_is_broadcast(clusters: Callable[[int], Any], how: str) -> None:
    clusters(2).run(check_broadcast, how)


def save_by_dcp(how: str, folder: str) -> list[float]:
    state = trained(how)
    model, optim = get_state_dict(state["model"], state["optim"])
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    return train(state, 2, 2)


def load_by_dcp(how: str, folder: str) -> list[float]:
    state = state_of(how, seed=1)
    model, optim = get_state_dict(state["model"], state["optim"])
    dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
    set_state_dict(state["model"], state["optim"], model_state_dict=model, optim_state_dict=optim)
    return train(state, 2, 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("source", "target"),
    [(how, how) for how in OURS[:4]]
    + [("flat", "fully_shard"), ("fully_shard", "ddp")]
    + [
        pytest.param(*pair, marks=compares_fsdp2)
        for pair in [("original", "fsdp2"), ("fsdp2", "flat")]
    ],
)
def test_dcp_saves_our_sharded_state_dicts_and_loads_them_at_another_world_size(
    clusters: Callable[[int], Any], tmp_path: Path, source: str, target: str
) -> None:
    losses = clusters(2).run(save_by_dcp, source, str(tmp_path))[0]
    for found in clusters(3).run(load_by_dcp, target, str(tmp_path)):
        assert found == pytest.approx(losses, rel=1e-5)


def clipped(how: str) -> list[float]:
    state = trained(how)
    tokens = torch.arange(10).reshape(2, 5)
    state["optim"].zero_grad()
    state["model"](tokens).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 0.01)
    after = torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 0.01)
    values = [
        value.full_tensor() if isinstance(value, DTensor) else value for value in (norm, after)
    ]
    return [float(value) for value in values]


@compares_fsdp2
def test_torch_s_clip_grad_norm_clips_what_fully_shard_sharded(
    clusters: Callable[[int], Any],
) -> None:
    ours, theirs = clusters(2).run(clipped, "fully_shard"), clusters(2).run(clipped, "fsdp2")
    assert ours == theirs
    assert ours[0] == pytest.approx(clipped("unsharded"), rel=1e-5)
    assert ours[0][1] == pytest.approx(0.01, rel=1e-3)


def behind_checkpointing() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), nn.Linear(3, 2))
    model[0] = FullyShardedDataParallel(model[0])
    model = FullyShardedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    found = get_optimizer_state_dict(model, optim)
    assert sorted(found["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    set_optimizer_state_dict(model, optim, found)


def test_names_are_clean_behind_activation_checkpointing(clusters: Callable[[int], Any]) -> None:
    clusters(2).run(behind_checkpointing)


def test_a_module_of_neither_runtime_is_what_it_was_to_torch() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert list(get_model_state_dict(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
