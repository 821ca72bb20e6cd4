"""torch.distributed.checkpoint: its FSDP2 and Adam checkpoints resume here, ours there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from tests.old_torch import runs_fsdp2

WORLDS = [
    (1, 3),
    *(pytest.param(*sizes, marks=runs_fsdp2) for sizes in [(2, 1), (3, 2)]),
    *(pytest.param(*sizes, marks=(runs_fsdp2, pytest.mark.thorough)) for sizes in [(4, 3), (2, 4)]),
]


def build(seed: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model of awkward sizes, sharded by FSDP2 over this world, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False))
    if dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=rate)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same after two steps on the same data on every rank."""
    model, optimizer = build(0, 0.05)
    for step in range(2):
        optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 28).reshape(4, 7) + step
        model(inputs).square().sum().backward()
        optimizer.step()
    return model, optimizer


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[np.ndarray]:
    """Every parameter and every tensor of the optimizer's state, whole."""
    found = list(model.state_dict().values())
    for parameter in model.parameters():
        found += [v for _, v in sorted(optimizer.state[parameter].items())]
    tensors = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
    return [tensor.detach().numpy() for tensor in tensors]


def save_with_dcp(folder: str) -> list[np.ndarray]:
    model, optimizer = trained()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": 2}
    dcp.save(state, checkpoint_id=folder)
    return whole(model, optimizer)


def load_with_ckpt(folder: str) -> tuple[list[np.ndarray], int, float]:
    model, optimizer = build(1, 0.5)
    state = ckpt.load(folder, {"model": model, "optim": optimizer, "step": 0})
    return whole(model, optimizer), state["step"], optimizer.param_groups[0]["lr"]


def save_with_ckpt(folder: str) -> list[np.ndarray]:
    model, optimizer = trained()
    ckpt.save(folder, {"model": model, "optim": optimizer})
    return whole(model, optimizer)


def load_with_dcp(folder: str) -> tuple[list[np.ndarray], float]:
    model, optimizer = build(1, 0.5)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    return whole(model, optimizer), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("saving", "loading"), WORLDS)
def test_a_checkpoint_of_dcp_resumes_at_another_world_size(
    clusters: Callable, tmp_path: Path, saving: int, loading: int
) -> None:
    expected = clusters(saving).run(save_with_dcp, str(tmp_path))[0]
    for found, step, rate in clusters(loading).run(load_with_ckpt, str(tmp_path)):
        assert (step, rate) == (2, 0.05)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.thorough
@pytest.mark.parametrize(("saving", "loading"), WORLDS)
def test_dcp_resumes_a_checkpoint_of_ours_at_another_world_size(
    clusters: Callable, tmp_path: Path, saving: int, loading: int
) -> None:
    expected = clusters(saving).run(save_with_ckpt, str(tmp_path / "ours"))[0]
    ckpt.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    for found, rate in clusters(loading).run(load_with_dcp, str(tmp_path / "dcp")):
        assert rate == 0.05
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert np.array_equal(a, b)
