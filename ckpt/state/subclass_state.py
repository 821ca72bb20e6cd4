"""Stores optimizer state of tensor subclasses that wrap other tensors, such as 8-bit moments.

A dict replaces such a tensor: the name of its class, the context of `__tensor_flatten__`, and its
inner tensors.

Rules:

1. A load imports no class that a checkpoint names. The program must have imported the class, which
   must be a subclass of `torch.Tensor`; otherwise that is a difference.
2. A DTensor whose local part is of such a class is stored by the parts of its inner tensors, if the
   class stores blocks (`ckpt.state.subclass_state`) and no rank's part cuts one. The dict is that
   of the whole tensor, so any number of ranks may load it.
3. Otherwise it is stored as a plain tensor of the values that its codes stand for: a rank whose
   part cuts a block has plain state already. The same holds in a flat parameter.

[Note: blocks]
Quantised state has blocks, of which ranks hold parts:

1. A class stores blocks if it has a `block_size`, and inner tensors `codes` and `scale` that follow
   the row-major elements: `scale` has an entry for each block, and each entry of `codes` has the
   codes of one element or more. Other inner tensors, such as `qmap`, are equal on all ranks. This
   holds for torchao.optim.
2. Ranks have parts of a whole tensor's blocks if one mesh axis cuts the rows and no other axis cuts
   the tensor. Then a rank's elements are consecutive. Each part must consist of whole blocks.
3. torchao keeps a part of fewer than 4,096 elements plain (`_AdamBase._new_buffer`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt.errors import StateError
from sharding.describe.dtensor import describe
from sharding.describe.members import LocalPart
from sharding.layout import FlatShard, Layout, Mesh, Replicate, Shard

ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
"""Classes whose tensors wrap no other tensors."""
_OF_DISTRIBUTED: set[type] = set()
"""The classes of torch.distributed that values have had so far."""
CLASS = "__tensor_subclass__"
"""The key of the class name."""


def is_composed(value: object) -> bool:
    """Whether a value is a tensor that wraps others, of a class outside of torch.distributed."""
    kind = type(value)
    if kind in ORDINARY or kind in _OF_DISTRIBUTED:
        return False  # the fast path: nearly all values
    if kind.__module__.startswith("torch.distributed"):
        _OF_DISTRIBUTED.add(kind)
        return False
    return (
        isinstance(value, torch.Tensor)
        and not value.is_nested
        and is_traceable_wrapper_subclass(value)
    )


def inner_of(value: object) -> Any:
    """Returns a tensor that wraps others: the value, or the local part of a DTensor; or None."""
    if type(value) in ORDINARY:
        return None
    if is_composed(value):
        return value
    local = getattr(value, "_local_tensor", None)
    return local if type(local) not in ORDINARY and is_composed(local) else None


def take_apart(value: Any, where: str) -> Any:
    """Returns the dict that replaces a tensor with inner tensors; any other value unchanged.

    Raises StateError, which begins with `where`, for a divided tensor of a class without blocks.
    """
    local = inner_of(value)
    if local is None:
        return value
    names, context = local.__tensor_flatten__()
    if local is value:
        tensors = {name: take_apart(getattr(value, name), where) for name in names}
    else:
        cut = _whole_blocks(local, layout_of(value, where))
        if cut is None:
            return plain(value, where)
        tensors = {name: _part(name, local, cut) for name in names}
    return {
        CLASS: f"{type(local).__module__}:{type(local).__qualname__}",
        "context": of_shape(context, tuple(local.shape), tuple(value.shape)),
        "shape": tuple(value.shape),
        "stride": tuple(value.stride()),
        "tensors": tensors,
    }


def layout_of(tensor: torch.Tensor, where: str) -> Layout:
    """Returns the layout of a DTensor."""
    return describe(tensor, where, Mesh.grid(("world",), (1,)))[1]


def _whole_blocks(local: Any, layout: Layout) -> Cut | None:
    """Returns the cut if each rank's part consists of whole blocks; None if one has plain state."""
    block, cut = getattr(local, "block_size", None), Cut.of(layout)
    if cut is None or type(block) is not int or not set(local.__tensor_flatten__()[0]) >= FOLLOWING:
        return None
    least = LEAST_OF_TORCHAO if type(local).__module__.startswith(TORCHAO) else 1
    return cut if cut.is_between(block) and cut.least >= least else None


def _part(name: str, local: Any, cut: Cut) -> Any:
    """Returns an inner tensor of a rank's part, as a part of the whole tensor's inner tensor."""
    inner = getattr(local, name)
    if name not in FOLLOWING:
        return inner
    if name == CODES and inner.shape == local.shape:
        return LocalPart(inner.detach(), cut.layout)
    return LocalPart(inner.detach(), cut.entries(local.numel() // inner.numel()))


def of_shape(context: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
    """Returns the context of a tensor of another shape, for classes that keep the shape in it.

    >>> of_shape([True, (4, 2)], (4, 2), (8, 2))
    [True, (8, 2)]
    """
    if not isinstance(context, list | tuple):
        return context
    changed = [new if isinstance(c, tuple) and tuple(c) == old else c for c in context]
    return changed if isinstance(context, list) else tuple(changed)


def plain(value: Any, where: str) -> Any:
    """Returns a plain tensor, placed like `value`, of the values that its codes stand for.

    Raises StateError for a class without `dequantize`.
    """
    local = inner_of(value)
    if local is None:
        return value
    if not hasattr(local, "dequantize"):
        raise StateError(
            f"{where}: a {type(local).__qualname__} is divided among ranks in the middle of the "
            "tensors that it wraps, and has no dequantize(): store its inner tensors"
        )
    values = local.dequantize().detach().contiguous()
    return values if local is value else LocalPart(values, layout_of(value, where))


def put_together(nest: Any) -> Any:
    """Returns a nest with tensors in the place of the dicts of `take_apart`."""
    if isinstance(nest, list):
        return [put_together(item) for item in nest]
    if not isinstance(nest, dict):
        return nest
    entries = {k: put_together(v) if isinstance(v, dict | list) else v for k, v in nest.items()}
    if CLASS not in entries:
        return entries
    shape, stride = torch.Size(entries["shape"]), tuple(entries["stride"])
    known: Any = _class_named(entries[CLASS])
    return known.__tensor_unflatten__(entries["tensors"], entries["context"], shape, stride)


def unknown_classes(nest: object) -> Iterator[str]:
    """Yields the names of classes in a nest that this program has not imported (rule 1)."""
    if isinstance(nest, Mapping):
        name = nest.get(CLASS)
        if name is not None and _class_named(name) is None:
            yield str(name)
        nest = [*nest.values()]
    for item in nest if isinstance(nest, list | tuple) else ():
        if isinstance(item, Mapping | list | tuple):
            yield from unknown_classes(item)


def _class_named(name: object) -> type[torch.Tensor] | None:
    module, _, path = str(name).partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_tensor = isinstance(found, type) and issubclass(found, torch.Tensor)
    return found if is_tensor and hasattr(found, "__tensor_unflatten__") else None  # type: ignore[return-value]


CODES, SCALE = "codes", "scale"
FOLLOWING = frozenset((CODES, SCALE))
"""The inner tensors that follow the elements (rule 1)."""
TORCHAO = "torchao."
LEAST_OF_TORCHAO = 4096
"""The fewest elements of a part that torchao.optim quantises (rule 3)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor whose consecutive elements are divided among ranks (rule 2)."""

    layout: Layout
    stride: int
    """Elements of a rank's part; the last parts may have fewer."""

    @classmethod
    def of(cls, layout: Layout) -> Cut | None:
        """Returns the cut of a layout; None unless it cuts rows along one axis, or not at all."""
        stride = layout.numel
        for placement, size in zip(layout.placements, layout.mesh.sizes, strict=True):
            if isinstance(placement, Replicate):
                continue
            if placement != Shard(0) or stride != layout.numel:
                return None
            stride = -(-layout.shape[0] // size) * prod(layout.shape[1:])
        return cls(layout, stride)

    def is_between(self, block: int) -> bool:
        """Whether every cut lies between two blocks of so many elements."""
        return self.stride % block == 0 and self.layout.numel % block == 0

    @property
    def least(self) -> int:
        """The elements of the smallest part."""
        sizes = zip(self.layout.placements, self.layout.mesh.sizes, strict=True)
        parts = prod(size for placement, size in sizes if not isinstance(placement, Replicate))
        return max(0, self.layout.numel - (parts - 1) * self.stride)

    def entries(self, elements: int) -> Layout:
        """Returns the layout of a tensor with one entry for each `elements` elements."""
        placements = tuple(
            FlatShard(0, self.stride // elements) if isinstance(placement, Shard) else placement
            for placement in self.layout.placements
        )
        return Layout((self.layout.numel // elements,), self.layout.mesh, placements)
