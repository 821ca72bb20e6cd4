"""Checks that all ranks have the same units; and, on request, that they run them in one order.

**The same units.** Before the first all-gather of a root, the ranks that share shards compare a
hash of its units: names, shapes, dtypes and settings of all parameters. Before its first reduction,
the ranks that replicate do. Ranks that differ are an error on all of them, before any parameter or
gradient travels. Without the comparison, parameters under other names in one flat parameter would
get each other's values, or wait until the time-out. Later steps compare nothing.

**One order.** `dist.set_debug_level(dist.DebugLevel.DETAIL)` before the module is wrapped turns
this check on. It checks forward, in training. In the first iteration, ranks that differ are an
error on all of them. Later, a rank that leaves the order of the first iteration warns, once. Ranks
agree on a unit before each all-gather. All ranks then gather and reduce every unit that any of them
runs, in the same order. Ranks that differ therefore do not wait for ever, and do not take one
unit's parameters for another's.

Names of the units and parameters of a root: paths in its module, the same on all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn

from sharding.engine.composition import Composition, Item, Purpose, ShardGroup, word
from sharding.engine.param_group import ParamGroup
from sharding.engine.transport import transport_between
from sharding.engine.unit import Unit, units_of
from sharding.errors import MisuseError, RankError, format_names

Row = tuple[str, dict[str, object]]
"""A tensor's name, and its properties that are equal on all ranks."""
SHOWN = 6
"""The number of names that an error shows for each rank."""


def check_shards(root: Unit) -> None:
    """Raises MisuseError if ranks that share shards have other units. All of them call it; waits.

    The first call compares, before the first all-gather of any unit of this root.
    """
    if not root.shards_compared:
        _check_units(root, of_replicas=False)
        root.shards_compared = True


def check_replicas(root: Unit) -> None:
    """Raises MisuseError if ranks that replicate have other units. All of them call it; waits.

    The first call compares, before the first reduction over replicas.
    """
    if not root.replicas_compared:
        _check_units(root, of_replicas=True)
        root.replicas_compared = True


def check_same(
    things: str,
    rows: Sequence[Row],
    among: Sequence[ShardGroup],
    device: torch.device,
    failure: Exception | None = None,
) -> None:
    """Raises MisuseError on all ranks if one of them has other rows. All of them call it; waits.

    `among` are one group, or the two groups of a grid of ranks. `things` names the rows in
    messages. Rows travel only if they differ. A `failure` of this rank takes the place of its
    rows: it is raised here, and a RankError with its text on the other ranks.
    """
    failed = None if failure is None else (type(failure).__name__, str(failure))
    number, same = _hash(failed or rows), failure is None
    for shard_group in among:  # the second exchange has a hash of the first one's results
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        places = [[torch.empty_like(mine)] for _ in range(shard_group.size)]
        composition = Composition((Item(things, _KEY, Purpose.COMPARISON, 1),))
        transport = transport_between(shard_group, device)
        transport.all_gather([mine], places, composition).wait()
        numbers = [int(place) for [place] in places]
        same &= len(set(numbers)) == 1
        number = _hash(numbers)
    if same:
        return
    everyone = [(dist.get_rank(), list(rows), failed)]
    for shard_group in among:
        gathered: list[list[_Answer]] = [[] for _ in range(shard_group.size)]
        dist.all_gather_object(gathered, everyone, group=shard_group.group)
        everyone = [each for some in gathered for each in some]
    if failure is not None:
        raise failure
    for rank, _, order in everyone:
        if order is not None:
            raise RankError(f"the comparison of {things}", rank, *order)
    in_order = sorted(((rank, each) for rank, each, _ in everyone), key=lambda each: each[0])
    raise MisuseError(f"{_difference(things, in_order)}; {_ADVICE}")


_Answer = tuple[int, list[Row], tuple[str, str] | None]
"""A rank with its rows, or with its failure: the name and text of an error."""
_KEY = int.from_bytes(blake2b(b"comparison", digest_size=8).digest(), "little")
"""The key of comparisons in tags: ranks whose units differ exchange their hashes all the same."""
_ADVICE = (
    "shard the same modules on all ranks with the same arguments, such as ignored modules and "
    "parameters, wrap policy, dtypes and strategy. No parameter was sent yet"
)


def _hash(value: object) -> int:
    digest = blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _check_units(root: Unit, of_replicas: bool) -> None:
    names = Names(root)
    rows: dict[ShardGroup, list[Row]] = {}
    devices: dict[ShardGroup, torch.device] = {}
    failures: dict[ShardGroup, Exception] = {}
    for unit in units_of(root.modules):
        for param_group in unit.param_groups:
            groups = param_group.groups
            among = groups.replicate if of_replicas else groups.shard
            if among.size > 1:
                try:
                    if not param_group.is_gathered:
                        param_group.take_over_replaced()
                except Exception as error:  # the other ranks wait in the comparison
                    failures.setdefault(among, error)
                rows.setdefault(among, []).extend(_rows(unit, param_group, names))
                devices.setdefault(among, param_group.device)
    for among, found in rows.items():
        things = f"sharded parameters of {names.unit(root)}"
        check_same(things, found, [among], devices[among], failures.get(among))


def _rows(unit: Unit, param_group: ParamGroup, names: Names) -> list[Row]:
    """Returns all that must be equal for the messages of a parameter group to fit."""
    alike = {
        "dtype": word(param_group.stored_dtype),
        "unit": names.unit(unit),
        "number among the parameter groups": param_group.number,
        "param_dtype": word(param_group.precision.param_dtype),
        "reduce_dtype": word(param_group.precision.reduce_dtype),
        "reshard_after_forward": unit.policy.reshard_after_forward,
    }
    return [
        (name, {"shape": tuple(p.shape), "divided dimension": p.dim, **alike})
        for name, p in zip(names.parameters(param_group), param_group.parameters, strict=True)
    ]


def _difference(things: str, everyone: Sequence[tuple[int, list[Row]]]) -> str:
    """Returns the first difference between the first rank and one that has other rows."""
    (first, mine), *others = everyone
    other, theirs = next((rank, rows) for rank, rows in others if rows != mine)
    here, there = dict(mine), dict(theirs)
    alone = [
        f"rank {rank} has "
        f"{format_names([name for name in some if name not in rest], SHOWN)}, which rank "
        f"{lacking} lacks"
        for rank, some, lacking, rest in ((first, here, other, there), (other, there, first, here))
        if some.keys() - rest.keys()
    ]
    if alone:
        return f"the ranks have different {things}: {', and '.join(alone)}"
    for name, properties in here.items():
        unlike = [
            f"{key} {value} on rank {first} and {there[name][key]} on rank {other}"
            for key, value in properties.items()
            if value != there[name][key]
        ]
        if unlike:
            return f"{name} differs between the ranks: {', '.join(unlike)}"
    return (
        f"the ranks have the same {things} in different orders: rank {first} "
        f"{format_names(list(here), SHOWN)}; rank {other} {format_names(list(there), SHOWN)}"
    )


class OrderCheck:
    """The order of one root's units."""

    def __init__(self) -> None:
        self._first: list[int] = []
        """The order of the first iteration."""
        self._position = 0
        self._is_first = True
        self._warned = False

    def check_call(self, unit: Unit, units: list[Unit]) -> list[tuple[Unit, bool]]:
        """Returns the units that other ranks run during `unit` of this one, and whether they train.

        The result has the order of the units. All ranks call it, for every unit with parameters.
        Raises RuntimeError in the first iteration if ranks differ.
        """
        index = units.index(unit)
        trained = any(param_group.requires_grad for param_group in unit.param_groups)
        param_group = unit.param_groups[0]
        mine = torch.tensor([index, int(trained)], device=param_group.device)
        group = param_group.groups.group
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(all_of_them, mine, group=group)
        indices = [int(other[0]) for other in all_of_them]
        if self._is_first:
            self._check_first(indices, units)
            self._first.append(index)
        else:
            self._check_later(index, units)
        others: dict[int, bool] = {}
        for other, is_trained in (tensor.tolist() for tensor in all_of_them):
            if other != index:
                others[other] = others.get(other, False) or bool(is_trained)
        return [(units[other], others[other]) for other in sorted(others)]

    def begin_forward(self) -> None:
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

    def _check_later(self, index: int, units: list[Unit]) -> None:
        position = self._position
        self._position += 1
        expected = self._first[position] if position < len(self._first) else None
        if self._warned or expected == index:
            return
        self._warned = True
        message = (
            "no more parameters"
            if expected is None
            else f"parameters for {_names(units[expected], units)}"
        )
        warnings.warn(
            "Forward order differs from that of the first iteration on rank "
            f"{dist.get_rank()}. Collectives are unchecked and may give incorrect results or hang "
            f"where ranks do not run the same number of units: expected to all-gather {message} "
            f"but got parameters for {_names(units[index], units)}",
            stacklevel=2,
        )


def _names(unit: Unit, units: list[Unit]) -> list[str]:
    """Returns the names of a unit's parameters in the root."""
    names = Names(units[0])
    return [name for param_group in unit.param_groups for name in names.parameters(param_group)]


WRAPPER = "_fsdp_wrapped_module."
"""The part of a path that the wrapper adds."""


class Names:
    """Paths in the modules of one root unit."""

    def __init__(self, root: Unit) -> None:
        self._paths: dict[nn.Module, str] = {}
        several = len(root.modules) > 1
        for index, module in enumerate(root.modules):
            for path, part in module.named_modules(prefix=f"[{index}]" if several else ""):
                self._paths.setdefault(part, path)

    def parameters(self, param_group: ParamGroup) -> list[str]:
        """Returns the names of a parameter group's parameters, in order."""
        owners = [parameter.owners[0] for parameter in param_group.parameters]
        return [_format_path(f"{self._paths.get(owner, '')}.{key}") for owner, key in owners]

    def unit(self, unit: Unit) -> str:
        """Returns the path of a unit's module, or modules; the class of the root itself."""
        paths = [self._paths.get(module, "") for module in unit.modules]
        if not all(paths):
            return f"the root {type(unit.modules[0]).__name__}"
        return "+".join(map(_format_path, paths))

    def give(self, unit: Unit) -> None:
        """Names a unit's groups like the unit; several groups also by a parameter of each."""
        name = self.unit(unit)
        for param_group in unit.param_groups:
            parameters = self.parameters(param_group)
            own = name if len(unit.param_groups) == 1 else f"{name} (with {parameters[0]})"
            param_group.set_name(own, parameters)


def _format_path(path: str) -> str:
    return path.replace(WRAPPER, "").lstrip(".")
