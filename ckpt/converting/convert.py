"""Converts a checkpoint of any format to any format, block by block.

Rules:

1. A file or checkpoint at the target is an error unless `overwrite`, also if it appears during the
   conversion. The new checkpoint appears as a whole, and the old one stays until then
   (`ckpt.converting.targets`).
2. A conversion holds a few blocks in memory, whatever the size of a tensor or the model. The files
   of each format are planned (`formats.catalog`), and copied by several threads
   (`ckpt.transfer.copy_files`) or ranks (`ckpt.transfer.copy_shares`).
3. A result with fewer weights than the source, or another dtype of one, is an error that names
   each, before a byte is written, unless the caller chose so or allows it
   (`ckpt.converting.target_formats`).
4. A kind of state dict and a number of ranks divide a native checkpoint (`ckpt.converting.layouts`)
   into the files that such ranks would write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt.arguments import DtypeName, FormatName, KindName
from ckpt.converting.layouts import by_size, check_kind, of_kind
from ckpt.converting.native_target import (
    StoredState,
    check_located,
    check_written,
    outgoing,
    write_native,
)
from ckpt.converting.target_formats import (
    SHOWN_NAMES,
    Format,
    became_text,
    check_names,
    check_values,
    format_of,
    losses,
    of_weights,
    omissions,
    prefix_of_model,
)
from ckpt.converting.targets import (
    Journal,
    check_file,
    check_folder,
    check_native,
    file_writer,
    folder_writer,
    identity_of,
)
from ckpt.mapping.apply import Mapped
from ckpt.mapping.changes import Changes, MappingName, Part
from ckpt.mapping.model_files import ModelFiles, base_name_of, config_of, content_beside
from ckpt.opening.sources import Source, open_source
from ckpt.state.patterns import NO_CASTS, Casts
from ckpt.stores.local_files import explained_on_disk
from ckpt.stores.store import Options, local_path, open_store, split_url
from ckpt.transfer.copy_shares import memory_bytes_of, write_plans
from formats.catalog import (
    Catalog,
    FilePlan,
    OpaqueValue,
    Outgoing,
    TensorRef,
    iter_leaves,
    without_opaque,
)
from formats.errors import CorruptError, UnsupportedError
from formats.native.shard import Progress
from formats.safetensors import file as safetensors_file
from formats.safetensors import huggingface
from formats.safetensors.huggingface import MAX_SHARD_BYTES, with_modules
from formats.storage import Writer
from sharding.agreement.ranks import SELF, Ranks
from sharding.errors import ArgumentError, ArgumentTypeError, format_names, without_secrets
from sharding.kind import Kind

if TYPE_CHECKING:
    from ckpt.converting.weighted_sum import WeightedSum
    from sharding.agreement.ranks import Group

__all__ = ["ConvertReport", "convert"]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the target."""

    name: str
    sources: tuple[str, ...]
    """The names in the source that it comes from."""
    shape: tuple[int, ...]
    source_dtype: str
    dtype: str
    nbytes: int
    """The bytes that are written."""
    tied_to: str | None = None
    """The name of the tensor whose bytes these are; they count once."""


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The tensors that a conversion reads and writes, and its bytes."""

    tensors: tuple[PlannedTensor, ...]
    """In the order of the target, with tied names."""
    excluded: tuple[str, ...]
    """The names in the source that a mapping leaves out."""
    read_bytes: int
    """The bytes of the source's tensors, each once."""
    written_bytes: int
    """The bytes of the target's tensors, without headers."""
    memory_bytes: int
    """The largest size of all blocks that are in memory together."""


def conversion_plan(mapped: Mapped, state: StoredState, memory_bytes: int) -> ConversionPlan:
    """Returns the plan for a state that was made of a catalog after its changes."""
    tensors: list[PlannedTensor] = []
    read = dict[str, int]()
    for name, leaf in iter_leaves(state.tree):
        if not isinstance(leaf, TensorRef):
            continue
        is_tied, tensor = name in state.aliases, state.tensors[leaf.name]
        record = state.copier.source_of(leaf.name).record
        read[record.name] = record.nbytes
        tensors.append(
            PlannedTensor(
                name,
                _sources(mapped.origins, name),
                tensor.shape,
                str(record.dtype),
                str(tensor.dtype),
                0 if is_tied else tensor.nbytes,
                leaf.name if is_tied else None,
            )
        )
    written = sum(tensor.nbytes for tensor in tensors)
    return ConversionPlan(
        tuple(tensors), mapped.excluded, sum(read.values()), written, memory_bytes
    )


def _sources(origins: Mapping[str, tuple[str, ...]], name: str) -> tuple[str, ...]:
    """Returns the origins of a name; an item of a list has those of the list."""
    while name and name not in origins:
        name = name.rpartition(".")[0]
    return origins.get(name, ())


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Top keys that were not converted, beside the weights, although the caller named no part."""
    weights: str = ""
    """The key path of the weights, if they alone were converted, although the caller named no
    part."""
    lost: tuple[str, ...] = ()
    """Weights that the target lacks or has with another dtype, each with the reason, if
    `allow_loss` let them go."""
    tied: tuple[str, ...] = ()
    """Names of weights that the target has under another name alone, as transformers' own files."""
    model_files: tuple[str, ...] | None = None
    """The configuration, tokenizer and other small files that a Hugging Face folder got; None for
    other formats."""
    not_copied: tuple[str, ...] = ()
    """Large files and sub-folders beside the model that may belong to it and were not copied."""
    prefix: str = ""
    """The key path of the model, with which its names begin in a format of weights."""
    plan: ConversionPlan | None = field(default=None, compare=False, repr=False)
    """Each tensor with its names in the source, its shape and dtypes, and the bytes."""


def convert(
    src: str | os.PathLike[str] | WeightedSum,
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
    config: str | os.PathLike[str] | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    allow_loss: bool = False,
    compress: bool = False,
    dtype: DtypeName | Mapping[str, DtypeName | None] | None = None,
    kind: KindName | None = None,
    world_size: int | None = None,
    dry_run: bool = False,
    resume: bool = False,
    verify: bool = False,
    group: Group = "self",
    progress: Progress | None = None,
    storage_options: Options = None,
    dst_storage_options: Options = None,
    since: str | os.PathLike[str] | None = None,
) -> ConvertReport:
    """Writes the checkpoint at `src`, or a part of it, to `dst`, and returns a report.

    One process calls this, or all ranks of `group`. All checksums of the read bytes are compared:
    those of a native source, and the CRC-32 of each storage or chunk in torch's formats.
    safetensors and Hugging Face have no checksums.

    Args:
        src: a path or URL, or the sum of several checkpoints (`ckpt.WeightedSum`).
        to: `ckpt`, `safetensors`, `hf`, `torch`, `dcp`, `gguf` or `npz`. By default the end of
            `dst` decides (`.safetensors`, `.pt`, `.pth`, `.bin`, `.gguf`, `.npz`); a name
            without an ending becomes `ckpt`. Other endings are refused.
        select: a key path. The conversion takes the entries below it and removes it from the names.
            By default of a training's folder the weights, if the target's format is one of weights;
            for `hf` also the model of a checkpoint with a model and an optimizer (see `part`),
            unless `include`, `exclude`, `mapping` or `rename` name tensors. An empty one takes
            everything.
        part: `model` or `optimizer`, in place of `select`: the top entry `model`, `state_dict`,
            `model_state_dict` or `module`, the one item of `models`, or everything if there is no
            optimizer; the one dict with `state` and `param_groups`.
        include: patterns of names to convert, without `select`: `*` and `?`, or a regular
            expression between slashes.
        exclude: patterns of names to leave out.
        mapping: mappings, applied in turn (docs/converting.md): the name of one that ships, such as
            `llama-hf-megatron`, the path of a mapping file, or the result of `ckpt.read_mapping`.
            `auto`, or as `auto-hf-megatron`, is the one for the `model_type` in the `config.json`.
        rename: from names to new names, as for `ckpt.load`, after the mappings.
        prefix: a name to put before all names, last of all.
        parameters: sizes that the mappings name, such as `{"heads": 32}`. By default they come from
            the model's `config.json`.
        config: the folder of the model, as `save_pretrained` writes it, or its `config.json`. Its
            sizes are for the mappings, and for `hf` its configuration and tokenizer are copied. By
            default the source's folder, whose files are copied unless names change.
        max_shard_bytes: the largest size of the files of `hf` and, without `kind`, of `ckpt`; 5 GB
            by default. A larger tensor has a file of its own.
        overwrite: replaces the target: a file, a checkpoint of ckpt's own format, or, for `hf` and
            `dcp`, a folder with all its content, unless it holds several checkpoints. Of a
            link, only the link is replaced. A pipe, a device, or a file that the source or another
            checkpoint needs is never replaced.
        allow_loss: converts also if weights of the source are left out or change their dtype: an
            object that hides tensors, a file that was not read, a dtype that the format lacks.
            `ConvertReport.lost` names them. By default this is an error.
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
            default one process calls this. Rank 0 alone compresses.
        progress: called with numbers of bytes as this rank reads them.
        storage_options: options of the fsspec drivers of both URLs.
        dst_storage_options: options of the driver of `dst` in place of `storage_options`.
        since: an earlier version of `src`. For `hf`: the target, whose name is `weight_v000007`,
            has what is different only, as slime and SGLang's `pull_weights` read it. Takes
            neither `group` nor `resume` nor `verify`; `storage_options` are for it too.

    Raises:
        ArgumentError: a format, kind, number of ranks or dtype is unknown, the format has no such
            kind or compression, the checkpoint has no entry at `select`, or no such part, a pattern
            or a rule matches no name, a mapping does not fit, tied names get two dtypes, `config`
            has no effect, or `since` has other names, shapes or dtypes.
        NotACheckpointError: no checkpoint is at `src`, or no `config.json` at `config`.
        ExistsError: a file, folder or checkpoint is at `dst` and `overwrite` is False, or it
            cannot be replaced.
        UnsupportedError: the target's format cannot hold a value or a name, or its dtype a number.
        CorruptError, FormatError: bytes of `src` are missing or changed; nothing appears at `dst`.
            With `verify`, also: the result differs from the source; it stays at `dst`. An S3 server
            copies long runs of unchanged bytes itself, with their checksums and without a look at
            them: without `verify`, damage in these shows when the result is read.
        StoreError: the disk or object store failed, or the ranks read different checkpoints.
        RankError: another rank failed; it has that rank's number and error.
    """
    given = changes = Changes(
        select=select,
        part=part,
        include=include,
        exclude=exclude,
        mapping=mapping,
        rename=rename,
        prefix=prefix,
        parameters=parameters,
        config=config,
    )
    divided, number = check_kind(kind, world_size)
    target = Target(
        url=os.fspath(dst),
        format=format_of(os.fspath(dst), to),
        options=storage_options if dst_storage_options is None else dst_storage_options,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
        compress=compress,
        kind=divided,
        world_size=number,
        casts=Casts.of(dtype),
    )
    target.check(changes, resume, group)
    if since is not None and (
        target.format is not Format.HUGGINGFACE or resume or verify or group != SELF
    ):
        raise ArgumentError(
            "since= is for a folder of hf that one process writes at once: give to='hf', and leave "
            "out resume=, verify= and group="
        )
    ranks = Ranks(group)
    is_first = ranks.rank == 0
    with ranks.call("ckpt.convert"), ExitStack() as stack:
        ranks.doing("reading the source")
        if isinstance(src, (str, os.PathLike)):
            opening = open_source(src, storage_options)
        elif hasattr(src, "opened"):
            opening = src.opened(storage_options)
        else:
            raise ArgumentTypeError(f"src is {src!r:.80}; give a path, a URL or a WeightedSum")
        source = stack.enter_context(opening)
        if is_first:
            target.check_free(source)
        changes, beside = of_weights(changes, source, target.format)
        changes = changes.resolved(source)
        if target.format is Format.HUGGINGFACE:
            target = replace(target, files=changes.model_files(source))
        if changes.config is None and changes.keeps_model(source):
            source = replace(source, catalog=with_modules(source.store, source.catalog))

        def count(nbytes: int) -> None:
            ranks.count(nbytes)
            if progress is not None:
                progress(nbytes)

        described = target.describe(source, changes, allow_loss, count)
        mapped, state = described.found, described.state
        check_located(state)
        source.check(mapped.catalog)
        write = partial(target.write, ranks, state)
        if since is not None:
            from ckpt.converting.weight_delta import check_alike, version_in, write_delta  # few do

            before = stack.enter_context(open_source(since, storage_options))
            own = of_weights(given, before, target.format)[0].resolved(before)
            older = target.describe(before, own, allow_loss).state
            check_located(older)
            check_alike(state, older)
            write = partial(write_delta, version_in(target.url), state, older, target.open_writer)
        if not dry_run:
            ranks.doing("writing")
        if not dry_run and resume:
            plans = target.plans(state)
            total = src if source.parts else None
            options = (target.format, changes, changes.parameters_of(source), total)
            identity = identity_of(source.parts or [source], options, plans)
            target.write_missing(state, plans, identity)
        elif not dry_run:
            write()
        if verify and not dry_run and is_first:
            from ckpt.checking.verify import library_problems  # start-up, for few conversions

            ranks.doing("verifying")
            wanted = target.outgoing(source, mapped.catalog)
            with open_source(target.url, target.options) as result:
                whole = with_modules(result.store, result.catalog)
                written = outgoing(result.url, result.store, whole)
                shown_url = without_secrets(target.url)
                check_written(wanted, written, shown_url, result.catalog.format)
                for problem in library_problems(result.store, result.catalog):
                    raise CorruptError(problem.message)
        ranks.agree("completing")
        return ConvertReport(
            src=source.url,
            dst=target.url,
            source_format=source.catalog.format,
            target_format=target.format.value,
            tensors=len(state.tensors),
            nbytes=sum(tensor.nbytes for tensor in state.tensors.values()),
            left_out=(*described.opaque, *omissions(target.format, state)),
            kind=None if divided is None else divided.value,
            world_size=number,
            became_text=became_text(target.format, state),
            not_cast=_not_cast(target.casts, state),
            beside=beside,
            weights=(changes.module or "") if beside else "",
            lost=described.lost,
            tied=tuple(state.aliases) if target.format.is_of_weights else (),
            model_files=tuple(target.files.content)
            if target.format is Format.HUGGINGFACE
            else None,
            not_copied=target.files.left,
            prefix=prefix_of_model(changes, source, target.format, state),
            plan=conversion_plan(mapped, state, target.memory_bytes(state)),
        )


@dataclass(frozen=True, slots=True)
class Described:
    """The tensors of a source as a target gets them."""

    found: Mapped
    """The catalog after all changes, without opaque values."""
    opaque: tuple[str, ...]
    """The names of the opaque values."""
    state: StoredState
    lost: tuple[str, ...] = ()
    """A line for each weight that is lost, if that is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The place and the format of the result."""

    url: str
    format: Format
    options: Options = field(repr=False)
    overwrite: bool
    max_shard_bytes: int | None
    compress: bool = False
    kind: Kind | None = None
    world_size: int | None = None
    casts: Casts = NO_CASTS
    files: ModelFiles = field(default_factory=ModelFiles)
    """The small files of the model; none but for a Hugging Face folder."""

    @property
    def shard_bytes(self) -> int:
        """The largest size of a file; of no meaning for formats of one file."""
        return MAX_SHARD_BYTES if self.max_shard_bytes is None else self.max_shard_bytes

    def check(self, changes: Changes, resume: bool, group: Group) -> None:
        """Raises ArgumentError for options that the format does not have."""
        place = f"{without_secrets(self.url)} would be written as {self.format.value}"
        if self.compress and self.format is not Format.CKPT:
            raise ArgumentError(
                f"{place}, which is not compressed; only ckpt's own format is: convert to a folder "
                "with to='ckpt', or leave out compress=True"
            )
        is_whole = self.kind in (None, Kind.FULL) and self.world_size in (None, 1)
        if self.format is not Format.CKPT and not is_whole:
            raise ArgumentError(
                f"{place}, which has whole tensors that belong to no rank; only ckpt's own format "
                "is divided among ranks: convert to a folder with to='ckpt', or leave out kind= "
                "and world_size="
            )
        is_folder = self.format in (Format.HUGGINGFACE, Format.DCP)
        if resume and not (is_folder and local_path(self.url) is not None):
            raise ArgumentError(
                f"{place}; a conversion can go on only to a folder of hf or dcp on a disk, whose "
                "files are complete one by one: leave out resume=True"
            )
        if resume and group != SELF:
            raise ArgumentError(
                "a conversion by several ranks leaves nothing to go on from: leave out "
                "resume=True, or convert with one process"
            )
        if self.format is not Format.HUGGINGFACE:
            changes.check_config_is_used()
        why = f"{self.format.value} has no files of a largest size"
        if self.format in (Format.CKPT, Format.HUGGINGFACE):
            why = "" if self.kind is None else f"kind={self.kind.value} decides the files"
        if self.max_shard_bytes is not None and why:
            raise ArgumentError(f"{without_secrets(self.url)}: {why}: leave out max_shard_bytes=")

    def check_free(self, source: Source) -> None:
        """Raises as `convert` does if the target is there, and may not be replaced."""
        check = check_file if self.format.is_file else check_folder
        if self.format is Format.CKPT:
            check = check_native
        with explained_on_disk("looking at", self.url):
            check(source, self.url, self.options, self.overwrite)

    def memory_bytes(self, state: StoredState) -> int:
        """Returns the most memory of all blocks together."""
        copier = state.copier
        return memory_bytes_of(copier) if self.compress else copier.sizes.memory_bytes

    def outgoing(
        self, source: Source, catalog: Catalog, progress: Progress | None = None
    ) -> StoredState:
        """Returns the tensors to write of a source, whose catalog is another one after changes.

        Each tied name has bytes of its own in npz and gguf, which know no ties, and for a model
        whose configuration ties no embeddings, which looks for both names.
        """
        is_untied = config_of(self.files, "config=").get("tie_word_embeddings") is False
        untied = self.format in (Format.NPZ, Format.GGUF) or is_untied
        return outgoing(source.url, source.store, catalog, self.casts, progress, untied)

    def describe(
        self,
        source: Source,
        changes: Changes,
        allow_loss: bool,
        progress: Progress | None = None,
    ) -> Described:
        """Returns the tensors to write. Raises as `convert` if they cannot be written."""
        changed = changes.apply(source)
        tree, opaque = without_opaque(changed.catalog.tree)
        if isinstance(changed.catalog.tree, OpaqueValue):
            raise UnsupportedError(
                f"{source.url}: it has no tensors and values, only {changed.catalog.tree}, an "
                "object that is shown and never made; load it where its class is known, and save "
                "its state_dict()"
            )
        mapped = replace(changed, catalog=replace(changed.catalog, tree=tree))
        state = self.outgoing(source, mapped.catalog, progress)
        check_values(self.format, state)
        lost = tuple(losses(source.catalog, changes, changed.catalog.tree, state, self.format))
        lost += check_names(source, changes, state, self.files)
        if not allow_loss:
            if self.format.is_of_weights and not state.tensors and opaque:
                raise UnsupportedError(
                    f"{without_secrets(source.url)}: none of its tensors can be converted: "
                    f"{len(opaque)} objects are shown and never made ({format_names(opaque, 3)}); "
                    "`ckpt inspect` says why",
                    names=opaque,
                )
            if lost:
                more = f"; and {len(lost) - SHOWN_NAMES} more" if len(lost) > SHOWN_NAMES else ""
                raise UnsupportedError(
                    f"{without_secrets(source.url)}: {len(lost)} of its weights would be lost: "
                    f"{'; '.join(lost[:SHOWN_NAMES])}{more}. Nothing was written: name the part to "
                    "convert (select=, include=, exclude=), or pass allow_loss=True to convert the "
                    "rest"
                )
        return Described(mapped, opaque, state, lost)

    def plans(self, state: StoredState) -> Sequence[FilePlan]:
        """Returns the files of a format other than ckpt's."""
        small = [FilePlan(name, [data]) for name, data in self.beside(state, "the source").items()]
        return [*small, *self.tensor_plans(state)]

    def beside(self, state: Outgoing, where: str) -> Mapping[str, bytes]:
        """Returns the small files; the configuration, which is at `where`, has the new dtype."""
        dtypes = {tensor.dtype for tensor in state.tensors.values()}
        return content_beside(self.files, self.casts, dtypes, where)

    def tensor_plans(self, state: StoredState) -> Sequence[FilePlan]:
        """Returns the files with tensors, and their index, of a format other than ckpt's."""
        name = split_url(self.url)[1]
        match self.format:
            case Format.HUGGINGFACE:
                base, modules = base_name_of(self.files), state.modules
                return huggingface.plans(state, self.shard_bytes, base, modules)
            case Format.SAFETENSORS:
                return [safetensors_file.plan(name, state)]
            case Format.DCP:
                from formats import dcp  # start-up: a conversion needs one format of these

                return dcp.plans(state)
            case Format.NPZ:
                from formats import npz

                return [npz.plan(name, state)]
            case Format.GGUF:
                from formats import gguf

                return [gguf.plan(name, state)]
        from formats import torch_save

        return [torch_save.plan(name, state)]

    def write(self, ranks: Ranks, state: StoredState) -> None:
        """Writes the result, by this process or by all ranks."""
        if self.format is not Format.CKPT:
            is_far = local_path(self.url) is None
            plans = self.plans(state)
            write_plans(ranks, state.copier, self.open_writer, plans, is_far)
            return
        tensors = state.tensors.values()
        if self.kind is not None and self.world_size is not None:
            division = of_kind(tensors, self.kind, self.world_size)
        else:
            division = by_size(tensors, self.shard_bytes)
        write_native(ranks, self.url, self.options, state, division, self.overwrite, self.compress)

    def write_missing(self, state: StoredState, plans: Sequence[FilePlan], identity: str) -> None:
        """Writes the files of a folder that an interrupted conversion has left out."""
        with Journal.open(self.url, self.options, self.overwrite, identity) as journal:
            state.copier.write(journal, journal.incomplete(plans))

    @contextmanager
    def open_writer(self) -> Iterator[Writer]:
        """Returns a writer for the files, which then take their place; not for ckpt's format."""
        if not self.format.is_file:
            with folder_writer(self.url, self.options, self.overwrite) as writer:
                yield writer
            return
        folder = split_url(self.url)[0]
        with (
            open_store(folder, self.options) as store,
            file_writer(self.url, store, self.overwrite) as writer,
        ):
            yield writer


def _not_cast(casts: Casts, state: Outgoing) -> tuple[str, ...]:
    return tuple(
        name
        for name, tensor in state.tensors.items()
        if casts.of_name(name) not in (None, tensor.dtype)
        and tensor.dtype.torch_name.startswith(("float", "bfloat"))
    )
