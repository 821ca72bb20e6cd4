"""A small network in every wrapping and under every sharding strategy, and its training.

A wrapping is told as text: a runtime's form, and a strategy of it where it has some, such as
`flat HYBRID_SHARD`. All ranks train on the same batch, so that every wrapping computes what one
process does, but for rounding. Where it must be the same to the bit, see `trainers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import sharding
from sharding.wrap import ModuleWrapPolicy
from tests.kept_groups import kept
from tests.networks import Frozen, ScaledBlock

CPU = torch.device("cpu")
WORDS, WIDTH = 11, 6


class Network(nn.Module):
    """An embedding shared with the head, two blocks of odd sizes, a frozen layer, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([ScaledBlock(9), ScaledBlock(7)])
        self.frozen = Frozen()
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return self.head(self.frozen(x))


class Other(Network):
    """A network with another size and another name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = ScaledBlock(8)
        self.extra = nn.Linear(2, 2)


class Counting(nn.Module):
    """A layer with a buffer, and state of its own that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.register_buffer("scale", torch.linspace(0.1, 0.3, 3))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(x * self.scale.to(x.dtype))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def network(seed: int = 0) -> Network:
    """A network drawn from a seed."""
    torch.manual_seed(seed)
    return Network()


def other(seed: int) -> Other:
    """The other network, drawn from a seed."""
    torch.manual_seed(seed)
    return Other()


def wrapped(how: str, seed: int = 0, make: Callable[[int], nn.Module] = network) -> nn.Module:
    """A network wrapped for this process group, each block a unit; torch's frozen layers too."""
    model = make(seed)
    form, _, strategy = how.partition(" ")
    strategy = strategy or "FULL_SHARD"
    if form == "unsharded":
        return model
    if form == "ddp":
        return DistributedDataParallel(model)
    if form in ("fsdp2", "fully_shard"):
        function = torch_fsdp.fully_shard if form == "fsdp2" else sharding.fully_shard
        for block in model.modules():
            if isinstance(block, ScaledBlock):
                function(block)
        return function(model)
    mesh = _grid() if "HYBRID" in strategy else None
    if form.startswith("torch-"):
        return torch_fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=torch_fsdp.wrap.ModuleWrapPolicy({ScaledBlock, Frozen}),
            device_id=CPU,
            device_mesh=mesh,
            sharding_strategy=torch_fsdp.ShardingStrategy[strategy],
            use_orig_params=form == "torch-original",
        )
    policy, chosen = ModuleWrapPolicy({ScaledBlock}), sharding.ShardingStrategy[strategy]
    groups = mesh and (mesh.get_group(1), mesh.get_group(0))
    if form == "composable":
        return sharding.composable.fully_shard(
            model, policy=policy, strategy=chosen, process_group=groups
        )
    return sharding.FullyShardedDataParallel(
        model,
        groups,
        sharding_strategy=chosen,
        auto_wrap_policy=policy,
        use_orig_params=form == "original",
    )


@kept
def _grid() -> DeviceMesh:
    """All ranks in two rows, each of which has a replica."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2))


def state_of(how: str, seed: int = 0) -> dict[str, Any]:
    """A wrapped network and its AdamW, with the blocks in a group of their own."""
    model = wrapped(how, seed)
    inside = [p for name, p in model.named_parameters() if "blocks" in name]
    outside = [p for name, p in model.named_parameters() if "blocks" not in name]
    groups = [{"params": outside, "lr": 0.02}, {"params": inside, "betas": (0.8, 0.9)}]
    return {"model": model, "optim": AdamW(groups, lr=0.01, weight_decay=0.1)}


def train(state: dict[str, Any], first: int, steps: int) -> list[float]:
    """Train on the batches of these steps, the same on all ranks; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens, following = torch.randint(WORDS, (2, 4, 5), generator=generator)
        scores = state["model"](tokens).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, following.flatten())
        state["optim"].zero_grad()
        loss.backward()
        state["optim"].step()
        losses.append(loss.item())
    return losses


# What is in a checkpoint.


def flat_dict(nest: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a nest by their names."""
    if isinstance(nest, dict):
        return {
            k: v for key, item in nest.items() for k, v in flat_dict(item, f"{path}.{key}").items()
        }
    return {path: nest}


def assert_alike(found: Any, wanted: Any, *, exact: bool) -> None:
    """The same names, shapes, types and values: bit for bit, or but for rounding."""
    found, wanted = flat_dict(found), flat_dict(wanted)
    assert found.keys() == wanted.keys()
    rounding = {"rtol": 0, "atol": 0} if exact else {}
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                found[name], value, **rounding, msg=lambda text, name=name: f"{name}: {text}"
            )
        elif name.endswith("param_groups"):
            for group, wanted_group in zip(found[name], value, strict=True):
                assert sorted(group["params"]) == sorted(wanted_group["params"])
                assert {**group, "params": 0} == {**wanted_group, "params": 0}
        else:
            assert found[name] == value, name
