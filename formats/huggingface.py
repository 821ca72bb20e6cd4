"""A Hugging Face folder: `model.safetensors`, or numbered shards of it and an index.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json     {"metadata": {"total_size": N}, "weight_map": {tensor: file}}

formats/safetensors_file.py describes each file, and the rules for plain values, tied names and
dtypes that safetensors lacks. Rules of the folder:

1. If a whole file and an index have one base name, the whole file counts, as for transformers.
2. The index names only files of its own folder, and each tensor lies in the file that it names. A
   tensor of these files that the index leaves out is read too, as transformers does. `total_size`
   is a hint and is not checked: writers count tied tensors differently.
3. Shards are filled in the order of the tensors, as by `huggingface_hub`. The index is written
   last: a folder with shards and no index is an unfinished save.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from formats.catalog import Catalog, FileRecord, TensorRecord
from formats.errors import CorruptError, FormatError, HostileError
from formats.file_plan import FilePlan
from formats.limits import check
from formats.outgoing import Outgoing, OutgoingTensor
from formats.safetensors_file import FileContents, flat_tree, plan_tensors, read_contents
from formats.storage import Reader
from formats.strict_json import decode_object

BASES = ("model", "diffusion_pytorch_model", "adapter_model")
"""The base names that count first, in this order: transformers', diffusers', peft's."""

MAX_SHARD_BYTES = 5_000_000_000
"""The default for the largest data of a shard. A larger tensor has a shard of its own."""

_WHOLE = ".safetensors"
_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"(?P<base>.+)-[0-9]{5,}-of-[0-9]{5,}\.safetensors")


def find(names: Iterable[str]) -> str | None:
    """Returns the file of a folder that describes its content: a whole file or an index.

    Returns None for a folder of another kind.

    Raises:
        FormatError: there are several such files and none has a usual name, or shards and no index.
    """
    present = set(names)
    for base in BASES:
        for name in (base + _WHOLE, base + _INDEX):
            if name in present:
                return name
    shards = {name: match for name in present if (match := _SHARD.fullmatch(name))}
    indexes = {name for name in present if name.endswith(_INDEX)}
    whole = {name for name in present if name.endswith(_WHOLE)} - shards.keys()
    indexes -= {name.removesuffix(_WHOLE) + _INDEX for name in whole}
    candidates = sorted(indexes | whole)
    if len(candidates) > 1:
        raise FormatError(
            f"the folder holds several checkpoints, {', '.join(candidates)}; name one of the files"
        )
    if candidates:
        return candidates[0]
    if shards:
        base = min(match["base"] for match in shards.values())
        raise FormatError(
            f"{base}{_INDEX} is missing, {len(shards)} shards are there: an index is written last, "
            f"so the save, or the copy of the folder, is unfinished"
        )
    return None


def read(reader: Reader, name: str | None = None) -> Catalog:
    """Reads the catalog of a folder: only the index and the headers of its files.

    `name` is the whole file or the index; by default the result of `find`.

    Raises:
        FileNotFoundError: the folder has no safetensors file.
        CorruptError: a file that the index names is missing, or a tensor is not in its file.
        HostileError: the index names a file outside the folder.
        FormatError: the index or a file breaks the rules of the format, or is ambiguous.
    """
    present = reader.names()
    name = name or find(present)
    if name is None:
        raise FileNotFoundError(f"{reader.url}: no *.safetensors or *{_INDEX} in this folder")
    files: tuple[FileRecord, ...] = ()
    weight_map: dict[str, str] = {}
    shards = [name]
    if name.endswith(_INDEX):
        weight_map = _read_index(reader, name)
        shards = sorted(set(weight_map.values()))
        _check_present(shards, present, name)
        files = (FileRecord(name, reader.size(name)),)
    contents = [read_contents(reader, shard) for shard in shards]
    tensors, aliases = _merge(contents, weight_map, name)
    return Catalog(
        format="huggingface",
        tensors=tensors,
        tree=flat_tree(tensors, aliases),
        files=files + tuple(content.record for content in contents),
        aliases=aliases,
        metadata={key: text for content in contents for key, text in content.metadata.items()},
    )


def plans(
    state: Outgoing, max_shard_bytes: int = MAX_SHARD_BYTES, base: str = "model"
) -> list[FilePlan]:
    """Plans the files of a folder with the tensors of a state.

    One file if all tensors fit into `max_shard_bytes`, otherwise shards and then the index.

    Raises:
        FormatError: two tensors have one name, or a name is not text.
    """
    shards = split(state.tensors.values(), max_shard_bytes)
    if len(shards) == 1:
        return [plan_tensors(base + _WHOLE, shards[0], state.aliases, state.metadata)]
    weight_map, found = {}, []
    for number, shard in enumerate(shards, 1):
        name = f"{base}-{number:05d}-of-{len(shards):05d}{_WHOLE}"
        found.append(plan_tensors(name, shard, state.aliases, state.metadata))
        weight_map.update({tensor.name: name for tensor in shard})
    total = sum(tensor.nbytes for tensor in state.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return [*found, FilePlan(base + _INDEX, [text.encode()])]


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


def _read_index(reader: Reader, name: str) -> dict[str, str]:
    """Returns the weight map of an index, from tensor to file. Each file is a plain name."""
    size = reader.size(name)
    check("index_bytes", size, name)
    index = decode_object(reader.read(name, 0, size), f"{name}: the index")
    found = index.get("weight_map")
    if not isinstance(found, dict):
        raise FormatError(
            f'{name}: an index is {{"metadata": ..., "weight_map": {{tensor: file}}}}'
        )
    weight_map: dict[str, str] = {}
    for tensor, file in found.items():
        if not isinstance(file, str):
            raise FormatError(f"{name}: the file of {tensor} is {file!r:.80}, which is not a name")
        if file in ("", ".", "..") or not file.isprintable() or set("/\\:") & set(file):
            raise HostileError(
                f"{name}: the file of {tensor} is {file!r:.80}; an index names only files of its "
                f"own folder"
            )
        weight_map[tensor] = file
    return weight_map


def _check_present(shards: Sequence[str], present: Sequence[str], index: str) -> None:
    missing = sorted(set(shards) - set(present))
    if missing:
        raise CorruptError(
            f"{index}: {len(missing)} of its {len(shards)} files are missing: {_some(missing)}; "
            f"copy them from the origin of the folder"
        )


def _merge(
    contents: Sequence[FileContents], weight_map: Mapping[str, str], index: str
) -> tuple[dict[str, TensorRecord], dict[str, str]]:
    """Returns the tensors of all files in their order, by the index, and the tied names."""
    by_file = {content.record.name: content for content in contents}
    lost = [name for name, file in weight_map.items() if name not in by_file[file].tensors]
    # Writers that list tied names in the index may leave them out of the file's own tensors.
    lost = [name for name in lost if name not in by_file[weight_map[name]].aliases]
    if lost:
        raise CorruptError(
            f"{index}: {len(lost)} tensors are not in the file that the index names: "
            + _some([f"{name} in {weight_map[name]}" for name in lost])
        )
    tensors: dict[str, TensorRecord] = {}
    aliases: dict[str, str] = {}
    for content in contents:
        file = content.record.name
        for name, record in content.tensors.items():
            if weight_map.get(name, file) != file:
                continue
            if name in tensors:
                raise FormatError(
                    f"{file}: {name} lies in another file of {index} too, and the index does not "
                    f"name one of the two"
                )
            tensors[name] = record
        aliases.update(content.aliases)
    aliases = {alias: name for alias, name in aliases.items() if alias not in tensors}
    for alias, name in aliases.items():
        if name not in tensors:
            raise FormatError(f"{index}: {alias} is tied to {name}, which is in none of its files")
    return tensors, aliases


def _some(items: Sequence[str]) -> str:
    """Returns the first few items as text, and how many more there are."""
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")
