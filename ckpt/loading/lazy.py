"""Lazy reading: an open checkpoint has all names, and reads tensors and slices on demand."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from operator import index as as_int
from types import EllipsisType
from typing import TYPE_CHECKING, cast
from warnings import warn
from weakref import finalize

import numpy as np
import torch

from ckpt.arguments import Uncopied, memory_budget
from ckpt.display import SHOWN_ROWS, count, html_table, printable, size
from ckpt.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    TensorIndexError,
    UnknownNameError,
    UnverifiedWarning,
)
from ckpt.mapping.changes import Changes, MappingName, changes_of
from ckpt.opening.sources import COMPARED, Source, open_source, unless_replaced
from ckpt.plan.read_plan import BoxCopies, ReadRequest, requests_for
from ckpt.state.memory import check_range, empty_for, memory_of, torch_dtype
from ckpt.state.patterns import Casts, Selection, map_selected
from ckpt.state.saved import names_of
from ckpt.state.typed_values import restore_value, with_versions
from ckpt.stores.store import Options
from ckpt.transfer.read import read_requests
from ckpt.transfer.record_sums import Verify, check_verify
from formats.catalog import Catalog, TensorRecord, TensorRef, Tree, map_tree
from formats.errors import UnsupportedError
from formats.storage import LOCAL_READ_BYTES, Reader
from sharding.agreement.call_events import pause_collection
from sharding.errors import without_secrets
from sharding.layout import Box, Layout, Piece

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["Checkpoint", "TensorHandle", "open", "read"]

Rows = Sequence[int] | np.ndarray | torch.Tensor
"""Numbers of rows, in any order; a row may come several times."""
Index = int | slice | EllipsisType | Rows | tuple[int | slice | EllipsisType | Rows, ...]
KEPT_BYTES = 16 << 20
"""The most bytes that an open checkpoint on a server keeps for later calls."""
KEPT_READS = 1024
MOST_KEPT_BYTES = 1 << 20
"""The largest read that is kept."""


def open(
    url: str | os.PathLike[str],
    *,
    mapping: MappingName | Sequence[MappingName] = (),
    parameters: Mapping[str, int] | None = None,
    verify: Verify = True,
    storage_options: Options = None,
) -> Checkpoint:
    """Opens the checkpoint at a path or URL, of any format, and reads only its description.

    One process can call this; no process group is involved.

    Args:
        mapping, parameters: changes of names and shapes, as for `ckpt.convert`. For a
            folder of a training they apply to its weights. A handle reads only the bytes that its
            elements need.
        verify: True compares the checksum of each chunk that a read touches, and so reads whole
            chunks of 64 KiB. False reads the exact bytes. torch.save and DCP have one checksum for
            a whole storage or chunk: True compares it if a read covers all of it, and the first
            partial read gives an UnverifiedWarning; "all" reads and compares the rest each time.
        storage_options: options of the fsspec driver.

    Raises:
        NotACheckpointError: no checkpoint of a known format is at `url`.
        CorruptError, FormatError: the description is damaged.
        HostileError: the checkpoint claims more than the limits allow.
        UnsupportedError: this version cannot read the checkpoint.
        ArgumentError: `verify` has another value, or a mapping does not fit.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(folder, {"w": torch.arange(6).reshape(3, 2)})
    ...     with ckpt.open(folder) as checkpoint:
    ...         list(checkpoint), checkpoint["w"].shape, checkpoint["w"][1:, 0]
    (['w'], (3, 2), tensor([2, 4]))
    """
    return Checkpoint(url, verify, storage_options, changes_of(mapping, parameters))


def read(
    url: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    mapping: MappingName | Sequence[MappingName] = (),
    parameters: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = None,
    verify: Verify = True,
    storage_options: Options = None,
) -> object:
    """Returns the saved state as a plain nest: whole tensors on the CPU, and the values.

    Tied names share one tensor. One process can call this; no process group is involved.

    Args:
        include, exclude: patterns (`*`, `?`) of names. A dict lacks its unselected entries, and a
            list has None for them.
        mapping, parameters: as for `open`. The patterns are of the new names.
        dtype: casts floating-point tensors to this floating-point dtype.
        verify: as for `open`.
        storage_options: options of the fsspec driver.

    Raises:
        ArgumentError: a pattern matches no name, the selection is empty, or floats are not cast to
            `dtype`; an ArgumentTypeError for a pattern or a `dtype` of another type.
        UnsupportedError: a number is beyond the range of `dtype`, or torch casts no such tensor.
        CorruptError, FormatError: bytes are missing or changed.
        ReplacedError: the checkpoint was replaced each time that it was read.
        Exception: the errors of `open`.
    """
    if not isinstance(dtype, torch.dtype | None):
        raise ArgumentTypeError(
            f"dtype is {dtype!r:.80}; give a dtype of torch, such as torch.bfloat16"
        )
    Casts.of(None if dtype is None else str(dtype))  # raises for another one than of floats
    selection = Selection.of(include, exclude)
    changes = changes_of(mapping, parameters)

    def reading() -> object:
        with Checkpoint(url, verify, storage_options, changes) as checkpoint:
            return checkpoint.state(selection, dtype)

    with pause_collection():
        return unless_replaced(reading)


class TensorHandle:
    """One tensor of an open checkpoint. Indexing the handle reads the elements."""

    def __init__(self, checkpoint: Checkpoint, record: TensorRecord) -> None:
        self._checkpoint = checkpoint
        self.record = record

    @property
    def name(self) -> str:
        """The name of the stored tensor."""
        return self.record.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.record.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return torch_dtype(self.record.dtype.torch_name)

    @property
    def layout(self) -> Layout | None:
        """The layout over the ranks that saved the tensor; None if the format has none."""
        return self.record.layout

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Reads the elements at these indices, as an indexed tensor returns them.

        The indices are integers, slices with a positive step, and `...`; the first may be a list of
        integers (or a tensor, or an array, of one dimension), whose rows are read in one call. A
        slice with a step above 1 reads its whole range and drops the other elements.

        On a server, chunks that were read for few rows are kept for later calls: 16 MiB of them.

        Raises:
            TensorIndexError: an integer is out of range, there are more indices than dimensions or
                several `...`, or a step is not positive.
            ArgumentTypeError: an index has another type: a mask, None, a list behind another index.
            CorruptError: bytes are missing or changed.
            ReplacedError: the checkpoint was replaced or deleted since it was opened, and the bytes
                are not among those that are kept.
            ClosedError: the checkpoint was closed.
        """
        rows, index = _rows_in(index, self.shape, self.name)
        box, steps, dropped = _resolve(index, self.shape, self.name)
        if rows is None:
            tensor = self._checkpoint.box(self.record, box)
        else:
            tensor = self._checkpoint.rows(self.record, box, rows)
        if any(step != 1 for step in steps):
            tensor = tensor[tuple(slice(None, None, step) for step in steps)].clone()
        kept = [size for dim, size in enumerate(tensor.shape) if dim not in dropped]
        return tensor.reshape(kept)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Reads the whole tensor as an array, for `numpy.asarray`.

        Raises:
            ArgumentTypeError: numpy lacks the dtype.
            ArgumentError: `copy` is False.
            Exception: the errors of `__getitem__`.
        """
        if copy is False:
            raise ArgumentError(f"{self.name}: reading makes a copy; leave out copy=False")
        try:
            array = self[...].numpy()
        except TypeError as error:
            raise ArgumentTypeError(
                f"{self.name}: numpy has no {self.record.dtype}; cast the tensor, as by "
                "handle[...].float()"
            ) from error
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"TensorHandle({self.name!r}, shape={self.shape}, dtype={self.record.dtype})"

    def _repr_html_(self) -> str:
        return html_table("TensorHandle", _COLUMNS, [_row(self.name, self.record)], 1)


class Checkpoint(Uncopied, Mapping[str, TensorHandle], AbstractContextManager["Checkpoint"]):
    """An open checkpoint: a mapping from tensor names, including tied names, to handles.

    Close it, or use it in a `with` statement. An open checkpoint is closed without a warning when
    its last reference goes or the interpreter exits.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        verify: Verify,
        storage_options: Options = None,
        changes: Changes | None = None,
    ) -> None:
        self._verify = check_verify(verify)
        self._has_told = False
        context = open_source(url, storage_options)
        self._source: Source | None = context.__enter__()
        self._reader: Reader = self._source.store
        if self._reader.read_bytes > LOCAL_READ_BYTES:  # of a disk, the system keeps pages
            self._reader = cast("Reader", KeptReads(self._reader))
        self._close = finalize(self, context.__exit__, None, None, None)  # at exit too
        self.catalog: Catalog = self._source.catalog
        if changes is not None:
            try:
                weights = replace(changes, select=self.catalog.weights or None)
                self.catalog = weights.apply(self._source).catalog
            except BaseException:
                self.close()
                raise

    @property
    def url(self) -> str:
        """The path or URL with which the checkpoint was opened."""
        return self._open_source().url

    @property
    def version(self) -> int | None:
        """The version of a live state that is read; None of another checkpoint."""
        found: int | None = getattr(self._open_source().store, "version", None)
        return found

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata that the writer stored."""
        return self.catalog.metadata

    def __repr__(self) -> str:
        return f"<{self._summary()}>"

    def _repr_html_(self) -> str:
        names = list(islice(self, SHOWN_ROWS))
        rows = [_row(name, self[name].record) for name in names]
        return html_table(self._summary(), _COLUMNS, rows, len(self))

    def _summary(self) -> str:
        """Returns one line with place or "closed", format, tensors and bytes."""
        place = "closed" if self._source is None else without_secrets(self._source.url)
        tensors, nbytes = count(len(self.catalog.tensors), "tensor"), size(self.catalog.nbytes)
        return f"Checkpoint {printable(place)}: {self.catalog.format}, {tensors}, {nbytes}"

    def values(self) -> Tree:  # type: ignore[override]
        """Returns the saved nest with a `TensorRef` in the place of each tensor."""
        return self.catalog.tree

    def __getitem__(self, name: str) -> TensorHandle:
        record = self.catalog.tensors.get(self.catalog.aliases.get(name, name))
        if record is None:
            near = get_close_matches(str(name), islice(self, COMPARED), 3)
            meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise UnknownNameError(
                f"{name!r} is not in {self.url}{meant or '; `list(checkpoint)` has the names'}"
            )
        return TensorHandle(self, record)

    def __iter__(self) -> Iterator[str]:
        yield from self.catalog.tensors
        yield from self.catalog.aliases

    def __len__(self) -> int:
        return len(self.catalog.tensors) + len(self.catalog.aliases)

    def box(self, record: TensorRecord, box: Box) -> torch.Tensor:
        """Reads a box of a tensor into new memory. Raises as `TensorHandle.__getitem__` does."""
        tensor = empty_for(record, box.shape)
        self.fill([(record, box, tensor)], stacklevel=5)
        return tensor

    def rows(self, record: TensorRecord, box: Box, rows: Sequence[int]) -> torch.Tensor:
        """Reads rows of a box of a tensor into new memory, each once and neighbours together."""
        runs: list[list[int]] = []
        for row in sorted({*rows}):
            if runs and runs[-1][1] == row:
                runs[-1][1] = row + 1
            else:
                runs.append([row, row + 1])
        places = {row: at for at, row in enumerate(sorted({*rows}))}
        tensor = empty_for(record, (len(places), *box.shape[1:]))
        wanted = []
        for lo, hi in runs:
            part = tensor[places[lo] : places[hi - 1] + 1]
            wanted.append((record, Box((lo, *box.lo[1:]), (hi, *box.hi[1:])), part))
        self.fill(wanted, stacklevel=5)
        order = [places[row] for row in rows]
        return tensor if order == [*range(len(places))] else tensor[order]

    def fill(
        self, wanted: Sequence[tuple[TensorRecord, Box, torch.Tensor]], stacklevel: int = 3
    ) -> None:
        """Reads regions of tensors into contiguous CPU tensors of the records' dtypes."""
        copies, pieces = BoxCopies(), {box: Piece.packed(box) for _, box, _ in wanted}
        requests = [
            request
            for number, (record, box, _) in enumerate(wanted)
            for request in requests_for(record, [pieces[box]], number, copies)
        ]
        self._read(requests, [memory_of(tensor) for *_, tensor in wanted], stacklevel)

    def state(self, selection: Selection, dtype: torch.dtype | None = None) -> object:
        """Reads the saved nest with its tensors. Arguments and errors are those of `read`."""
        if not selection.is_all:
            selection.check_chooses(set(names_of(self.catalog.tree)), without_secrets(self.url))
        tensors: dict[str, torch.Tensor] = {}
        requests: list[ReadRequest] = []
        memory: list[memoryview] = []
        box_copies = BoxCopies()

        def target_of(leaf: Tree, _: str) -> object:
            if not isinstance(leaf, TensorRef):
                return restore_value(leaf)
            if leaf.name not in tensors:
                record = self.catalog.tensors[leaf.name]
                tensor = empty_for(record, record.shape)
                pieces = box_copies.whole(record.shape)
                requests.extend(requests_for(record, pieces, len(memory), box_copies))
                memory.append(memory_of(tensor))
                tensors[leaf.name] = tensor
            return leaf

        nest = map_selected(self.catalog.tree, selection, target_of)
        self._read(requests, memory, stacklevel=6)
        if dtype is not None:
            for name, tensor in tensors.items():
                if tensor.is_floating_point():
                    tensors[name] = _cast(name, tensor, dtype)
        state = map_tree(
            nest, lambda node: tensors[node.name] if isinstance(node, TensorRef) else node
        )
        return with_versions(state, self.catalog.versions)

    def _read(
        self, requests: Sequence[ReadRequest], memory: Sequence[memoryview], stacklevel: int
    ) -> None:
        """Reads the requests. Warns once if some bytes could not be verified."""
        source = self._open_source()
        unverified = read_requests(self._reader, requests, memory, self._verify)
        if unverified and not self._has_told:
            self._has_told = True
            warn(UnverifiedWarning(source.url, unverified), stacklevel=stacklevel)

    def close(self) -> None:
        """Closes the files. Handles keep their metadata and can no longer read."""
        self._source = None
        self._close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_source(self) -> Source:
        if self._source is None:
            raise ClosedError("the checkpoint was closed; open it again to read")
        return self._source


class KeptReads:
    """A server's folder that keeps the last small reads. All else is the reader's of the folder."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._kept_bytes = 0
        self._most_bytes = min(KEPT_BYTES, memory_budget() // 4)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fills the buffers with the bytes from `offset` on, from memory if they were kept."""
        end = offset + sum(target.nbytes for target in targets)
        if end - offset > MOST_KEPT_BYTES:
            self._reader.read_into(name, offset, *targets)
            return
        data = self._find(name, offset, end)
        if data is None:
            found = bytearray(end - offset)
            self._reader.read_into(name, offset, memoryview(found))
            data = bytes(found)
            self._keep((name, offset, end), data)
        at = 0
        for target in targets:
            view = target.cast("B")
            view[:] = data[at : at + len(view)]
            at += len(view)

    def forget(self, name: str, lo: int, hi: int) -> None:
        """Drops what was kept of these bytes."""
        with self._lock:
            for key in [*self._kept]:
                if key[0] == name and key[1] < hi and lo < key[2]:
                    self._kept_bytes -= len(self._kept.pop(key))

    def _find(self, name: str, lo: int, hi: int) -> bytes | None:
        """Returns the bytes if they were kept, in one read or in several that touch."""
        parts, at = [], lo
        with self._lock:
            for key in sorted(key for key in self._kept if key[0] == name and key[1] < hi):
                if key[1] <= at < key[2]:
                    parts.append(self._kept[key][at - key[1] : min(hi, key[2]) - key[1]])
                    self._kept.move_to_end(key)
                    at = min(hi, key[2])
        return b"".join(parts) if at == hi else None

    def _keep(self, key: tuple[str, int, int], data: bytes) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = data
                self._kept_bytes += len(data)
            while self._kept_bytes > self._most_bytes or len(self._kept) > KEPT_READS:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])


_COLUMNS = ("name", "type", "shape", "size")


def _row(name: str, record: TensorRecord) -> tuple[str, str, str, str]:
    return name, str(record.dtype), str(list(record.shape)), size(record.nbytes)


def _rows_in(index: Index, shape: tuple[int, ...], name: str) -> tuple[list[int] | None, Index]:
    """Returns the rows of an index that begins with a list, and the index with all rows instead."""
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    is_rows = isinstance(first, list) or (
        isinstance(first, torch.Tensor | np.ndarray)
        and first.ndim == 1
        and first.dtype not in (torch.bool, np.dtype(bool))
    )
    if not is_rows:
        return None, index
    numbers = first if isinstance(first, list) else first.tolist()  # type: ignore[union-attr]
    if not shape:
        raise TensorIndexError(f"{name}: {1 + len(rest)} indices for shape {shape}")
    rows = []
    for number in numbers:
        at = _integer(number, name)
        if not -shape[0] <= at < shape[0]:
            raise TensorIndexError(f"{name}: index {at} is out of range in dimension 0 of {shape}")
        rows.append(at % shape[0])
    return rows, (slice(None), *rest)


def _resolve(
    index: Index, shape: tuple[int, ...], name: str
) -> tuple[Box, tuple[int, ...], frozenset[int]]:
    """Returns the box of an index, the step of each dimension, and the dimensions to drop."""
    parts = list(index) if isinstance(index, tuple) else [index]
    ellipses = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise TensorIndexError(f"{name}: an index has at most one ellipsis, not {len(ellipses)}")
    for at in ellipses:
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape):
        raise TensorIndexError(f"{name}: {len(parts)} indices for shape {shape}")
    parts += [slice(None)] * (len(shape) - len(parts))
    lo, hi, steps, dropped = [], [], [], set()
    for dim, (part, length) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            start, stop, step = _bounds(part, length, name)
            lo.append(start)
            hi.append(max(start, stop))
            steps.append(min(step, max(1, length)))  # torch takes no step beyond 64 bits
        else:
            at = _integer(part, name)
            if not -length <= at < length:
                raise TensorIndexError(
                    f"{name}: index {at} is out of range in dimension {dim} of {shape}"
                )
            lo.append(at % length)
            hi.append(at % length + 1)
            steps.append(1)
            dropped.add(dim)
    return Box(tuple(lo), tuple(hi)), tuple(steps), frozenset(dropped)


def _bounds(part: slice, length: int, name: str) -> tuple[int, int, int]:
    """Returns first, end and step of a slice of a dimension."""
    step = 1 if part.step is None else _integer(part.step, name)
    if step < 1:
        raise TensorIndexError(f"{name}: the step of a slice must be positive, not {step}")
    first, end = (None if at is None else _integer(at, name) for at in (part.start, part.stop))
    return slice(first, end, step).indices(length)


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    try:
        cast = tensor.to(dtype)
    except NotImplementedError as error:  # torch's, for packed floats of 4 bits
        raise UnsupportedError(
            f"{name}: torch casts no {tensor.dtype}; leave it out (exclude=), or leave out dtype="
        ) from error
    check_range(name, tensor, dtype, "choose another dtype, or leave out dtype=")
    return cast


def _integer(part: object, name: str) -> int:
    """Returns an index of any integer type as an int; refuses those that torch takes as masks."""
    is_mask = isinstance(part, bool) or (
        isinstance(part, torch.Tensor) and (part.ndim > 0 or part.dtype is torch.bool)
    )
    try:
        if not is_mask:
            return as_int(part)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ArgumentTypeError(
        f"{name}: an index is an integer, a slice or `...`, and the first may be a list of "
        "integers, not "
        f"{type(part).__name__}; read a range that holds the elements and index the result"
    )
