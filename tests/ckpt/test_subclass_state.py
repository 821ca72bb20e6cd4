"""Optimizer state that is made of other tensors: saved, loaded into a fresh optimizer, refused.

tests/peers has torchao's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD

import ckpt
from ckpt.state.subclass_state import CLASS, put_together, take_apart
from tests.ckpt.quantised import Quantized
from tests.conftest import Cluster


def trained() -> dict[str, Any]:
    model = nn.Linear(4, 3)
    optim = SGD(model.parameters(), lr=0.1)
    codes = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    moment = Quantized(codes, torch.tensor([0.5, 2.0, 4.0]), signed=True)
    optim.state[model.weight] = {"moment": moment, "step": 3}
    return {"model": model, "optim": optim}


def fresh() -> dict[str, Any]:
    model = nn.Linear(4, 3)
    return {"model": model, "optim": SGD(model.parameters(), lr=0.5)}


def check(state: dict[str, Any]) -> None:
    loaded = state["optim"].state[state["model"].weight]
    assert loaded["step"] == 3
    assert type(loaded["moment"]) is Quantized
    assert loaded["moment"].signed is True
    assert loaded["moment"].codes.tolist() == torch.arange(12).reshape(3, 4).tolist()
    assert loaded["moment"].scale.tolist() == [0.5, 2.0, 4.0]


def test_it_is_saved_by_its_tensors_and_made_again_in_a_fresh_optimizer(tmp_path: Path) -> None:
    ckpt.save(tmp_path, trained())
    stored = ckpt.read(tmp_path)["optim"]["state"]["weight"]["moment"]
    assert stored["tensors"]["codes"].dtype == torch.uint8
    assert stored[CLASS].endswith(":Quantized")
    check(ckpt.load(tmp_path, fresh()))


def test_it_goes_from_memory_to_memory(tmp_path: Path) -> None:
    target = fresh()
    ckpt.state_dict.load(ckpt.state_dict.convert(trained(), to="local"), target)
    check(target)


def test_a_class_that_nobody_imported_is_a_difference(tmp_path: Path) -> None:
    state = ckpt.state_dict.convert(trained(), to="full")
    state["optim"]["state"]["weight"]["moment"][CLASS] = "os:system"
    target = fresh()
    with pytest.raises(ckpt.MismatchError, match="os:system in the checkpoint, which this program"):
        ckpt.state_dict.load(state, target)
    assert not target["optim"].state


def test_elsewhere_it_is_refused_by_name(tmp_path: Path) -> None:
    moment = trained()["optim"].state_dict()["state"][0]["moment"]
    with pytest.raises(ckpt.StateError, match=r"state\['m'\]: a Quantized wraps other tensors"):
        ckpt.save(tmp_path, {"m": moment})


def test_what_is_made_of_nothing_else_stays_as_it_is() -> None:
    tensor = torch.ones(2)
    assert take_apart(tensor, "w") is tensor
    assert put_together({"a": [tensor, 3]})["a"][0] is tensor


# On ranks.

COLUMNS = 4


def codes_of(rows: int) -> torch.Tensor:
    return torch.arange(rows * COLUMNS).view(rows, COLUMNS)


def sharded(rows: int, block: int) -> dict[str, Any]:
    """A parameter whose rows the ranks share, with a moment in blocks; plain on a rank without."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(codes_of(rows).float(), mesh, [Shard(0)]))
    optim = SGD(model.parameters(), lr=0.1)
    if block:
        codes = model.w.detach()._local_tensor.to(torch.uint8)
        moment = codes.float()
        if codes.numel() % block == 0:
            scale = moment.view(-1, block).amax(1) + 1
            moment = Quantized(codes, scale, signed=False)
        optim.state[model.w] = {"moment": placed_like(model.w, moment), "step": 3}
    return {"model": model, "optim": optim}


def placed_like(parameter: Any, local: torch.Tensor) -> DTensor:
    found: DTensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return found


def save_on_ranks(folder: Path, rows: int, block: int, blocking: bool) -> None:
    handle = ckpt.save(folder, sharded(rows, block), blocking=blocking)
    if handle is not None:
        handle.wait()


def load_on_ranks(folder: Path, rows: int, dtype: Any = None) -> tuple[str, list[Any], list[Any]]:
    """The class, the codes or values, and the scales of this rank's part; or the refusal."""
    target = sharded(rows, 0)
    try:
        ckpt.load(folder, target, dtype=dtype)
    except ckpt.MismatchError as error:
        assert not target["optim"].state
        return str(error), [], []
    held = target["optim"].state[target["model"].w]
    assert held["step"] == 3
    local = held["moment"]._local_tensor
    if type(local) is Quantized:
        return "Quantized", local.codes.tolist(), local.scale.tolist()
    return "plain", local.tolist(), []


@pytest.mark.parametrize("blocking", [True, False])
def test_ranks_share_the_blocks_of_a_divided_tensor(
    clusters: Callable[[int], Cluster], tmp_path: Path, blocking: bool
) -> None:
    clusters(2).run(save_on_ranks, tmp_path, 12, 8, blocking)
    stored = ckpt.read(tmp_path)["optim"]["state"]["w"]["moment"]["tensors"]
    assert stored["codes"].tolist() == codes_of(12).tolist()
    found = clusters(3).run(load_on_ranks, tmp_path, 12)
    assert [each[0] for each in found] == ["Quantized"] * 3
    assert [row for each in found for row in each[1]] == codes_of(12).tolist()
    assert [scale for each in found for scale in each[2]] == stored["scale"].tolist()


def test_a_cut_inside_a_block_is_a_difference_unless_casts_are_allowed(
    clusters: Callable[[int], Cluster], tmp_path: Path
) -> None:
    clusters(2).run(save_on_ranks, tmp_path, 12, 24, True)
    for message, *_ in clusters(3).run(load_on_ranks, tmp_path, 12):
        assert "optim.state.w.moment" in message
        assert "blocks of 24 elements" in message
    found = clusters(3).run(load_on_ranks, tmp_path, 12, "target")
    assert [each[0] for each in found] == ["plain"] * 3
    scale = torch.tensor([24.0, 48.0])[:, None]
    values = (codes_of(12).float().view(2, -1) * scale).view(12, COLUMNS)
    assert [row for each in found for row in each[1]] == values.tolist()


def test_blocks_are_stored_as_values_where_a_rank_has_no_whole_block(
    clusters: Callable[[int], Cluster], tmp_path: Path
) -> None:
    clusters(2).run(save_on_ranks, tmp_path, 3, 8, True)  # two rows are a block, one row is none
    stored = ckpt.read(tmp_path)["optim"]["state"]["w"]["moment"]
    values = codes_of(3).float()
    values[:2] *= 8
    assert stored.tolist() == values.tolist()
    found = clusters(3).run(load_on_ranks, tmp_path, 3)
    assert [row for each in found for row in each[1]] == values.tolist()
