"""Turns the items of a rank's plan into parts of tensors and values of the native format.

Rules:

1. `resolve_data` may take memory. A planner whose `resolve_data` may do more than look a tensor up
   is therefore called when the tensor is written, and not before.
2. A value that the planner returns as an object is stored as it is. If a planner returns bytes,
   torch's restricted unpickler reads them: they run no code, although they come from this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from ckpt.errors import StateError
from ckpt.state.flatten import flatten
from ckpt.state.tensor_kinds import awaited, kind_problem, memory_problem
from ckpt.transfer.write import outgoing_whole
from formats.catalog import Tree
from formats.dtypes import dtype_of_torch
from formats.outgoing import OutgoingTensor
from sharding.layout import Box, Mesh

_ALONE = Mesh.grid(("world",), (1,))


@dataclass(frozen=True, slots=True)
class OutgoingPart:
    """A box of a tensor on its way to a file."""

    tensor: OutgoingTensor
    """The elements, under the whole tensor's name."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    box: Box


def outgoing_item(item: WriteItem, planner: SavePlanner) -> tuple[Tree, list[OutgoingPart]]:
    """Returns the value of an item, with a reference for each tensor in it, and these tensors.

    The value is None if the item is a tensor or a part of one. Raises StateError for a value that
    cannot be stored, UnsupportedError for a dtype that cannot.
    """
    if item.type == WriteItemType.BYTE_IO:
        return _value(item, planner)
    data, name = item.tensor_data, item.index.fqn
    assert data is not None  # DCP defines it for every item that is not a value
    lo, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    box = Box(lo, tuple(start + size for start, size in zip(lo, shape, strict=True)))
    dtype = dtype_of_torch(str(data.properties.dtype), name)

    def part() -> OutgoingTensor:
        found = planner.resolve_data(item)
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise StateError(f"{name}: the plan has a part {box}, and resolve_data gives {what}")
        local = awaited(found).detach()
        if (problem := kind_problem(local) or memory_problem(local)) is not None:
            raise StateError(f"{name}: {problem}")
        return outgoing_whole(name, dtype, local.to(data.properties.dtype))

    def blocks() -> Iterator[memoryview]:
        yield from part().blocks()

    lazy = OutgoingTensor(name, shape, dtype, blocks)
    tensor = part() if _only_looks_up(planner) and box.numel else lazy
    return None, [OutgoingPart(tensor, tuple(data.size), box)]


def _value(item: WriteItem, planner: SavePlanner) -> tuple[Tree, list[OutgoingPart]]:
    name = item.index.fqn
    if _only_looks_up(planner):
        value = planner.lookup_object(item.index)
    else:
        value = _unpickled(name, planner.resolve_data(item))
    flat = flatten({name: value}, _ALONE)
    assert isinstance(flat.tree, dict)
    parts = []
    for leaf in flat.leaves.values():
        shape = tuple(leaf.local.shape)
        outgoing = outgoing_whole(leaf.name, leaf.dtype, leaf.local)
        parts.append(OutgoingPart(outgoing, shape, Box.whole(shape)))
    return flat.tree[name], parts


def _unpickled(name: str, data: object) -> object:
    if not isinstance(data, BytesIO):
        raise StateError(f"{name}: resolve_data gives a {type(data).__name__}, not a BytesIO")
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise StateError(
            f"{name}: the planner's bytes hold no plain value, and no pickle is stored: give the "
            f"value as numbers, texts, lists, dicts and tensors ({error})"
        ) from error


def _only_looks_up(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether a planner only looks tensors up to resolve them, like DCP's own planner."""
    if not isinstance(planner, DefaultSavePlanner):
        return False
    kind, default = type(planner), DefaultSavePlanner
    return (
        kind.resolve_data is default.resolve_data
        and kind.transform_object is default.transform_object
    )
