"""A check, on request, that all ranks run the units of a model in the same order.

`dist.set_debug_level(dist.DebugLevel.DETAIL)` before the module is wrapped turns the check on. It
checks forward, in training. In the first iteration, ranks that differ are an error on all of them.
Later, a rank that leaves the order of the first iteration warns, once.

With the check, ranks agree on a unit before each all-gather. All ranks then gather and reduce every
unit that any of them runs, in the same order. Ranks that differ therefore do not wait for ever, and
do not take one unit's parameters for another's.
"""

from __future__ import annotations

import warnings
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from sharding.engine.names import Names
from sharding.engine.unit import Unit
from sharding.errors import MisuseError


class OrderCheck:
    """The order of one root's units."""

    def __init__(self) -> None:
        self._first: list[int] = []
        """The order of the first iteration."""
        self._position = 0
        self._is_first = True
        self._warned = False

    @classmethod
    def if_wanted(cls) -> OrderCheck | None:
        """Returns a check, if the debug level asks for one now."""
        return cls() if get_debug_level() == DebugLevel.DETAIL else None

    def called(self, unit: Unit, units: list[Unit]) -> list[tuple[Unit, bool]]:
        """Returns the units that other ranks run during `unit` of this one, and whether they train.

        The result has the order of the units. All ranks call it, for every unit with parameters.
        Raises RuntimeError in the first iteration if ranks differ.
        """
        index = units.index(unit)
        trained = any(param_group.requires_grad for param_group in unit.param_groups)
        param_group = unit.param_groups[0]
        mark = _mark(unit, units) if self._is_first else 0
        mine = torch.tensor([index, int(trained), mark], device=param_group.device)
        group = param_group.groups.group
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(all_of_them, mine, group=group)
        indices = [int(other[0]) for other in all_of_them]
        if self._is_first:
            self._check_first(indices, units)
            self._check_marks([int(other[2]) for other in all_of_them], unit, units)
            self._first.append(index)
        else:
            self._check_later(index, units)
        others: dict[int, bool] = {}
        for other, is_trained, _ in (tensor.tolist() for tensor in all_of_them):
            if other != index:
                others[other] = others.get(other, False) or bool(is_trained)
        return [(units[other], others[other]) for other in sorted(others)]

    def begin_forward(self) -> None:
        """The root begins to run."""
        self._position = 0

    def end_backward(self) -> None:
        """The first iteration ends with its backward."""
        self._is_first = self._is_first and not self._first

    def _check_first(self, indices: list[int], units: list[Unit]) -> None:
        for rank, index in enumerate(indices):
            if index != indices[0]:
                here, there = _names(units[indices[0]], units), _names(units[index], units)
                raise MisuseError(
                    "Forward order differs across ranks: rank 0 is all-gathering parameters for "
                    f"{here} while rank {rank} is all-gathering parameters for {there}"
                )

    def _check_marks(self, marks: list[int], unit: Unit, units: list[Unit]) -> None:
        for rank, mark in enumerate(marks):
            if mark != marks[0]:
                raise MisuseError(
                    f"The unit with the parameters {_names(unit, units)} on rank {dist.get_rank()} "
                    f"has parameters of other names or shapes on rank {rank} than on rank 0: build "
                    "and wrap the same modules on all ranks, with the same ignored ones"
                )

    def _check_later(self, index: int, units: list[Unit]) -> None:
        position = self._position
        self._position += 1
        expected = self._first[position] if position < len(self._first) else None
        if self._warned or expected == index:
            return
        self._warned = True
        said = (
            "no more parameters"
            if expected is None
            else f"parameters for {_names(units[expected], units)}"
        )
        warnings.warn(
            "Forward order differs from that of the first iteration on rank "
            f"{dist.get_rank()}. Collectives are unchecked and may give incorrect results or hang "
            f"where ranks do not run the same number of units: expected to all-gather {said} but "
            f"got parameters for {_names(units[index], units)}",
            stacklevel=2,
        )


def _mark(unit: Unit, units: list[Unit]) -> int:
    """Returns 63 bits that identify the names and shapes of a unit's parameters."""
    shapes = [tuple(p.shape) for group in unit.param_groups for p in group.parameters]
    digest = blake2b(repr((_names(unit, units), shapes)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _names(unit: Unit, units: list[Unit]) -> list[str]:
    """Returns the names of a unit's parameters in the root."""
    names = Names(units[0])
    return [name for param_group in unit.param_groups for name in names.parameters(param_group)]
