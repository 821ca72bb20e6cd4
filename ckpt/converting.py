"""Converts a checkpoint of any format to any format, block by block.

Rules:

1. A file or checkpoint at the target is an error unless `overwrite` (`ckpt.targets`), also if it
   appears during the conversion. The new checkpoint appears as a whole, and the old one stays until
   then (`ckpt.placing`).
2. A conversion holds a few blocks in memory, whatever the size of a tensor or the model. Files are
   copied by several threads (`ckpt.transfer.copy_files`).
3. A kind of state dict and a number of ranks divide a native checkpoint (`kind_layouts`) into the
   files that such ranks would write. Each file streams from the source while it is written.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.arguments import DtypeName, FormatName, KindName
from ckpt.conversion_plan import ConversionPlan, conversion_plan
from ckpt.errors import ExistsError
from ckpt.kind_layouts import Division, by_size, checked_kind, of_kind, run_of
from ckpt.mapping.apply import Mapped
from ckpt.mapping.casts import Casts
from ckpt.mapping.changes import Changes, MappingName, Part
from ckpt.outgoing import Streams, outgoing
from ckpt.placing import file_writer, folder_writer
from ckpt.read_back import check_written
from ckpt.resuming import Journal, identity_of
from ckpt.sources import open_source
from ckpt.stores.store import Options, Store, local_path, open_store, split_url
from ckpt.target_formats import (
    Format,
    became_text,
    check_can_hold,
    check_values,
    format_of,
    left_out,
)
from ckpt.targets import check_file, check_folder, check_native
from ckpt.transfer.commit import commit, now
from ckpt.transfer.copy_shares import called_together, write_plans
from ckpt.version import __version__
from formats import dcp, gguf_write, huggingface, npz, safetensors_file, torch_save
from formats.catalog import OpaqueValue, Tree, without_opaque
from formats.errors import FormatError, UnsupportedError
from formats.file_plan import FilePlan
from formats.limits import current
from formats.native.manifest import MANIFEST, Manifest, ShardFile
from formats.native.shard import stored_order
from formats.native.shard_writer import write_shard
from formats.outgoing import Outgoing, announce
from formats.storage import Writer
from sharding.agreement.ranks import SELF, Ranks
from sharding.errors import ArgumentError
from sharding.url_secrets import without_secrets

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group

__all__ = ["ConvertReport", "convert"]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of a conversion."""

    src: str
    dst: str
    source_format: str
    target_format: str
    tensors: int
    nbytes: int
    """Bytes of the written tensors."""
    left_out: tuple[str, ...]
    """Key paths of opaque values, of plain values that the target's format cannot hold, of tied
    names that it lacks, and metadata."""
    kind: str | None = None
    """`full`, `sharded` or `local` if the caller gave a kind."""
    world_size: int | None = None
    """The number of ranks of the target if the caller gave a kind."""
    became_text: tuple[str, ...] = ()
    """Key paths of dicts with keys that were numbers and are text in the target: dcp's keys are."""
    not_cast: tuple[str, ...] = ()
    """Tensors of floats below 16 bits, which `dtype` does not cast."""
    beside: tuple[str, ...] = ()
    """Keys of a training's folder that were not converted, beside the weights."""
    plan: ConversionPlan | None = field(default=None, compare=False, repr=False)
    """Each tensor with its names in the source, its shape and dtypes, and the bytes."""


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: FormatName | None = None,
    select: str | None = None,
    part: Part | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    mapping: MappingName | Sequence[MappingName] = (),
    rename: Mapping[str, str] | None = None,
    prefix: str = "",
    parameters: Mapping[str, int] | None = None,
    max_shard_bytes: int = huggingface.MAX_SHARD_BYTES,
    overwrite: bool = False,
    compress: bool = False,
    dtype: DtypeName | Mapping[str, DtypeName | None] | None = None,
    kind: KindName | None = None,
    world_size: int | None = None,
    dry_run: bool = False,
    resume: bool = False,
    verify: bool = False,
    group: Group = "self",
    progress: Callable[[int], None] | None = None,
    storage_options: Options = None,
    dst_storage_options: Options = None,
) -> ConvertReport:
    """Writes the checkpoint at `src`, or a part of it, to `dst`, and returns a report.

    One process calls this, or all ranks of `group`. All checksums of the read bytes are compared:
    those of a native source, and the CRC-32 of each storage or chunk in torch's formats.
    safetensors and Hugging Face have no checksums.

    Args:
        to: `ckpt`, `safetensors`, `hf`, `torch`, `dcp`, `gguf` or `npz`. By default the end of
            `dst` decides (`.safetensors`, `.pt`, `.pth`, `.bin`, `.gguf`, `.npz`); a folder becomes
            `ckpt`. The ending of a format that is not written is refused.
        select: a key path. The conversion takes the entries below it and removes it from the names.
            By default of a training's folder the weights, if the target's format is one of weights.
        part: `model` or `optimizer`, in the place of `select`: the top entry `model`, `state_dict`,
            `model_state_dict` or `module`, or everything if there is no optimizer; the one dict
            with `state` and `param_groups`.
        include: patterns of names to convert, without `select`: `*` and `?`, or a regular
            expression between slashes.
        exclude: patterns of names to leave out.
        mapping: mappings, applied in turn (docs/converting.md): the name of one that ships, such as
            `llama-hf-megatron`, the path of a mapping file, or the result of `ckpt.read_mapping`.
        rename: from names to new names, as for `ckpt.load`, after the mappings.
        prefix: a name to put before all names, last of all.
        parameters: sizes that the mappings name, such as `{"heads": 32}`. By default they come from
            the `config.json` beside the source.
        max_shard_bytes: the largest size of a folder's files (not for dcp, nor with `kind`). A
            larger tensor has a file of its own.
        overwrite: replaces the target: a file, a checkpoint of ckpt's own format, or, for `hf` and
            `dcp`, a folder with all its content, unless it holds several checkpoints. A link is
            replaced itself. A pipe, a device, or a file that the source or another checkpoint needs
            is never replaced.
        compress: compresses with zstd; for `ckpt` only.
        dtype: torch's name of the dtype to which floats of 16 bits and more are cast, or names by
            patterns of the new names, such as `{"*norm.weight": "float32", "*": "bfloat16"}`. The
            first pattern that matches counts; None keeps the dtype.
        kind: `full`, `sharded` or `local`: each rank's part of a tensor. The target has the files
            that `world_size` ranks would save: shares of whole tensors, rows as `torch.chunk` cuts
            them, or even runs of row-major elements. For `ckpt`; other formats are `full`.
        world_size: the number of ranks; 1 by default for `full`.
        dry_run: checks everything, writes nothing, and returns the report with its plan.
        resume: goes on where an interrupted conversion with equal arguments stopped, and lets a
            later one go on: complete files are kept beside `dst`. For `hf` and `dcp` on a disk.
        verify: reads the result back and compares each byte and value with the source.
        group: the ranks that convert together, each its share: a process group, or None for the
            default one. All of them call this, and see the target's folder if it is on a disk. By
            default one process calls this. `ckpt` is written by rank 0 alone.
        progress: called with numbers of bytes as this rank reads them.
        storage_options: options of the fsspec drivers of both URLs.
        dst_storage_options: options of the driver of `dst` in the place of `storage_options`.

    Raises:
        ArgumentError: a format, kind, number of ranks or dtype is unknown, the format has no such
            kind or compression, a pattern or a rule matches no name, or a mapping does not fit.
        MismatchError: the checkpoint has no entry at `select`, or no such part.
        NotACheckpointError: no checkpoint is at `src`.
        ExistsError: a file, folder or checkpoint is at `dst` and `overwrite` is False, or it
            cannot be replaced.
        UnsupportedError: the target's format cannot hold a value or a name.
        CorruptError, FormatError: bytes of `src` are missing or changed; nothing appears at `dst`.
            With `verify`, also: the result differs from the source; it stays at `dst`.
        StoreError: the disk or object store failed, or the ranks read different checkpoints.
        RankError: another rank failed; it has that rank's number and error.
    """
    source, target = os.fspath(src), os.fspath(dst)
    chosen = format_of(target, to)
    divided, ranks = checked_kind(kind, world_size)
    check_can_hold(chosen, target, divided, ranks, compress)
    _check_resumable(chosen, target, resume, group)
    casts = Casts.of(dtype)
    changes = Changes.of(select, part, include, exclude, mapping, rename, prefix, parameters)
    there = storage_options if dst_storage_options is None else dst_storage_options
    together = None if group == SELF else Ranks(group)
    is_first = together is None or together.rank == 0
    with called_together(together), open_source(source, storage_options) as opened:
        check = check_folder
        if chosen is Format.CKPT:
            check = check_native
        elif chosen.is_file:
            check = check_file
        if is_first:
            check(opened, target, there, overwrite)
        beside: tuple[str, ...] = ()
        if select is None and part is None and chosen.is_of_weights and opened.catalog.weights:
            weights = opened.catalog.weights
            beside = tuple(key for key in _top_keys(opened.catalog.tree) if key != weights)
            changes = replace(changes, select=weights)
        found, opaque = _without_opaque(opened.url, changes.applied(opened))
        with outgoing(opened.url, opened.store, found.catalog, casts, progress) as state:
            check_values(chosen, state)
            if dry_run:
                pass
            elif chosen is not Format.CKPT:
                placed = partial(_placed, chosen, target, there, overwrite)
                plans = _plans(chosen, split_url(target)[1], state, max_shard_bytes)
                if resume:
                    values = changes.parameters_of(opened)
                    identity = identity_of(opened, (chosen, changes, values, casts), plans)
                    with folder_writer(target, there, overwrite, kept=True) as writer:
                        _write_missing(writer, state, plans, identity)
                else:
                    is_far = local_path(target) is None
                    write_plans(together, state.copier, placed, plans, is_far)
            elif is_first:
                tensors = state.tensors.values()
                if divided is not None and ranks is not None:
                    division = of_kind(tensors, divided, ranks)
                else:
                    division = by_size(tensors, max_shard_bytes)
                with open_store(target, there) as store:
                    write_native(store, state, division, overwrite, compress)
        if verify and not dry_run and is_first:
            with (
                outgoing(opened.url, opened.store, found.catalog, casts) as wanted,
                open_source(target, there) as result,
                outgoing(result.url, result.store, result.catalog) as written,
            ):
                check_written(wanted, written, without_secrets(target), result.catalog.format)
        return ConvertReport(
            source,
            target,
            opened.catalog.format,
            chosen.value,
            len(state.tensors),
            sum(tensor.nbytes for tensor in state.tensors.values()),
            (*opaque, *left_out(chosen, state)),
            None if divided is None else divided.value,
            ranks,
            became_text(chosen, state),
            _not_cast(casts, state),
            beside,
            conversion_plan(found, casts, state.memory_bytes),
        )


def write_native(
    store: Store, state: Streams, division: Division, overwrite: bool, compress: bool
) -> None:
    """Writes and commits a native checkpoint with the files of a division, rank by rank."""
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
    """Whether no manifest will ever name the files of an attempt, after an error of its commit.

    A server may still carry out a request that seemed to fail. Only a refusal is certain.
    """
    if local_path(store.url) is None and not isinstance(error, ExistsError):
        return False
    try:
        return attempt.encode() not in store.read_whole(MANIFEST, current().manifest_bytes)
    except FileNotFoundError:
        return True
    except (OSError, FormatError):
        return False


@contextmanager
def _placed(chosen: Format, target: str, options: Options, overwrite: bool) -> Iterator[Writer]:
    """Returns a writer for the files of a format other than ckpt's, which then take their place."""
    if not chosen.is_file:
        with folder_writer(target, options, overwrite) as writer:
            yield writer
        return
    folder = split_url(target)[0]
    with open_store(folder, options) as store, file_writer(target, store, overwrite) as writer:
        yield writer
        store.flush()


def _write_missing(
    writer: Writer, state: Streams, plans: Sequence[FilePlan], identity: str
) -> None:
    """Writes the files of a folder that an interrupted conversion has left out."""
    with Journal.opened(Path(writer.url), identity) as journal:
        state.copier.write(journal.writer(writer), journal.left(plans))


def _plans(chosen: Format, name: str, state: Streams, max_shard_bytes: int) -> Sequence[FilePlan]:
    """Returns the files of a format other than ckpt's; `name` is that of a single file."""
    if chosen is Format.HUGGINGFACE:
        return huggingface.plans(state, max_shard_bytes)
    if chosen is Format.DCP:
        return dcp.plans(state)
    match chosen:
        case Format.SAFETENSORS:
            return [safetensors_file.plan(name, state)]
        case Format.NPZ:
            return [npz.plan(name, state)]
        case Format.GGUF:
            return [gguf_write.plan(name, state)]
    return [torch_save.plan(name, state)]


def _without_opaque(url: str, found: Mapped) -> tuple[Mapped, tuple[str, ...]]:
    """Returns what is converted without opaque values, and their names."""
    tree, names = without_opaque(found.catalog.tree)
    if isinstance(found.catalog.tree, OpaqueValue):
        raise UnsupportedError(
            f"{url}: it has no tensors and values, only {found.catalog.tree}, an object that is "
            "shown and never made; load it where its class is known, and save its state_dict()"
        )
    return replace(found, catalog=replace(found.catalog, tree=tree)), names


def _top_keys(tree: Tree) -> tuple[str, ...]:
    return tuple(map(str, tree)) if isinstance(tree, dict) else ()


def _not_cast(casts: Casts, state: Outgoing) -> tuple[str, ...]:
    return tuple(
        name
        for name, tensor in state.tensors.items()
        if casts.of_name(name) not in (None, tensor.dtype)
        and tensor.dtype.torch_name.startswith(("float", "bfloat"))
    )


def _check_resumable(chosen: Format, target: str, resume: bool, group: Group) -> None:
    """Raises ArgumentError unless an interrupted conversion to a target can go on."""
    is_folder = chosen in (Format.HUGGINGFACE, Format.DCP)
    if resume and not (is_folder and local_path(target) is not None):
        raise ArgumentError(
            f"{without_secrets(target)} would be written as {chosen.value}; a conversion can go on "
            "only to a folder of hf or dcp on a disk, whose files are complete one by one: leave "
            "out resume=True (--resume)"
        )
    if resume and group != SELF:
        raise ArgumentError(
            "a conversion by several ranks leaves nothing to go on from: leave out resume=True "
            "(--resume), or convert with one process"
        )
