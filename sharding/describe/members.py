"""The parameters that an optimizer sees for flat ones, and the names of a module's parameters.

Both runtimes that flatten parameters use these types: ours (`sharding.describe.own_members`) and
torch's FSDP1 (`sharding.describe.torch_fsdp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from sharding.describe.local_part import FlatSlice, LocalPart
from sharding.errors import LocalShapeError

KEY_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of names that FSDP's class and activation checkpointing add; state dicts lack them."""
WRAPPERS = (*KEY_WRAPPERS, "_orig_mod.")
"""All parts that wrappers add. The keys of state dicts keep the part of torch.compile."""


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


def clean_prefix(path: str) -> str:
    """Returns the prefix of a module's path for the names inside the module.

    >>> clean_prefix("layers.0._fsdp_wrapped_module"), clean_prefix("")
    ('layers.0.', '')
    """
    return clean_name(f"{path}.") if path else ""


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
    found: list[dict[str, None]] = [{} for _ in parameters]
    for path, part in module.named_modules(remove_duplicate=False):
        for attribute, index in places.get(part, ()):
            found[index][clean_prefix(path) + attribute] = None
    return [tuple(names) for names in found]


def check_numel(parameter: nn.Parameter, name: str, numel: int) -> None:
    """Raises LocalShapeError unless a parameter has this rank's number of elements."""
    if parameter.numel() != numel:
        raise LocalShapeError(
            f"{name} has {parameter.numel()} elements, but this rank's shard of it has {numel}: "
            "its data was replaced by a tensor of another shape"
        )
