"""Workload A: a transformer-like model of 291 parameters with Adam's moments, sharded by FSDP2.

Rules:

1. The module is built on the meta device and filled shard by shard: building costs one pass over
   the memory, and no rank ever holds a whole tensor.
2. The values depend on the rank and the seed alone; `digest` of a state that was saved and of the
   same state after a load are equal exactly when every bit came back.
3. The model has the shape of a transformer and never runs: saving does not care.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

LAYERS = 24
VOCABULARY = 8
"""Rows of the embedding, in widths."""
BYTES_PER_SQUARE = (12 * LAYERS + VOCABULARY) * 4 * 3
"""Bytes of the state per width squared: float32 parameters and two moments."""


class Block(nn.Module):
    """The parameters of one transformer layer: 12 tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.before_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Linear(width, 4 * width)
        self.feed_forward_out = nn.Linear(4 * width, width)


class Transformer(nn.Module):
    """An embedding, `LAYERS` blocks and a norm: 291 tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY * width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)


@dataclass(frozen=True, slots=True)
class Training:
    """A sharded model and its optimizer on one rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, object]:
        """What ckpt is given."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dicts(self) -> dict[str, object]:
        """What DCP is given: state dicts whose tensors are the model's and the optimizer's own."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def locals(self) -> Iterator[torch.Tensor]:
        """This rank's memory, tensor by tensor: what the floor writes and reads."""
        for parameter in self.model.parameters():
            yield local(parameter)
            for value in self.optimizer.state[parameter].values():
                yield local(value)

    def buffers(self) -> list[memoryview]:
        """The bytes of `locals`, without copying; empty ones left out."""
        return [
            memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            for tensor in self.locals()
            if tensor.numel()
        ]

    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return sum(tensor.nbytes for tensor in self.locals())

    def clear(self) -> None:
        """Zero everything, so that a load that does nothing is noticed."""
        for tensor in self.locals():
            tensor.zero_()

    def digest(self) -> str:
        """A hash of every byte of this rank's part."""
        hasher = xxhash.xxh3_128()
        for buffer in self.buffers():
            hasher.update(buffer)
        return hasher.hexdigest()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def width_for(gib: float) -> int:
    """The width, a multiple of 16, that makes the state about this large.

    >>> width_for(0.5), width_for(1.95)
    (384, 768)
    """
    return max(16, round((gib * 2**30 / BYTES_PER_SQUARE) ** 0.5 / 16) * 16)


def build(gib: float, seed: int = 0, by_columns: bool = False) -> Training:
    """The workload on this rank of the default group; matrices are cut by rows or by columns."""

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(1 if by_columns and parameter.ndim > 1 else 0)

    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    with torch.device("meta"):
        model = Transformer(width_for(gib))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    model.to_empty(device="cpu")
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    for parameter in model.parameters():
        state = {
            "step": torch.tensor(100.0),
            "exp_avg": torch.empty_like(parameter),
            "exp_avg_sq": torch.empty_like(parameter),
        }
        optimizer.state[parameter] = state
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            local(tensor).uniform_(-1, 1, generator=generator)
    return Training(model, optimizer)
