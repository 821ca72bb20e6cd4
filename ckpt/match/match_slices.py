"""State of a parameter that is a part of one, or of several end to end: tensors filled in slices.

Rules:

1. An entry that was saved in each name's shape becomes one tensor like what the optimizer sees, and
   each name fills its slice. A name without the entry has zeros there, as before its first step.
2. An entry that is a single number or a plain value is one for all names, so they must agree.
   Numbers stored as tensors are read, and compared, before anything of the target is touched.
3. Anything else cannot be divided and is a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from ckpt.errors import Difference
from ckpt.match.match_builder import Installer, MatchBuilder, whole_tensor
from ckpt.state.memory import torch_dtype
from ckpt.state.saved import Missing, holds_tensor, join
from ckpt.state.stateful import STEP
from formats.catalog import Key, TensorRecord, TensorRef, Tree
from sharding.describe.dtensor import zeros_placed_like
from sharding.describe.local_part import FlatSlice
from sharding.describe.members import NamedParameter


def match_slices(
    builder: MatchBuilder, named: NamedParameter, held: Mapping[object, object], path: str
) -> Installer:
    """Match the state of a parameter with what was saved below a path for its names.

    `held` is the state that it has now.
    """
    found: list[_Saved] = []
    left_out = False
    for name, part in zip(named.names, named.slices, strict=True):
        where = join(path, name)
        below = builder.saved.under(where)
        if below and not any(entry in builder.selection for entry in below):
            left_out = True
            continue
        saved = builder.saved.node(where)
        builder.used.update(below)
        if isinstance(saved, dict):
            found.append(_Saved(where, part, saved))
        elif not isinstance(saved, Missing):
            builder.differ(where, "structure", "is no dict of entries in the checkpoint")
    before = dict(held) if left_out else {}
    keys = dict.fromkeys(key for each in found for key in each.entries)
    matching = _Slices(builder, named, held, found)
    steps = {key: matching.entry(key) for key in keys}
    return lambda: before | {key: step() for key, step in steps.items()}


@dataclass(frozen=True, slots=True)
class _Saved:
    """What was saved for one of the names."""

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
        """One entry of the state, from all names that have it."""
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
            self.builder.differ(first, "structure", f"differs from another's; {self._advice()}")
            return lambda: mine
        self.builder.differ(
            first,
            "structure",
            f"is neither a number nor of the shape of its parameter, {having[0].part.layout.shape}"
            f": it cannot be divided among ranks; {self._advice()}",
        )
        return lambda: mine

    def _placed(self, key: Key, pairs: list[tuple[_Saved, TensorRecord]]) -> Installer:
        """A tensor like the parameter, filled in slices (rule 1)."""
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
        """A number that all names agree on (rule 2)."""
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
            return "load it into a model that is not sharded, or leave it out with exclude="
        return f"one flat parameter has these {count}: wrap with use_orig_params=True"
