"""The parameters that an optimizer sees for flat ones, and the names of a module's parameters.

Both runtimes that flatten parameters use these types: ours (`sharding.describe.own_members`) and
torch's FSDP1 (`sharding.describe.torch_fsdp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from sharding.describe.local_part import FlatSlice, LocalPart
from sharding.errors import LocalShapeError

KEY_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of names that FSDP's class and activation checkpointing add; state dicts lack them."""
WRAPPERS = (*KEY_WRAPPERS, "_orig_mod.")
"""All parts that wrappers add. The keys of state dicts keep the part of torch.compile."""
WRAPPED = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
    f"{__name__.removesuffix('describe.members')}fsdp1.wrapper.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
}
"""The classes of wrappers, and the attribute that each has for the module that it wraps.

A module of another class may have a child of the same name: its name belongs to the child's."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatMember:
    """A parameter that an optimizer sees, and the slices of module parameters in it."""

    parameter: nn.Parameter
    names: tuple[tuple[str, ...], ...]
    """For each slice: the names of its parameter, in the order of the modules."""
    slices: tuple[FlatSlice, ...]
    is_original: bool
    """Whether it is in the modules, in the place of its one parameter."""
    is_idle: bool = False
    """Whether this rank has no element of it and gets no gradient, unlike other ranks."""

    def parts(self) -> Iterator[tuple[str, LocalPart]]:
        """Yields the parts in it, under all names."""
        for names, part in zip(self.names, self.slices, strict=True):
            found = part.of(self.parameter, part.key)
            for name in names:
                yield name, found


class NamedParameter(NamedTuple):
    """A parameter that an optimizer sees, with the names of its parameters in a module."""

    parameter: torch.Tensor
    names: tuple[str, ...]
    """One name, several for a flat parameter; the first name of a tied one."""
    slices: tuple[FlatSlice, ...] = ()
    """For each name: its part of the parameter; empty if the parameter is not a flat one."""
    is_idle: bool = False
    """Whether this rank has no element of it, so that its optimizer keeps no state for it."""

    @classmethod
    def of(cls, member: FlatMember) -> NamedParameter:
        """Returns a parameter with parts of the module's parameters."""
        names = tuple(tied[0] for tied in member.names)
        return cls(member.parameter, names, member.slices, member.is_idle)


def clean_name(name: str) -> str:
    """Returns a name without the parts that wrappers add.

    >>> clean_name("_fsdp_wrapped_module.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def wrapped_child(module: nn.Module) -> str | None:
    """Returns the attribute of a wrapper for the module that it wraps; None for another module.

    >>> wrapped_child(nn.DataParallel(nn.Linear(2, 2))), wrapped_child(nn.Linear(2, 2))
    ('module', None)
    """
    return _wrapped_child(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _wrapped_child(kind: type[nn.Module]) -> str | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((WRAPPED[name] for name in names if name in WRAPPED), None)


class CleanNames:
    """The names of a module's state without the parts that wrappers add.

    The class of the module that has a child decides whether the child's name is such a part.

    >>> net = nn.Sequential(nn.Module(), nn.DataParallel(nn.Linear(2, 2)))
    >>> net[0].module = nn.Linear(2, 2)
    >>> [CleanNames(net).of(key) for key in ("0.module.bias", "1.module.bias")]
    ['0.module.bias', '1.bias']
    """

    def __init__(self, module: nn.Module) -> None:
        self.has_wrappers = any(map(wrapped_child, module.modules()))
        self._known: dict[str, tuple[str, nn.Module | None]] = {"": ("", module)}
        """The names and modules by their paths; None where a path leads to no module."""

    def of(self, key: str) -> str:
        """Returns the name of a path, or of a key of the state dict."""
        if not self.has_wrappers:
            return key
        path, dot, last = key.rpartition(".")
        return self.prefix(path) + last if dot else key

    def prefix(self, path: str) -> str:
        """Returns the prefix of a module's path for the names inside the module."""
        if not self.has_wrappers:
            return f"{path}." if path else ""
        return self._at(path)[0]

    def _at(self, path: str) -> tuple[str, nn.Module | None]:
        found = self._known.get(path)
        if found is None:
            above, _, child = path.rpartition(".")
            prefix, owner = self._at(above)
            wrapped = None if owner is None else wrapped_child(owner)
            while owner is not None and wrapped is not None and child not in owner._modules:
                owner = owner._modules[wrapped]  # the hooks of a wrapper take its part off keys
                wrapped = None if owner is None else wrapped_child(owner)
            has_child = owner is not None and child in owner._modules
            below = owner._modules[child] if owner is not None and has_child else None
            found = self._known[path] = (
                prefix if child == wrapped else f"{prefix}{child}.",
                below,
            )
        return found


def state_key(path: str) -> str:
    """Returns the state dict's key of a parameter or buffer with this path."""
    for wrapper in KEY_WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def key_prefix(path: str) -> str:
    """Returns the prefix of a module's path for the keys of its state dict.

    >>> key_prefix("layers.0._fsdp_wrapped_module"), key_prefix("")
    ('layers.0.', '')
    """
    return state_key(f"{path}.") if path else ""


Places = Sequence[tuple[nn.Module, str]]
"""The modules that a parameter is in, and the attribute it is there."""


def names_in(module: nn.Module, parameters: Sequence[Places]) -> list[tuple[str, ...]]:
    """Returns each parameter's names in a module, in the order of the modules; perhaps none."""
    if not parameters:
        return []
    places: dict[nn.Module, list[tuple[str, int]]] = {}
    for index, parameter in enumerate(parameters):
        for owner, attribute in parameter:
            places.setdefault(owner, []).append((attribute, index))
    clean = CleanNames(module)
    found: list[dict[str, None]] = [{} for _ in parameters]
    for path, part in module.named_modules(remove_duplicate=False):
        for attribute, index in places.get(part, ()):
            found[index][clean.prefix(path) + attribute] = None
    return [tuple(names) for names in found]


def check_numel(parameter: nn.Parameter, name: str, numel: int) -> None:
    """Raises LocalShapeError unless a parameter has this rank's number of elements."""
    if parameter.numel() != numel:
        raise LocalShapeError(
            f"{name} has {parameter.numel()} elements, but this rank's shard of it has {numel}: "
            "its data was replaced by a tensor of another shape"
        )
