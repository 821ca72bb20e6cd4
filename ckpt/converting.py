"""From any format to any format, one block of one tensor at a time, on one process.

Rules:

1. What is there already is an error, unless `overwrite`. A target that is a file, or a native
   checkpoint, is replaced atomically. A local folder of another format is written under another
   name beside it and renamed when it is complete; on an object store, where nothing can be renamed,
   such a folder has to be empty.
2. Memory is bounded by two blocks, whatever the size of a tensor or of the model.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ckpt.commit import committed_files
from ckpt.errors import ExistsError
from ckpt.outgoing import outgoing
from ckpt.selection import Selection
from ckpt.sources import Source, open_source
from ckpt.store import Store, is_file, open_store, split_url
from ckpt.version import __version__
from formats import huggingface, safetensors_file
from formats.native.manifest import MANIFEST, Manifest, StoredTensor, dump
from formats.native.shard import write_shard
from formats.outgoing import Outgoing, OutgoingTensor
from sharding.layout import Layout

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
    """Key paths of plain values that the target's format cannot hold."""


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
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """The checkpoint at `src`, or a part of it, written to `dst`; says what was written.

    Every byte read is verified where the source has checksums.

    Args:
        to: `ckpt`, `safetensors`, `hf`, `torch` or `dcp`; by default what the end of `dst` says
            (`.safetensors`, `.pt`, `.pth`, `.bin`), and `ckpt` for a folder.
        select: a key path; takes what lies below it and drops it from the names.
        include: patterns (`*`, `?`) of names, after `select`, to take.
        exclude: patterns of names to leave out.
        max_shard_bytes: the size at which a folder's files are cut (not for dcp).
        overwrite: replace what is at `dst`.
        compress: zstd, for `ckpt` only.
        dtype: torch's name of the type to cast floating-point tensors to.
        progress: called with numbers of bytes as they are read.

    Raises:
        NotACheckpointError: there is none at `src`.
        ExistsError: something is at `dst` and `overwrite` is False.
        CorruptError: bytes of `src` are missing or changed; nothing appears at `dst`.
    """
    source, target = os.fspath(src), os.fspath(dst)
    chosen = format_of(target, to)
    selection = Selection.of(include, exclude)
    with open_source(source) as opened:
        _check_apart(opened, target, chosen)
        with outgoing(opened.store, opened.catalog, select, selection, dtype, progress) as state:
            left_out: tuple[str, ...] = ()
            if chosen.is_file:
                left_out = _write_file(chosen, target, state, overwrite)
            elif chosen is Format.CKPT:
                with open_store(target) as store:
                    write_native(store, state, overwrite, compress, max_shard_bytes)
            else:
                left_out = _write_folder(chosen, target, state, overwrite, max_shard_bytes)
        return ConvertReport(
            source,
            target,
            opened.catalog.format,
            chosen.value,
            len(state.tensors),
            sum(tensor.nbytes for tensor in state.tensors.values()),
            left_out,
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
    store: Store, state: Outgoing, overwrite: bool, compress: bool, max_shard_bytes: int
) -> None:
    """A committed native checkpoint, in files of about `max_shard_bytes`."""
    if not overwrite and store.exists(MANIFEST):
        raise ExistsError(f"{store.url} holds a checkpoint; pass overwrite=True to replace it")
    old = committed_files(store) if overwrite else []
    attempt = secrets.token_hex(8)
    stored: dict[str, StoredTensor] = {}
    files = []
    try:
        for rank, part in enumerate(_parts(list(state.tensors.values()), max_shard_bytes)):
            name = f"{attempt}-{rank:05d}.safetensors"
            with store.create(name, rewritable=compress) as file:
                files.append(write_shard(file, part, compress).named(name, rank))
            for tensor in part:
                layout = Layout.single(tensor.shape, rank)
                stored[tensor.name] = StoredTensor(tensor.shape, tensor.dtype, layout)
        writer = {
            "ckpt": __version__,
            "world_size": "1",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        manifest = dump(Manifest(stored, state.aliases, state.tree, files, writer))
    except BaseException:
        for written in files:
            store.delete(written.name)
        raise
    store.commit(MANIFEST, manifest, replace=overwrite)
    for name in old:
        store.delete(name)


def _parts(
    tensors: Sequence[OutgoingTensor], max_shard_bytes: int
) -> Iterator[list[OutgoingTensor]]:
    """Tensors in order, as many together as fit; a larger one alone."""
    part: list[OutgoingTensor] = []
    nbytes = 0
    for tensor in tensors:
        if part and nbytes + tensor.nbytes > max_shard_bytes:
            yield part
            part, nbytes = [], 0
        part.append(tensor)
        nbytes += tensor.nbytes
    if part:
        yield part


def _write_file(chosen: Format, target: str, state: Outgoing, overwrite: bool) -> tuple[str, ...]:
    folder, name = split_url(target)
    if not overwrite and is_file(target):
        raise ExistsError(f"{target} exists; pass overwrite=True to replace it")
    left_out: tuple[str, ...] = ()
    with open_store(folder) as store:
        if chosen is Format.SAFETENSORS:
            left_out = safetensors_file.write(store, name, state)
        else:
            from formats import torch_save

            torch_save.write(store, name, state)
        store.flush()
    return left_out


def _write_folder(
    chosen: Format, target: str, state: Outgoing, overwrite: bool, max_shard_bytes: int
) -> tuple[str, ...]:
    left_out: tuple[str, ...] = ()
    with _fresh_folder(target, overwrite) as folder, open_store(folder) as store:
        if chosen is Format.HUGGINGFACE:
            left_out = huggingface.write(store, state, max_shard_bytes)
        else:
            from formats import dcp

            dcp.write(store, state)
        if state.tensors:
            store.flush()
    return left_out


@contextmanager
def _fresh_folder(target: str, overwrite: bool) -> Iterator[str]:
    """A folder to write into that becomes `target` when the block ends well (rule 1)."""
    with open_store(target) as store:
        occupied = bool(store.names() or store.folders())
    local = Path(target.removeprefix("file://"))
    if "://" in target and not target.startswith("file://"):
        if occupied:
            raise ExistsError(f"{target} is not empty; choose another folder of the bucket")
        yield target
        return
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
        if local.exists():
            local.rename(old)
        fresh.rename(local)
        with open_store(str(local.parent)) as parent:
            parent.flush()
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if old.exists() and not local.exists():
            old.rename(local)
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _check_apart(source: Source, target: str, chosen: Format) -> None:
    """Raise ExistsError where writing the target would take the source away."""
    here, there = _place(source.url), _place(target)
    if here == there:
        raise ExistsError(f"{target} is the source itself; convert to another place")
    if chosen.is_file and there in [f"{here}/{file.name}" for file in source.catalog.files]:
        raise ExistsError(f"{target} is a file of the source; convert to another place")
    if chosen in (Format.HUGGINGFACE, Format.DCP) and here.startswith(f"{there}/"):
        raise ExistsError(
            f"{target} holds the source {source.url}, and is replaced as a whole; convert to "
            "another place"
        )


def _place(url: str) -> str:
    """One spelling for a path or URL."""
    if "://" in url and not url.startswith("file://"):
        return url.rstrip("/")
    return str(Path(url.removeprefix("file://")).resolve())
