"""Optimizer state whose tensors are made of other tensors, as 8-bit moments are: stored by those.

In the place of such a tensor stands a dict: its class by name, what its class needs besides to make
it again (`__tensor_flatten__` says what), and its tensors.

Rules:

1. Nothing that a checkpoint names is imported. Its class is one that the program has imported, is a
   subclass of `torch.Tensor`, and is found by its name; else that is a difference.
2. DTensors are no such tensors: their layouts say what they are made of.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ORDINARY = (torch.Tensor, torch.nn.Parameter, type(None))
"""Classes of which no tensor is made of others."""
CLASS = "__tensor_subclass__"
"""The key under which the name of the class stands."""


def is_composed(value: object) -> bool:
    """Whether it is a tensor that is made of others, by a class that is not torch.distributed's."""
    kind = type(value)
    if kind in ORDINARY or kind.__module__.startswith("torch.distributed"):
        return False  # nearly always
    return (
        isinstance(value, torch.Tensor)
        and not value.is_nested
        and is_traceable_wrapper_subclass(value)
    )


def taken_apart(value: Any) -> Any:
    """What stands for a tensor that is made of others; anything else as it is."""
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
    """A nest with the tensors themselves in the place of what stands for them."""
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
    """The names in a nest of classes that this program has not imported (rule 1)."""
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
