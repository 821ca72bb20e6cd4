"""Optimizers saved by torch's own `state_dict`, which numbers parameters in the place of names.

Trainer, Accelerate, Lightning and most scripts save such a state. Number i is the i-th parameter of
all groups in their order, as for torch's `load_state_dict`. Rules:

1. The numbers become the names of the target's parameters in the order of its groups, if both sides
   have as many groups with as many parameters each.
2. A flat parameter holds several parameters in an order of its own, so it has no number. Its
   optimizer is loaded from a state with names only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from torch.optim import Optimizer

from ckpt.state.saved import Saved, nodes_in
from ckpt.state.stateful import ParameterNames
from formats.catalog import Tree, join
from sharding.describe.members import NamedParameter


def named_by_position(saved: Saved, state: object, parameters: ParameterNames) -> Saved:
    """Returns a checkpoint whose numbered optimizer states have the names of the target's.

    `parameters` has the names of the modules' parameters. Returns `saved` if nothing is numbered.
    """
    table: dict[str, str] = {}
    for path, optimizer in nodes_in(state, _is_optimizer):
        numbers = _numbers(saved.node(join(path, "param_groups")))
        if [len(group["params"]) for group in optimizer.param_groups] != [*map(len, numbers)]:
            continue
        named = parameters.of(optimizer)
        flat = [number for group in numbers for number in group]
        if flat == [*range(len(named))] and not any(map(_is_flat, named)):
            where = join(path, "state")
            for number, each in enumerate(named):
                if each.names[0] != str(number):
                    table[join(where, number)] = join(where, each.names[0])
    return saved.renamed(table) if table else saved


def _is_flat(named: NamedParameter) -> bool:
    return bool(named.slices) or len(named.names) != 1


def _numbers(groups: object) -> Sequence[Sequence[int]]:
    """Returns the numbers of the parameters of each saved group; none if one has names."""
    found = []
    for group in groups if isinstance(groups, list) else ():
        members: Tree = group.get("params") if isinstance(group, dict) else None
        if not isinstance(members, list | tuple) or any(type(each) is not int for each in members):
            return []
        found.append([each for each in members if type(each) is int])
    return found


def _is_optimizer(node: object) -> TypeGuard[Optimizer]:
    return isinstance(node, Optimizer)
