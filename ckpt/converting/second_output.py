"""A second output of one save: a conversion whose source is the memory of the save.

    ckpt.save("runs/step-100", {"model": model}, also=ckpt.HuggingFace("hf/step-100"))

Rules:

1. The checkpoint is committed first. A failure of the second output is a warning on all ranks, and
   changes nothing about the checkpoint.
2. The plan is that of `ckpt.convert` from the committed checkpoint: each process makes it from the
   manifest, so that all have the same. The bytes of this rank come from memory (`MadeFiles`): the
   arena of a background save, read by the process that has written the shard file, or the tensors.
3. On a disk rank 0 makes the files, and each rank writes its own elements into all of them, each at
   its place. No rank reads another's bytes, or a file.
4. A file with checksums of whole tensors, and a file in a bucket, is made by one rank. That rank
   reads the other ranks' elements from the committed checkpoint (decision 045).
5. The output appears as a whole, as that of a conversion (`ckpt.converting.targets`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckpt.arguments import DtypeName, FormatName
from ckpt.converting.convert import Described, Target
from ckpt.converting.target_formats import Format, format_of, of_weights
from ckpt.converting.targets import NewFiles
from ckpt.errors import StoreError
from ckpt.mapping.changes import Changes, MappingName, Part
from ckpt.mapping.model_files import ModelFiles, read_configs, read_model_files
from ckpt.opening.sources import Source, open_source
from ckpt.plan.save_plan import SavePlan
from ckpt.state.patterns import Casts
from ckpt.stores.local_files import join_file
from ckpt.stores.store import (
    Options,
    Store,
    absolute,
    local_path,
    open_store,
    place_elsewhere,
    split_url,
)
from ckpt.transfer.copy_shares import hash_of
from formats.catalog import Catalog, Extent, Pieces, PieceTable, StoredPiece, TensorRecord
from formats.native.reader import NativePieces
from formats.native.shard import Progress, ShardSummary
from formats.storage import MadeFiles
from sharding.agreement.ranks import Ranks
from sharding.errors import ArgumentError, without_secrets
from sharding.layout import Box, Layout

if TYPE_CHECKING:  # torch, which the writer process has no need of
    from ckpt.saving.writers import CommittedSave
    from ckpt.state.state_spec import StateSpec

__all__ = ["HuggingFace", "SecondOutput"]

MEMORY = "/memory"
"""The name of the memory among the files of a checkpoint."""
STEP = "{step}"
"""The part of a place that becomes the number of the step."""

Fill = Callable[[int, memoryview], None]
"""Fills memory with this rank's bytes from a place on."""


@dataclass(frozen=True, slots=True)
class SecondOutput:
    """A second output of a save, in any format but ckpt's own: the argument `also` of `ckpt.save`.

    The arguments are those of `ckpt.convert` with these names. For `Checkpointer` the place has
    `{step}`, which becomes the number of the step.

    Raises:
        ArgumentError: an argument has no meaning, or the format is ckpt's own.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     also = ckpt.SecondOutput(f"{folder}/w.safetensors", dtype="bfloat16")
    ...     ckpt.save(f"{folder}/step-1", {"w": torch.ones(2)}, also=also)
    ...     ckpt.read(f"{folder}/w.safetensors")
    {'w': tensor([1., 1.], dtype=torch.bfloat16)}
    """

    place: str | os.PathLike[str]
    """The file or folder to write."""
    to: FormatName | None = None
    _: KW_ONLY
    config: str | os.PathLike[str] | None = None
    dtype: DtypeName | Mapping[str, DtypeName | None] | None = None
    select: str | None = None
    part: Part | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    mapping: MappingName | Sequence[MappingName] = ()
    rename: Mapping[str, str] | None = None
    prefix: str = ""
    parameters: Mapping[str, int] | None = None
    max_shard_bytes: int | None = None
    overwrite: bool = False
    allow_loss: bool = False
    storage_options: Options = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Another process makes the plan too, in a folder that may be another one by then.
        object.__setattr__(self, "mapping", self._changes().mapping)
        object.__setattr__(self, "place", absolute(self.place))
        if self.config is not None:
            object.__setattr__(self, "config", absolute(self.config))
        target, changes = self._target(), self._changes()
        if target.format is Format.CKPT:
            raise ArgumentError(
                f"also={without_secrets(target.url)!r} would be a second checkpoint of ckpt's own "
                "format; name another format (to='hf', to='safetensors'), or copy the checkpoint "
                "(ckpt cp)"
            )
        target.check(changes, False, None)

    def at(self, step: int) -> SecondOutput:
        """Returns the output of a step."""
        return replace(self, place=os.fspath(self.place).replace(STEP, str(step)))

    def check_steps(self) -> None:
        """Raises ArgumentError if all steps would have one place, which no step may replace."""
        if STEP not in os.fspath(self.place) and not self.overwrite:
            raise ArgumentError(
                f"also={without_secrets(os.fspath(self.place))!r} is one place for all steps: put "
                "{step} into it, as 'hf/step-{step}', or pass overwrite=True for the newest alone"
            )

    def check(self, store: Store, is_first: bool) -> None:
        """Raises if the place is taken, or the configuration missing. All ranks call this.

        `store` is the folder of the checkpoint.
        """
        self._configs()
        if is_first:
            nothing = Source(store.url, store, Catalog("memory", {}, {}, ()))
            self._target().check_free(nothing)

    def plan(self, store: Store, described: StateSpec) -> Planned:
        """Returns the files to write for a state, the same on all ranks. Raises as `convert`.

        The last plan is kept: a training saves the same tensors again and again.
        """
        target = self._target(self._configs())
        own = [getattr(self, field.name) for field in fields(self) if field.name != "place"]
        key = [target.format, *own, target.files, described.aliases]
        for tensors, known, planned in _last:
            if tensors is described.tensors and known == key:
                return planned.at(target)
        nowhere = PieceTable([])  # of no use for a plan
        records = {
            name: TensorRecord(name, tensor.shape, tensor.dtype, nowhere, tensor.layout)
            for name, tensor in described.tensors.items()
        }
        catalog = Catalog("memory", records, described.tree, (), described.aliases)
        source = Source(store.url, store, catalog)
        state = self._describe(target, source, self.allow_loss).state
        plans = target.tensor_plans(state)
        has_sums = any(plan.needs_sums or plan.chunk_bytes for plan in plans)
        names = tuple(plan.name for plan in plans)
        planned = Planned(names, has_sums, target.beside(state, "also"))
        _last[:] = [(described.tensors, key, planned)]
        return planned

    def write(self, ranks: Ranks, save: CommittedSave) -> None:
        """Writes the output of a committed save: it exists when this returns, or all ranks raise.

        All ranks call this.
        """
        # All that can fail runs inside an exchange: nothing else tells the other ranks.
        target, is_far = self._target(), local_path(self.place) is None
        is_first, stage = ranks.rank == 0, "writing a second output"
        ranks.doing(stage)
        with ExitStack() as stack:

            def begin() -> tuple[Planned, dict[str, str | None]]:
                store = stack.enter_context(open_store(save.url, save.options))
                planned = self.plan(store, save.attempt.described)
                places = dict[str, str | None].fromkeys(planned.names)
                if is_first:
                    self.check(store, is_first)
                    writer = stack.enter_context(target.open_writer())
                    content = planned.beside
                    if self.config is not None and content:  # others of the model too
                        content = {**read_model_files(self.config).content, **content}
                    for name, data in content.items():
                        with writer.create(name) as file:
                            file.write([data])
                    for name in () if is_far else planned.names:
                        made: Any = stack.enter_context(writer.create(name))
                        places[name] = made.path
                return planned, places

            planned, places = ranks.run_on_all("beginning a second output", begin)
            places = json.loads(ranks.broadcast(json.dumps(places).encode()))
            by_pieces = not is_far and not planned.has_sums
            turns = [planned.names]
            if not by_pieces:  # each rank writes whole files; the last one makes it a checkpoint
                own = planned.names[ranks.rank : -1 : ranks.world_size]
                turns = [own, planned.names[-1:] if is_first else ()]
            for names in turns:
                turn = {name: places[name] for name in names}
                job = self._job(save, turn, by_pieces, is_first)
                _, agreed = ranks.run_and_compare(
                    stage,
                    partial(save.call, WORK, job, target.url, self.storage_options),
                    lambda found: {"plans": int(found.digest, 16)},
                )
                if not agreed.same["plans"]:
                    raise StoreError(
                        f"{without_secrets(target.url)}: the ranks have planned different files; "
                        "give all ranks the same also="
                    )
            ranks.run_on_all("completing a second output", stack.close)

    def _job(
        self, save: CommittedSave, places: Mapping[str, str | None], by_pieces: bool, is_first: bool
    ) -> Job:
        here = self.place, dict(self.storage_options or {})
        place, options = place_elsewhere(*here) or here
        attempt = save.attempt
        return Job(
            replace(self, place=place, storage_options=options),
            self._configs(),
            *(place_elsewhere(save.url, save.options) or (save.url, save.options)),
            attempt.attempt_id,
            attempt.mesh.rank((attempt.rank,)),
            attempt.plan,
            places,
            by_pieces,
            is_first,
        )

    def _describe(
        self, target: Target, source: Source, allow_loss: bool, progress: Progress | None = None
    ) -> Described:
        changes, _ = of_weights(self._changes(), source, target.format)
        return target.describe(source, changes, allow_loss, progress)

    def _target(self, files: ModelFiles | None = None) -> Target:
        place = os.fspath(self.place)
        return Target(
            url=place,
            format=format_of(place, self.to),
            options=self.storage_options,
            overwrite=self.overwrite,
            max_shard_bytes=self.max_shard_bytes,
            casts=Casts.of(self.dtype),
            files=files or ModelFiles(),
        )

    def _changes(self) -> Changes:
        names = {each.name for each in fields(Changes)} & {each.name for each in fields(self)}
        return Changes(**{name: getattr(self, name) for name in names})

    def _configs(self) -> ModelFiles:
        """Returns the configuration of the model, without its other files; nothing but for hf."""
        if self.config is None or self._target().format is not Format.HUGGINGFACE:
            return ModelFiles()
        return read_configs(self.config)


@dataclass(frozen=True, slots=True)
class HuggingFace(SecondOutput):
    """A second output of a save for `from_pretrained`: shards, their index and the model's files.

    `config` is the folder of the model, as `save_pretrained` writes it, or its `config.json`.
    Without one the folder has weights alone. Of a state with a model and an optimizer, the model is
    written, under its own names.

    >>> import ckpt, os, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = {"model": torch.nn.Linear(2, 1), "step": 1}
    ...     ckpt.save(f"{folder}/step-1", state, also=ckpt.HuggingFace(f"{folder}/hf/step-1"))
    ...     os.listdir(f"{folder}/hf/step-1"), sorted(ckpt.open(f"{folder}/hf/step-1"))
    (['model.safetensors'], ['bias', 'weight'])
    """

    to: FormatName | None = field(default="hf", init=False)


@dataclass(frozen=True, slots=True)
class Planned:
    """The files of a second output, as all ranks plan them."""

    names: tuple[str, ...]
    """The files with tensors, and their index, in their order."""
    has_sums: bool
    """Whether a file has checksums of whole tensors."""
    beside: Mapping[str, bytes]
    """The configuration, with the dtype of the weights."""

    def at(self, target: Target) -> Planned:
        """Returns the plan for another place."""
        return replace(self, names=(split_url(target.url)[1],)) if target.format.is_file else self


_last: list[tuple[object, object, Planned]] = []
"""The last plan: for these tensors, with these arguments."""

WORK = f"{__name__}:work"


class Job(NamedTuple):
    """The part of one rank in a second output."""

    output: SecondOutput
    configs: ModelFiles
    url: str
    """The committed checkpoint."""
    options: Mapping[str, Any]
    attempt: int
    rank: int
    plan: SavePlan
    places: Mapping[str, str | None]
    """The files to write, with their paths on a disk."""
    by_pieces: bool
    is_first: bool


def work(
    job: Job,
    data: memoryview | Fill,
    arena: int,
    advance: Callable[[int], None],
) -> ShardSummary:
    """Writes this rank's part of a second output, in any process that reaches both places.

    `data` is the rank's part of the state, as memory or as a function that fills memory. Returns
    the number of written bytes, and a hash of all files as `digest`.
    """
    plan, written, target = job.plan, [0], job.output._target(job.configs)

    def count(nbytes: int) -> None:
        written[0] += nbytes
        advance(plan.nbytes)  # raises if the trainer has ended

    with open_source(job.url, job.options, with_advice=False) as source:
        if len(source.catalog.files) > 1 and source.attempt != job.attempt >> 4:
            raise StoreError(
                f"{without_secrets(source.url)}: another process has replaced the checkpoint, and "
                "its second output was not written"
            )
        extents = {item.name: Extent(MEMORY, item.offset, item.nbytes) for item in plan.items}
        records = {}
        for name, record in source.catalog.tensors.items():
            assert record.layout is not None
            others = None if job.by_pieces else record.pieces
            pieces = StagedPieces(record.layout, job.rank, extents.get(name), others)
            records[name] = record._replace(pieces=pieces)

        def fill(name: str, offset: int, target: memoryview) -> None:
            if isinstance(data, memoryview):
                target[:] = data[offset : offset + len(target)]
            else:
                data(offset, target)

        reader = cast(Store, MadeFiles(source.store, fill))
        catalog = replace(source.catalog, tensors=records)
        staged = Source(source.url, reader, catalog)
        state = job.output._describe(target, staged, True, count).state
        plans, copier = target.tensor_plans(state), state.copier
        todo = [file_plan for file_plan in plans if file_plan.name in job.places]
        is_far = None in job.places.values()
        for file_plan in () if is_far else todo:
            path = job.places[file_plan.name] or ""
            with join_file(path, path) as file:
                if job.by_pieces:
                    copier.write_pieces(file, file_plan, job.is_first)
                else:
                    copier.write_part(file, file_plan, 0)
        if is_far:
            folder = split_url(target.url)[0] if target.format.is_file else target.url
            with open_store(folder, target.options) as store:
                is_new = not (target.format.is_file and target.overwrite)
                copier.write(NewFiles(store) if is_new else store, todo)
        copier.finish()
    return ShardSummary(written[0], 0, 0, f"{hash_of(plans):x}")


@dataclass(frozen=True, slots=True)
class StagedPieces:
    """The pieces of a tensor: this rank's in memory, and those of the others in a checkpoint."""

    layout: Layout
    rank: int
    extent: Extent | None
    """The place of this rank's part in memory, if it has one."""
    others: Pieces | None
    """All stored pieces; None if those of other ranks are of no use."""

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        if self.extent is not None:
            for piece in self.layout.pieces(self.rank):
                if piece.box & box:
                    yield StoredPiece(piece, self.extent)
        if self.others is not None:
            yield from cast(NativePieces, self.others).locate(box, self.rank)

    def __iter__(self) -> Iterator[StoredPiece]:
        return self.locate(Box.whole(self.layout.shape))
