"""A program that a type checker accepts, with the types of the installed package."""

import torch
from torch import nn

import ckpt
import tools
from ckpt.sharding import FSDPModule, fully_shard
from ckpt.sharding.layout import Box
from ckpt.sharding.wrap import ModuleWrapPolicy


def is_sharded(model: nn.Linear) -> bool:
    """Whether the model is divided among the ranks, after that was asked for."""
    sharded: nn.Linear = fully_shard(model)
    return isinstance(sharded, FSDPModule)


with ckpt.open("a") as checkpoint:
    weight: torch.Tensor = checkpoint["model.weight"][0]
    shape: tuple[int, ...] = checkpoint["model.weight"].shape
box = Box((0,), shape[:1])
policy = ModuleWrapPolicy({nn.Linear})
theirs: bool = tools.THEIRS
wrong: int = ckpt.save("b", {"weight": weight})  # type: ignore[assignment]
also_wrong = ckpt.sharding.fully_shard(3)  # type: ignore[type-var]
