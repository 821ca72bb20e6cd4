"""What is said of a module on every rank, put together again: the pieces must tile each tensor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from sharding.describe.describing import describe
from sharding.describe.members import LocalPart
from sharding.layout import Layout, Mesh

Held = dict[str, tuple[np.ndarray, Layout]]
"""By name, the elements of a rank's local storage, and the layout."""


class Parameters(nn.Module):
    """Parameters of given shapes that count through, every other one in a module inside."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.inner = nn.Module()
        first = 0
        for index, shape in enumerate(shapes):
            numel = int(np.prod(shape))
            values = torch.arange(first, first + numel, dtype=torch.float64).reshape(shape)
            owner = self if index % 2 else self.inner
            owner.register_parameter(f"p{index}", nn.Parameter(values))
            first += numel


def held(entries: Mapping[str, object]) -> Held:
    """What a module is said to have on this rank, as values that travel."""
    world = Mesh.grid(("world",), (dist.get_world_size(),))
    found = {}
    for name, entry in entries.items():
        assert isinstance(entry, torch.Tensor | LocalPart)
        local, layout = describe(entry, name, world)
        found[name] = local.reshape(-1).numpy().copy(), layout
    return found


def whole(name: str, ranks: list[Held], *, one_layout: bool = True) -> np.ndarray:
    """A tensor from the pieces of all ranks, of which every element has as many as replicas.

    The ranks must have the same layout of it, or else (`one_layout=False`) the same shape.
    """
    layout = ranks[0][name][1]
    found = np.full(layout.shape, np.nan)
    counts = np.zeros(layout.shape, dtype=int)
    for rank, tensors in enumerate(ranks):
        local, own = tensors[name]
        assert own == layout if one_layout else own.shape == layout.shape
        assert sum(piece.box.numel for piece in own.pieces(rank)) == local.size
        for piece in own.pieces(rank):
            at = tuple(slice(lo, hi) for lo, hi in zip(piece.box.lo, piece.box.hi, strict=True))
            sizes = [hi - lo for lo, hi in zip(piece.box.lo, piece.box.hi, strict=True)]
            strides = [8 * stride for stride in piece.strides]
            start = local.astype(np.float64)[piece.at :]
            values = np.lib.stride_tricks.as_strided(start, sizes, strides)
            assert np.all(np.isnan(found[at]) | (found[at] == values)), name
            found[at] = values
            counts[at] += 1
    assert counts.min(initial=1) >= 1
    assert len(set(counts.flat)) <= 1
    return found
