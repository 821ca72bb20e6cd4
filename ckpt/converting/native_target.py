"""Turns a catalog into the tensors that a conversion writes, and writes ckpt's own format.

Rules:

1. Before a byte is written, the headers prove that all elements are in files of the right length.
   An incomplete checkpoint is thus an error before the conversion writes.
2. Tensors are copied by `ckpt.transfer.copy_files`. For callers that take bytes in order,
   `ckpt.transfer.copy_shares` makes streams, and reads many of them ahead.
3. Uncompressed files are planned, and copied like those of any other format, by one process or by
   all ranks. The sizes of compressed chunks are known only once they are written, so one process
   compresses streams. The manifest comes last.
4. `check_written` reads a result of any format back as such tensors, and compares their
   bytes with those of the source.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ckpt.checking.diff import FLAT_FORMATS, GGUF, plain_values
from ckpt.checking.elements import Tolerance, same_value
from ckpt.converting.layouts import Division, run_of
from ckpt.installation import __version__
from ckpt.plan.copy_plan import CopySource
from ckpt.state.patterns import NO_CASTS, Casts, Selection, map_selected
from ckpt.state.saved import names_of
from ckpt.stores.store import Options, Store, local_path, open_store
from ckpt.transfer.commit import commit, is_not_there, now
from ckpt.transfer.copy_files import FileCopier
from ckpt.transfer.copy_shares import stream_tensors, write_plans
from formats.catalog import (
    Catalog,
    FilePlan,
    Outgoing,
    OutgoingTensor,
    TensorRef,
    Tree,
)
from formats.errors import CorruptError
from formats.native.manifest import WRITER_KEYS, Manifest, ShardFile
from formats.native.shard import ShardSummary, sort_for_file
from formats.native.shard_writer import plan_shard, plan_summary, write_shard
from formats.storage import Reader
from sharding.agreement.ranks import Ranks
from sharding.errors import ArgumentError, without_secrets
from sharding.layout import HoleError, row_major


def write_native(
    ranks: Ranks,
    target: str,
    options: Options,
    state: StoredState,
    division: Division,
    overwrite: bool,
    compress: bool,
) -> None:
    """Writes and commits a checkpoint with the files of a division.

    All ranks call this. Rank 0 compresses and commits.
    """
    began, attempt = now(), ranks.broadcast(secrets.token_hex(8).encode()).decode()
    is_first = ranks.rank == 0
    plans = [
        plan_shard(f"{attempt}-{rank:05d}.safetensors", _parts(state, division, rank))
        for rank in division.parts
    ]
    with open_store(target, options) as store:
        path = local_path(store.url)
        is_new = path is not None and not os.path.lexists(path)
        may_be_there = False
        written: list[ShardSummary] = []
        try:
            if not compress:
                is_far = path is None
                tables = write_plans(ranks, state.copier, lambda: nullcontext(store), plans, is_far)
                written = [plan_summary(*pair) for pair in zip(plans, tables, strict=is_first)]
            elif is_first:
                written = _write_compressed(store, state, plans)
            if is_first:
                manifest = _manifest(state, division, plans, written)
                may_be_there = True
                commit(store, manifest, began, overwrite)
        except BaseException as error:
            if is_first and (not may_be_there or is_not_there(store, attempt, error)):
                with suppress(OSError):  # left-overs; the first error tells more
                    for plan in plans:
                        store.delete(plan.name)
                    if is_new:
                        store.remove_if_empty()
            raise


def _parts(state: StoredState, division: Division, rank: int) -> list[OutgoingTensor]:
    """Returns the runs of tensors in a rank's file."""
    parts = []
    for name in division.parts[rank]:
        lo, shape = run_of(division.stored[name].layout, rank)
        parts.append(OutgoingTensor(name, shape, state.tensors[name].dtype, first=lo))
    return parts


def _write_compressed(
    store: Store, state: StoredState, plans: Sequence[FilePlan]
) -> list[ShardSummary]:
    """Writes compressed files, from streams of the tensors of the plans."""
    written = []
    for plan in plans:
        parts = [part for part in plan.parts if isinstance(part, OutgoingTensor)]
        with (
            store.create(plan.name, rewritable=True) as file,
            stream_tensors(state.copier, sort_for_file(parts)) as tensors,
        ):
            written.append(write_shard(file, tensors, compress=True))
            if plan is plans[-1]:
                state.copier.finish()
    return written


def _manifest(
    state: StoredState,
    division: Division,
    plans: Sequence[FilePlan],
    written: Sequence[ShardSummary],
) -> Manifest:
    files: list[ShardFile] = [
        summary.to_file(plan.name, rank)
        for rank, plan, summary in zip(division.parts, plans, written, strict=True)
    ]
    writer = {
        "ckpt": __version__,
        "world_size": str(division.world_size),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **state.metadata,
    }
    stored, versions = division.stored, state.versions
    return Manifest(
        stored,
        state.aliases,
        state.tree,
        files,
        writer,
        versions=versions,
        strides=state.strides,
        optimizers=state.optimizers,
    )


_WRITTEN = {"ckpt": WRITER_KEYS, "safetensors": ("format",), "huggingface": ("format",), "gguf": ()}
"""Formats with metadata, and the keys that their writers add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState(Outgoing):
    """A whole checkpoint to write, whose bytes are stored in another."""

    copier: FileCopier
    """Copies the tensors by their names, and compares all checksums."""
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For the native format, as `Manifest.strides`."""
    optimizers: Mapping[str, str | None] = field(default_factory=dict)
    """For the native format, as `Manifest.optimizers`."""
    modules: tuple[str, ...] = ()
    """The sub-folders of a Hugging Face folder, which begin the names of their tensors."""


def outgoing(
    url: str,
    reader: Reader,
    catalog: Catalog,
    casts: Casts = NO_CASTS,
    progress: Callable[[int], None] | None = None,
    untied: bool = False,
) -> StoredState:
    """Returns the tensors of a catalog to write, under the names in its tree.

    With `untied`, each tied name is a tensor of its own. Raises ArgumentError if a pattern of
    `casts` matches no name, or tied names get two dtypes.
    """
    casts.check_all_match(names_of(catalog.tree), without_secrets(url))
    tensors: dict[str, OutgoingTensor] = {}
    sources: dict[str, CopySource] = {}
    aliases: dict[str, str] = {}
    first_names: dict[str, str] = {}
    strides: dict[str, tuple[int, ...]] = {}
    copier = FileCopier(reader, sources.__getitem__, "all", progress)

    def place(leaf: Tree, path: str) -> Tree:
        if not isinstance(leaf, TensorRef):
            return leaf
        record = catalog.tensors[leaf.name]
        first = first_names.setdefault(leaf.name, path)
        if first != path and not untied:
            dtype, written = casts.written_dtype(path, record), sources[first].dtype
            if casts.names(path) and dtype != written:
                raise ArgumentError(
                    f"{path} is tied to {first}, and dtype= makes it {dtype} and {first} "
                    f"{written}; give both names one dtype, or leave one out (exclude=)"
                )
            aliases[path] = first
            return TensorRef(first)
        if record.strides is not None and record.strides != row_major(record.shape):
            strides[path] = record.strides
        source = sources[path] = CopySource(record, casts.written_dtype(path, record))
        tensors[path] = OutgoingTensor(path, record.shape, source.dtype)
        return TensorRef(path)

    tree: Tree = map_selected(catalog.tree, Selection.of(None, None), place)
    modules = tuple(folder for folder, _ in catalog.parts if folder)
    added = _WRITTEN.get(catalog.format, catalog.metadata)  # of another format none is kept
    return StoredState(
        tensors,
        tree,
        aliases,
        {key: text for key, text in catalog.metadata.items() if key not in added},
        catalog.versions,
        copier=copier,
        strides=strides,
        optimizers=catalog.optimizers,
        modules=modules if catalog.format == "huggingface" else (),
    )


def check_located(state: StoredState) -> None:
    """Raises HoleError unless all elements of a state are stored. Reads no data (rule 1).

    Raises CorruptError or FormatError if a needed file is missing, has another length, or
    contradicts the description of the checkpoint.
    """
    for name in state.tensors:
        record = state.copier.source_of(name).record
        numel = sum(stored.piece.box.numel for stored in record.pieces)
        if numel != prod(record.shape):
            raise HoleError(
                f"{record.name}: only {numel} of its {prod(record.shape)} elements are in the "
                "checkpoint: the part of a rank is missing; copy the files of all ranks"
            )


def check_written(wanted: StoredState, found: StoredState, url: str, target_format: str) -> None:
    """Compares two checkpoints: names, shapes, dtypes, bytes, and plain values if both hold them.

    `wanted` is the source with all changes, `found` the result at `url`.

    Raises:
        CorruptError: they differ. The message names the tensor or value.
    """
    written: list[OutgoingTensor] = []
    for name, tensor in wanted.tensors.items():
        other = found.tensors.get(found.aliases.get(name, name))
        if other is None:
            raise _differs(url, name, "it is missing")
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            now, before = (f"{each.dtype} {list(each.shape)}" for each in (other, tensor))
            raise _differs(url, name, f"it is {now} and was {before}")
        written.append(other)
    names = {*found.tensors, *found.aliases}
    for name in wanted.aliases:
        if target_format not in (*FLAT_FORMATS, GGUF) and name not in names:
            raise _differs(url, name, "it is missing")
    with (
        stream_tensors(wanted.copier, list(wanted.tensors.values())) as ours,
        stream_tensors(found.copier, written) as theirs,
    ):
        for tensor, other in zip(ours, theirs, strict=True):
            at = _first_difference(tensor.blocks(), other.blocks())
            if at is not None:
                at //= tensor.dtype.itemsize
                raise _differs(url, tensor.name, f"element {at} has other bytes")
        found.copier.finish()
    if target_format not in (*FLAT_FORMATS, GGUF):
        _check_values(dict(plain_values(wanted.tree)), dict(plain_values(found.tree)), url)


def _first_difference(a: Iterator[memoryview], b: Iterator[memoryview]) -> int | None:
    """Returns the first byte in which two streams differ; None if they are equal."""
    at = 0
    for left, right in paired(a, b):
        if len(left) != len(right):
            return at
        unequal = np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8)
        if unequal.any():
            return at + int(unequal.argmax())
        at += len(left)
    return None


def paired(
    a: Iterator[memoryview], b: Iterator[memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yields two streams in parts of equal length, and last what one of them has alone."""
    left = right = memoryview(b"")
    while True:
        left = left or _next(a)
        right = right or _next(b)
        size = min(len(left), len(right)) or max(len(left), len(right))
        if not size:
            return
        yield left[:size], right[:size]
        left, right = left[size:], right[size:]


def _next(blocks: Iterator[memoryview]) -> memoryview:
    """Returns the next block that has bytes; an empty one at the end."""
    return next((block for each in blocks if (block := each.cast("B"))), memoryview(b""))


def _check_values(wanted: Mapping[str, Tree], found: Mapping[str, Tree], url: str) -> None:
    exact = Tolerance(0.0, 0.0)
    for name, value in wanted.items():
        is_empty = isinstance(value, dict | list | tuple) and not value
        if name not in found and not is_empty:
            raise _differs(url, name, "the value is missing")
        if name in found and not same_value(value, found[name], exact):
            raise _differs(url, name, f"the value is {found[name]!s:.80} and was {value!s:.80}")


def _differs(url: str, name: str, problem: str) -> CorruptError:
    return CorruptError(
        f"{url}: {name}: {problem} when the result is read back: it is not what was converted; "
        "check the disk, and convert again"
    )
