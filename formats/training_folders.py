"""The folders of a training: of Trainer, Accelerate, Lightning, Megatron-core and others.

    checkpoint-500/                                  place in the tree
        model.safetensors, or shards, or .bin        model
        pytorch_model_fsdp_0/    a folder of DCP     model
        optimizer.pt or .bin, or optimizer_0/        optimizer
        scheduler.pt or .bin, scaler.pt              scheduler, scaler
        rng_state.pth; rng_state_1.pth, ...          rng; rng.1, ...
        random_states_0.pkl, ...                     rng.0, ...
        latest, global_step500/    of DeepSpeed      module, fp32, optimizer, zero
        trainer_state.json                           trainer_state
        training_args.bin                            training_args, an object that is only shown

Rules:

1. The second of several models, optimizers or schedulers is at `model_1`, `optimizer_1`, ...
2. The weights are at `model`, and `Catalog.weights` tells it: a verb that wants only weights takes
   these. A folder with weights in two forms gives the first of the forms above.
3. A file beside weights and optimizer whose content cannot be read is left out, and a note names
   it. Damage and hostile content are errors in every file.

The names are those of transformers/trainer.py, accelerate/checkpointing.py and
accelerate/utils/fsdp_utils.py.

Lightning's FSDP and model-parallel strategies write a folder of DCP with the model and the
optimizers, and in it `meta.pt`, a file of torch.save with the rest of the state: the epoch, the
loops, the hyperparameters. Both lie at the top of the tree, as in a `.ckpt` file of Lightning. The
names are those of lightning/fabric/strategies/fsdp.py and model_parallel.py.

A pipeline of diffusers has a sub-folder for each component, which `model_index.json` names. PEFT
saves several adapters, none of them the default one, in sub-folders.

[Note: Megatron-core]
A distributed checkpoint of Megatron-core is a folder of DCP with two files beside it:

    latest_checkpointed_iteration.txt    the number of the newest iteration, or `release`
    iter_0000500/.metadata, *.distcp     the sharded tensors and objects, as DCP stores them
    iter_0000500/common.pt               equal on all ranks: arguments, options of the optimizer
    iter_0000500/metadata.json           the names of the formats of both

1. Names are Megatron's keys. A `ShardedObject` is an item for each of its parts: `key/shard_0_2` is
   part 0 of 2.
2. The values of common.pt stand beside the tensors.
3. Only the formats `torch_dist` and `fsdp_dtensor` are folders of DCP. Others are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from formats import dcp, torch_save
from formats.catalog import Catalog, FileRecord, Tree
from formats.deepspeed import folder as deepspeed
from formats.errors import CorruptError, UnsupportedError
from formats.joined import Part, below, join_catalogs, join_folders, under
from formats.limits import check, decode_object
from formats.safetensors import huggingface
from formats.safetensors.huggingface import BASES, choose
from formats.storage import Reader

MODEL = "model"
DEEPSPEED = "deepspeed"
TRAINER_STATE = "trainer_state.json"
PIPELINE = "model_index.json"


@dataclass(frozen=True, slots=True)
class _Row:
    """Entries of one kind; the group of the pattern is the number of the object or the rank."""

    pattern: re.Pattern[str]
    place: str
    by_rank: bool = False
    """Whether each rank has an entry, at its rank below the place."""
    may_be_left_out: bool = False
    """Whether the rest is of use without it (rule 3)."""

    def place_of(self, number: str | None) -> tuple[str, ...]:
        if self.by_rank:
            return (self.place,) if number is None else (self.place, str(int(number)))
        at = int(number or 0)
        return (f"{self.place}_{at}" if at else self.place,)


_N = r"(?:_([0-9]{1,6}))?"
_ROWS = (
    _Row(re.compile(r"model_([0-9]{1,6})\.safetensors"), MODEL),
    _Row(re.compile(r"pytorch_model_([0-9]{1,6})\.bin"), MODEL),
    _Row(re.compile(rf"pytorch_model_fsdp{_N}\.bin"), MODEL),
    _Row(re.compile(r"pytorch_model_fsdp_([0-9]{1,6})/"), MODEL),
    _Row(re.compile(rf"optimizer{_N}\.(?:bin|pt)"), "optimizer"),
    _Row(re.compile(r"optimizer_([0-9]{1,6})/"), "optimizer"),
    _Row(re.compile(rf"scheduler{_N}\.(?:bin|pt)"), "scheduler"),
    _Row(re.compile(r"scaler\.pt()"), "scaler"),
    _Row(re.compile(rf"dl_state_dict{_N}\.bin"), "dataloader", may_be_left_out=True),
    _Row(re.compile(r"custom_checkpoint_([0-9]{1,6})\.pkl"), "custom", True, True),
    _Row(re.compile(rf"sampler{_N}\.bin"), "sampler", may_be_left_out=True),
    _Row(re.compile(r"training_args\.bin()"), "training_args", may_be_left_out=True),
    _Row(re.compile(rf"rng_state{_N}\.pth"), "rng", True, True),
    _Row(re.compile(r"random_states_([0-9]{1,6})\.pkl"), "rng", True, True),
)


_WEIGHTS_OF_RANK = re.compile(r"pytorch_model_fsdp(_[0-9]+)?_rank[0-9]+\.bin")
_OF_RANK = re.compile(r"(pytorch_model_fsdp|optimizer)(_[0-9]+)?_rank[0-9]+\.bin")


def read(reader: Reader) -> Catalog:
    """Reads the catalog of a folder: descriptions, and the values beside the tensors.

    Raises:
        HostileError: a file claims absurd sizes or names code. Nothing was executed.
        UnsupportedError: the weights or the optimizer cannot be read.
        CorruptError, FormatError: a file is damaged, or breaks the rules of its format.
    """
    entries = reader.entries()
    is_trainer = TRAINER_STATE in entries
    parts: dict[tuple[str, ...], Catalog] = {}
    notes: list[str] = []
    weights = _weights(reader, entries)
    if weights is not None:
        parts[(MODEL,)] = weights
    for row, place, entry in _find_entries(entries):
        if place in parts:
            first = parts[place].files[0].name
            notes.append(f"{entry} was not read: {'.'.join(place)} is in {first}")
            continue
        try:
            parts[place] = _read(reader, entry, row)
        except UnsupportedError as error:
            if not row.may_be_left_out:
                raise
            notes.append(f"{entry} was not read: {error}")
    notes += [
        f"{entry} was not read: each rank saved a file of its own (LOCAL_STATE_DICT, or "
        "use_dcp=False); load it in Accelerate and save it with SHARDED_STATE_DICT"
        for entry in entries
        if _OF_RANK.fullmatch(entry)
    ]
    unread = [name for name in entries if _WEIGHTS_OF_RANK.fullmatch(name)]
    unread += [
        name
        for _, place, name in _find_entries(entries)
        if place[0] == "custom" and place not in parts
    ]
    of_deepspeed = ""
    if deepspeed.LATEST[0] in entries:
        try:
            inner = parts[(DEEPSPEED,)] = deepspeed.read(reader)
            of_deepspeed = f"{DEEPSPEED}.{inner.weights}" if inner.weights else ""
        except UnsupportedError as error:  # also if its folder was removed, and `latest` was not
            notes.append(f"the checkpoint of DeepSpeed was not read: {error}")
    if is_trainer:
        parts[("trainer_state",)] = _json(reader, TRAINER_STATE)
    every = [Part(place, catalog) for place, catalog in parts.items()]
    found = join_catalogs("trainer" if is_trainer else "accelerate", every, metadata={})
    notes = [*(note for part in every for note in part.catalog.notes), *notes]
    unread += [name for part in every for name in part.catalog.unread]
    return replace(
        found,
        notes=tuple(notes),
        unread=tuple(unread),
        weights=MODEL if (MODEL,) in parts else of_deepspeed,
    )


def _find_entries(entries: Sequence[str]) -> Iterator[tuple[_Row, tuple[str, ...], str]]:
    """Yields the known entries in the order of the table, each with its place."""
    for row in _ROWS:
        matches = [match for entry in entries if (match := row.pattern.fullmatch(entry))]
        for match in sorted(matches, key=_number):
            yield row, row.place_of(match[1] or None), match.string


def _number(match: re.Match[str]) -> int:
    return int(match[1] or 0)


def _weights(reader: Reader, entries: Sequence[str]) -> Catalog | None:
    """Returns the weights that transformers would load from the folder."""
    usual = [name for name in entries if name.startswith(_STARTS)]
    if choose(usual, ".safetensors") is not None:
        return huggingface.read(reader, present=usual)
    if choose(usual, ".bin") is not None:
        return huggingface.read_bin(reader, usual)
    return None


_STARTS = tuple(f"{base}{end}" for base in BASES for end in (".", "-"))
"""The beginnings of the usual names of weights: whole files, shards and indexes."""


def _read(reader: Reader, entry: str, row: _Row) -> Catalog:
    """Reads one entry: a sub-folder of DCP with one object, or a file."""
    if entry.endswith("/"):
        return under(below(reader, entry.rstrip("/"), dcp.read), row.place)
    if entry.endswith(".safetensors"):
        return huggingface.read(reader, entry)
    return torch_save.read(reader, entry)


def _json(reader: Reader, name: str) -> Catalog:
    """Returns the values of a JSON file. Losses may be NaN."""
    size = reader.size(name)
    check("index_bytes", size, name)
    values: Tree = decode_object(reader.read(name, 0, size), name, nan=True)  # type: ignore[assignment]
    return Catalog("json", {}, values, (FileRecord(name, size),))


def read_lightning(reader: Reader) -> Catalog:
    """Reads the catalog of a folder: the descriptions of both parts. Raises as they do."""
    parts = [dcp.read(reader), torch_save.read(reader, "meta.pt")]
    found = join_catalogs("lightning", [Part((), catalog) for catalog in parts], metadata={})
    return replace(found, weights=torch_save.weights_of_lightning(found.tree))


def read_pipeline(reader: Reader) -> Catalog:
    """Reads the catalog of a pipeline of diffusers: each component with weights, at its name.

    Raises CorruptError if a component's folder is missing. Further errors are those of the parts.
    """
    index = _json(reader, PIPELINE)
    listed = index.tree if isinstance(index.tree, dict) else {}
    wanted = [str(key) for key, item in listed.items() if isinstance(item, list) and any(item)]
    if missing := sorted({f"{name}/" for name in wanted} - {*reader.entries()}):
        raise CorruptError(
            f"{reader.url}: {PIPELINE} names {', '.join(missing)}, which is missing; copy the "
            "folder again"
        )
    return join_folders("diffusers", reader, wanted, index.files)


COMMON = "common.pt"
METADATA = "metadata.json"
LATEST = "latest_checkpointed_iteration.txt"
SMALL_BYTES = 1 << 20
"""The limit of the two small files."""
FORMATS = ("torch_dist", "fsdp_dtensor")


def read_megatron(reader: Reader) -> Catalog:
    """Reads the catalog of an iteration's folder, or of the newest one: no tensor.

    Raises:
        UnsupportedError: the tensors have another format.
        FormatError: a file is invalid. Further errors are those of `formats.dcp.reader`.
    """
    entries = reader.entries()
    if METADATA in entries:
        return _read_iteration(reader, COMMON in entries)
    text = reader.read_whole(LATEST, SMALL_BYTES).decode("utf-8", "replace").strip()
    folder = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 10 else text
    if f"{folder}/" not in entries or METADATA not in reader.entries(folder):
        raise UnsupportedError(
            f"{reader.url}: its file {LATEST} says {text!r:.200}, and there is no folder of that "
            "iteration with a distributed checkpoint of Megatron-core; open the folder of an "
            "iteration by its name, or save with --ckpt-format torch_dist"
        )
    return below(reader, folder, read_megatron)


def _read_iteration(reader: Reader, has_common: bool) -> Catalog:
    size = reader.size(METADATA)
    description = decode_object(reader.read_whole(METADATA, SMALL_BYTES), METADATA)
    backend = description.get("sharded_backend")
    if not isinstance(backend, str):  # a file of another program
        return dcp.read(reader)
    if backend not in FORMATS:
        raise UnsupportedError(
            f"{reader.url}: its tensors have Megatron-core's format {backend!r:.200}, which this "
            f"version cannot read; load it with Megatron and save with --ckpt-format {FORMATS[0]}"
        )
    parts = [Part((), dcp.read(reader))]
    if has_common:
        parts.append(Part((), torch_save.read(reader, COMMON)))
    catalog = join_catalogs(
        "megatron", parts, [FileRecord(METADATA, size)], {"sharded_backend": backend}
    )
    is_cut = backend == FORMATS[0] and not has_common
    note = f"{COMMON} is missing, with the arguments and the options of the optimizer"
    return replace(catalog, notes=(note,)) if is_cut else catalog
