"""Training goes on bit for bit: every optimizer, plain and sharded, loaded into fresh objects."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import ckpt
from ckpt.errors import MismatchError, StateError
from ckpt.opening.sources import open_source
from formats.native.manifest import MANIFEST, dump, read_manifest
from formats.native.manifest import load as load_manifest
from tests.old_torch import TORCH_TRAINS_ON_CPU

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
}


def network(seed: int) -> nn.Sequential:
    """A small network, its parameters drawn from a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def train(model: nn.Module, optimizer: Optimizer, first: int, steps: int) -> list[float]:
    """Train on the batches of these steps; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 5, generator=generator)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss.item()

        losses.append(float(optimizer.step(closure)))
    return losses


def tensors(nest: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a nest with its key path."""
    if isinstance(nest, torch.Tensor):
        yield path, nest
    elif isinstance(nest, dict):
        yield from chain.from_iterable(tensors(v, f"{path}.{k}") for k, v in nest.items())
    elif isinstance(nest, list | tuple):
        yield from chain.from_iterable(tensors(v, f"{path}.{i}") for i, v in enumerate(nest))


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a model and its optimizer, whole."""
    found = dict(tensors({"model": model.state_dict(), "optim": optimizer.state_dict()}))
    return {
        name.replace("model.module.", "model."): (
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        )
        .detach()
        .clone()
        for name, tensor in found.items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that two sets of tensors are equal bit for bit, types included."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_optimizer_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model = network(0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 0, 3)
    ckpt.save(tmp_path, {"model": model, "optim": optimizer})
    saved = everything(model, optimizer)
    losses = train(model, optimizer, 3, 3)
    fresh = network(1)
    again = OPTIMIZERS[kind](fresh.parameters())
    ckpt.load(tmp_path, {"model": fresh, "optim": again})
    same(everything(fresh, again), saved)
    assert train(fresh, again, 3, 3) == losses
    same(everything(fresh, again), everything(model, optimizer))


@pytest.mark.parametrize("kind", ["adam", "sgd momentum", "lbfgs"])
def test_an_optimizer_that_has_stepped_is_overwritten(tmp_path: Path, kind: str) -> None:
    model = network(0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 0, 2)
    ckpt.save(tmp_path, {"model": model, "optim": optimizer})
    saved, losses = everything(model, optimizer), train(model, optimizer, 2, 2)
    train(model, optimizer, 50, 3)
    ckpt.load(tmp_path, {"model": model, "optim": optimizer})
    same(everything(model, optimizer), saved)
    assert train(model, optimizer, 2, 2) == losses


def test_a_checkpoint_before_the_first_step_empties_the_optimizer(tmp_path: Path) -> None:
    model = network(0)
    optimizer = torch.optim.Adam(model.parameters())
    ckpt.save(tmp_path, {"model": model, "optim": optimizer})
    train(model, optimizer, 0, 2)
    ckpt.load(tmp_path, {"model": model, "optim": optimizer})
    assert not optimizer.state_dict()["state"]


def schedulers(optimizer: Optimizer) -> dict[str, Any]:
    """Those of torch that keep a Counter, alone and inside of another."""
    made = torch.optim.lr_scheduler
    inner: list[Any] = [made.LinearLR(optimizer), made.MultiStepLR(optimizer, [3, 3, 9])]
    return {
        "steps": made.MultiStepLR(optimizer, [2, 5, 5], 0.5),
        "sequence": made.SequentialLR(optimizer, inner, [4]),
    }


def test_a_scheduler_that_counts_milestones_goes_on_where_it_was(tmp_path: Path) -> None:
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made = schedulers(optimizer)
    train(model, optimizer, 0, 1)
    for scheduler in made.values():
        scheduler.step()
    ckpt.save(tmp_path, {"schedulers": made, "counts": Counter({"a": 2})})
    again = schedulers(torch.optim.SGD(network(1).parameters(), lr=1.0))
    counts = Counter({"a": 5})
    ckpt.load(tmp_path, {"schedulers": again, "counts": counts})
    assert counts == Counter({"a": 2})
    for name, scheduler in made.items():
        assert again[name].state_dict() == scheduler.state_dict()
    assert type(again["steps"].milestones) is Counter
    assert type(again["sequence"]._schedulers[1].milestones) is Counter


def groups(model: nn.Sequential, order: int) -> Optimizer:
    """Adam with two groups of different options, in either order."""
    decayed = {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1, "name": "w"}
    others = {"params": [model[0].bias, model[2].bias], "lr": 0.02, "betas": (0.5, 0.9)}
    return torch.optim.AdamW([decayed, others][::order])


def test_groups_keep_their_options_also_in_another_order(tmp_path: Path) -> None:
    model = network(0)
    optimizer = groups(model, 1)
    train(model, optimizer, 0, 3)
    optimizer.param_groups[0]["lr"] = 0.005
    ckpt.save(tmp_path, {"model": model, "optim": optimizer})
    for order in (1, -1):
        fresh = network(1)
        again = groups(fresh, order)
        for group in again.param_groups:
            group["lr"] = 99.0
        ckpt.load(tmp_path, {"model": fresh, "optim": again})
        decayed, others = again.param_groups[::order]
        assert (decayed["lr"], decayed["weight_decay"], decayed["name"]) == (0.005, 0.1, "w")
        assert (others["lr"], others["betas"]) == (0.02, (0.5, 0.9))
        for name, parameter in model.named_parameters():
            there = again.state[fresh.get_parameter(name)]
            same(dict(tensors(there)), dict(tensors(optimizer.state[parameter])))
        # After training on, the original is another one: compare one step of a copy.
        one, other = network(0), network(0)
        first, second = groups(one, 1), groups(other, order)
        ckpt.load(tmp_path, {"model": one, "optim": first})
        ckpt.load(tmp_path, {"model": other, "optim": second})
        assert train(one, first, 3, 2) == train(other, second, 3, 2)


def test_groups_that_cannot_be_matched_are_named(tmp_path: Path) -> None:
    model = network(0)
    ckpt.save(tmp_path, {"model": model, "optim": groups(model, 1)})
    fresh = network(1)
    merged = torch.optim.AdamW(fresh.parameters())
    with pytest.raises(ckpt.MismatchError, match=r"optim\.param_groups\.0: .* the groups \[0, 1\]"):
        ckpt.load(tmp_path, {"model": fresh, "optim": merged})
    larger = nn.Sequential(*network(1), nn.Linear(5, 5))
    ckpt.save(tmp_path / "less", {"model": model, "optim": torch.optim.SGD(model.parameters())})
    with pytest.raises(ckpt.MismatchError, match=r"2 of its 6 parameters .* first is 3\.weight"):
        ckpt.load(
            tmp_path / "less", {"model": larger, "optim": torch.optim.SGD(larger.parameters())}
        )


def test_frozen_and_unused_parameters_have_no_state(tmp_path: Path) -> None:
    model = network(0)
    model[0].requires_grad_(False)
    unused = nn.Parameter(torch.ones(3))
    model.register_parameter("unused", unused)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    ckpt.save(tmp_path, {"model": model, "optim": optimizer})
    saved = everything(model, optimizer)
    fresh = network(1)
    fresh.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    fresh[0].requires_grad_(False)
    again = torch.optim.Adam(fresh.parameters())
    ckpt.load(tmp_path, {"model": fresh, "optim": again})
    same(everything(fresh, again), saved)
    assert fresh.unused not in again.state
    assert fresh[0].weight not in again.state


def test_state_in_another_dtype_than_its_parameter_keeps_it(tmp_path: Path) -> None:
    model = network(0).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 1 / 3).float()
    ckpt.save(tmp_path, {"model": model, "optim": optimizer})
    fresh = network(1).to(torch.bfloat16)
    again = torch.optim.SGD(fresh.parameters(), lr=0.01, momentum=0.9)
    ckpt.load(tmp_path, {"model": fresh, "optim": again})
    same(everything(fresh, again), everything(model, optimizer))


def test_one_optimizer_over_two_modules_goes_by_both_their_names(tmp_path: Path) -> None:
    one, two = network(0), network(1)
    optimizer = torch.optim.Adam([*two.parameters(), *one.parameters()])
    train(one, optimizer, 0, 2)
    train(two, optimizer, 2, 2)
    ckpt.save(tmp_path, {"actor": one, "critic": two, "optim": optimizer})
    first, second = network(2), network(3)
    again = torch.optim.Adam([*first.parameters(), *second.parameters()])
    ckpt.load(tmp_path, {"actor": first, "critic": second, "optim": again})
    for old, new in ((one, first), (two, second)):
        for name, parameter in old.named_parameters():
            there = again.state[new.get_parameter(name)]
            same(dict(tensors(there)), dict(tensors(optimizer.state[parameter])))


def test_an_optimizer_alone_goes_by_position(tmp_path: Path) -> None:
    model = network(0)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    ckpt.save(tmp_path, optimizer)
    again = torch.optim.Adam(network(1).parameters())
    ckpt.load(tmp_path, again)
    same(dict(tensors(again.state_dict())), dict(tensors(optimizer.state_dict())))


def test_a_group_without_parameters_gets_its_options_back(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, Optimizer]:
        model = network(seed)
        return model, torch.optim.SGD([{"params": []}, {"params": model.parameters()}], lr=0.3)

    model, optimizer = made(0)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.2, 0.1
    ckpt.save(tmp_path / "named", {"model": model, "optim": optimizer})
    ckpt.save(tmp_path / "alone", {"optim": optimizer})
    numbered = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch.save(numbered, tmp_path / "numbered")
    for place in ("named", "alone", "numbered"):
        fresh, again = made(1)
        state = {"optim": again} if place == "alone" else {"model": fresh, "optim": again}
        ckpt.load(tmp_path / place, state)
        assert [group["lr"] for group in again.param_groups] == [0.2, 0.1]


def test_groups_without_parameters_are_counted(tmp_path: Path) -> None:
    model = network(0)
    two = torch.optim.SGD([{"params": []}, {"params": model.parameters()}], lr=0.3)
    one = torch.optim.SGD(model.parameters(), lr=0.3)
    ckpt.save(tmp_path / "two", {"model": model, "optim": two})
    ckpt.save(tmp_path / "one", {"model": model, "optim": one})
    with pytest.raises(MismatchError, match=r"param_groups\.0: has no parameters in the ch"):
        ckpt.load(tmp_path / "two", {"model": model, "optim": one})
    with pytest.raises(MismatchError, match=r"param_groups\.0: has no parameters, and the"):
        ckpt.load(tmp_path / "one", {"model": model, "optim": two})
    two.param_groups[0]["lr"] = 0.7
    with pytest.warns(UserWarning, match="has no parameters"):
        ckpt.load(tmp_path / "one", {"model": model, "optim": two}, strict=False)
    assert two.param_groups[0]["lr"] == 0.7


def test_new_groups_with_other_options_take_none_of_one_old_group(tmp_path: Path) -> None:
    model = network(0)
    ckpt.save(tmp_path, {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)})
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.5}]
    divided = torch.optim.SGD(groups, lr=0.2)
    with pytest.raises(MismatchError, match=r"param_groups\.1: .* another weight_decay"):
        ckpt.load(tmp_path, {"model": model, "optim": divided})
    ckpt.load(tmp_path, {"model": model, "optim": divided}, exclude="optim.param_groups")
    assert [group["weight_decay"] for group in divided.param_groups] == [0, 0.5]
    divided.param_groups[1]["weight_decay"] = 0
    ckpt.load(tmp_path, {"model": model, "optim": divided})
    assert [group["lr"] for group in divided.param_groups] == [0.1, 0.1]


def adam_over(*modules: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam([p for module in modules for p in module.parameters()])


def moments(module: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    named = module.named_parameters()
    found = {name: optimizer.state.get(parameter, {}) for name, parameter in named}
    return dict(tensors({name: dict(state) for name, state in found.items()}))


def test_moments_are_found_after_the_optimizer_gets_another_module(tmp_path: Path) -> None:
    one, two = network(0), network(1)
    optimizer = adam_over(one)
    train(one, optimizer, 0, 2)
    ckpt.save(tmp_path / "one", {"one": one, "two": two, "optim": optimizer})
    first, second = network(2), network(3)
    both = adam_over(first, second)
    with pytest.warns(UserWarning, match="strict=False skips"):
        ckpt.load(tmp_path / "one", {"one": first, "two": second, "optim": both}, strict=False)
    same(moments(first, both), moments(one, optimizer))
    assert not moments(second, both)
    train(second, both, 0, 2)
    ckpt.save(tmp_path / "both", {"one": first, "two": second, "optim": both})
    third = network(4)
    alone = adam_over(third)
    state = {"one": network(5), "two": third, "optim": alone}
    with pytest.warns(UserWarning, match="strict=False skips"):
        ckpt.load(tmp_path / "both", state, strict=False)
    same(moments(third, alone), moments(second, both))


def test_moments_of_one_module_never_go_to_another_of_the_same_names(tmp_path: Path) -> None:
    one, two = network(0), network(1)
    optimizer = adam_over(one)
    train(one, optimizer, 0, 2)
    ckpt.save(tmp_path, {"one": one, "two": two, "optim": optimizer})
    fresh = adam_over(two)
    with pytest.raises(MismatchError, match=r"optim\.state\.one\.0\.weight\.exp_avg: is in"):
        ckpt.load(tmp_path, {"one": one, "two": two, "optim": fresh})
    with pytest.warns(UserWarning, match="strict=False skips"):
        ckpt.load(tmp_path, {"one": one, "two": two, "optim": fresh}, strict=False)
    assert not fresh.state_dict()["state"]
    ckpt.convert(tmp_path, tmp_path / "copy", to="ckpt")
    with pytest.raises(MismatchError, match=r"optim\.state\.one"):
        ckpt.load(tmp_path / "copy", {"one": one, "two": two, "optim": fresh})
    swapped = {"one": "two", "two": "one"}
    ckpt.load(tmp_path, {"one": one, "two": two, "optim": fresh}, rename=swapped)
    same(moments(two, fresh), moments(one, optimizer))


def test_checkpoints_without_the_module_of_the_names_load_in_both_forms(tmp_path: Path) -> None:
    one, two = network(0), network(1)
    single, both = adam_over(one), adam_over(two, one)
    train(one, single, 0, 2)
    train(two, both, 0, 2)
    ckpt.save(tmp_path / "single", {"one": one, "two": two, "optim": single})
    ckpt.save(tmp_path / "both", {"one": one, "two": two, "optim": both})
    for place in (tmp_path / "single", tmp_path / "both"):
        without_optimizers(place)
    for saved, where in ((single, "single"), (both, "both")):
        first, second = network(2), network(3)
        again = adam_over(first) if where == "single" else adam_over(second, first)
        ckpt.load(tmp_path / where, {"one": first, "two": second, "optim": again})
        same(moments(first, again), moments(one, saved))
    alone = adam_over(second)
    ckpt.load(tmp_path / "both", {"one": first, "two": second, "optim": alone})
    same(moments(second, alone), moments(two, both))
    wider = nn.ModuleDict({"deep": network(4)})
    wide = adam_over(first, wider)
    state = {"one": first, "wide": wider, "optim": wide}
    with pytest.warns(UserWarning, match="strict=False skips"):
        ckpt.load(tmp_path / "single", state, strict=False)
    same(moments(first, wide), moments(one, single))


def without_optimizers(folder: Path) -> None:
    """Writes the manifest again as earlier versions did."""
    url = str(folder)
    with open_source(url) as source:
        manifest = load_manifest(read_manifest(source.store), url)
    (folder / MANIFEST).write_bytes(dump(replace(manifest, optimizers={}, strides={})))


def test_tensors_of_the_state_go_by_their_key_paths(tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        model = network(seed)
        rate = nn.Parameter(torch.full((3,), float(seed)))
        extra = [nn.Parameter(torch.ones(2) * seed), nn.Parameter(torch.zeros(2))]
        own = [rate, *model.parameters(), *extra]
        return {"model": model, "rate": rate, "extra": extra, "optim": torch.optim.Adam(own)}

    state = made(1)
    for index, parameter in enumerate(state["optim"].param_groups[0]["params"]):
        parameter.grad = torch.full_like(parameter, float(index))
    state["optim"].step()
    ckpt.save(tmp_path, state)
    assert {"rate", "extra.1", "model.0.weight"} <= set(ckpt.read(tmp_path)["optim"]["state"])
    fresh = made(2)
    order = [*fresh["extra"], *fresh["model"].parameters(), fresh["rate"]]
    fresh["optim"] = torch.optim.Adam(order)
    ckpt.load(tmp_path, fresh)
    for name in ("rate", "extra"):
        pairs = zip(*(dict(tensors(s[name], name)).values() for s in (state, fresh)), strict=True)
        for old, new in pairs:
            there = fresh["optim"].state[new]
            same(dict(tensors(dict(there))), dict(tensors(dict(state["optim"].state[old]))))


def test_positions_need_groups_of_the_same_sizes(tmp_path: Path) -> None:
    model = network(0)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    ckpt.save(tmp_path, {"optim": optimizer})
    first, *rest = network(1).parameters()
    divided = torch.optim.Adam([{"params": [first]}, {"params": rest}])
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"which have \[4\], .* have \[1, 3\]"):
            ckpt.load(tmp_path, {"optim": divided}, strict=strict)
    fresh = network(1)
    again = torch.optim.Adam(fresh.parameters())
    ckpt.load(tmp_path, {"model": fresh, "optim": again}, include="optim*")
    same(moments(fresh, again), moments(model, optimizer))


class Counting(torch.optim.SGD):
    """An optimizer with state of its own under a key that is no parameter, as of MADGRAD."""

    def step(self, closure: Any = None) -> Any:
        count = self.state["count"]  # type: ignore[index]
        count.setdefault("steps", torch.zeros(()))
        count["steps"] += 1
        count["rates"] = [*count.get("rates", []), 0.5]
        return super().step(closure)


def test_state_under_a_key_that_is_no_parameter_comes_back(tmp_path: Path) -> None:
    model = network(0)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 0, 3)
    ckpt.save(tmp_path / "own", {"model": model, "optim": optimizer})
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "pt")
    for place in ("own", "pt"):
        fresh = network(1)
        again = Counting(fresh.parameters(), lr=0.1, momentum=0.9)
        ckpt.load(tmp_path / place, {"model": fresh, "optim": again})
        same(everything(fresh, again), everything(model, optimizer))
        assert again.state_dict()["state"]["count"]["rates"] == [0.5] * 3
    ckpt.load(tmp_path / "own", {"model": fresh, "optim": again}, exclude="optim.state.count*")
    assert again.state_dict()["state"]["count"]["rates"] == [0.5] * 3


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.ones(2))


def test_a_key_that_is_also_a_parameters_name_is_refused(tmp_path: Path) -> None:
    model = Named()
    optimizer = Counting(model.parameters())
    model.count.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(StateError, match="has a parameter of this name too"):
        ckpt.save(tmp_path, {"model": model, "optim": optimizer})


class Around(Optimizer):
    """Has another optimizer inside, and a state dict with a form of its own, as Lookahead."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.slow = inner, torch.zeros(2)

    def step(self, closure: Any = None) -> Any:
        self.slow += 1
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": {(0, 0): self.slow}, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slow = state["slow"][0, 0]
        self.inner.load_state_dict(state["inner"])


def test_an_optimizer_around_another_is_saved_by_its_own_state_dict(tmp_path: Path) -> None:
    model = network(0)
    optimizer = Around(torch.optim.Adam(model.parameters()))
    train(model, optimizer, 0, 2)
    ckpt.save(tmp_path, {"model": model, "optim": optimizer})
    fresh = network(1)
    again = Around(torch.optim.Adam(fresh.parameters()))
    ckpt.load(tmp_path, {"model": fresh, "optim": again})
    assert torch.equal(again.slow, optimizer.slow)
    same(everything(fresh, again.inner), everything(model, optimizer.inner))
    assert train(fresh, again, 2, 2) == train(model, optimizer, 2, 2)


def test_moments_keep_the_strides_that_they_had(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(6, 7))
        return model, torch.optim.SGD(model.parameters(), momentum=0.9)

    model, optimizer = made(0)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)
        optimizer.state[parameter]["sides"] = [torch.randn(4, 5).t(), torch.randn(1, 6).t()]
    image = optimizer.state[model[0].weight]
    image["momentum_buffer"] = image["momentum_buffer"].to(memory_format=torch.channels_last)
    ckpt.save(tmp_path / "own", {"model": model, "optim": optimizer})
    saved = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch.save(saved, tmp_path / "pt")
    ckpt.convert(tmp_path / "own", tmp_path / "converted", to="ckpt")
    for place in ("own", "pt", "converted"):
        fresh, again = made(1)
        fresh.to(memory_format=torch.channels_last)
        for _ in range(2):  # the second time in the place of state of other strides
            ckpt.load(tmp_path / place, {"model": fresh, "optim": again})
            found = dict(tensors(again.state_dict()["state"]))
            for name, tensor in tensors(optimizer.state_dict()["state"]):
                assert torch.equal(found[name], tensor)
                is_same = found[name].stride() == tensor.stride()
                assert is_same or 1 in tensor.shape, name
            for parameter in fresh.parameters():
                other = again.state[parameter]["sides"]
                again.state[parameter]["sides"] = [side.contiguous() for side in other]


# Sharded: each way of wrapping at a world size, and the world sizes it is loaded at.


def wrapped(how: str) -> nn.Module:
    """A network of uneven sizes, wrapped for this process group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    world_size = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(model)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    elif how == "tp":
        return parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan)
    elif how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "fsdp"))
    else:
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


Packed = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Type, shape and bytes of tensors: what travels between the processes of a test."""


def packed(found: dict[str, torch.Tensor]) -> Packed:
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in found.items()
    }


def fresh_state(how: str, kind: str) -> tuple[nn.Module, Optimizer]:
    model = wrapped(how)
    return model, OPTIMIZERS[kind](model.parameters())


def train_and_save(folder: str, how: str, kind: str) -> Packed:
    """Train a wrapped network and save it; returns everything in it, whole."""
    model, optimizer = fresh_state(how, kind)
    train(model, optimizer, 0, 2)
    ckpt.save(folder, {"model": model, "optim": optimizer})
    return packed(everything(model, optimizer))


def load_and_train(folder: str, how: str, kind: str) -> Packed:
    """Load into fresh objects; returns everything in them, once they have been seen to train."""
    model, optimizer = fresh_state(how, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ckpt.load(folder, {"model": model, "optim": optimizer})
    found = everything(model, optimizer)
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor):
            assert all(
                value.placements == parameter.placements
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            )
    train(model, optimizer, 2, 1)
    return packed(found)


WAYS = [
    ("ddp", 2, "adam", [("ddp", 3), ("fsdp", 2)]),
    ("fsdp", 3, "adamw fused", [("fsdp", 2), ("fsdp", 4), ("ddp", 2)]),
    ("fsdp", 2, "sgd momentum", [("fsdp", 3)]),
    ("tp", 2, "adam", [("tp", 4), ("fsdp", 3)]),
    ("fsdp and tp", 4, "adam amsgrad foreach", [("fsdp", 3), ("tp", 2), ("fsdp and tp", 2)]),
    ("hsdp", 4, "adam", [("fsdp and tp", 4), ("ddp", 2)]),
]


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.skipif(
    not TORCH_TRAINS_ON_CPU,
    reason="torch's FSDP2, the oracle, trains right on a CPU from torch 2.10 on",
)
@pytest.mark.parametrize(
    ("how", "saving", "kind", "loads"), WAYS, ids=[f"{way[0]} {way[1]} {way[2]}" for way in WAYS]
)
def test_sharded_training_goes_on_at_another_world_size_and_wrapping(
    clusters: Callable,
    tmp_path: Path,
    how: str,
    saving: int,
    kind: str,
    loads: list[tuple[str, int]],
) -> None:
    folder = str(tmp_path)
    saved = clusters(saving).run(train_and_save, folder, how, kind)[0]
    for other, loading in loads:
        for found in clusters(loading).run(load_and_train, folder, other, kind):
            assert found == saved
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    optimizer = OPTIMIZERS[kind](model.parameters())
    ckpt.load(folder, {"model": model, "optim": optimizer})
    assert packed(everything(model, optimizer)) == saved
    train(model, optimizer, 2, 1)


def zero_redundancy(seed: int) -> tuple[nn.Module, Any]:
    with warnings.catch_warnings():  # its package takes a second, and uses a deprecated part
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(network(seed))
    groups = [{"params": [p]} for p in model.parameters()]
    return model, ZeroRedundancyOptimizer(groups, torch.optim.Adam, lr=0.01)


def consolidated(optimizer: Any) -> tuple[Packed, list[float]]:
    """The whole state of an optimizer, on rank 0, and the rates of its groups."""
    optimizer.consolidate_state_dict(to=0)
    found = packed(dict(tensors(optimizer.state_dict()))) if dist.get_rank() == 0 else {}
    return found, [group["lr"] for group in optimizer.param_groups]


def save_zero_redundancy(folder: str) -> tuple[Packed, list[float]]:
    model, optimizer = zero_redundancy(0)
    train(model, optimizer, 0, 2)
    optimizer.param_groups[1]["lr"] = 0.5
    ckpt.save(folder, {"model": model, "optim": optimizer})
    return consolidated(optimizer)


def load_zero_redundancy(folder: str) -> tuple[Packed, list[float]]:
    model, optimizer = zero_redundancy(1)
    for _ in range(2):  # the second time in the place of other state
        ckpt.load(folder, {"model": model, "optim": optimizer})
        found = consolidated(optimizer)
        own = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
        assert {id(parameter) for parameter in optimizer.optim.state} == own
        train(model, optimizer, 2, 1)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("saving", "loading"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.thorough)]
)
def test_a_zero_redundancy_optimizer_is_restored_at_another_world_size(
    clusters: Callable, tmp_path: Path, saving: int, loading: int
) -> None:
    saved = clusters(saving).run(save_zero_redundancy, str(tmp_path / "zero"))
    wanted = [saved[0], *[({}, saved[0][1])] * (loading - 1)]
    assert clusters(loading).run(load_zero_redundancy, str(tmp_path / "zero")) == wanted
    model = network(2)
    plain = torch.optim.Adam([{"params": [p]} for p in model.parameters()])
    ckpt.load(tmp_path / "zero", {"model": model, "optim": plain})
    assert packed(dict(tensors(plain.state_dict()))) == saved[0][0]
    assert [group["lr"] for group in plain.param_groups] == saved[0][1]
    ckpt.save(tmp_path / "plain", {"model": model, "optim": plain})
    assert clusters(loading).run(load_zero_redundancy, str(tmp_path / "plain")) == wanted


def save_modules_of_stages(folder: str, alike: bool) -> str:
    """Saves an optimizer of another module on each rank; returns the error."""
    name = "all" if alike else f"stage{dist.get_rank()}"
    layers = nn.ModuleDict({f"layer{dist.get_rank()}" if alike else "layer": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(layers.parameters(), momentum=0.9)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    try:
        ckpt.save(folder, {name: layers, "optim": optimizer})
    except ckpt.CkptError as error:
        return str(error)
    return ""


def test_optimizers_of_different_modules_with_the_same_names_are_refused_under_one_key(
    clusters: Callable, tmp_path: Path
) -> None:
    assert clusters(2).run(save_modules_of_stages, str(tmp_path / "a"), True) == ["", ""]
    names = [f"layer{at}.{each}" for at in range(2) for each in ("weight", "bias")]
    assert sorted(ckpt.read(tmp_path / "a")["optim"]["state"]) == sorted(names)
    for error in clusters(2).run(save_modules_of_stages, str(tmp_path / "b"), False):
        assert "of a parameter of 'stage0' on rank 0, of 'stage1' on rank 1" in error
