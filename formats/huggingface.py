"""A Hugging Face folder: `model.safetensors`, or numbered shards of it and an index.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json     {"metadata": {"total_size": N}, "weight_map": {tensor: file}}

Each file is what formats/safetensors_file.py describes, and so are the rules for plain values, tied
names and dtypes safetensors lacks. Rules of the folder:

1. Where there is a whole file and an index of one base name, the whole file counts; transformers
   chooses so.
2. The index names files of its own folder, nothing else, and each tensor lies in the file it says.
   A tensor of those files that it leaves out is read all the same, as transformers does. Its
   `total_size` is a hint (writers count tied tensors differently) and is not checked.
3. Writers fill shards in order of the tensors, as `huggingface_hub` does. The index comes last: a
   folder with shards and no index is a save that did not end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from formats.catalog import Catalog, FileRecord, TensorRecord
from formats.errors import CorruptError, FormatError, HostileError
from formats.limits import check
from formats.outgoing import Outgoing, OutgoingTensor
from formats.safetensors_file import FileContents, flat_tree, left_out, read_contents, write_tensors
from formats.storage import Reader, Writer
from formats.strict_json import decode_object

BASES = ("model", "diffusion_pytorch_model", "adapter_model")
"""Base names looked for first, in this order: transformers', diffusers', peft's."""

MAX_SHARD_BYTES = 5_000_000_000
"""The data in one shard unless the caller says otherwise; a larger tensor has a shard to itself."""

_WHOLE = ".safetensors"
_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"(?P<base>.+)-[0-9]{5,}-of-[0-9]{5,}\.safetensors")


def find(names: Iterable[str]) -> str | None:
    """Of a folder's files, the one that says what is in it: a whole file or an index.

    None where the folder is of another kind.

    Raises:
        FormatError: there are several and none has a usual name, or shards and no index.
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
            f"so the save, or the copy of the folder, did not end"
        )
    return None


def read(reader: Reader, name: str | None = None) -> Catalog:
    """What a folder holds; reads the index and the headers of its files only.

    `name` is the whole file or the index to read; without it, the one that `find` finds.

    Raises:
        FileNotFoundError: the folder has no safetensors file.
        CorruptError: a file that the index names is missing, or a tensor is not where it says.
        HostileError: the index names a file outside the folder.
        FormatError: the index or a file is not what this format describes, or is ambiguous.
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


def write(
    writer: Writer,
    state: Outgoing,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    base: str = "model",
) -> tuple[str, ...]:
    """Stream a state into a folder; returns the key paths of the values left out.

    One file where everything fits into `max_shard_bytes`, else shards and at last the index. The
    folder is best empty: files of an earlier save that this one does not replace stay there.

    Raises:
        CorruptError: a tensor's stream gave fewer or more bytes than its shape needs.
        FormatError: two tensors of one name, or a name that is no text.
    """
    shards = split(state.tensors.values(), max_shard_bytes)
    if len(shards) == 1:
        write_tensors(writer, base + _WHOLE, shards[0], state.aliases, state.metadata)
        return left_out(state.tree)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"{base}-{number:05d}-of-{len(shards):05d}{_WHOLE}"
        write_tensors(writer, name, shard, state.aliases, state.metadata)
        weight_map.update({tensor.name: name for tensor in shard})
    total = sum(tensor.nbytes for tensor in state.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    with writer.create(base + _INDEX) as file:
        file.write([text.encode()])
    return left_out(state.tree)


def split(
    tensors: Iterable[OutgoingTensor], max_shard_bytes: int
) -> tuple[tuple[OutgoingTensor, ...], ...]:
    """The tensors of each shard: at least one shard, the same ones that `huggingface_hub` makes.

    Tensors are taken in order until the next would not fit. One that is larger than a shard stands
    alone, before the shard that is being filled.
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
    """The weight map of an index: file by tensor, every file a plain name."""
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
            raise FormatError(f"{name}: {tensor} is said to lie in {file!r:.80}, which is no name")
        if file in ("", ".", "..") or not file.isprintable() or set("/\\:") & set(file):
            raise HostileError(
                f"{name}: {tensor} is said to lie in {file!r:.80}; an index names files of its own "
                f"folder only"
            )
        weight_map[tensor] = file
    return weight_map


def _check_present(shards: Sequence[str], present: Sequence[str], index: str) -> None:
    missing = sorted(set(shards) - set(present))
    if missing:
        raise CorruptError(
            f"{index}: {len(missing)} of its {len(shards)} files are missing: {_some(missing)}; "
            f"copy them from where the folder came from"
        )


def _merge(
    contents: Sequence[FileContents], weight_map: Mapping[str, str], index: str
) -> tuple[dict[str, TensorRecord], dict[str, str]]:
    """The tensors of all files, in their order, each where the index has it; and the tied names."""
    by_file = {content.record.name: content for content in contents}
    lost = [name for name, file in weight_map.items() if name not in by_file[file].tensors]
    # Writers that list tied names in the index may leave them out of the file's own tensors.
    lost = [name for name in lost if name not in by_file[weight_map[name]].aliases]
    if lost:
        raise CorruptError(
            f"{index}: {len(lost)} tensors are not in the file it says: "
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
                    f"{file}: {name} lies in another file of {index} too, which does not say which "
                    f"one counts"
                )
            tensors[name] = record
        aliases.update(content.aliases)
    aliases = {alias: name for alias, name in aliases.items() if alias not in tensors}
    for alias, name in aliases.items():
        if name not in tensors:
            raise FormatError(f"{index}: {alias} is tied to {name}, which lies in no file it says")
    return tensors, aliases


def _some(items: Sequence[str]) -> str:
    """The first few, and how many more."""
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")
