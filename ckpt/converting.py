"""From any format to any format, one block of one tensor at a time, on one process.

Rules:

1. What is there already is an error, unless `overwrite`. A target that is a file, or a native
   checkpoint, is replaced atomically. A local folder of another format is written under another
   name beside it and renamed when it is complete; on an object store, where nothing can be renamed,
   such a folder has to be empty.
2. Memory is bounded by two blocks, whatever the size of a tensor or of the model.
3. A kind of state and a number of ranks say how a native checkpoint is divided (`kind_layouts`):
   file by file as those ranks would have written it, each read from the source as it is written.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ckpt.errors import ExistsError
from ckpt.kind_layouts import Division, by_size, checked_kind, of_kind, run_of
from ckpt.matching.selection import Selection
from ckpt.outgoing import Streams, outgoing
from ckpt.reading.sources import Source, open_source
from ckpt.stores.store import (
    Options,
    Store,
    is_file,
    local_path,
    one_spelling,
    open_store,
    split_url,
)
from ckpt.version import __version__
from ckpt.writing.bases import check_unused
from ckpt.writing.commit import commit, now
from formats import huggingface, safetensors_file
from formats.errors import FormatError
from formats.limits import current
from formats.native.manifest import MANIFEST, Manifest, ShardFile
from formats.native.shard import stored_order
from formats.native.shard_writer import write_shard
from formats.outgoing import Outgoing, announce
from formats.url_secrets import without_secrets
from sharding.kind import Kind

PART_SUFFIX = ".part"


class Format(str, Enum):
    """What can be written."""

    CKPT = "ckpt"
    SAFETENSORS = "safetensors"
    HUGGINGFACE = "hf"
    TORCH = "torch"
    DCP = "dcp"

    @property
    def is_file(self) -> bool:
        """True for a format that is one file, not a folder."""
        return self in (Format.SAFETENSORS, Format.TORCH)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did."""

    src: str
    dst: str
    source_format: str
    target_format: str
    tensors: int
    nbytes: int
    """Bytes of the tensors written."""
    left_out: tuple[str, ...]
    """Key paths of plain values that the target's format cannot hold, and metadata."""
    kind: str | None = None
    """`full`, `sharded` or `local`, where it was asked for."""
    world_size: int | None = None
    """The ranks that the target is divided among, where a kind was asked for."""
    became_text: tuple[str, ...] = ()
    """Key paths of dicts of which some keys are text now and were numbers; dcp has no others."""
    not_cast: tuple[str, ...] = ()
    """Tensors of smaller floats, which `dtype` leaves as they are."""


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    select: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    max_shard_bytes: int = huggingface.MAX_SHARD_BYTES,
    overwrite: bool = False,
    compress: bool = False,
    dtype: str | None = None,
    kind: str | None = None,
    world_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    storage_options: Options = None,
    dst_storage_options: Options = None,
) -> ConvertReport:
    """The checkpoint at `src`, or a part of it, written to `dst`; says what was written.

    Every byte that is read of a native source is verified; the CRC-32 that torch's own formats have
    of whole records is checked by `verify` alone.

    Args:
        to: `ckpt`, `safetensors`, `hf`, `torch` or `dcp`; by default what the end of `dst` says
            (`.safetensors`, `.pt`, `.pth`, `.bin`), and `ckpt` for a folder.
        select: a key path; takes what lies below it and drops it from the names.
        include: patterns (`*`, `?`) of names, after `select`, to take.
        exclude: patterns of names to leave out.
        max_shard_bytes: the size at which a folder's files are cut (not for dcp, nor with `kind`).
        overwrite: replace what is at `dst`.
        compress: zstd, for `ckpt` only.
        dtype: torch's name of the type to cast tensors of 16-bit floats and larger to.
        kind: `full`, `sharded` or `local`: what each of `world_size` ranks has of every tensor. The
            target is what those would have saved: whole tensors that they divide evenly when they
            write, rows as `torch.chunk` cuts them, or even runs of row-major elements; a file for
            each rank that has something. For `ckpt`; any other format is written `full`, by one.
        world_size: how many ranks; with `full` one if it is not given.
        progress: called with numbers of bytes as they are read.
        storage_options: what the fsspec drivers of both URLs are told.
        dst_storage_options: what that of `dst` is told instead.

    Raises:
        ValueError: an unknown format, kind or number of ranks, a kind or compression the format
            cannot have, a type that is no float, or a pattern that matches no name.
        NotACheckpointError: there is none at `src`.
        ExistsError: something is at `dst` and `overwrite` is False.
        CorruptError, FormatError: bytes of `src` are missing or changed, or its files are not
            those of the ranks it speaks of; nothing appears at `dst`.
    """
    source, target = os.fspath(src), os.fspath(dst)
    chosen = format_of(target, to)
    divided, ranks = checked_kind(kind, world_size)
    _check_can_hold(chosen, target, divided, ranks, compress)
    _check_castable(dtype)
    selection = Selection.of(include, exclude)
    there = storage_options if dst_storage_options is None else dst_storage_options
    with open_source(source, storage_options) as opened:
        _check_apart(opened, target, chosen)
        with outgoing(
            opened.url, opened.store, opened.catalog, select, selection, dtype, progress
        ) as state:
            left_out: tuple[str, ...] = ()
            if chosen.is_file:
                left_out = _write_file(chosen, target, there, state, overwrite)
            elif chosen is Format.CKPT:
                tensors = state.tensors.values()
                if divided is not None and ranks is not None:
                    division = of_kind(tensors, divided, ranks)
                else:
                    division = by_size(tensors, max_shard_bytes)
                with open_store(target, there) as store:
                    write_native(store, state, division, overwrite, compress)
            else:
                left_out = _write_folder(chosen, target, there, state, overwrite, max_shard_bytes)
        return ConvertReport(
            source,
            target,
            opened.catalog.format,
            chosen.value,
            len(state.tensors),
            sum(tensor.nbytes for tensor in state.tensors.values()),
            left_out,
            None if divided is None else divided.value,
            ranks,
            _became_text(chosen, state),
            _not_cast(dtype, state),
        )


def format_of(target: str, to: str | None) -> Format:
    """The format to write: what was asked for, or what the target's name says."""
    if to is not None:
        try:
            return Format(to)
        except ValueError:
            known = ", ".join(f.value for f in Format)
            raise ValueError(f"cannot write {to!r}; known formats are {known}") from None
    if target.endswith(".safetensors"):
        return Format.SAFETENSORS
    if target.endswith((".pt", ".pth", ".bin")):
        return Format.TORCH
    return Format.CKPT


def write_native(
    store: Store, state: Streams, division: Division, overwrite: bool, compress: bool
) -> None:
    """A committed native checkpoint whose files hold what the division says, rank by rank."""
    if store.exists(MANIFEST):
        if not overwrite:
            raise ExistsError(f"{store.url} holds a checkpoint; pass overwrite=True to replace it")
        check_unused(store.url, store.options)
    began = now()
    attempt = secrets.token_hex(8)
    path = local_path(store.url)
    is_new = path is not None and not os.path.lexists(path)
    files: list[ShardFile] = []
    may_be_there = False
    try:
        for rank, names in division.parts.items():
            file_name = f"{attempt}-{rank:05d}.safetensors"
            part = []
            for name in names:
                run = run_of(division.stored[name].layout, rank)
                part.append(state.part(name, run.shape, run.lo, run.hi))
            announce(stored_order(part))
            with store.create(file_name, rewritable=compress) as file:
                files.append(write_shard(file, part, compress).named(file_name, rank))
        writer = {
            "ckpt": __version__,
            "world_size": str(division.world_size),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **state.metadata,
        }
        manifest = Manifest(division.stored, state.aliases, state.tree, files, writer)
        may_be_there = True
        commit(store, manifest, began, overwrite)
    except BaseException as error:
        if not may_be_there or _is_not_there(store, attempt, error):
            for written in files:
                store.delete(written.name)
            if is_new:
                store.remove_if_empty()
        raise


def _is_not_there(store: Store, attempt: str, error: BaseException) -> bool:
    """Whether no manifest will name the files of an attempt, of which the commit failed so.

    A server may yet do what it was asked to: only where it has refused is that sure.
    """
    if local_path(store.url) is None and not isinstance(error, ExistsError):
        return False
    try:
        return attempt.encode() not in store.read_whole(MANIFEST, current().manifest_bytes)
    except FileNotFoundError:
        return True
    except (OSError, FormatError):
        return False


def _write_file(
    chosen: Format, target: str, options: Options, state: Outgoing, overwrite: bool
) -> tuple[str, ...]:
    folder, name = split_url(target)
    if not overwrite and is_file(target, options):
        raise ExistsError(f"{target} exists; pass overwrite=True to replace it")
    left_out: tuple[str, ...] = ()
    with open_store(folder, options) as store:
        if chosen is Format.SAFETENSORS:
            left_out = safetensors_file.write(store, name, state)
        else:
            from formats import torch_save

            torch_save.write(store, name, state)
            left_out = _said(state)
        store.flush()
    return left_out


def _became_text(chosen: Format, state: Outgoing) -> tuple[str, ...]:
    from formats.dcp_nest import lost

    found = lost(state.tree) if chosen is Format.DCP else ()
    return tuple(name or "the outermost" for name, is_empty in found if not is_empty)


def _not_cast(dtype: str | None, state: Outgoing) -> tuple[str, ...]:
    wanted = (dtype or "").removeprefix("torch.")
    kinds = {name: tensor.dtype.torch_name for name, tensor in state.tensors.items()}
    return tuple(
        name
        for name, kind in kinds.items()
        if wanted and kind != wanted and kind.startswith(("float", "bfloat"))
    )


def _said(state: Outgoing) -> tuple[str, ...]:
    """The metadata, as what a format without a place for it leaves out."""
    return tuple(f"metadata[{key!r}]" for key in sorted(state.metadata))


def _write_folder(
    chosen: Format,
    target: str,
    options: Options,
    state: Outgoing,
    overwrite: bool,
    max_shard_bytes: int,
) -> tuple[str, ...]:
    left_out: tuple[str, ...] = ()
    with (
        _fresh_folder(target, options, overwrite) as folder,
        open_store(folder, options) as store,
    ):
        if chosen is Format.HUGGINGFACE:
            left_out = huggingface.write(store, state, max_shard_bytes)
        else:
            from formats import dcp
            from formats.dcp_nest import lost

            dcp.write(store, state)
            left_out = (*(name for name, is_empty in lost(state.tree) if is_empty), *_said(state))
        if state.tensors:
            store.flush()
    return left_out


@contextmanager
def _fresh_folder(target: str, options: Options, overwrite: bool) -> Iterator[str]:
    """A folder to write into that becomes `target` when the block ends well (rule 1)."""
    with open_store(target, options) as store:
        occupied = bool(store.names() or store.folders())
        if overwrite and store.exists(MANIFEST):
            check_unused(target, store.options)
    path = local_path(target)
    if path is None:
        if occupied:
            raise ExistsError(f"{target} is not empty; choose another folder of the bucket")
        yield target
        return
    local = Path(path)
    if local.exists() and not local.is_dir():
        raise ExistsError(f"{target} is a file; this format is a folder")
    if occupied and not overwrite:
        raise ExistsError(f"{target} is not empty; pass overwrite=True to replace it")
    local.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    fresh = local.parent / f".{local.name}.{mark}{PART_SUFFIX}"
    old = local.parent / f".{local.name}.{mark}.old"
    try:
        yield str(fresh)
        fresh.mkdir(exist_ok=True)  # nothing to write is an empty folder
        if local.exists() and not _exchange(fresh, local):
            local.rename(old)
        if not local.exists():
            fresh.rename(local)
        with open_store(str(local.parent)) as parent:
            parent.flush()
        for rest in (fresh, old):
            shutil.rmtree(rest, ignore_errors=True)
    except BaseException:
        if old.exists() and not local.exists():
            old.rename(local)
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """True when two folders have got one another's names, at one moment; Linux can.

    Two renames would leave a moment in which there is nothing under the name.
    """
    if _renameat2 is None:
        return False
    here, names = -100, (os.fsencode(one), os.fsencode(other))  # AT_FDCWD, <fcntl.h>
    return bool(_renameat2(here, names[0], here, names[1], 2) == 0)  # RENAME_EXCHANGE, <linux/fs.h>


_renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
if _renameat2 is not None:
    _renameat2.argtypes = (
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p),
        ctypes.c_uint,
    )


def _check_apart(source: Source, target: str, chosen: Format) -> None:
    """Raise ExistsError where writing the target would take the source away."""
    here, there = one_spelling(source.url), one_spelling(target)
    if here == there:
        raise ExistsError(f"{target} is the source itself; convert to another place")
    if chosen.is_file and there in [f"{here}/{file.name}" for file in source.catalog.files]:
        raise ExistsError(f"{target} is a file of the source; convert to another place")
    if chosen in (Format.HUGGINGFACE, Format.DCP) and here.startswith(f"{there}/"):
        raise ExistsError(
            f"{target} holds the source {source.url}, and is replaced as a whole; convert to "
            "another place"
        )


def _check_can_hold(
    chosen: Format, target: str, kind: Kind | None, ranks: int | None, compress: bool
) -> None:
    """Raise ValueError where the format has no place for the division or compression asked for."""
    if compress and chosen is not Format.CKPT:
        raise ValueError(
            f"{without_secrets(target)} would be written as {chosen.value}, which is not "
            "compressed; only ckpt's own format is: convert to a folder with to='ckpt' "
            "(--to ckpt), or leave out compress=True (--compress)"
        )
    is_whole = kind in (None, Kind.FULL) and ranks in (None, 1)
    if chosen is not Format.CKPT and not is_whole:
        raise ValueError(
            f"{without_secrets(target)} would be written as {chosen.value}, which has whole "
            "tensors that belong to no rank; only ckpt's own format is divided among ranks: "
            "convert to a folder with to='ckpt' (--to ckpt), or leave out the kind and the "
            f"world size of {ranks}"
        )


_CAST_TO = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
"""Not float8_e8m0fnu, which has no sign, nor packed floats, which torch casts nothing to."""


def _check_castable(dtype: str | None) -> None:
    """Raise ValueError unless weights are still weights when they are cast to a type."""
    if dtype is not None and dtype.removeprefix("torch.") not in _CAST_TO:
        raise ValueError(
            f"{dtype!r} is no type to cast floating-point tensors to; give dtype= (--dtype) as "
            f"one of {', '.join(_CAST_TO)}"
        )
