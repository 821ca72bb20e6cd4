"""Matches saved parameter groups with an optimizer's groups, by their parameters.

Rules:

1. The result has the optimizer's own groups, in its order, each with the saved options of its
   parameters, which must have been in one group. If the optimizer is not known, the result has the
   saved groups.
2. The optimizer has exactly the parameters that were saved. A parameter without state is also in a
   group. Only a parameter that no unit divides may be lacking, as in torch: the result lacks it
   too, and a caller who keeps its state elsewhere adds its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from sharding.errors import OptimizerMismatchError, listed
from sharding.fsdp1.optim_keys import SHOWN, Key, Keyed, OptimState, options_of


@dataclass(frozen=True, slots=True)
class SavedGroups:
    """The groups that were saved: their parameters by name, and their options."""

    names: Sequence[Sequence[str]]
    options: Sequence[Mapping[str, Any]]
    group_of: Mapping[str, int]
    """The index of each parameter's group, by name."""

    @classmethod
    def of(cls, saved: OptimState, first: Mapping[str, str]) -> SavedGroups | None:
        """Returns a state dict's groups, with parameters by first names; None without groups."""
        if "param_groups" not in saved:
            return None
        groups = saved["param_groups"]
        names = [[first.get(name, name) for name in group["params"]] for group in groups]
        group_of = {name: index for index, each in enumerate(names) for name in each}
        return cls(names, [options_of(group) for group in groups], group_of)

    def beside(self, name: str) -> Sequence[str]:
        """Returns the names in the same group."""
        return self.names[self.group_of[name]] if name in self.group_of else ()

    def check_names(self, known: Keyed, first: Mapping[str, str]) -> None:
        """Raises if the groups have other parameters than the optimizer (rule 2)."""
        mine = known.key_of()
        strange = [name for name in self.group_of if name not in first]
        elsewhere = [name for name in self.group_of if name in first and name not in mine]
        lacking = [
            name
            for name, key in mine.items()
            if name not in self.group_of and not known.is_unmanaged(key)
        ]
        if known.groups is None:  # the optimizer may have fewer, but all or none of a flat one
            used = {mine[name] for name in self.group_of if name in mine}
            lacking = [name for name in lacking if mine[name] in used]
        complaints = [
            (strange, "are of parameters that the module does not have"),
            (elsewhere, "are of parameters that the optimizer does not have"),
            (lacking, "are lacking, which the optimizer has"),
        ]
        if any(names for names, _ in complaints):
            said = "; ".join(
                f"{listed(names, SHOWN)} {what}" for names, what in complaints if names
            )
            hint = ""
            if any(isinstance(name, int) for name in strange):
                hint = "; these are positions: rekey_optim_state_dict makes names of them"
            raise OptimizerMismatchError(
                f"the groups of the optimizer's state are not those of this optimizer: {said}"
                f"{hint}",
                names=[str(name) for names, _ in complaints for name in names],
            )

    def matched(self, known: Keyed, optim: Optimizer | None) -> list[dict[str, Any]]:
        """Returns the groups with keys for parameters. Raises if one group was several (rule 1)."""
        if known.groups is None:
            return self._as_saved(known)
        matched = []
        for position, members in enumerate(known.groups):
            own = {} if optim is None else optim.param_groups[position]
            index = self._one_of(members, known)
            saved = {} if index is None else self.options[index]
            options = {key: value for key, value in own.items() if key != "params"}
            there = [key for key in members if not self._is_left_out(key, known)]
            matched.append({**deepcopy({**options, **saved}), "params": there})
        return matched

    def _is_left_out(self, key: Key, known: Keyed) -> bool:
        """Whether a parameter that no unit divides was not saved (rule 2)."""
        names = known.parameters[key].names
        return known.is_unmanaged(key) and self.group_of.keys().isdisjoint(names)

    def _as_saved(self, known: Keyed) -> list[dict[str, Any]]:
        mine = known.key_of()
        order = {key: position for position, key in enumerate(known.parameters)}
        groups = []
        for names, options in zip(self.names, self.options, strict=True):
            keys = sorted({mine[name] for name in names}, key=order.__getitem__)
            for key in keys:
                self._one_of([key], known)
            groups.append({**deepcopy(dict(options)), "params": keys})
        return groups

    def _one_of(self, keys: Sequence[Key], known: Keyed) -> int | None:
        """Returns the one saved group of these parameters; None without parameters."""
        names = [name for key in keys for name in known.parameters[key].names]
        found = {self.group_of[name]: name for name in names if name in self.group_of}
        if len(found) > 1:
            raise OptimizerMismatchError(
                "parameters of one group of the optimizer, or of one flat parameter, were in "
                f"several groups when it was saved: {found}; give the optimizer the same groups"
            )
        return next(iter(found), None)
