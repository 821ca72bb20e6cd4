"""Matches an optimizer: its groups get the saved options, its parameters the saved state.

Rules:

1. Names identify parameters (`ckpt.match.match_positions`). Saved groups do not matter, unless the
   names are positions, whose groups are as large as the target's, as in torch. A group takes its
   selected options from the saved group that had its parameters. If several saved groups had them,
   or if the saved group is also that of a group with other options, that is a difference.
2. A fresh optimizer gets its state before its first step. A tensor of the parameter's shape gets
   the parameter's placement, any other tensor is whole. Existing state is filled in place.
   `match_slices` has the rules for flat parameters.
3. If the saved state of a parameter lacks an entry that similar parameters have, that is a
   difference. The note below defines similar.
4. State keeps its saved dtype, although torch's `load_state_dict` would cast it to the parameter's.
   It keeps the strides that it had, as in torch, if the checkpoint tells them.
5. A group without parameters takes the options of the saved group at its position, if all others
   are at theirs; otherwise those of the saved group without parameters at its place among these.
6. State under keys that are no parameters is taken as it was saved.

[Note: lacking entries]
Entries that the state lacks are found by the states of similar parameters. A parameter without any
state may never have been stepped. A parameter with state that lacks one entry is different:
training would start this entry from zero, silently for a flat parameter and with a KeyError
elsewhere. Each optimizer chooses its own entries, so the rule is narrow:

1. Two parameters are similar if they are in the same group and have equally many dimensions.
2. An entry is lacking if the state of a similar parameter has all entries of this state and this
   entry too, in the shape of that parameter.

Adafactor and 8-bit optimizers keep different entries for different parameters. Neither breaks the
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt.match.match_builder import Installer, MatchBuilder, whole_tensor
from ckpt.match.match_entries import match_slices, match_with_blocks
from ckpt.match.match_positions import (
    are_numbers,
    members_of_groups,
    path_in_checkpoint,
    rename_parameter,
)
from ckpt.match.match_stateful import Fill, match_stateful
from ckpt.state.memory import ORDINARY
from ckpt.state.saved import Missing, node_at
from ckpt.state.stateful import (
    STEP,
    OptimizerNames,
    ParameterNames,
    call_of,
    check_whole,
    is_packed,
    optimizer_entries,
    pack_state,
    state_of,
)
from ckpt.state.subclass_state import put_together, unknown_classes
from formats.catalog import Key, TensorRecord, TensorRef, Tree, join
from sharding.describe.dtensor import zeros_placed_like
from sharding.describe.members import NamedParameter


def match_optimizer(
    builder: MatchBuilder,
    fill: Fill,
    leave_out: Callable[[OptimizerNames, str], None],
    optimizer: Optimizer,
    parameters: ParameterNames,
    path: str,
) -> Installer:
    """Matches an optimizer with the saved state at a path.

    `fill` matches a tensor of an optimizer of another form; `leave_out` leaves out the state of
    parameters whose weights do not fit.
    """
    packed = pack_state(optimizer, path) if builder.selects(path) else None
    if packed is not None and not is_packed(packed):
        check_whole(optimizer, path)
        return match_stateful(builder, fill, optimizer, path)
    names = parameters.of(optimizer)
    leave_out(names, path)
    named, kept, state = names.named, state_of(optimizer), join(path, "state")
    for each in named if not builder.selection.is_all else ():
        own = [f"{state}.{name}" for name in each.names]
        entries = kept.get(each.parameter, {})
        builder.owns(*own, *(f"{name}.{key}" for name in own for key in entries))
    if packed is None:
        return lambda: optimizer
    return _OptimizerMatch(builder, optimizer, named, path, state, packed).run()


@dataclass(frozen=True)
class _OptimizerMatch:
    builder: MatchBuilder
    optimizer: Optimizer
    named: list[NamedParameter]
    path: str
    state: str
    """The name of the state of all parameters."""
    packed: Mapping[str, Any]
    """The optimizer's present state dict."""
    _options: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)
    """The tensors among the options, by their names in the checkpoint and their devices."""

    def run(self) -> Installer:
        groups = self._groups()
        self._find_lacking()
        self.builder.used.add(self.state)  # a leaf if no parameter has state
        own = optimizer_entries(self.packed, self.named, self.path)
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

        extra = self._of_no_parameter(own["state"])

        def install() -> object:
            found = ((index, step()) for index, step in states.items())
            state: dict[Any, Any] = {index: _composed(e) for index, e in found if e is not None}
            rest = {key: step() for key, step in others.items()}
            whole = {**state, **{key: step() for key, step in extra.items()}}
            with call_of("load_state_dict", self.path):
                self.optimizer.load_state_dict({"state": whole, "param_groups": groups, **rest})
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

    def _of_no_parameter(self, own: Any) -> dict[Any, Installer]:
        """Returns installers of the state under keys that are no parameter's (rule 6)."""
        builder, state = self.builder, self.state
        names = {name for named in self.named for name in named.names}
        mine = {key: value for key, value in own.items() if key not in names}
        members = members_of_groups(builder.saved, self.path) or []
        before = path_in_checkpoint(builder.saved, self.path)
        catalog = builder.saved.catalog
        if before not in catalog.optimizers and not are_numbers(members):
            return {}  # after a mapping, the groups have other names than the state
        theirs = {str(name) for group in members for name in group}
        saved = node_at(catalog.tree, join(before, "state"))
        keys = [key for key in saved if str(key) not in theirs] if isinstance(saved, dict) else []
        found = {
            key: builder.anything(mine.get(key), f"{state}.{key}")
            for key in keys
            if key in mine or builder.chooses(f"{state}.{key}")
        }
        kept = {key: value for key, value in mine.items() if not builder.chooses(f"{state}.{key}")}
        return {key: (lambda value=value: value) for key, value in kept.items()} | found

    # Groups.

    def _groups(self) -> list[dict[str, object]]:
        """Returns the target's groups with the saved options of their parameters (rule 1).

        Options that the selection excludes stay as they are.
        """
        where = join(self.path, "param_groups")
        self.builder.used.update(self.builder.saved.under(where))
        is_one = where in self.builder.saved.leaves  # as without options that are tensors
        saved = _groups_by_position(self.builder.saved.node(where))
        first = 0
        groups: list[dict[str, object]] = []
        members: list[list[str]] = []
        for group in self.optimizer.param_groups:
            last = first + len(group["params"])
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": Positions(range(first, last))})
            members.append([name for named in self.named[first:last] for name in named.names])
            first = last
        if not self.builder.chooses(where):
            return groups
        for options, names, at in zip(groups, members, self._places(members, saved), strict=True):
            if at is None:
                continue
            for key, value in saved[at].options.items():
                entry = f"{where}.{at}.{key}"
                if key == "param_names" and len(names) != len(saved[at].names):
                    continue  # the names of other parameters
                if is_one or self.builder.chooses(entry):
                    options[str(key)] = self._option(value, entry, options.get(str(key)))
        return groups

    def _places(
        self, members: list[list[str]], saved: Mapping[int, _SavedGroup]
    ) -> list[int | None]:
        """Returns the saved group of each group; None after adding a difference (rules 1 and 5)."""
        where = join(self.path, "param_groups")
        own = path_in_checkpoint(self.builder.saved, self.path)
        rename = partial(rename_parameter, self.builder.saved, join(own, "state"), self.state)
        group_of = {rename(name): at for at, group in saved.items() for name in group.names}
        if not self._are_as_large(members, saved, where):
            return [None] * len(members)
        places = [
            self._group_of(names, group_of, f"{where}.{position}") if names else None
            for position, names in enumerate(members)
        ]
        self._find_divided(places, where)
        empty = [position for position, names in enumerate(members) if not names]
        others = [(position, at) for position, at in enumerate(places) if members[position]]
        if empty and len(saved) == len(members) and all(place == at for place, at in others):
            return list(range(len(members)))
        theirs = [at for at, group in saved.items() if not group.names]
        for position, at in zip(empty, theirs, strict=False):
            places[position] = at
        for position in empty[len(theirs) :]:
            self.builder.differ(
                f"{where}.{position}",
                "missing",
                f"has no parameters, and the checkpoint has {len(theirs)} such groups of "
                f"{len(saved)}; the target has {len(empty)}",
            )
        if self.builder.world.size == 1:  # otherwise the group may be that of another rank
            for at in theirs[len(empty) :]:
                self.builder.differ(
                    f"{where}.{at}",
                    "unexpected",
                    "has no parameters in the checkpoint, and the "
                    f"target has {len(empty)} such groups",
                )
        return places

    def _are_as_large(
        self, members: list[list[str]], saved: Mapping[int, _SavedGroup], where: str
    ) -> bool:
        """Whether groups fit if the saved names are positions; False after adding a difference."""
        found = self.builder.saved
        path, optimizers = path_in_checkpoint(found, self.path), found.catalog.optimizers
        numbers = are_numbers(members_of_groups(found, self.path) or [])
        by_position = numbers or (path in optimizers and optimizers[path] is None)
        sizes = [len(group.names) for group in saved.values()]
        wanted = [*map(len, members)]
        if not by_position or not saved or sizes == wanted:
            return True
        theirs = {name for group in saved.values() for name in group.names}
        by_chance = any(not theirs.isdisjoint(names) for names in members)
        self.builder.differ(
            where,
            "structure" if by_chance else "missing",
            f"the checkpoint numbers the parameters of its groups, which have {sizes}, the groups "
            f"of the target have {wanted}; give the optimizer the same groups, or save it with its "
            "modules, so that the parameters have names",
        )
        return False

    def _find_divided(self, places: list[int | None], where: str) -> None:
        """Adds a difference for groups with other options that are one in the checkpoint."""
        first: dict[int, int] = {}
        groups = self.optimizer.param_groups
        for position, at in enumerate(places):
            if at is None:
                continue
            other = first.setdefault(at, position)
            differing = _differing_options(groups[other], groups[position])
            if differing:
                self.builder.differ(
                    f"{where}.{position}",
                    "structure",
                    f"its parameters are in group {at} of the checkpoint, as those of the target's "
                    f"group {other}, which has another {', '.join(differing)}; give the optimizer "
                    f"the same groups, or keep its own options with exclude={where!r}",
                )

    def _group_of(self, members: list[str], group_of: Mapping[str, int], where: str) -> int | None:
        """Returns the saved group that had these parameters, or some of them; None without one.

        Adds a difference unless one group had them all.
        """
        self.builder.owns(where)
        is_named = join(self.path, "param_groups") in self.builder.selection  # the whole list
        if self.builder.selection.excludes(where) or not (is_named or self.builder.chooses(where)):
            return None
        lacking = [name for name in members if name not in group_of]
        places = sorted({group_of[name] for name in members if name in group_of})
        if lacking:
            self.builder.differ(
                where,
                "missing",
                f"{len(lacking)} of its {len(members)} parameters are in no group of the "
                f"checkpoint, the first is {lacking[0]}",
            )
        if len(places) > 1:
            self.builder.differ(
                where,
                "structure",
                f"its parameters are in the groups {places} of the checkpoint; give the optimizer "
                f"the same groups, or keep its own options with exclude='{where}*'",
            )
        return places[0] if len(places) == 1 else None

    def _option(self, value: Tree, path: str, own: object) -> object:
        """Returns an option of a group. A tensor is new, and the load fills it.

        A tensor that was an option of several groups, as a learning rate is, is one again.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if not isinstance(value, TensorRef):
            return self.builder.whole(value, path, is_one=True)()
        device = own.device if isinstance(own, torch.Tensor) else torch.device("cpu")
        tensor = self._options.get((value.name, device))
        if tensor is None:
            record = self.builder.saved.catalog.tensors[value.name]
            tensor = self._options[value.name, device] = whole_tensor(record).to(device)
            self.builder.fill(path, record, tensor)
        return tensor

    # State.

    def _find_lacking(self) -> None:
        """Adds a difference for each entry that a saved state lacks (rule 3)."""
        named = iter(self.named)
        for group in self.optimizer.param_groups:
            members = [next(named) for _ in group["params"]]
            states = [state for member in members for state in self._iter_saved(member)]
            for lacking in lacking_entries(states):
                where = f"{self.state}.{lacking.name}.{lacking.entry}"
                if where in self.builder.selection:
                    self.builder.differ(
                        where,
                        "missing",
                        f"is not in the checkpoint, which has {lacking.entry} of {lacking.other}",
                    )

    def _iter_saved(self, named: NamedParameter) -> Iterator[SavedState]:
        tensors = self.builder.saved.catalog.tensors
        shapes = [part.layout.shape for part in named.slices] or [tuple(named.parameter.shape)]
        for name, shape in zip(named.names, shapes, strict=True):
            where = f"{self.state}.{name}"
            saved = self.builder.saved.node(where)
            if not isinstance(saved, dict) or where in self.builder.left_out:
                continue
            placed = [
                key
                for key, value in saved.items()
                if isinstance(value, TensorRef) and tensors[value.name].shape == shape
            ]
            yield SavedState(name, len(shape), frozenset(saved), frozenset(placed) - {STEP})

    def _parameter_state(self, named: NamedParameter, entries: object) -> Installer:
        """Matches the saved state of one parameter (rule 2)."""
        parameter, state = named.parameter, self.state
        if named.slices:
            held_now = state_of(self.optimizer).get(parameter, {})
            divided = match_slices(self.builder, named, held_now, state)
            if named.is_idle:  # each rank matches: all find equal differences
                return _nothing
            return lambda: divided() or None
        name = named.names[0]
        where = f"{state}.{name}"
        mine = entries.get(name, {}) if isinstance(entries, dict) else {}
        below = self.builder.saved.under(where)
        if where in self.builder.left_out:
            return lambda: mine or None
        selection = self.builder.selection
        if below and not selection.is_all and not any(entry in selection for entry in below):
            return lambda: mine or None
        saved = self.builder.saved.node(where)
        if isinstance(saved, Missing):
            return _nothing
        self.builder.used.update(below)
        if named.is_idle:  # another rank keeps it
            return _nothing
        is_flat = _is_flat(saved)  # nearly always
        for unknown in () if is_flat else unknown_classes(saved):
            self.builder.differ(
                where,
                "structure",
                f"has tensors of the class {unknown} in the checkpoint, which this program has not "
                "imported; import the class before loading",
            )

        def like(entry: str, record: TensorRecord) -> torch.Tensor:
            key = entry[len(where) + 1 :]
            existing = mine.get(key) if isinstance(mine, dict) else None
            dtype, strides = self.builder.dtype_of(record), record.strides
            if (
                isinstance(existing, torch.Tensor)
                and tuple(existing.shape) == record.shape
                and existing.dtype == dtype
                and _has(existing, strides)
            ):
                return existing
            if record.shape != tuple(parameter.shape) or key == STEP:
                return whole_tensor(record)
            if strides is None or type(parameter) not in ORDINARY:
                return zeros_placed_like(parameter, dtype)
            return torch.empty_strided(record.shape, strides, dtype=dtype, device=parameter.device)

        if is_flat:
            step = self.builder.whole(saved, where, like)
        else:
            step = match_with_blocks(self.builder, parameter, saved, where, like)
        if not isinstance(mine, dict) or not isinstance(saved, dict):
            return step

        def with_own() -> object:
            loaded = step()
            kept = {key: value for key, value in mine.items() if key in saved}
            return kept | loaded if isinstance(loaded, dict) else loaded

        return with_own


@dataclass(frozen=True, slots=True)
class SavedState:
    """The names of the entries that were saved for one parameter."""

    name: str
    dimensions: int
    entries: frozenset[Key]
    placed: frozenset[Key]
    """The entries that have the parameter's shape."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """An entry that a parameter lacks and a similar one, `other`, has."""

    name: str
    entry: Key
    other: str


def lacking_entries(group: Iterable[SavedState]) -> Iterator[Lacking]:
    """Yields the entries that states of one group's parameters lack, by the note of this file.

    >>> moments = frozenset({"exp_avg", "exp_avg_sq"})
    >>> whole = SavedState("up.weight", 2, moments, moments)
    >>> half = SavedState("down.weight", 2, moments - {"exp_avg_sq"}, frozenset({"exp_avg"}))
    >>> list(lacking_entries([whole, half]))
    [Lacking(name='down.weight', entry='exp_avg_sq', other='up.weight')]
    """
    states = [state for state in group if state.entries]
    kinds: dict[tuple[int, frozenset[Key], frozenset[Key]], SavedState] = {}
    for state in states:
        kinds.setdefault((state.dimensions, state.entries, state.placed), state)
    for state in states:
        holders: dict[Key, str] = {}
        for other in kinds.values():
            if other.dimensions == state.dimensions and state.entries < other.entries:
                for entry in other.placed - state.entries:
                    holders.setdefault(entry, other.name)
        for entry in sorted(holders, key=str):
            yield Lacking(state.name, entry, holders[entry])


def _is_flat(entries: object) -> bool:
    """Whether no entry of one parameter's state is a nest, as a tensor that was taken apart is."""
    return isinstance(entries, dict) and not any(
        isinstance(entry, dict | list | tuple) for entry in entries.values()
    )


def _composed(entries: object) -> Any:
    """Returns a copy of one parameter's state with tensors in the place of those taken apart."""
    return {**entries} if isinstance(entries, dict) and _is_flat(entries) else put_together(entries)


def _nothing() -> None:
    """Installs no state of a parameter."""


class Positions(list[int]):
    """The numbers of a group's parameters, one after the other.

    For each entry of the state, torch's `load_state_dict` looks for the number of its parameter in
    each group. In a plain list, that takes a time that grows with the square of the parameters.

    >>> positions = Positions([3, 4, 5])
    >>> 4 in positions, 2 in positions, 6 in positions, "4" in positions
    (True, False, False, False)
    """

    def __contains__(self, number: object) -> bool:
        at = number - self[0] if type(number) is int and self else -1
        return (0 <= at < len(self) and self[at] == number) or super().__contains__(number)


def _has(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> bool:
    """Whether a plain tensor has these strides in all dimensions of more than one element."""
    if strides is None or type(tensor) is not torch.Tensor:
        return True
    found = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or step == other for size, step, other in found)


def _differing_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the options that two groups have with different values."""
    skipped = ("params", "param_names")

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
        return bool(a == b)

    return [
        key
        for key in dict.fromkeys([*one, *other])
        if key not in skipped and not (key in one and key in other and same(one[key], other[key]))
    ]


@dataclass(frozen=True, slots=True)
class _SavedGroup:
    """A parameter group of the checkpoint."""

    names: list[str]
    options: dict[object, Tree]


def _groups_by_position(saved: Tree | Missing) -> dict[int, _SavedGroup]:
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
    kept = state_of(optimizer)
    for index, entries in state.items():
        if not isinstance(entries, dict):
            continue
        now = kept.get(parameters[index], {})
        for key, value in entries.items():
            entry = now.get(key)
            both = isinstance(value, torch.Tensor) and isinstance(entry, torch.Tensor)
            if both and entry.dtype != value.dtype:
                now[key] = value.to(entry.device)
