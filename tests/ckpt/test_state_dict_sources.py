"""State dicts in memory between all runtimes, and those that runtimes make themselves.

The trainers, and how their state is read without `ckpt`, are those of the table of files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.tensor import DTensor

import ckpt
import sharding
from sharding.describe.members import LocalPart
from sharding.kind import Kind
from sharding.layout import FlatShard, Layout, Mesh
from tests.ckpt.test_any_to_any import options, unlike
from tests.ckpt.test_state_dict import same
from tests.ckpt.trainers import KINDS, Trainer, snapshot, train, trainer, worlds
from tests.conftest import RankFailed
from tests.selection import slow

STATE_DICT_KINDS = [kind.value for kind in Kind]
FLAT_KINDS = ["torch-fsdp1-flat", "torch-fsdp1-original", "wrapper-flat", "wrapper-original"]


def trained(kind: str) -> Trainer:
    source = trainer(kind, seed=0)
    train(source, 0, 2)
    return source


def state_of(this: Trainer) -> dict[str, Any]:
    return {"model": this.model, "optim": this.optimizer}


QUICK_TARGETS = 12
"""`make test` has every twelfth target of a source; of another source, another twelfth.

CI has each of the other pairs at two ranks or at four, and the slow set has the rest.
"""


def share(turn: int) -> str:
    """The test that has a target, which is so many kinds behind its source."""
    if turn % QUICK_TARGETS == 0:
        return "some"
    return "half" if (turn + dist.get_world_size() // 2) % 2 else "the others"


def into_targets(kind: str, which: str) -> list[str]:
    """Into every trainer of these, one kind of state dict after the other; what differs."""
    source = trained(kind)
    wanted = snapshot(source)
    found = []
    targets = [target for target in KINDS if dist.get_world_size() in worlds(target)]
    for index, target_kind in enumerate(targets):
        if which != share(index - KINDS.index(kind)):
            continue
        to = STATE_DICT_KINDS[(index + KINDS.index(kind)) % len(STATE_DICT_KINDS)]
        target = trainer(target_kind, seed=1)
        made = ckpt.state_dict.convert(state_of(source), to=to)
        ckpt.state_dict.load(made, state_of(target))
        found += [f"{to} to {target_kind}: {p}" for p in unlike(snapshot(target), wanted, True)]
        if options(target) != options(source):
            found.append(f"{to} to {target_kind}: {options(target)}")
    return found


@pytest.mark.wide
@pytest.mark.parametrize("which", ["some", slow("half"), slow("the others")])
@pytest.mark.parametrize("world_size", [2, slow(3), 4])
@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_of_every_runtime_load_into_every_other_to_the_bit(
    clusters: Callable[[int], Any], kind: str, world_size: int, which: str
) -> None:
    if world_size not in worlds(kind):
        return
    for rank, problems in enumerate(clusters(world_size).run(into_targets, kind, which)):
        assert not problems, f"rank {rank}\n" + "\n".join(problems)


def own_state_dicts(this: Trainer, to: str) -> dict[str, Any]:
    """What the runtime's own methods give."""
    runtime: Any = torch_fsdp if this.kind.startswith("torch-") else sharding
    wrapper = runtime.FullyShardedDataParallel
    chosen = runtime.StateDictType[f"{to.upper()}_STATE_DICT"]
    configs = []
    if to == "full":
        # With its defaults torch 2.13 gives one moment for the other on the CPU.
        optim = runtime.FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False)
        configs = [runtime.FullStateDictConfig(), optim]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with wrapper.state_dict_type(this.model, chosen, *configs):
            return {
                "model": this.model.state_dict(),
                "optim": wrapper.optim_state_dict(this.model, this.optimizer),
            }


def convert_own(kind: str, own: str) -> None:
    source = trained(kind)
    made = own_state_dicts(source, own)
    model = source.model if kind.startswith("torch-") else None
    wanted = ckpt.state_dict.convert(state_of(source), to="full")
    found = ckpt.state_dict.convert(made, to="full", model=model)
    frozen = "frozen.turn.weight"
    for group in [*found["optim"]["param_groups"], *wanted["optim"]["param_groups"]]:
        group["params"] = [name for name in group["params"] if not name.startswith(frozen)]
    same(found, wanted)
    target = trainer("fully_shard", seed=1)
    ckpt.state_dict.load(made, state_of(target), model=model)
    assert not unlike(snapshot(target), snapshot(source), exact=True)


@pytest.mark.wide
@pytest.mark.thorough
@pytest.mark.parametrize("own", STATE_DICT_KINDS)
@pytest.mark.parametrize("kind", FLAT_KINDS)
def test_what_a_wrapper_s_own_methods_give_is_converted_and_loaded(
    clusters: Callable[[int], Any], kind: str, own: str
) -> None:
    clusters(2).run(convert_own, kind, own)


def into_own(kind: str, to: str) -> None:
    """What `convert` makes, by a wrapper's own methods into the wrapper."""
    source, target = trained("fully_shard"), trainer(kind, seed=1)
    made = ckpt.state_dict.convert(state_of(source), to=to)
    runtime: Any = torch_fsdp if kind.startswith("torch-") else sharding
    wrapper = runtime.FullyShardedDataParallel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with wrapper.state_dict_type(target.model, runtime.StateDictType.FULL_STATE_DICT):
            target.model.load_state_dict(made["model"])
            loadable = wrapper.optim_state_dict_to_load(
                target.model, target.optimizer, made["optim"]
            )
    target.optimizer.load_state_dict(loadable)
    assert not unlike(snapshot(target), snapshot(source), exact=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FLAT_KINDS)
def test_a_full_state_dict_of_ours_loads_by_a_wrapper_s_own_methods(
    clusters: Callable[[int], Any], kind: str
) -> None:
    clusters(2).run(into_own, kind, "full")


def save_own_local(kind: str, folder: str) -> None:
    """The local state dict of our wrapper, as it is, saved; and filled from the checkpoint."""
    source = trained(kind)
    made = own_state_dicts(source, "local")
    ckpt.save(folder, made)
    wanted = snapshot(source)
    target = trainer(kind, seed=1)
    held = own_state_dicts(target, "local")["model"]
    given = {"model": held}
    assert ckpt.load(folder, given, exclude="optim.*") is given
    assert given["model"] is held
    found = {name: value for name, value in snapshot(target).items() if "exp_avg" not in name}
    for name, value in found.items():
        if not name.startswith(("step", "buffer calls")):
            assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("kind", ["wrapper-flat", "wrapper-original"])
def test_a_local_state_dict_is_saved_and_filled_by_the_names_of_its_parameters(
    clusters: Callable[[int], Any], tmp_path: Path, kind: str
) -> None:
    clusters(2).run(save_own_local, kind, str(tmp_path))
    names = ckpt.read(tmp_path)["model"]
    assert names["blocks.0.up.weight"].shape == (8, 7)
    assert not [name for name in names if "_flat_param" in name]


def save_truncated(folder: str) -> None:
    layout = Layout((7,), Mesh.grid(("dp",), (2,)), (FlatShard(0, 4),))
    ckpt.save(folder, {"w": LocalPart(torch.zeros(3), layout)})


def test_a_truncated_part_is_never_saved(clusters: Callable[[int], Any], tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(save_truncated, str(tmp_path))
    assert "w: rank 0 has a local tensor of 3 elements" in failed.value.errors[1][1]
    assert not list(tmp_path.iterdir())


def cut_short() -> None:
    source = trained("torch-fsdp1-flat")
    made = own_state_dicts(source, "local")
    for key, value in made["model"].items():
        if key.endswith("_flat_param"):
            shard = value.local_shards()[0].tensor
            made["model"][key] = shard[:-1] if dist.get_rank() == 1 else shard
    ckpt.state_dict.convert({"model": made["model"]}, to="full", model=source.model)


def test_a_truncated_flat_shard_is_an_error_that_names_flat_parameter_and_rank(
    clusters: Callable[[int], Any],
) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(cut_short)
    name, message, _ = failed.value.errors[1]
    assert name == "LocalShapeError"
    assert "_flat_param: rank 1 has a local shard of shape" in message
    assert failed.value.errors[0][0] == "RankError"


def nameless() -> None:
    made = own_state_dicts(trained("torch-fsdp1-flat"), "local")
    ckpt.state_dict.convert(made, to="full")


def test_flat_parameters_that_nobody_can_name_are_an_error_that_says_what_to_give(
    clusters: Callable[[int], Any],
) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(nameless)
    for name, message, _ in failed.value.errors.values():
        assert name == "StateError"
        assert "pass the module of the state dict as model=" in message


def by_itself() -> None:
    """The optimizer of flat parameters, and no word about what is in them."""
    ckpt.state_dict.convert({"optim": trained("wrapper-flat").optimizer}, to="full")


def test_an_optimizer_of_parts_without_its_module_is_an_error(
    clusters: Callable[[int], Any],
) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(by_itself)
    assert {name for name, _, _ in failed.value.errors.values()} == {"StateError"}


def quantized() -> None:
    """8-bit moments, and a scale for every block, which has not the parameter's shape."""
    model = torch.nn.Linear(6, 5)
    sharded = sharding.fully_shard(model)
    optim = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for parameter in sharded.parameters():
        codes = torch.zeros_like(parameter.detach(), dtype=torch.uint8).add_(7)
        optim.state[parameter] = {"codes": codes, "scales": torch.arange(3.0), "step": 4}
    made = ckpt.state_dict.convert({"model": model, "optim": optim}, to="full")
    entry = made["optim"]["state"]["weight"]
    assert entry["codes"].dtype == torch.uint8
    assert entry["codes"].eq(7).all()
    assert entry["scales"].tolist() == [0, 1, 2]
    assert entry["step"] == 4
    fresh = sharding.fully_shard(torch.nn.Linear(6, 5))
    taking = torch.optim.SGD(fresh.parameters(), lr=0.5)
    ckpt.state_dict.load(made, {"model": fresh, "optim": taking})
    loaded = taking.state[fresh.weight]
    assert isinstance(loaded["codes"], DTensor)
    assert loaded["codes"].dtype == torch.uint8
    assert loaded["scales"].tolist() == [0, 1, 2]


def test_eight_bit_state_goes_through_by_its_tensors(clusters: Callable[[int], Any]) -> None:
    clusters(2).run(quantized)
