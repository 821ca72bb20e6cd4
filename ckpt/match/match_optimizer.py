"""Matches an optimizer: its groups get the saved options, its parameters the saved state.

Rules:

1. Names identify parameters. Saved groups and positions do not matter. A group takes its selected
   options from the saved group that had its parameters. If several saved groups had them, that is a
   difference.
2. A fresh optimizer gets its state before its first step. A tensor of the parameter's shape gets
   the parameter's placement, any other tensor is whole. Existing state is filled in place.
   `match_slices` has the rules for flat parameters.
3. If the saved state of a parameter lacks an entry that similar parameters have, that is a
   difference. `match_entries` defines similar.
4. State keeps its saved dtype, although torch's `load_state_dict` would cast it to the parameter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ckpt.match.match_blocks import match_with_blocks
from ckpt.match.match_builder import Installer, MatchBuilder, whole_tensor
from ckpt.match.match_entries import SavedState, lacking_entries
from ckpt.match.match_slices import match_slices
from ckpt.state.memory import torch_dtype
from ckpt.state.saved import Missing
from ckpt.state.stateful import STEP, call_of, optimizer_entries
from ckpt.state.subclass_state import put_together, unknown_classes
from formats.catalog import TensorRecord, TensorRef, Tree, join
from sharding.describe.dtensor import zeros_placed_like
from sharding.describe.members import NamedParameter


def match_optimizer(
    builder: MatchBuilder, optimizer: Optimizer, named: list[NamedParameter], path: str
) -> Installer:
    """Matches an optimizer with the saved state at a path; `named` has its parameters' names."""
    for each in named:
        state = [join(join(path, "state"), name) for name in each.names]
        held = optimizer.state.get(each.parameter, {})
        builder.owns(*state, *(join(name, key) for name in state for key in held))
    if not builder.selects(path):
        return lambda: optimizer
    return _OptimizerMatch(builder, optimizer, named, path).run()


@dataclass(frozen=True)
class _OptimizerMatch:
    builder: MatchBuilder
    optimizer: Optimizer
    named: list[NamedParameter]
    path: str

    def run(self) -> Installer:
        groups = self._groups()
        self._find_lacking()
        self.builder.used.add(join(self.path, "state"))  # a leaf if no parameter has state
        own = optimizer_entries(self.optimizer, self.named, self.path)
        parameters = [named.parameter for named in self.named]
        states = {
            index: self._parameter_state(named, own["state"])
            for index, named in enumerate(self.named)
        }
        others = {
            key: self.builder.anything(own.get(key), join(self.path, key))
            for key in self._other_keys()
            if key in own or self.builder.selects(join(self.path, key))
        }

        def install() -> object:
            state = {index: put_together(step()) for index, step in states.items()}
            state = {index: entries for index, entries in state.items() if entries}
            rest = {key: step() for key, step in others.items()}
            with call_of("load_state_dict", self.path):
                self.optimizer.load_state_dict({"state": state, "param_groups": groups, **rest})
            _undo_casts(self.optimizer, parameters, state)
            return self.optimizer

        return install

    def _other_keys(self) -> list[str]:
        """Returns the saved keys beside `state` and `param_groups`."""
        saved = self.builder.saved.node(self.path)
        if not isinstance(saved, dict):
            return []
        return [
            str(key) for key in saved if str(key).partition(".")[0] not in ("state", "param_groups")
        ]

    # Groups.

    def _groups(self) -> list[dict[str, object]]:
        """Returns the target's groups with the saved options of their parameters (rule 1).

        Options that the selection excludes stay as they are.
        """
        where = join(self.path, "param_groups")
        self.builder.used.update(self.builder.saved.under(where))
        is_one = where in self.builder.saved.leaves  # as without options that are tensors
        saved = _saved_groups(self.builder.saved.node(where))
        group_of = {self._renamed(name): at for at, group in saved.items() for name in group.names}
        first = 0
        groups: list[dict[str, object]] = []
        for position, group in enumerate(self.optimizer.param_groups):
            last = first + len(group["params"])
            members = [name for named in self.named[first:last] for name in named.names]
            options = {key: value for key, value in group.items() if key != "params"}
            at = None
            if self.builder.chooses(where):
                at = self._group_of(members, group_of, f"{where}.{position}")
            for key, value in saved[at].options.items() if at is not None else ():
                entry = join(join(where, at), key)
                if is_one or self.builder.chooses(entry):
                    options[str(key)] = self._option(value, entry, options.get(str(key)))
            groups.append({**options, "params": list(range(first, last))})
            first = last
        return groups

    def _group_of(self, members: list[str], group_of: Mapping[str, int], where: str) -> int | None:
        """Returns the saved group that had these parameters; None after adding a difference."""
        lacking = [name for name in members if name not in group_of]
        found = sorted({group_of[name] for name in members if name in group_of})
        if lacking:
            self.builder.differ(
                where,
                "missing",
                f"{len(lacking)} of its {len(members)} parameters are in no group of the "
                f"checkpoint, the first is {lacking[0]}",
            )
        elif len(found) > 1:
            self.builder.differ(
                where,
                "structure",
                f"its parameters are in the groups {found} of the checkpoint; give the optimizer "
                "the same groups",
            )
        elif found:
            return found[0]
        return None

    def _option(self, value: Tree, path: str, own: object) -> object:
        """Returns an option of a group. A tensor is new, and the load fills it."""
        if not isinstance(value, TensorRef):
            return self.builder.whole(value, path, is_one=True)()
        record = self.builder.saved.catalog.tensors[value.name]
        tensor = whole_tensor(record)
        if isinstance(own, torch.Tensor):
            tensor = tensor.to(own.device)
        self.builder.fill(path, record, tensor)
        return tensor

    def _renamed(self, name: str) -> str:
        """Returns a parameter's name in the target, by the rename of its state."""
        state = join(join(self._saved_path, "state"), name)
        return self.builder.saved.rename(state).removeprefix(join(self.path, "state") + ".")

    @property
    def _saved_path(self) -> str:
        """The optimizer's own path in the checkpoint; its path in the target if that is unknown."""
        groups = join(self.path, "param_groups")
        leaf = next(iter(self.builder.saved.under(groups)), groups)
        before = f".{self.builder.saved.before.get(leaf, leaf)}"
        tail = f".{leaf}"[len(self.path) + 1 if self.path else 0 :]
        is_below = leaf.startswith(groups) and before.endswith(tail)
        return before.removesuffix(tail).removeprefix(".") if is_below else self.path

    # State.

    def _find_lacking(self) -> None:
        """Adds a difference for each entry that a saved state lacks (rule 3)."""
        named = iter(self.named)
        for group in self.optimizer.param_groups:
            members = [next(named) for _ in group["params"]]
            states = [state for each in members for state in self._saved_states(each)]
            for lacking in lacking_entries(states):
                where = join(join(join(self.path, "state"), lacking.name), lacking.entry)
                if where in self.builder.selection:
                    self.builder.differ(
                        where,
                        "missing",
                        f"is not in the checkpoint, which has {lacking.entry} of {lacking.other}",
                    )

    def _saved_states(self, named: NamedParameter) -> Iterator[SavedState]:
        """Yields the saved state of each name of a parameter."""
        tensors = self.builder.saved.catalog.tensors
        shapes = [part.layout.shape for part in named.slices] or [tuple(named.parameter.shape)]
        for name, shape in zip(named.names, shapes, strict=True):
            where = join(join(self.path, "state"), name)
            saved = self.builder.saved.node(where)
            if not isinstance(saved, dict) or where in self.builder.left_out:
                continue
            placed = [
                key
                for key, value in saved.items()
                if isinstance(value, TensorRef) and tensors[value.name].shape == shape
            ]
            yield SavedState(name, len(shape), frozenset(saved), frozenset(placed) - {STEP})

    def _parameter_state(self, named: NamedParameter, held: object) -> Installer:
        """Matches the saved state of one parameter (rule 2)."""
        parameter, state = named.parameter, join(self.path, "state")
        if named.slices:
            held_now = self.optimizer.state.get(parameter, {})
            step = match_slices(self.builder, named, held_now, state)
            return dict if named.is_idle else step  # each rank matches: all find equal differences
        name = named.names[0]
        where = join(state, name)
        mine = held.get(name, {}) if isinstance(held, dict) else {}
        below = self.builder.saved.under(where)
        if where in self.builder.left_out:
            return lambda: mine
        if below and not any(entry in self.builder.selection for entry in below):
            return lambda: mine
        saved = self.builder.saved.node(where)
        if isinstance(saved, Missing):
            return dict
        self.builder.used.update(below)
        for unknown in unknown_classes(saved):
            self.builder.differ(
                where,
                "structure",
                f"has tensors of the class {unknown} in the checkpoint, which this program has not "
                "imported; import the class before loading",
            )

        def like(entry: str, record: TensorRecord) -> torch.Tensor:
            key = entry[len(where) + 1 :]
            existing = mine.get(key) if isinstance(mine, dict) else None
            if (
                isinstance(existing, torch.Tensor)
                and tuple(existing.shape) == record.shape
                and str(existing.dtype) == f"torch.{record.dtype.torch_name}"
            ):
                return existing
            if record.shape == tuple(parameter.shape) and key != STEP:
                return zeros_placed_like(parameter, torch_dtype(record.dtype.torch_name))
            return whole_tensor(record)

        step = match_with_blocks(self.builder, parameter, saved, where, like)
        if not isinstance(mine, dict) or not isinstance(saved, dict):
            return step

        def with_own() -> object:
            loaded = step()
            kept = {key: value for key, value in mine.items() if key in saved}
            return kept | loaded if isinstance(loaded, dict) else loaded

        return with_own


@dataclass(frozen=True, slots=True)
class _SavedGroup:
    """A parameter group of the checkpoint."""

    names: list[str]
    options: dict[object, Tree]


def _saved_groups(saved: Tree | Missing) -> dict[int, _SavedGroup]:
    """Returns the checkpoint's groups by position, without groups that lack parameter names."""
    groups = {}
    for position, entry in enumerate(saved if isinstance(saved, list) else []):
        names = entry.get("params") if isinstance(entry, dict) else None
        if isinstance(entry, dict) and isinstance(names, list | tuple):
            options: dict[object, Tree] = {k: v for k, v in entry.items() if k != "params"}
            groups[position] = _SavedGroup([str(name) for name in names], options)
    return groups


def _undo_casts(
    optimizer: Optimizer, parameters: list[torch.Tensor], state: Mapping[int, object]
) -> None:
    """Restores the saved dtype of state that torch cast to the parameter's dtype (rule 4)."""
    for index, entries in state.items():
        if not isinstance(entries, dict):
            continue
        now = optimizer.state[parameters[index]]
        for key, value in entries.items():
            held = now.get(key)
            both = isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor)
            if both and held.dtype != value.dtype:
                now[key] = value.to(held.device)
