"""Finds parameters and their optimizer state in the flat partitions of ZeRO.

The files are zips of torch.save whose content is a dict. A file chooses each value, so every value
is checked where it is taken out. Rules, which are those of deepspeed/utils/zero_to_fp32.py:

1. Stages 1 and 2: a group of parameters is one row of elements, in the order of `param_shapes`.
   Behind each parameter there may be padding (`param_alignment_paddings`), and at most `2 * ranks`
   elements of it behind all. Each rank has consecutive elements of the row. Padding may be cut off
   the last partitions of the weights and not off those of the state.
2. Stage 3: each parameter is divided by the number of ranks, rounded up. A rank has the parts of a
   group's parameters end to end.
3. State that is a tensor without dimensions, or a number that all ranks have, belongs to all
   parameters of the group. Any other state has no published layout. It stays with its rank.
4. A `Line` is a row of elements, end to end, in storages of several zips. A tensor's row-major
   elements are dealt out to lines in equal shares, the last of which may be shorter. All of its
   shares begin at one place of their lines. The pieces are computed on demand: a table would have a
   row for each tensor, rank and state.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import NamedTuple

from formats.catalog import Key, StoredPiece, TensorRecord, Tree
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import ELEMENTS
from formats.pickles.machine import load
from formats.pickles.records import StoredTensor, is_shape
from formats.pickles.tree import KeyPath, Nest, format_path
from formats.storage import Reader
from formats.zip_records import DATA_PICKLE, Archive
from sharding.layout import Box, Piece, row_major, span_boxes

WEIGHTS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
"""The master weights in stages up to 2, and in stage 3."""
Nested = dict[Key, Tree]
"""A dict of the tree."""
STATES = ("base_optimizer_state", "optimizer_state_dict")
"""The state of the torch optimizer in stages up to 2, and in stage 3."""
_PLAIN = (int, float, bool, str, type(None))
_OF_LAYOUT = frozenset({*WEIGHTS, *STATES, "param_groups"}) | {
    *("param_slice_mappings", "group_paddings", "param_alignment_paddings"),
    *("ds_zero_partition_groups", "fp32_groups"),
}
"""Keys of an optimizer's file that are represented by tensors and their names."""


@dataclass(frozen=True, slots=True)
class States:
    """The trained parameters and the state of the optimizer."""

    fp32: Nested = field(default_factory=dict)
    """By parameter, in the order of the files."""
    state: dict[str, Nested] = field(default_factory=dict)
    """By parameter and key."""
    groups: list[Nested] = field(default_factory=list)
    """The options of the optimizer, with the names of parameters as `params`."""
    values: Nested = field(default_factory=dict)
    """Other values of the optimizer's file."""

    def own_steps(self) -> None:
        """Gives each parameter with state the step of its group, unless it has one.

        DeepSpeed's fused optimizers count steps by group, torch's by parameter.
        """
        for group in self.groups:
            members = group["params"] if "step" in group else []
            for name in members if isinstance(members, list) else []:
                if isinstance(name, str) and self.state.get(name):
                    self.state[name].setdefault("step", group["step"])


def zero_states(nest: Nest, files: Sequence[File], groups: Sequence[Shapes]) -> States:
    """Returns the states in the optimizer files of all ranks, which are in the order of ranks.

    Raises:
        CorruptError: files are missing.
        FormatError: the partitions do not hold the parameters.
        UnsupportedError: the layout of the state is not one of the rules above.
    """
    states = States()
    partitions = _Partitions(nest, files)
    partitions.check(groups)
    for number, shapes in enumerate(groups):
        _add_group(partitions, number, shapes, states)
    names = [list(shapes) for shapes in groups]
    states.groups.extend(option_groups(nest, files[0], partitions.options(), names))
    states.own_steps()
    states.values.update(other_values(nest, files[0], partitions.contents[0]))
    return states


def option_groups(
    nest: Nest, file: File, options: Sequence[object], names: Sequence[Sequence[str]]
) -> Iterator[Nested]:
    """Yields the optimizer's groups. Their `params` number the rows of elements, end to end."""
    first = 0
    for at, group in enumerate(options):
        if not isinstance(group, dict):
            raise file.unlike("dict", group, "param_groups", at)
        last = first + len(file.items(group, "params"))
        rest = {key: value for key, value in group.items() if key != "params"}
        path = ("optimizer", "param_groups", at)
        members: list[Tree] = [name for row in names[first:last] for name in row]
        yield {**dict_of(file, nest.tree(rest, path, file.archive)), "params": members}
        first = last


def other_values(nest: Nest, file: File, holder: dict[object, object]) -> Nested:
    """Returns the values of an optimizer that describe no tensor."""
    rest = {key: value for key, value in holder.items() if key not in _OF_LAYOUT}
    return dict_of(file, nest.tree(rest, ("zero",), file.archive))


def dict_of(file: File, tree: Tree) -> Nested:
    """Returns the tree of a dict. Raises FormatError if its keys are not text or numbers."""
    if isinstance(tree, dict):
        return tree
    raise file.unlike("dict with names", tree)


class _Partitions:
    """The optimizer files of all ranks."""

    def __init__(self, nest: Nest, files: Sequence[File]) -> None:
        self.nest, self.files = nest, files
        self.contents = [file.part("optimizer_state_dict") for file in files]
        self.stage_3 = WEIGHTS[1] in self.contents[0]
        key = WEIGHTS[self.stage_3]
        if key not in self.contents[0]:
            raise UnsupportedError(
                f"{files[0].name}: neither {WEIGHTS[0]} nor {WEIGHTS[1]} is in it; load the "
                "checkpoint with DeepSpeed and save it again, without elastic checkpoints"
            )
        self.weights = [
            [segment(file.archive, each, f"{key}[{at}]") for at, each in enumerate(row)]
            for file, row in zip(files, self._rows(key), strict=True)
        ]
        self.states = [self._states(rank) for rank in range(len(files))]

    def check(self, groups: Sequence[Shapes]) -> None:
        """Raises unless all ranks are there, with as many partitions as there are groups."""
        ranks = self.contents[0].get("partition_count")
        counts = set(ranks) if isinstance(ranks, list) else {ranks}
        if len(counts) > 1:
            raise UnsupportedError(
                f"{self.files[0].name}: its groups are divided by {sorted(map(str, counts))} "
                "ranks, as for experts; convert it with deepspeed.checkpoint.ds_to_universal"
            )
        if counts != {len(self.files)}:
            raise CorruptError(
                f"{self.files[0].name}: {counts.pop()} ranks saved their parts of the optimizer, "
                f"files of {len(self.files)} are there; copy the others too"
            )
        for file, row, states in zip(self.files, self.weights, self.states, strict=True):
            if (
                len(row) != len(groups)
                or len(states) not in (0, len(groups))
                or (len(states) != len(self.states[0]))
            ):
                raise FormatError(
                    f"{file.name}: {len(row)} flat partitions and {len(states)} states, the "
                    f"model's file has {len(groups)} groups of parameters"
                )

    def gaps(self, number: int, parameters: int) -> list[int]:
        """Returns the padding behind each parameter of a group; none if it has no padding there."""
        file, every = self.files[0], self.contents[0].get("param_alignment_paddings")
        if every is None:
            return []
        rows = file.items({"gaps": every}, "gaps")
        items = file.items({"gaps": rows[number]}, "gaps") if number < len(rows) else []
        if len(items) == parameters:
            gaps = [each for each in items if type(each) is int and 0 <= each < ELEMENTS]
            if len(gaps) == parameters:
                return gaps
        raise file.unlike("padding for each parameter", items, "param_alignment_paddings", number)

    def segments(self, values: Sequence[object], key: str) -> list[Segment]:
        """Returns the state of all ranks as parts of lines; none if its form is another one."""
        if not all(isinstance(value, StoredTensor) and len(value.shape) == 1 for value in values):
            return []
        each = zip(self.files, values, strict=True)
        return [segment(file.archive, value, f"the state {key!r:.200}") for file, value in each]

    def keep(self, found: States, number: int, key: str, values: Sequence[object]) -> None:
        """Adds state without a published layout under the names of its ranks (rule 3)."""
        by_rank = dict_of(self.files[0], found.values.setdefault("state of ranks", {}))
        for rank, (file, value) in enumerate(zip(self.files, values, strict=True)):
            path = ("zero", "state of ranks", rank, number, key)
            by_group = dict_of(file, by_rank.setdefault(rank, {}))
            of_group = dict_of(file, by_group.setdefault(number, {}))
            of_group[key] = self.nest.tree(value, path, file.archive)

    def options(self) -> list[object]:
        """Returns the groups of the optimizer with their options; one for each row if unknown."""
        base = self._base(0)
        if isinstance(base, dict):
            return self.files[0].items(base, "param_groups")
        return [{"params": [at]} for at in range(len(self.weights[0]))]

    def _rows(self, key: str) -> list[list[object]]:
        each = zip(self.files, self.contents, strict=True)
        return [file.items(content, key) for file, content in each]

    def _base(self, rank: int) -> object:
        return self.contents[rank].get(STATES[self.stage_3])

    def _states(self, rank: int) -> list[dict[object, object]]:
        """Returns the state of each row of elements on a rank; none if it was not saved."""
        file, base = self.files[rank], self._base(rank)
        if base is None:
            return []
        if not isinstance(base, dict):  # an elastic checkpoint
            return [_state(file, each) for each in file.items({"state": base}, "state")]
        state = base.get("state")
        if not isinstance(state, dict):
            raise file.unlike("dict", state, "state")
        groups = [_state(file, group) for group in file.items(base, "param_groups")]
        numbers = [each for group in groups for each in file.items(group, "params")]
        # Before the first step the state is empty.
        return [_state(file, state.get(number, {})) for number in numbers if type(number) is int]


def _state(file: File, value: object) -> dict[object, object]:
    if isinstance(value, dict):
        return value
    raise file.unlike("dict", value, "state")


def _add_group(partitions: _Partitions, number: int, shapes: Shapes, found: States) -> None:
    gaps = partitions.gaps(number, len(shapes))
    rows = _Rows(shapes, gaps, len(partitions.files), partitions.stage_3)
    weights = rows.lines([row[number] for row in partitions.weights])
    rows.check(weights, f"{partitions.files[0].name}: group {number}")
    for name, tensor in rows.place(partitions.nest, weights, ("fp32",), ()):
        found.fp32[name] = tensor
        found.state[name] = {}
    states = [row[number] for row in partitions.states if row]
    for key in dict.fromkeys(key for state in states for key in state):
        values = [state.get(key) for state in states]
        lines = rows.lines(partitions.segments(values, str(key)))
        if lines and rows.is_like(lines, weights):
            for name, tensor in rows.place(partitions.nest, lines, ("optimizer", "state"), (key,)):
                found.state[name][str(key)] = tensor
        elif not belongs_to_all(values):
            partitions.keep(found, number, str(key), values)
        else:
            for name in shapes:
                where = ("optimizer", "state", name, key)
                tree = partitions.nest.tree(values[0], where, partitions.files[0].archive)
                found.state[name][str(key)] = tree


def belongs_to_all(values: Sequence[object]) -> bool:
    """Whether the state of all ranks belongs to all parameters of a group (rule 3)."""
    if all(isinstance(value, StoredTensor) and not value.shape for value in values):
        return True
    return type(values[0]) in _PLAIN and all(value == values[0] for value in values)


class _Rows:
    """The places of a group's parameters in its row of elements, or in the rows of all ranks."""

    def __init__(self, shapes: Shapes, gaps: Sequence[int], ranks: int, stage_3: bool) -> None:
        """`gaps` has the elements of padding behind each parameter; empty if there is none."""
        self._shapes, self._ranks, self._stage_3 = shapes, ranks, stage_3
        numels = [prod(shape) for shape in shapes.values()]
        self._shares = [-(-numel // ranks) if stage_3 else numel for numel in numels]
        self._gaps = list(gaps) or [0] * len(numels)
        self._total = sum(self._shares) + sum(self._gaps)

    def lines(self, segments: Sequence[Segment]) -> list[Line]:
        """Returns the ranks' partitions as one line, in stage 3 as a line for each rank."""
        if not segments:
            return []
        return [Line([each]) for each in segments] if self._stage_3 else [Line(segments)]

    def check(self, lines: Sequence[Line], where: str) -> None:
        """Raises FormatError unless the lines have the parameters' elements, and little padding."""
        align = 1 if self._stage_3 else 2 * self._ranks
        for line in lines:
            if line.numel < self._total or -(-line.numel // align) != -(-self._total // align):
                raise FormatError(
                    f"{where}: the flat partitions have {line.numel} elements, the parameters "
                    f"{self._total}: files of several checkpoints are mixed, or one is incomplete"
                )

    def is_like(self, lines: Sequence[Line], weights: Sequence[Line]) -> bool:
        """Whether lines are divided like those of the weights, up to padding (rule 1)."""
        return all(
            line.numel >= self._total
            and all(
                one == other or min(one, other) >= self._total
                for one, other in zip(line.starts, weight.starts, strict=True)
            )
            for line, weight in zip(lines, weights, strict=True)
        )

    def place(
        self, nest: Nest, lines: Sequence[Line], before: KeyPath, after: KeyPath
    ) -> Iterator[tuple[str, Tree]]:
        """Adds the parameters to the nest, and yields their names with their tensors."""
        offset = 0
        for name, share, gap in zip(self._shapes, self._shares, self._gaps, strict=True):
            shape = self._shapes[name]
            pieces = FlatPieces(shape, lines, offset, share)
            full = nest.claim((*before, name, *after))
            yield name, nest.place(full, TensorRecord(full, shape, lines[0].dtype, pieces))
            offset += share + gap


class Segment(NamedTuple):
    """A one-dimensional packed tensor of a zip: consecutive elements of a line."""

    archive: Archive
    tensor: StoredTensor

    @property
    def numel(self) -> int:
        return self.tensor.shape[0]


class Line:
    """Segments end to end. Raises FormatError if their dtypes differ."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.dtype: DType = segments[0].tensor.dtype
        self.starts = [0, *accumulate(segment.numel for segment in segments)]
        for segment in segments:
            if segment.tensor.dtype != self.dtype:
                raise FormatError(
                    f"{segment.archive.where}: a flat partition has the dtype "
                    f"{segment.tensor.dtype}, that of another rank {self.dtype}"
                )

    @property
    def numel(self) -> int:
        return self.starts[-1]

    def between(self, lo: int, hi: int) -> range:
        """Returns the numbers of the segments from the one with element `lo` on, before `hi`."""
        return range(bisect_right(self.starts, lo) - 1, bisect_left(self.starts, hi))


class FlatPieces:
    """The pieces of one tensor in flat partitions (rule 2)."""

    def __init__(
        self, shape: tuple[int, ...], lines: Sequence[Line], offset: int, share: int
    ) -> None:
        """Share `i` has `share` elements and lies in `lines[i]` from `offset` on."""
        self._shape, self._lines, self._offset = shape, lines, offset
        self._share = max(1, share)
        self._strides = row_major(shape)
        self._numel = prod(shape)

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        if box:
            last = tuple(hi - 1 for hi in box.hi)
            for stored in self._between(self._index(box.lo), self._index(last) + 1):
                if stored.piece.box & box:
                    yield stored

    def __iter__(self) -> Iterator[StoredPiece]:
        return self._between(0, self._numel)

    def _between(self, lo: int, hi: int) -> Iterator[StoredPiece]:
        """Yields the pieces of the segments that have any of the row-major elements `[lo, hi)`."""
        for number in range(lo // self._share, -(-hi // self._share) if lo < hi else 0):
            line, begins = self._lines[number], number * self._share
            ends = min(self._numel, begins + self._share)
            back = self._offset - begins
            for at in line.between(max(lo, begins) + back, min(hi, ends) + back):
                start, stop = line.starts[at] - back, line.starts[at + 1] - back
                yield from self._boxes(
                    line.segments[at], start, max(start, begins), min(stop, ends)
                )

    def _boxes(self, segment: Segment, start: int, lo: int, hi: int) -> Iterator[StoredPiece]:
        """Yields the elements `[lo, hi)` of the tensor; the segment begins at its `start`."""
        if lo < hi:
            extent = segment.archive.extent(f"data/{segment.tensor.storage.key}")
            for box in span_boxes(self._shape, lo, hi):
                at = segment.tensor.at + self._index(box.lo) - start
                yield StoredPiece(Piece(box, at, self._strides), extent)

    def _index(self, place: tuple[int, ...]) -> int:
        return sum(i * stride for i, stride in zip(place, self._strides, strict=True))


def segment(archive: Archive, value: object, name: str) -> Segment:
    """Returns a tensor of a zip as a segment. `name` is that of the entry, for messages.

    Raises:
        FormatError: the value is not a packed tensor of one dimension.
        CorruptError: its storage is missing from the zip or has another size.
    """
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or not _is_packed(value):
        raise FormatError(f"{archive.where}: {name} is not a packed tensor of one dimension")
    if value.shape[0]:
        found = archive.record(f"data/{value.storage.key}").nbytes
        if found != value.storage.nbytes:
            raise CorruptError(
                f"{archive.where}: the storage of {name} has {value.storage.nbytes} bytes by the "
                f"pickle, {found} by the zip; restore it from another copy"
            )
    return Segment(archive, value)


def _is_packed(tensor: StoredTensor) -> bool:
    return tensor.shape[0] < 2 or tensor.strides == (1,)


Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters by name, in the order of their elements."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of torch.save, opened."""

    name: str
    size: int
    archive: Archive
    content: object
    pickle_bytes: int

    def part(self, *path: str) -> dict[object, object]:
        """Returns the dict at a key path. Raises FormatError if another value is there."""
        found = self.content
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
        raise self.unlike("dict", found, *path)

    def items(self, holder: Mapping[object, object], key: str) -> list[object]:
        """Returns the list of a dict. Raises FormatError if another value is there."""
        found = holder.get(key)
        if isinstance(found, list | tuple):
            return list(found)
        raise self.unlike("list", found, key)

    def unlike(self, kind: str, found: object, *path: object) -> FormatError:
        return FormatError(
            f"{self.name}: {format_path(path)} is a {type(found).__name__}, DeepSpeed "
            f"stores a {kind} "
            "there"
        )


def open_file(reader: Reader, name: str) -> File:
    """Opens a file and reads its pickle, no tensor. Raises as `formats.torch_save.read` does."""
    archive = Archive(reader, name)
    pickled = archive.read(DATA_PICKLE)
    return File(name, reader.size(name), archive, load(pickled, name), len(pickled))


def shapes_of(file: File, value: object, *path: object) -> Shapes:
    """Returns a table of shapes.

    Raises FormatError for another value, HostileError for more elements than torch can count.
    """
    if not isinstance(value, dict):
        raise file.unlike("table of shapes", value, *path)
    for name, shape in value.items():
        if type(name) is not str or not is_shape(shape):
            raise file.unlike("name with a shape", shape, *path, name)
        if prod(size or 1 for size in shape) >= ELEMENTS:
            raise HostileError(
                f"{file.name}: {format_path((*path, name))} has more elements than torch can count"
            )
    return value


def groups_of(file: File) -> list[Shapes]:
    """Returns the shapes of the trained parameters by group; none if ZeRO is off."""
    if file.part().get("param_shapes") is None:
        return []
    groups = file.items(file.part(), "param_shapes")
    return [shapes_of(file, each, "param_shapes", at) for at, each in enumerate(groups)]
