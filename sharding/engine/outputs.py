"""The tensors in the arguments and results of a module: any nest of containers, dataclasses too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import TypeVar, cast

import torch

T = TypeVar("T")


def tensors_in(nest: object) -> Iterator[torch.Tensor]:
    """Yields every tensor in a nest of dicts, lists, (named) tuples and dataclasses."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for item in nest.values():
            yield from tensors_in(item)
    elif isinstance(nest, list | tuple | set):
        for item in nest:
            yield from tensors_in(item)
    elif is_dataclass(nest) and not isinstance(nest, type):
        for field in fields(nest):
            yield from tensors_in(getattr(nest, field.name, None))


def mapped(nest: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Returns the nest with every tensor changed; unchanged containers stay the same objects."""
    changed: object = nest
    if isinstance(nest, torch.Tensor):
        changed = change(nest)
    elif isinstance(nest, tuple):
        items = [mapped(item, change) for item in nest]
        if _differ(items, nest):
            changed = type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    elif isinstance(nest, list | MutableMapping):
        keys = range(len(nest)) if isinstance(nest, list) else list(nest)
        items = [mapped(nest[key], change) for key in keys]
        if _differ(items, [nest[key] for key in keys]):
            changed = copy(nest)
            for key, item in zip(keys, items, strict=True):
                changed[key] = item
    elif is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in fields(nest) if hasattr(nest, field.name)]
        items = [mapped(getattr(nest, name), change) for name in names]
        if _differ(items, [getattr(nest, name) for name in names]):
            changed = copy(nest)
            for name, item in zip(names, items, strict=True):
                object.__setattr__(changed, name, item)  # also for frozen dataclasses
    return cast(T, changed)


def _differ(items: Iterable[object], others: Iterable[object]) -> bool:
    return any(item is not other for item, other in zip(items, others, strict=True))


def in_dtype(nest: T, dtype: torch.dtype) -> T:
    """Returns the nest with its floating-point tensors in another dtype."""
    return mapped(nest, lambda t: t.to(dtype) if t.is_floating_point() else t)
