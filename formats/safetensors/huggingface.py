"""Folders of Hugging Face: `model.safetensors`, `pytorch_model.bin`, or shards and an index.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json     {"metadata": {"total_size": N}, "weight_map": {tensor: file}}

`formats.safetensors.file` describes each file, and the rules for plain values, tied names and
dtypes that safetensors lacks. Rules of the folder, for `.bin` files of torch.save too:

1. A whole file or an index of a usual base name counts first, and of the two the whole file, as for
   transformers. Without one of them, numbered shards of one base name count, if none is missing; a
   note tells it. Without numbers, all files of the folder count together. Equal names in two of
   them are an error, and so are files with numbers beside files without them.
2. The index names only files of its own folder, and each tensor lies in the file that it names. A
   tensor of these files that the index leaves out is read too, as transformers does. `total_size`
   is a hint and is not checked: writers count tied tensors differently.
3. Shards are filled in the order of the tensors, as by `huggingface_hub`. The index is written
   last.

DCP's HuggingFaceStorageWriter with `save_distributed=True` writes a file of chunks for each rank:

    shard-00001-model-00001-of-00001.safetensors     the chunks of rank 0
    shard-00002-model-00001-of-00001.safetensors     the chunks of rank 1

The metadata of each file has, under `DCP_SHARDING_INFO`, the offsets of each chunk in its tensor:
`{"w": {"saved_offsets": [4, 0]}}`. Nothing in the folder has the shape of a whole tensor or the
number of files. Rules of these files (torch/distributed/checkpoint/hf_storage.py and _hf_utils.py):

4. A tensor reaches as far as its last chunk, as for torch's own reader. The chunks must tile it.
5. A tensor without offsets begins at zero.
6. If the last file is missing, the rest may still tile smaller tensors. A note tells it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from formats.catalog import (
    Catalog,
    FilePlan,
    FileRecord,
    Outgoing,
    OutgoingTensor,
    PieceTable,
    StoredPiece,
    TensorRecord,
    check_tiling,
)
from formats.detect import folder_format
from formats.errors import CorruptError, FormatError, HostileError
from formats.joined import Part, below, join_catalogs
from formats.limits import ELEMENTS, check, decode_object
from formats.safetensors import file as safetensors_file
from formats.safetensors.file import flat_tree, plan_tensors
from formats.storage import Reader
from sharding.errors import format_names
from sharding.layout import Box, Piece

BASES = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
"""The base names that count first, in this order: transformers', diffusers', peft's."""

INDEX = ".index.json"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files that count: an index, or the files themselves."""

    index: str | None
    files: tuple[str, ...]
    """Empty if the index names them."""
    notes: tuple[str, ...] = ()

    @classmethod
    def from_name(cls, name: str) -> Chosen:
        """Returns the choice of one file, a whole file or an index."""
        return cls(name, ()) if name.endswith(".json") else cls(None, (name,))


def choose(names: Collection[str], ending: str) -> Chosen | None:
    """Returns the files with an ending (".safetensors" or ".bin") that count, None without one.

    Raises FormatError for shards with a missing number, and for several checkpoints.

    >>> choose(["model.safetensors", "other.safetensors"], ".safetensors").files
    ('model.safetensors',)
    >>> choose(["a-00001-of-00002.bin", "a-00002-of-00002.bin"], ".bin").files
    ('a-00001-of-00002.bin', 'a-00002-of-00002.bin')
    """
    variant = re.compile(rf".+{re.escape(ending)}\.index\.[\w-]+\.json")  # of transformers
    named = (name for name in names if variant.fullmatch(name) or name.endswith(ending + INDEX))
    present = {*named, *(name for name in names if name.endswith(ending))}
    for base in BASES:
        for name in (base + ending, base + ending + INDEX):
            if name in present:
                return Chosen.from_name(name)
    shards, others = _split_shards(present, ending)
    whole = {name for name in others if name.endswith(ending)}
    indexes = others - whole - {name + INDEX for name in whole}
    if len(indexes) > 1 or (indexes and whole):
        raise _several(sorted(indexes | whole))
    if indexes:
        return Chosen.from_name(min(indexes))
    firsts = {min(found.values()) for found in shards.values()}
    if len(firsts) + bool(whole) > 1:
        raise _several(sorted(whole | firsts))
    if whole:
        together = f"{len(whole)} files without numbers or an index were read as one checkpoint"
        return Chosen(None, tuple(sorted(whole)), (together,) if len(whole) > 1 else ())
    for (base, count), found in shards.items():
        return _complete(base, count, found, ending)
    return None


def unread_files(present: Iterable[str], own: Collection[str]) -> tuple[str, ...]:
    """Returns the files of weights in a folder that are not among its `own`, nor known copies.

    Copies are the weights in the older form (`pytorch_model.bin`), in another precision
    (`model.fp16.safetensors`), or under Meta's names (`consolidated.safetensors`).

    >>> own = ["model.safetensors"]
    >>> unread_files([*own, "pytorch_model.bin", "value_head.safetensors", "optimizer.bin"], own)
    ('value_head.safetensors',)
    """
    return tuple(
        name
        for name in present
        if name.endswith((".safetensors", ".bin"))
        and name not in own
        and _KNOWN_BESIDE.fullmatch(name) is None
    )


_KNOWN_BESIDE = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model)(_fsdp)?([.-].*)?\.(safetensors|bin)"
    r"|consolidated.*|(optimizer|scheduler|sampler|dl_state_dict|training_args|vocab)(_\d+)?\.bin"
    r"|[0-9a-f]{16}-\d+\.safetensors|optimizer_\d+_rank.*"
)


def read_weight_map(
    reader: Reader, chosen: Chosen, present: Collection[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the weight map of the index, from tensor to file, and its files; else nothing.

    Raises CorruptError if a file that the index names is missing.
    """
    if chosen.index is None:
        return {}, ()
    weight_map = _read_index(reader, chosen.index)
    files = sorted(set(weight_map.values()))
    missing = sorted(set(files) - set(present))
    if missing:
        raise CorruptError(
            f"{chosen.index}: {len(missing)} of its {len(files)} files are missing: "
            f"{format_names(missing, 5)}; copy them from the origin of the folder"
        )
    return weight_map, tuple(files)


def check_in_their_files(
    weight_map: Mapping[str, str], names: Mapping[str, Collection[str]], index: str | None
) -> None:
    """Raises CorruptError unless each tensor of the index is among the names of its file."""
    known = {file: frozenset(there) for file, there in names.items()}
    lost = [name for name, file in weight_map.items() if name not in known[file]]
    if lost:
        raise CorruptError(
            f"{index}: {len(lost)} tensors are not in the file that the index names: "
            + format_names([f"{name} in {weight_map[name]}" for name in lost], 5)
        )


_Shards = dict[tuple[str, int], dict[int, str]]
"""The names of shards by number; by their base name and count."""


def _split_shards(names: Iterable[str], ending: str) -> tuple[_Shards, set[str]]:
    numbered = re.compile(rf"(.+)-([0-9]{{5,9}})-of-([0-9]{{5,9}}){re.escape(ending)}")
    shards: _Shards = {}
    others: set[str] = set()
    for name in names:
        if match := numbered.fullmatch(name):
            shards.setdefault((match[1], int(match[3])), {})[int(match[2])] = name
        else:
            others.add(name)
    return shards, others


def _complete(base: str, count: int, found: Mapping[int, str], ending: str) -> Chosen:
    """Returns all shards of one base name in their order. Raises FormatError if one is missing."""
    index = base + ending + INDEX
    if sorted(found) != [*range(1, len(found) + 1)] or len(found) != count:
        first = next(number for number in range(1, len(found) + 2) if number not in found)
        raise FormatError(
            f"{base}-{first:05d}-of-{count:05d}{ending} is missing, and {index} too; {len(found)} "
            "shards are there: an index is written last, so the save, or the copy of the folder, "
            "is unfinished"
        )
    note = f"{index} is missing; the numbers of the {count} shards are complete"
    return Chosen(None, tuple(found[number] for number in sorted(found)), (note,))


def _several(names: Sequence[str]) -> FormatError:
    return FormatError(
        f"the folder holds several checkpoints, {', '.join(names)}; name one of the files"
    )


def _read_index(reader: Reader, name: str) -> dict[str, str]:
    """Returns the weight map of an index, from tensor to file. Each file is a plain name."""
    size = reader.size(name)
    check("index_bytes", size, name)
    index = decode_object(reader.read(name, 0, size), f"{name}: the index")
    files_by_tensor = index.get("weight_map")
    if not isinstance(files_by_tensor, dict):
        raise FormatError(
            f'{name}: an index is {{"metadata": ..., "weight_map": {{tensor: file}}}}'
        )
    weight_map: dict[str, str] = {}
    for tensor, file in files_by_tensor.items():
        if not isinstance(file, str):
            raise FormatError(f"{name}: the file of {tensor} is {file!r:.80}, which is not a name")
        if file in ("", ".", "..") or not file.isprintable() or set("/\\:") & set(file):
            raise HostileError(
                f"{name}: the file of {tensor} is {file!r:.80}; an index names only files of its "
                f"own folder"
            )
        weight_map[tensor] = file
    return weight_map


MAX_SHARD_BYTES = 5_000_000_000
"""The default for the largest data of a shard. A larger tensor has a shard of its own."""

MODULES, ADAPTER = "modules.json", "adapter_config.json"
_WHOLE = ".safetensors"
_INDEX = ".safetensors.index.json"


def read(reader: Reader, name: str | None = None, present: Sequence[str] | None = None) -> Catalog:
    """Reads the catalog of a folder: only the index and the headers of its files.

    `name` is the whole file or the index; by default `huggingface_files` decides among the files
    that are `present`: by default all of the folder.

    Raises:
        FileNotFoundError: the folder has no safetensors file.
        CorruptError: a file that the index names is missing, or a tensor is not in its file.
        HostileError: the index names a file outside the folder.
        FormatError: the index or a file breaks the rules of the format, or is ambiguous.
    """
    present = reader.names() if present is None else present
    if name is None and any(map(SHARD.fullmatch, present)):
        return read_dcp_shards(reader)
    chosen = Chosen.from_name(name) if name is not None else choose(present, _WHOLE)
    if chosen is None:
        raise FileNotFoundError(f"{reader.url}: no *.safetensors or *{_INDEX} in this folder")
    weight_map, files = read_weight_map(reader, chosen, present)
    contents = [safetensors_file.read(reader, shard) for shard in chosen.files or files]
    tensors, aliases = _merge(contents, weight_map, chosen.index)
    metadata = {key: text for content in contents for key, text in content.metadata.items()}
    index = (FileRecord(chosen.index, reader.size(chosen.index)),) if chosen.index else ()
    unread: tuple[str, ...] = ()
    if name is None:
        own = {content.files[0].name for content in contents}
        modules = module_folders(reader, present)
        unread = (*unread_files(present, own), *(f"{folder}/" for folder in modules))
    return Catalog(
        format="huggingface",
        tensors=tensors,
        tree=flat_tree(tensors, aliases),
        files=index + tuple(content.files[0] for content in contents),
        aliases=aliases,
        metadata=metadata,
        notes=(*chosen.notes, *_differing(contents, metadata)),
        unread=unread,
    )


def module_folders(reader: Reader, present: Sequence[str]) -> tuple[str, ...]:
    """Returns the sub-folders with weights that `modules.json` names: of sentence-transformers.

    The first module lies in the folder itself. Others, such as `2_Dense`, are folders of their own.
    So are further adapters of PEFT.
    """
    if ADAPTER in present:
        folders = [name[:-1] for name in reader.entries() if name.endswith("/")]
        return tuple(folder for folder in folders if ADAPTER in reader.entries(folder))
    return tuple(
        name
        for name in (module_names(reader) if MODULES in present else ())
        if any(entry.endswith((_WHOLE, ".bin")) for entry in reader.entries(name))
    )


def module_names(reader: Reader) -> dict[str, str]:
    """Returns the sub-folders that `modules.json` names, each with its module's name in memory."""
    size = reader.size(MODULES)
    check("index_bytes", size, MODULES)
    try:
        listed = json.loads(reader.read(MODULES, 0, size))
    except ValueError:
        return {}  # of another library
    names: dict[str, str] = {}
    for each in listed if isinstance(listed, list) else ():
        path, name = (each.get("path"), each.get("name")) if isinstance(each, dict) else (None, "")
        if isinstance(path, str) and not set("\\:") & set(path):
            path = path.strip("/")
            if path not in ("", ".") and ".." not in path.split("/"):
                names[path] = str(name)
    return names


def plans(
    state: Outgoing,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    base: str = "model",
    modules: Sequence[str] = (),
) -> list[FilePlan]:
    """Plans the files of a folder with the tensors of a state.

    One file if all tensors fit into `max_shard_bytes`, otherwise shards and then the index. The
    tensors of `modules` lie in sub-folders of these names (`with_modules`).

    Raises:
        FormatError: two tensors have one name, or a name is not text.
    """
    planned: list[FilePlan] = []
    left = list(state.tensors.values())
    for folder in modules:
        start = f"{folder}."
        inside = [tensor for tensor in left if tensor.name.startswith(start)]
        left = [tensor for tensor in left if not tensor.name.startswith(start)]
        planned += _plans(state, inside, max_shard_bytes, f"{folder}/{base}", start)
    return [*planned, *_plans(state, left, max_shard_bytes, base, "")]


def _plans(
    state: Outgoing, tensors: Sequence[OutgoingTensor], max_shard_bytes: int, base: str, start: str
) -> list[FilePlan]:
    """Plans the files of one folder, in which names lose `start`."""
    shards = split(tensors, max_shard_bytes)
    if len(shards) == 1:
        return [plan_tensors(base + _WHOLE, shards[0], state.aliases, state.metadata, start)]
    folder, _, stem = base.rpartition("/")
    weight_map, plans = {}, []
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}{_WHOLE}"
        path = f"{folder}/{name}" if folder else name
        plans.append(plan_tensors(path, shard, state.aliases, state.metadata, start))
        weight_map.update({tensor.name.removeprefix(start): name for tensor in shard})
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return [*plans, FilePlan(base + _INDEX, [text.encode()])]


def with_modules(reader: Reader, catalog: Catalog) -> Catalog:
    """Returns the catalog of a folder with the weights of its modules in sub-folders.

    Their names begin with the sub-folder: `2_Dense.linear.weight`. `plans` writes them there again.
    """
    folders = [name.removesuffix("/") for name in catalog.unread if name.endswith("/")]
    if not folders:
        return catalog
    parts = [Part((), catalog)]
    for folder in folders:
        kind = folder_format(reader.entries(folder))
        if kind is not None:
            parts.append(Part((folder,), below(reader, folder, kind.read)))
    found = join_catalogs(catalog.format, parts, metadata=catalog.metadata)
    read = {f"{part.place[0]}/" for part in parts[1:]}
    return replace(
        found, notes=catalog.notes, unread=tuple(n for n in catalog.unread if n not in read)
    )


def split(
    tensors: Iterable[OutgoingTensor], max_shard_bytes: int
) -> tuple[tuple[OutgoingTensor, ...], ...]:
    """Returns the tensors of each shard, at least one: the shards that `huggingface_hub` makes.

    A shard takes tensors in order until the next would not fit. A tensor larger than a shard has
    its own shard, before the one that is being filled.
    """
    shards: list[tuple[OutgoingTensor, ...]] = []
    filling: list[OutgoingTensor] = []
    filled = 0
    for tensor in tensors:
        if tensor.nbytes > max_shard_bytes:
            shards.append((tensor,))
            continue
        if filled + tensor.nbytes > max_shard_bytes:
            shards.append(tuple(filling))
            filling, filled = [], 0
        filling.append(tensor)
        filled += tensor.nbytes
    if filling or not shards:
        shards.append(tuple(filling))
    return tuple(shards)


def _differing(contents: Sequence[Catalog], metadata: Mapping[str, str]) -> Iterator[str]:
    """Yields a note for each key of the metadata that is another text in another file."""
    for key, text in metadata.items():
        if any(content.metadata.get(key, text) != text for content in contents):
            yield f"the files have different metadata {key!r:.80}; that of the last one counts"


def _merge(
    contents: Sequence[Catalog], weight_map: Mapping[str, str], index: str | None
) -> tuple[dict[str, TensorRecord], dict[str, str]]:
    """Returns the tensors of all files in their order, by the index, and the tied names."""
    check_in_their_files(
        weight_map,
        {content.files[0].name: (*content.tensors, *content.aliases) for content in contents},
        index,
    )
    tensors: dict[str, TensorRecord] = {}
    aliases: dict[str, str] = {}
    for content in contents:
        file = content.files[0].name
        for name, record in content.tensors.items():
            if weight_map.get(name, file) != file:
                continue
            if name in tensors:
                problem = (
                    "and the index does not name one of the two; open one of the files by its name"
                    if index
                    else "so the files are several checkpoints; name one of the files"
                )
                where = index or "the folder"
                raise FormatError(f"{file}: {name} lies in another file of {where} too, {problem}")
            tensors[name] = record
        for alias, name in content.aliases.items():
            if aliases.setdefault(alias, name) != name:
                raise FormatError(
                    f"{file}: {alias} is tied to {name}, and in another file of the folder to "
                    f"{aliases[alias]}; open one of the files by its name"
                )
    aliases = {alias: name for alias, name in aliases.items() if alias not in tensors}
    for alias, name in aliases.items():
        if name not in tensors:
            raise FormatError(
                f"{index or contents[0].files[0].name}: {alias} is tied to {name}, which is in "
                "none of its files"
            )
    return tensors, aliases


ENDING = ".bin"


def read_bin(reader: Reader, present: Sequence[str] | None = None) -> Catalog:
    """Reads the catalog of a folder: only the index, and the directory and pickle of its files.

    `present` has the names of the files that may count; by default those of the folder.

    Raises:
        FileNotFoundError: the folder has no weights in `.bin` files.
        CorruptError: a file that the index names is missing, or a tensor is not in its file.
        FormatError: the index or a file breaks the rules, or two files have one tensor.
    """
    there = reader.names() if present is None else []
    present = [name for name in present or there if is_weights(name)]
    chosen = choose(present, ENDING)
    if chosen is None:
        raise FileNotFoundError(f"{reader.url}: no *.bin with weights in this folder")
    weight_map, files = read_weight_map(reader, chosen, present)
    from formats import torch_save  # start-up: most folders have safetensors

    catalogs = [torch_save.read(reader, name) for name in chosen.files or files]
    index = [FileRecord(chosen.index, reader.size(chosen.index))] if chosen.index else []
    names = {each.files[0].name: (*each.tensors, *each.aliases) for each in catalogs}
    check_in_their_files(weight_map, names, chosen.index)
    found = join_catalogs("huggingface", [Part((), catalog) for catalog in catalogs], index)
    return replace(found, notes=chosen.notes, unread=unread_files(there, names))


def is_weights(name: str) -> bool:
    """Whether a `.bin` file or an index of such files has weights, by its name.

    >>> is_weights("pytorch_model-00001-of-00002.bin"), is_weights("training_args.bin")
    (True, False)
    """
    return name.startswith(("pytorch_model", "diffusion_pytorch_model", "adapter_model"))


SHARD = re.compile(r"shard-([0-9]{5,9})-model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")
OFFSETS_KEY = "DCP_SHARDING_INFO"
_WRITTEN = frozenset({OFFSETS_KEY, "DCP_VERSION", "format"})
"""The keys of the metadata that the writer adds."""


def read_dcp_shards(reader: Reader) -> Catalog:
    """Reads the catalog of a folder: only the headers of its files.

    Raises:
        FormatError: the offsets are invalid, or chunks overlap or leave holes.
        HostileError: a tensor has more elements than torch can count.
        CorruptError, UnsupportedError: as for one safetensors file.
    """
    shards = sorted(filter(SHARD.fullmatch, reader.names()))
    parts: dict[str, list[tuple[str, TensorRecord, Box]]] = {}
    files: list[FileRecord] = []
    metadata: dict[str, str] = {}
    for shard in shards:
        contents = safetensors_file.read(reader, shard)
        offsets = _offsets(contents, shard)
        for name, record in contents.tensors.items():
            parts.setdefault(name, []).append((shard, record, _box(record, offsets, shard)))
        files += contents.files
        metadata |= {k: text for k, text in contents.metadata.items() if k not in _WRITTEN}
    tensors = {name: _tensor(name, found) for name, found in parts.items()}
    note = (
        f"these {len(shards)} files have no list of all files: if the last ranks' are missing, "
        "tensors end earlier"
    )
    return Catalog(
        format="huggingface",
        tensors=tensors,
        tree=flat_tree(tensors, {}),
        files=tuple(files),
        metadata=metadata,
        notes=(note,),
    )


def _offsets(contents: Catalog, file: str) -> Mapping[str, object]:
    """Returns the metadata's entry for each tensor of a file."""
    text = contents.metadata.get(OFFSETS_KEY)
    return decode_object(text, f"{file}: {OFFSETS_KEY}") if text is not None else {}


def _box(record: TensorRecord, offsets: Mapping[str, object], file: str) -> Box:
    entry = offsets.get(record.name)
    at = entry.get("saved_offsets") if isinstance(entry, dict) else [0] * len(record.shape)
    if not isinstance(at, list) or len(at) != len(record.shape):
        raise FormatError(
            f"{file}: {OFFSETS_KEY} does not have {len(record.shape)} offsets of {record.name}"
        )
    if any(type(lo) is not int or not 0 <= lo < ELEMENTS for lo in at):
        raise FormatError(f"{file}: the offsets of {record.name} are {at!r:.80}, not whole numbers")
    return Box(tuple(at), tuple(lo + size for lo, size in zip(at, record.shape, strict=True)))


def _tensor(name: str, found: list[tuple[str, TensorRecord, Box]]) -> TensorRecord:
    """Returns the tensor of these chunks (rule 1)."""
    file, first, _ = found[0]
    for other, record, _ in found:
        if record.dtype != first.dtype or len(record.shape) != len(first.shape):
            raise FormatError(
                f"{other}: {name} is {record.dtype} of {len(record.shape)} dimensions, and "
                f"{first.dtype} of {len(first.shape)} in {file}"
            )
    shape = tuple(max(his) for his in zip(*(box.hi for _, _, box in found), strict=True))
    if prod(size or 1 for size in shape) >= ELEMENTS:
        raise HostileError(f"{file}: {name} has more elements than torch can count")
    placed = [(record, box) for _, record, box in found if box]
    check_tiling(name, shape, [box for _, box in placed])
    pieces = [
        StoredPiece(Piece.packed(box), stored.extent)
        for record, box in placed
        for stored in record.pieces
    ]
    return first._replace(shape=shape, pieces=PieceTable(pieces))
