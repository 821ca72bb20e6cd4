"""Programs written for torch.distributed.checkpoint, as its recipes and documents have them.

`tests/dcp/test_programs.py` runs each twice: as it is, and with `ckpt.dcp` in its import lines. A
program gets a folder and returns what it has loaded, or what it has seen.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor


class AppState(Stateful):
    """Model and optimizer together, by torch's recipe."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def build(seed: int, rate: float = 0.05) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of awkward sizes, sharded by FSDP2 where there are ranks, and Adam."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False))
    if dist.is_initialized() and dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=rate)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 28).reshape(4, 7) + number).square().sum().backward()
    optimizer.step()


def whole(value: Any) -> Any:
    """A nest without DTensors, which a test can compare."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(item) for item in value)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def save_recipe(folder: str) -> Any:
    model, optimizer = build(0)
    for number in range(2):
        step(model, optimizer, number)
    app = AppState(model, optimizer)
    dcp.save({"app": app, "step": 2}, checkpoint_id=folder)
    return whole(app.state_dict())


def resume_recipe(folder: str) -> Any:
    model, optimizer = build(1, 0.5)
    state = {"app": AppState(model, optimizer), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    loaded = whole(state["app"].state_dict())
    return loaded, state["step"], optimizer.param_groups[0]["lr"]


def save_in_a_loop(folder: str) -> Any:
    model, optimizer = build(0)
    group = dist.new_group(backend="gloo")  # torch's saves disturb the collectives of the training
    future, seen = None, []
    for number in range(3):
        step(model, optimizer, number)
        state = {"app": AppState(model, optimizer), "step": number}
        seen.append(whole(state["app"].state_dict()))
        if future is not None:
            future.result()
        future = dcp.async_save(state, checkpoint_id=f"{folder}/{number}", process_group=group)
    future.result()
    assert future.done()
    assert future.exception() is None
    dist.destroy_process_group(group)
    return seen


def load_from_the_loop(folder: str) -> Any:
    return [resume_recipe(f"{folder}/{number}")[0] for number in range(3)]


def load_a_part(folder: str) -> Any:
    """Only the model, of a checkpoint that has more, into a model without its last layer."""
    model, _ = build(1)
    state = {"app": {"model": get_model_state_dict(model)}}
    del state["app"]["model"]["2.weight"]
    dcp.load(state, checkpoint_id=folder)
    rest = get_model_state_dict(model) | state["app"]["model"]
    set_model_state_dict(model, rest)
    return whole(get_model_state_dict(model)), whole(state)


def load_more_than_there_is(folder: str) -> Any:
    """Names that the checkpoint lacks, by a planner that allows them."""
    model, _ = build(1)
    state = {"app": {"model": get_model_state_dict(model), "new": torch.ones(2), "old": {}}}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state | {"lr": 0.25}, checkpoint_id=folder, planner=planner)
    return whole(state)


def miss_a_name(folder: str) -> Any:
    """The message of the error, cut to the name; and a target that was not touched."""
    state = {"step": torch.zeros(()), "app": {"model": {"other.weight": torch.zeros(2)}}}
    try:
        dcp.load(state, checkpoint_id=folder)
    except BaseException as error:
        return "app.model.other.weight" in str(error), state
    return None


NEST = {
    "epoch": 3,
    "name": "run",
    "rates": [0.1, 0.2],
    "pair": (1, 2),
    "none": None,
    "flags": {"on": True, "deep": [{"lr": 1.5, "betas": (0.9, 0.99)}, {"lr": 2.5, "betas": ()}]},
    "tensors": [torch.arange(4.0), torch.tensor(7)],
    "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
}


def save_alone(folder: str) -> Any:
    dcp.save(NEST, checkpoint_id=folder, no_dist=True)
    return NEST


def load_alone(folder: str) -> Any:
    state = {
        "epoch": 0,
        "name": "",
        "rates": [],
        "pair": None,
        "none": 5,
        "flags": {"on": False, "deep": [{"lr": 0.0, "betas": None}, {"lr": 0.0, "betas": None}]},
        "tensors": [torch.zeros(4), torch.tensor(0)],
        "half": torch.zeros(2, 3),  # of another dtype: DCP casts
    }
    given = state["tensors"][0]
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert state["tensors"][0] is given
    return state


def save_by_a_group(folder: str) -> Any:
    """Two ranks of three save and load, by a group of their own."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    value = torch.arange(4.0)
    dcp.save({"w": value, "n": 4}, checkpoint_id=folder, process_group=group)
    state = {"w": torch.zeros(4), "n": 0}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    return state


def save_by_storage(folder: str) -> Any:
    model, optimizer = build(0)
    step(model, optimizer, 0)
    state = {"model": model, "optim": optimizer}  # Stateful by themselves
    dcp.save(state, storage_writer=FileSystemWriter(folder), planner=DefaultSavePlanner())
    other, loaded = build(1)
    step(other, loaded, 1)
    dcp.load(
        {"model": other, "optim": loaded},
        storage_reader=FileSystemReader(folder),
        planner=DefaultLoadPlanner(),
    )
    return whole(other.state_dict()), whole(loaded.state_dict())


class Prefixed(DefaultSavePlanner):
    """The planner of torch's documents: all keys get a prefix."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        named = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(named, storage_meta, is_coordinator)


class Doubling(DefaultLoadPlanner):
    """A planner that changes what was loaded."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def save_by_planner(folder: str) -> Any:
    model, _ = build(0)
    state = {"model": get_model_state_dict(model), "step": 3, "name": "x"}
    dcp.save(state, checkpoint_id=folder, planner=Prefixed())
    loaded = {"foo_model": whole(get_model_state_dict(build(1)[0])), "foo_step": 0}
    dcp.load(loaded, checkpoint_id=folder, planner=Doubling())
    return loaded


def save_over_another(folder: str) -> Any:
    dcp.save({"w": torch.zeros(3), "old": 1}, checkpoint_id=folder)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=folder)
    return state


def build_flat(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    model = FSDP(layers, use_orig_params=True, device_id=torch.device("cpu"))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def sharded_states_of_flat_parameters(folder: str) -> Any:
    """FSDP1 by the example in the docstring of load_sharded_optimizer_state_dict."""
    model, optimizer = build_flat(0)
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 12).reshape(2, 6)).square().sum().backward()
    optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save_state_dict(state, FileSystemWriter(folder), planner=DefaultSavePlanner())
    other, fresh = build_flat(1)
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        loaded = {"model": other.state_dict()}
        dcp.load_state_dict(loaded, FileSystemReader(folder), planner=DefaultLoadPlanner())
        other.load_state_dict(loaded["model"])
        found = dcp.load_sharded_optimizer_state_dict(
            loaded["model"], "optim", FileSystemReader(folder)
        )
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, found["optim"]))
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        return whole(other.state_dict()), whole(FSDP.optim_state_dict(other, fresh))


def what_is_returned(folder: str) -> Any:
    """The names, shapes and dtypes in the Metadata that a save returns."""
    saved = dcp.save({"a": {"w": torch.ones(2, 3).short()}, "n": [1, 2]}, checkpoint_id=folder)
    entries = saved.state_dict_metadata
    tensor = entries["a.w"]
    return (
        sorted(entries),
        tuple(tensor.size),
        tensor.properties.dtype,
        type(entries["n"]).__name__,
        saved.planner_data,
    )
