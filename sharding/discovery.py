"""Finds the parameters of a unit: those of its modules that no unit below has, each once.

A *tied* parameter is in several modules, perhaps of several units. Inside a unit it is one
parameter with several owners. Across units, the unit that first shards it has it, and the others
borrow its parameter group. The first unit sets an attribute of the parameter, by which the others
find the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import Parameter
from sharding.engine.unit import units_of

_TIED = "_sharding_entry"


@dataclass(frozen=True, slots=True)
class FreeParameter:
    """A parameter and every place in the modules that has it."""

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    name: str

    @property
    def borrowed(self) -> Parameter | None:
        """The entry that another unit has made for it; None if no unit has it."""
        return entry_of(self.parameter)

    def assign(self, entry: Parameter) -> None:
        """Notes that a unit has it now; other units borrow it."""
        setattr(self.parameter, _TIED, _Tied(entry))


@dataclass(frozen=True, slots=True)
class _Tied:
    entry: Parameter


def entry_of(parameter: nn.Parameter) -> Parameter | None:
    """Returns the entry that a unit has made for a parameter; None if no unit has it."""
    tied = getattr(parameter, _TIED, None)
    return tied.entry if isinstance(tied, _Tied) else None


def free_parameters(
    modules: tuple[nn.Module, ...],
    ignored: Iterable[nn.Parameter] = (),
    ignored_modules: Iterable[nn.Module] = (),
) -> Iterator[FreeParameter]:
    """Yields the parameters that no unit below has yet, in the modules' order."""
    left_out = {id(parameter) for parameter in ignored}
    taken: set[tuple[int, str]] = set()
    skipped = {part for module in ignored_modules for part in module.modules()}
    for unit in units_of(modules):
        for param_group in unit.param_groups:
            taken |= {(id(owner), key) for owner, key in param_group.places()}
    found: dict[int, FreeParameter] = {}
    for root in modules:
        for prefix, part in root.named_modules():
            if part in skipped:
                continue
            for key, parameter in part._parameters.items():
                if parameter is None or id(parameter) in left_out or (id(part), key) in taken:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                entry = found.setdefault(id(parameter), FreeParameter(parameter, [], name))
                entry.owners.append((part, key))
    yield from found.values()


def find_tied_group(found: FreeParameter) -> ParamGroup | None:
    """Returns the group that has a tied parameter already, and adds the parameter's places."""
    entry = found.borrowed
    if entry is None or not isinstance(entry.param_group, ParamGroup):
        return None
    entry.owners += found.owners
    entry.param_group.fill_places(entry)
    return entry.param_group
