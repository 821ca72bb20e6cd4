"""Loads by mappings on several ranks, each of its own shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt


def differing_shards(
    source: Path, wanted: Path, mapping: Sequence[str], parameters: Mapping[str, int]
) -> list[str]:
    """The tensors whose shards, loaded from a source by a mapping, are not those wanted."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with ckpt.open(wanted) as found:
        whole = {name: handle[...] for name, handle in found.items()}
    target: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)])
        for name, tensor in whole.items()
    }
    ckpt.load(source, target, mapping=mapping, parameters=parameters)
    parts = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in whole.items()}
    own = {name: one.to_local() for name, one in parts.items()}
    return [name for name, one in own.items() if not torch.equal(one, target[name].to_local())]
