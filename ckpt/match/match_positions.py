"""The saved names as the target has them, however its modules and optimizers were saved.

The name of a parameter in a saved optimizer depends on the modules that the optimizer had then, and
other programs number parameters. Other programs also save the parts that wrappers add to the names
of modules' entries. Rules:

1. A native checkpoint tells for each optimizer the module of its names. A parameter is the one
   with the same key path, after `rename=`. A name that `rename=` changes in the optimizer itself is
   final.
2. Numbers become names in the order of the groups, as for torch's `load_state_dict`, if both sides
   have as many groups with as many parameters each. Trainer, Accelerate, Lightning and most scripts
   save numbers, and so does an optimizer without its modules.
3. A flat parameter holds several parameters in an order of its own, so it has no number. Its
   optimizer is loaded from a state with names only.
4. Another checkpoint does not tell the module of its names. Names that fit the target count as
   they are. If none fits, they are tried with and without the paths of the target's modules, and
   count if exactly one module has them all.
5. An entry of a wrapped module whose name is not saved is the one with the wrappers' parts in its
   name, as in the `state_dict()` of the wrapped target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

from torch.optim import Optimizer

from ckpt.state.saved import Saved, nodes_in
from ckpt.state.stateful import OptimizerNames, ParameterNames, modules
from formats.catalog import Key, Tree, join
from sharding.describe.describing import state_dict_keys
from sharding.describe.members import NamedParameter
from sharding.describe.wrappers import WRAPPED, CleanNames


def name_like_target(saved: Saved, state: object, parameters: ParameterNames) -> Saved:
    """Returns a checkpoint with the target's names of optimizer states and of wrapped modules.

    `parameters` has the names of the target's modules. Returns `saved` if no name changes.
    """
    table = dict(_of_wrapped(saved, state))
    for path, optimizer in nodes_in(state, _is_optimizer):
        members = members_of_groups(saved, path)
        if members is not None:
            names = _new_names(saved, path, members, parameters.of(optimizer), optimizer)
            where = join(path, "state")
            for old, new in names.items():
                if str(old) != new:
                    table[f"{where}.{old}"] = f"{where}.{new}"
    return saved.with_names(table) if table else saved


def _of_wrapped(saved: Saved, state: object) -> Iterator[tuple[str, str]]:
    """Yields the saved names with wrappers' parts, and the target's names (rule 5)."""
    for path, module in modules(state):
        if not CleanNames(module).has_wrappers:
            continue
        names = "\n".join(saved.under(path))
        if not any(f"{part}." in names for part in set(WRAPPED.values())):
            continue
        for name, key in state_dict_keys(module).items():
            wrapped, clean = join(path, key), join(path, name)
            if name != key and clean not in saved.leaves and wrapped in saved.leaves:
                yield wrapped, clean


def members_of_groups(saved: Saved, path: str) -> list[list[Key]] | None:
    """Returns the names of the parameters of each saved group; None if the groups are not lists."""
    groups = saved.node(join(path, "param_groups"))
    by_group: list[list[Key]] = []
    for group in groups if isinstance(groups, list) else ():
        members: Tree = group.get("params") if isinstance(group, dict) else None
        if not isinstance(members, list | tuple):
            return None
        by_group.append([name for name in members if isinstance(name, str | int)])
    return by_group or None


def path_in_checkpoint(saved: Saved, path: str) -> str:
    """Returns the path in the checkpoint of a target's optimizer; the same path if unknown."""
    groups = join(path, "param_groups")
    leaf = next(iter(saved.under(groups)), groups)
    before = f".{saved.before.get(leaf, leaf)}"
    tail = f".{leaf}"[len(path) + 1 if path else 0 :]
    is_below = leaf.startswith(groups) and before.endswith(tail)
    return before.removesuffix(tail).removeprefix(".") if is_below else path


def are_numbers(members: Sequence[Sequence[Key]]) -> bool:
    """Whether saved groups number their parameters, as torch does."""
    return all(type(name) is int for group in members for name in group)


def _new_names(
    saved: Saved,
    path: str,
    members: list[list[Key]],
    target: OptimizerNames,
    optimizer: Optimizer,
) -> Mapping[Key, str]:
    """Returns the target's name of each saved parameter of an optimizer."""
    flat = [name for group in members for name in group]
    own, optimizers = path_in_checkpoint(saved, path), saved.catalog.optimizers
    module = optimizers.get(own, "")
    labels = [name for named in target.named for name in named.names]
    if are_numbers(members) or (own in optimizers and module is None):
        return _by_position(members, target, optimizer)
    texts = [str(name) for name in flat]
    before, state = join(own, "state"), join(path, "state")
    new = {text: rename_parameter(saved, before, state, text) for text in texts}
    if own not in optimizers or module is None:
        guessed: Mapping[Key, str] = dict(_guess_names([*new.values()], target, labels))
        return guessed or _of_old(members, target, optimizer)
    by_path = dict(zip(_paths(target), labels, strict=True))
    taken, prefix = set(labels), f"{target.module}." if target.module else ""
    saved_prefix = f"{module}." if module else ""
    names: dict[Key, str] = {}
    for text in texts:
        if new[text] == text:
            full = saved.rename(saved_prefix + text)
            label = by_path.get(full) or full.removeprefix(prefix)
            while label in taken and full not in by_path:
                label = f"other.{label}"  # by chance the name of another parameter of the target
            names[text] = label
    return names


def _paths(target: OptimizerNames) -> list[str]:
    """Returns the key path of each parameter; positions are no paths."""
    labels = [name for named in target.named for name in named.names]
    before = f"{target.module}." if target.module else ""
    return [before + label if target.module is not None else "" for label in labels]


def rename_parameter(saved: Saved, before: str, state: str, name: str) -> str:
    """Returns a parameter's name in the target, by the rename of its state: `before`, `state`."""
    return saved.rename(f"{before}.{name}").removeprefix(f"{state}.")


def _by_position(
    members: Sequence[Sequence[Key]], target: OptimizerNames, optimizer: Optimizer
) -> dict[Key, str]:
    """Returns the names in the order of the groups; none if these have other sizes (rule 2)."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != [*map(len, members)] or any(map(_is_flat, target.named)):
        return {}
    flat = [name for group in members for name in group]
    return {name: named.names[0] for name, named in zip(flat, target.named, strict=True)}


def _of_old(
    members: Sequence[Sequence[Key]], target: OptimizerNames, optimizer: Optimizer
) -> Mapping[Key, str]:
    """Returns the names of the texts "0", "1", ... that stand for positions in old checkpoints."""
    flat = [name for group in members for name in group]
    labels = {name for named in target.named for name in named.names}
    if flat != [str(number) for number in range(len(flat))] or not labels.isdisjoint(
        map(str, flat)
    ):
        return {}
    return _by_position(members, target, optimizer)


def _guess_names(
    names: list[str], target: OptimizerNames, labels: list[str]
) -> Iterator[tuple[str, str]]:
    """Yields names of an unknown module with those of the target (rule 4)."""
    if target.module is None or not names or not set(labels).isdisjoint(names):
        return
    by_path = dict(zip(_paths(target), labels, strict=True))
    if not by_path.keys().isdisjoint(names):  # saved with several modules, loaded with one
        yield from ((name, by_path[name]) for name in names if name in by_path)
        return
    fitting = [
        module for module in target.modules if all(join(module, name) in by_path for name in names)
    ]
    if len(fitting) == 1:
        yield from ((name, by_path[join(fitting[0], name)]) for name in names)


def _is_flat(named: NamedParameter) -> bool:
    return bool(named.slices) or len(named.names) != 1


def _is_optimizer(node: object) -> TypeGuard[Optimizer]:
    return isinstance(node, Optimizer)
