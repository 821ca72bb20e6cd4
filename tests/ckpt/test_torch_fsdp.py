"""What only torch's FSDP1 does to a save and a load: what it keeps whole, cuts empty, and gives.

Its strategies and its way into other wrappings are in `test_flat_modules` and `test_any_to_any`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType

import ckpt
from tests.ckpt.wrappings import CPU, WORDS, Counting, state_of, train, wrapped
from tests.old_torch import needs

KEEPING = ["torch-flat", "torch-original", "torch-flat SHARD_GRAD_OP"]
KEEPING += ["torch-original SHARD_GRAD_OP", "torch-original NO_SHARD"]
"""Ways of which torch keeps something whole after a forward, and one of which it does not."""


def saved_without_steps(how: str, folder: str) -> list[list[tuple[int, ...]]]:
    """Save a module that has not run, load it into one that has not either."""
    ckpt.save(folder, state_of(how))
    other = state_of(how, seed=1)
    ckpt.load(folder, other)
    ckpt.save(f"{folder}-again", other)
    return [sorted(map(tuple, (p.shape for p in other["model"].parameters())))]


@pytest.mark.parametrize("how", ["torch-flat", "torch-original"])
def test_a_module_that_has_never_run_is_saved_and_loaded(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    clusters(2).run(saved_without_steps, how, str(tmp_path / "new"))
    plain = wrapped("unsharded")
    for folder in ("new", "new-again"):
        read = ckpt.read(tmp_path / folder)["model"]
        assert sorted(read) == sorted(plain.state_dict())
        for name, tensor in plain.state_dict().items():
            assert torch.equal(read[name], tensor), name


def scores_after_loading(how: str, folder: str, grad: bool) -> tuple[list[float], list[float]]:
    """What a module that has just run without a backward computes, once it was loaded."""
    tokens = torch.arange(WORDS)
    state = state_of(how, seed=1)
    with torch.set_grad_enabled(grad):
        state["model"](tokens)
    ckpt.load(folder, state["model"])
    with torch.no_grad():
        return state["model"](tokens).sum(1).tolist(), wrapped("unsharded")(tokens).sum(1).tolist()


@pytest.mark.wide
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", KEEPING)
def test_what_torch_keeps_whole_after_a_forward_does_not_outlive_a_load(
    clusters: Callable[[int], Any], tmp_path: Path, how: str, grad: bool
) -> None:
    ckpt.save(tmp_path, wrapped("unsharded"))
    for found, wanted in clusters(2).run(scores_after_loading, how, str(tmp_path), grad):
        assert found == pytest.approx(wanted, rel=1e-5)


def between_forward_and_backward(
    state: dict[str, Any], step: int, save: Callable[[], None]
) -> torch.Tensor:
    """The loss of a step; `save` is called with the parameters whole and the last gradients."""
    loss = state["model"](torch.arange(WORDS) % (step + 2)).square().mean()
    save()
    state["optim"].zero_grad()
    loss.backward()
    return loss


def while_gradients_are_summed(
    state: dict[str, Any], step: int, save: Callable[[], None]
) -> torch.Tensor:
    """The loss of a step over two batches; `save` is called with the first one's gradients."""
    state["optim"].zero_grad()
    with state["model"].no_sync():
        state["model"](torch.arange(WORDS)).square().mean().backward()
    save()
    loss = state["model"](torch.arange(WORDS) % (step + 2)).square().mean()
    loss.backward()
    return loss


MOMENTS = {
    step.__name__: step for step in (between_forward_and_backward, while_gradients_are_summed)
}


def trained(how: str, moment: str, folder: str | None) -> list[float]:
    """The losses of a run, which is saved in the middle of every step if there is a folder."""
    state = state_of(how)

    def save() -> None:
        if folder is not None:
            ckpt.save(folder, state, overwrite=True)

    losses = []
    for step in range(3):
        losses.append(MOMENTS[moment](state, step, save).item())
        state["optim"].step()
    return losses


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", KEEPING)
def test_saving_in_the_middle_of_a_step_changes_nothing(
    clusters: Callable[[int], Any], tmp_path: Path, how: str, moment: str
) -> None:
    alone = clusters(2).run(trained, how, moment, None)
    assert clusters(2).run(trained, how, moment, str(tmp_path)) == alone


def kept_for_empty_parts(folder: str) -> list[tuple[int, int]]:
    """For each parameter its elements here, and the entries that a loaded optimizer has for it."""
    state = state_of("torch-original", seed=1)
    ckpt.load(folder, state)
    held = state["optim"].state
    return [(p.numel(), len(held.get(p, {}))) for p in state["model"].parameters()]


def test_a_rank_without_elements_of_a_parameter_gets_no_optimizer_state_for_it(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    state = state_of("unsharded")
    train(state, 0, 2)
    ckpt.save(tmp_path, state)
    found = clusters(3).run(kept_for_empty_parts, str(tmp_path))
    assert any(numel == 0 for rank in found for numel, _ in rank)
    frozen = 2
    for rank in found:
        assert all(entries == 0 for numel, entries in rank if numel == 0)
        assert sum(numel > 0 and entries == 0 for numel, entries in rank) <= frozen


def optimizer_alone(how: str, folder: str) -> None:
    state = state_of(how)
    train(state, 0, 1)
    ckpt.save(folder, {"optim": state["optim"]})


@pytest.mark.parametrize("how", ["torch-flat", "torch-original", "flat", "original"])
def test_an_optimizer_of_parts_without_its_module_is_refused(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    with pytest.raises(Exception, match="put the module into the state") as caught:
        clusters(2).run(optimizer_alone, how, str(tmp_path))
    assert len(caught.value.errors) == 2  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def torchs_state_dict(folder: str, kind: str) -> dict[str, Any]:
    """Save torch's state dict of a kind, and load it into another module's."""
    state = state_of("torch-flat")
    train(state, 0, 1)
    ckpt.save(f"{folder}-direct", state["model"])
    other = state_of("torch-flat", seed=1)["model"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TorchFSDP.state_dict_type(state["model"], StateDictType[kind]):
            ckpt.save(folder, state["model"].state_dict())
            dcp.save(state["model"].state_dict(), checkpoint_id=f"{folder}-dcp")
            optimizer = TorchFSDP.optim_state_dict(state["model"], state["optim"])
            dcp.save({"optim": optimizer}, checkpoint_id=f"{folder}-optim")
        with TorchFSDP.state_dict_type(other, StateDictType[kind]):
            target = other.state_dict()
            ckpt.load(folder, target)
            other.load_state_dict(target)
    ckpt.save(f"{folder}-again", other)
    return {name: type(value).__name__ for name, value in target.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_sharded_tensors_of_torchs_state_dicts_are_saved_and_filled_in_place(
    clusters: Callable[[int], Any], tmp_path: Path, kind: str
) -> None:
    found = clusters(3).run(torchs_state_dict, str(tmp_path / "dict"), kind)[0]
    assert "ShardedTensor" in found.values()
    direct, again = ckpt.read(tmp_path / "dict-direct"), ckpt.read(tmp_path / "dict-again")
    read, theirs = ckpt.read(tmp_path / "dict"), ckpt.read(tmp_path / "dict-dcp")
    assert set(read) == set(theirs)
    assert all(torch.equal(read[name], theirs[name]) for name in read)
    moments = ckpt.read(tmp_path / "dict-optim")["optim"]["state"]
    assert ckpt.verify(tmp_path / "dict-optim").sound
    assert set(moments) & set(direct)
    for name, tensor in direct.items():
        if name in moments:
            assert moments[name]["exp_avg"].shape == tensor.shape
        assert torch.equal(again[name], tensor), name
        if kind == "SHARDED_STATE_DICT":
            assert torch.equal(read[name], tensor), name
    if kind == "LOCAL_STATE_DICT":
        unit = [direct[f"blocks.1.{name}"] for name in ("up.weight", "up.bias", "down.weight")]
        whole = torch.cat([tensor.reshape(-1) for tensor in (*unit, direct["blocks.1.down.bias"])])
        assert torch.equal(read["blocks.1._flat_param"], whole)


def counting(original: bool, folder: str) -> tuple[int, str, list[float], bool]:
    """What a unit under mixed precision has after it was saved, changed and loaded."""
    mixed = torch_fsdp.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    arguments = {"device_id": CPU, "use_orig_params": original, "mixed_precision": mixed}
    model = TorchFSDP(nn.Sequential(TorchFSDP(Counting(), **arguments)), **arguments)
    model(torch.ones(2, 3)).float().sum().backward()
    ckpt.save(folder, model)
    inner = model.module[0].module
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    inner.seen = 0
    ckpt.load(folder, model)
    same = all(map(torch.equal, before, model.parameters()))
    return inner.seen, str(inner.scale.dtype), inner.scale.tolist(), same


@needs((2, 8), "torch 2.6 does not cast the buffers of an inner module")
@pytest.mark.parametrize("original", [False, True])
def test_extra_state_and_buffers_of_mixed_precision_are_loaded_by_the_module_itself(
    clusters: Callable[[int], Any], tmp_path: Path, original: bool
) -> None:
    wanted = torch.linspace(0.1, 0.3, 3).bfloat16()
    for seen, dtype, scale, same in clusters(2).run(counting, original, str(tmp_path)):
        assert (seen, dtype, scale, same) == (1, "torch.bfloat16", wanted.tolist(), True)
    assert ckpt.read(tmp_path)["0.scale"].dtype == torch.float32
