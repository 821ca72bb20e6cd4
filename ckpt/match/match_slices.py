"""Matches the state of a flat parameter: one tensor holds slices of several saved tensors.

A flat parameter is a part of one parameter, or of several end to end. Each has a name.

Rules:

1. An entry with the shape of each name's parameter becomes one tensor like the flat parameter. Each
   name fills its slice. The slice of a name without the entry holds zeros, as before a first step.
2. All names share an entry that is a single number or a plain value, so their values must agree.
   The load reads and compares numbers stored as tensors before it changes the target.
3. Any other entry cannot be divided and is a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from ckpt.errors import Difference
from ckpt.match.match_builder import Installer, MatchBuilder, whole_tensor
from ckpt.state.memory import torch_dtype
from ckpt.state.saved import Missing, holds_tensor
from ckpt.state.stateful import STEP
from formats.catalog import Key, TensorRecord, TensorRef, Tree, join
from sharding.describe.dtensor import zeros_placed_like
from sharding.describe.local_part import FlatSlice
from sharding.describe.members import NamedParameter


def match_slices(
    builder: MatchBuilder, named: NamedParameter, held: Mapping[object, object], path: str
) -> Installer:
    """Matches the state of a flat parameter with the saved state of its names below a path.

    `held` is the parameter's present state.
    """
    found: list[_Saved] = []
    left_out = False
    for name, part in zip(named.names, named.slices, strict=True):
        where = join(path, name)
        below = builder.saved.under(where)
        is_chosen = not below or any(entry in builder.selection for entry in below)
        if where in builder.left_out or not is_chosen:
            left_out = True
            continue
        saved = builder.saved.node(where)
        builder.used.update(below)
        if isinstance(saved, dict):
            found.append(_Saved(where, part, saved))
        elif not isinstance(saved, Missing):
            builder.differ(where, "structure", "is not a dict of entries in the checkpoint")
    before = dict(held) if left_out else {}
    keys = dict.fromkeys(key for each in found for key in each.entries)
    matching = _Slices(builder, named, held, found)
    steps = {key: matching.entry(key) for key in keys}
    return lambda: before | {key: step() for key, step in steps.items()}


@dataclass(frozen=True, slots=True)
class _Saved:
    """The saved state of one name."""

    where: str
    part: FlatSlice
    entries: Mapping[Key, Tree]


@dataclass(frozen=True, slots=True)
class _Slices:
    builder: MatchBuilder
    named: NamedParameter
    held: Mapping[object, object]
    found: list[_Saved]

    def entry(self, key: Key) -> Installer:
        """Matches one entry of the state, from all names that have it."""
        mine = self.held.get(key)
        every = [each for each in self.found if each.entries.get(key) is not None]
        having = [each for each in every if join(each.where, key) in self.builder.selection]
        if not having:
            return lambda: mine if every else None
        trees = [each.entries[key] for each in having]
        records = [self._record(tree) for tree in trees if isinstance(tree, TensorRef)]
        first = join(having[0].where, key)
        if len(records) == len(trees):
            pairs = list(zip(having, records, strict=True))
            if key != STEP and all(r.shape == each.part.layout.shape for each, r in pairs):
                return self._placed(key, pairs)
            if all(prod(record.shape) == 1 for record in records):
                return self._number(key, pairs)
        elif not records and not any(map(holds_tensor, trees)):
            if all(tree == trees[0] for tree in trees):
                return self.builder.whole(trees[0], first)
            self.builder.differ(
                first, "structure", f"differs from another parameter's; {self._advice()}"
            )
            return lambda: mine
        self.builder.differ(
            first,
            "structure",
            f"is neither a number nor of the shape of its parameter, {having[0].part.layout.shape}"
            f": it cannot be divided among ranks; {self._advice()}",
        )
        return lambda: mine

    def _placed(self, key: Key, pairs: list[tuple[_Saved, TensorRecord]]) -> Installer:
        """Makes a tensor like the flat parameter and an item for each slice (rule 1)."""
        dtype = torch_dtype(pairs[0][1].dtype.torch_name)
        held, parameter = self.held.get(key), self.named.parameter
        if isinstance(held, torch.Tensor) and held.shape == parameter.shape:
            tensor = held.to(dtype)
        else:
            tensor = zeros_placed_like(parameter, dtype)
        for each, record in pairs:
            self.builder.fill(join(each.where, key), record, each.part.of(tensor))
        return lambda: tensor

    def _number(self, key: Key, pairs: list[tuple[_Saved, TensorRecord]]) -> Installer:
        """Makes a preflight scalar for each name, and a check that all are equal (rule 2)."""
        read: dict[str, tuple[str, torch.Tensor]] = {}
        for each, record in pairs:
            if record.name not in read:
                where, tensor = join(each.where, key), whole_tensor(record)
                read[record.name] = where, tensor
                self.builder.preflight_scalars.append(self.builder.item(where, record, tensor))
        (first, number), *others = read.values()

        def check() -> Difference | None:
            for where, other in others:
                if other.item() != number.item():
                    return Difference(
                        where,
                        "structure",
                        f"is {other.item()} in the checkpoint and {first} is {number.item()}; "
                        f"{self._advice()}",
                    )
            return None

        self.builder.checks.append(check)
        return lambda: number

    def _record(self, ref: TensorRef) -> TensorRecord:
        return self.builder.saved.catalog.tensors[ref.name]

    def _advice(self) -> str:
        count = len(self.named.names)
        if count == 1:
            return "load into a model that is not sharded, or leave the entry out with exclude="
        return f"one flat parameter holds {count} parameters: wrap with use_orig_params=True"
