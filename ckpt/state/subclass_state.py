"""Stores optimizer state of tensor subclasses that wrap other tensors, such as 8-bit moments.

A dict replaces such a tensor: the name of its class, the context of `__tensor_flatten__`, and its
inner tensors.

Rules:

1. A load imports no class that a checkpoint names. The program must have imported the class, which
   must be a subclass of `torch.Tensor`; otherwise that is a difference.
2. DTensors do not count: layouts describe them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ORDINARY = (torch.Tensor, torch.nn.Parameter, type(None))
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


def taken_apart(value: Any) -> Any:
    """Returns the dict that replaces a tensor with inner tensors; any other value unchanged."""
    if not is_composed(value):
        return value
    names, context = value.__tensor_flatten__()
    return {
        CLASS: f"{type(value).__module__}:{type(value).__qualname__}",
        "context": context,
        "shape": tuple(value.shape),
        "stride": tuple(value.stride()),
        "tensors": {name: taken_apart(getattr(value, name)) for name in names},
    }


def put_together(nest: Any) -> Any:
    """Returns a nest with tensors in the place of the dicts of `taken_apart`."""
    if isinstance(nest, list):
        return [put_together(item) for item in nest]
    if not isinstance(nest, dict):
        return nest
    found = {key: put_together(item) for key, item in nest.items()}
    if CLASS not in found:
        return found
    shape, stride = torch.Size(found["shape"]), tuple(found["stride"])
    known: Any = _class_named(found[CLASS])
    return known.__tensor_unflatten__(found["tensors"], found["context"], shape, stride)


def unknown_classes(nest: object) -> Iterator[str]:
    """Yields the names of classes in a nest that this program has not imported (rule 1)."""
    if isinstance(nest, Mapping):
        name = nest.get(CLASS)
        if name is not None and _class_named(name) is None:
            yield str(name)
        for item in nest.values():
            yield from unknown_classes(item)
    elif isinstance(nest, list | tuple):
        for item in nest:
            yield from unknown_classes(item)


def _class_named(name: object) -> type[torch.Tensor] | None:
    module, _, path = str(name).partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_tensor = isinstance(found, type) and issubclass(found, torch.Tensor)
    return found if is_tensor and hasattr(found, "__tensor_unflatten__") else None  # type: ignore[return-value]
