"""Matches entries of optimizers' states that are no whole tensors: of flat parameters, quantised.

[Note: flat parameters]
One tensor holds slices of several saved tensors. A flat parameter is a part of one parameter, or of
several end to end. Each has a name.

Rules:

1. An entry with the shape of each name's parameter becomes one tensor like the flat parameter. Each
   name fills its slice. The slice of a name without the entry holds zeros, as before a first step.
2. All names share an entry that is a single number or a plain value, so their values must agree.
   The load reads and compares numbers stored as tensors before it changes the target.
3. Any other entry cannot be divided and is a difference.

[Note: quantised state]
The parameter may be divided among ranks (`ckpt.state.subclass_state`).

Rules:

1. If every cut of the target lies between two blocks, each rank gets the codes and scales of its
   part, bit by bit, and makes a tensor of the saved class of them.
2. A cut inside a block is a difference. `dtype="target"` allows a cast: then the ranks get plain
   tensors of the values that the codes stand for. Each rank reads all codes for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ckpt.errors import Difference
from ckpt.match.match_builder import Installer, MatchBuilder, whole_tensor
from ckpt.state.memory import torch_dtype
from ckpt.state.saved import Missing, holds_tensor
from ckpt.state.stateful import STEP
from ckpt.state.subclass_state import (
    CLASS,
    CODES,
    FOLLOWING,
    SCALE,
    Cut,
    layout_of,
    of_shape,
    put_together,
)
from formats.catalog import Key, TensorRecord, TensorRef, Tree, join
from sharding.describe.dtensor import dtensor_like, zeros_placed_like
from sharding.describe.members import FlatSlice, LocalPart, NamedParameter


def match_slices(
    builder: MatchBuilder, named: NamedParameter, entries: Mapping[object, object], path: str
) -> Installer:
    """Matches the state of a flat parameter with the saved state of its names below a path.

    `held` is the parameter's present state.
    """
    saved_slices: list[_Saved] = []
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
            saved_slices.append(_Saved(where, part, saved))
        elif not isinstance(saved, Missing):
            builder.differ(where, "structure", "is not a dict of entries in the checkpoint")
    before = dict(entries) if left_out else {}
    keys = dict.fromkeys(key for each in saved_slices for key in each.entries)
    matching = _Slices(builder, named, entries, saved_slices)
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
                return self._place(key, pairs)
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

    def _place(self, key: Key, pairs: list[tuple[_Saved, TensorRecord]]) -> Installer:
        """Makes a tensor like the flat parameter and an item for each slice (rule 1)."""
        dtype = torch_dtype(pairs[0][1].dtype.torch_name)
        entry, parameter = self.held.get(key), self.named.parameter
        if isinstance(entry, torch.Tensor) and entry.shape == parameter.shape:
            tensor = entry.to(dtype)
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


INNER = "tensors"


Like = Callable[[str, TensorRecord], torch.Tensor]
"""Returns the memory for a tensor, by its name and record."""


def match_with_blocks(
    builder: MatchBuilder, parameter: torch.Tensor, saved: Tree, path: str, like: Like
) -> Installer:
    """Matches the saved state of one parameter, of which any entry may be quantised."""
    if not isinstance(saved, dict) or not hasattr(parameter, "_local_tensor"):
        return builder.whole(saved, path, like)
    blocks = {
        key: _Blocks(builder, parameter, entry, join(path, key)).run()
        for key, entry in saved.items()
        if isinstance(entry, dict) and CLASS in entry and builder.chooses(join(path, key))
    }
    rest = {key: entry for key, entry in saved.items() if key not in blocks}
    step = builder.whole(rest, path, like)

    def install() -> object:
        plain: Any = step()
        return plain | {key: flat() for key, flat in blocks.items()}

    return install


@dataclass(frozen=True, slots=True)
class _Blocks:
    builder: MatchBuilder
    parameter: Any
    """A DTensor."""
    saved: Mapping[Any, Tree]
    path: str

    def run(self) -> Installer:
        shape, records = tuple(self.parameter.shape), dict(self._records())
        saved = self.saved.get("shape")
        is_alike = isinstance(saved, list | tuple) and tuple(saved) == shape
        if not is_alike or not set(records) >= FOLLOWING:
            self.builder.differ(
                self.path,
                "shape",
                f"has the shape {saved!r} and the tensors {', '.join(records)} in the "
                f"checkpoint, the target's parameter has {shape} and is divided among ranks; "
                "load into a model that is not sharded, or leave the entry out with exclude=",
            )
            return lambda: None
        block = prod(shape) // max(1, prod(records[SCALE].shape))
        cut = Cut.of(layout_of(self.parameter, self.path))
        if cut is not None and cut.is_between(max(1, block)):
            return self._by_parts(records, cut)
        if not self.builder.allows_casts:
            self.builder.differ(
                self.path,
                "dtype",
                f"is quantised in blocks of {block} elements in the checkpoint, and the target's "
                f"placements {tuple(self.parameter.placements)} cut inside of blocks; load on a "
                f"number of ranks that divides the rows of {shape} into whole blocks, or pass "
                "dtype='target' for plain tensors of the values that the codes stand for",
            )
            return lambda: None
        return self._plain(records)

    def _records(self) -> Iterator[tuple[str, TensorRecord]]:
        inner = self.saved.get(INNER)
        for name, ref in inner.items() if isinstance(inner, dict) else ():
            if isinstance(ref, TensorRef):
                yield str(name), self.builder.saved.catalog.tensors[ref.name]

    def _by_parts(self, records: Mapping[str, TensorRecord], cut: Cut) -> Installer:
        """Fills the inner tensors of this rank's part (rule 1)."""
        local = self.parameter._local_tensor
        parts = {name: self._part(name, record, local, cut) for name, record in records.items()}

        def install() -> object:
            shape, stride = tuple(local.shape), tuple(local.stride())
            return dtensor_like(self.parameter, self._make(parts, shape, stride))

        return install

    def _part(self, name: str, record: TensorRecord, local: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Returns the memory of an inner tensor of this rank's part, which the load fills."""
        path = join(join(self.path, INNER), name)
        if name not in FOLLOWING:
            tensor = whole_tensor(record).to(local.device)
            self.builder.fill(path, record, tensor)
            return tensor
        dtype = torch_dtype(record.dtype.torch_name)
        if name == CODES and record.shape == cut.layout.shape:
            tensor = torch.zeros(local.shape, dtype=dtype, device=local.device)
            self.builder.fill(path, record, LocalPart(tensor, cut.layout))
            return tensor
        elements = cut.layout.numel // max(1, prod(record.shape))
        tensor = torch.zeros(local.numel() // max(1, elements), dtype=dtype, device=local.device)
        self.builder.fill(path, record, LocalPart(tensor, cut.entries(elements)))
        return tensor

    def _plain(self, records: Mapping[str, TensorRecord]) -> Installer:
        """Fills whole inner tensors, and takes this rank's part of their values (rule 2)."""
        whole = {name: whole_tensor(record) for name, record in records.items()}
        for name, record in records.items():
            self.builder.fill(join(join(self.path, INNER), name), record, whole[name])
        shape, local = tuple(self.parameter.shape), self.parameter._local_tensor
        layout = layout_of(self.parameter, self.path)
        rank = self.parameter.device_mesh.get_rank()

        def install() -> object:
            values = self._make(whole, shape, self.parameter.stride()).dequantize().flatten()
            flat = torch.zeros(local.numel(), dtype=values.dtype)
            for piece in layout.pieces(rank):
                box, strides = piece.box.shape, torch.empty(shape, device="meta").stride()
                at = sum(lo * step for lo, step in zip(piece.box.lo, strides, strict=True))
                flat.as_strided(box, piece.strides, piece.at).copy_(
                    values.as_strided(box, strides, at)
                )
            return dtensor_like(self.parameter, flat.view(local.shape).to(local.device))

        return install

    def _make(self, tensors: Mapping[str, Any], shape: Any, stride: Any) -> Any:
        """Returns a tensor of the saved class with these inner tensors."""
        step = self.builder.whole(self.saved["context"], join(self.path, "context"))
        context = of_shape(step(), tuple(self.parameter.shape), tuple(shape))
        nest = {CLASS: self.saved[CLASS], "context": context, "shape": shape, "stride": stride}
        return put_together({**nest, INNER: dict(tensors)})
