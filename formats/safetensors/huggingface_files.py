"""The files of a Hugging Face folder that count, by their names and the index.

The rules are one for both kinds of files, `.safetensors` and `.bin` (torch.save):

1. A whole file or an index of a usual base name counts first, and of the two the whole file.
2. Without one of them, numbered shards of one base name count, if none is missing.
3. Without numbers, all files of the folder count together. Equal names in two of them are an error,
   and so are files with numbers beside files without them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from formats.errors import CorruptError, FormatError, HostileError
from formats.limits import check
from formats.storage import Reader
from formats.strict_json import decode_object
from sharding.errors import listed

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
    def named(cls, name: str) -> Chosen:
        """Returns the choice of one file, a whole file or an index."""
        return cls(name, ()) if name.endswith(INDEX) else cls(None, (name,))


def choose(names: Iterable[str], ending: str) -> Chosen | None:
    """Returns the files with an ending (".safetensors" or ".bin") that count, None without one.

    Raises FormatError for shards with a missing number, and for several checkpoints.

    >>> choose(["model.safetensors", "other.safetensors"], ".safetensors").files
    ('model.safetensors',)
    >>> choose(["a-00001-of-00002.bin", "a-00002-of-00002.bin"], ".bin").files
    ('a-00001-of-00002.bin', 'a-00002-of-00002.bin')
    """
    present = {name for name in names if name.endswith((ending, ending + INDEX))}
    for base in BASES:
        for name in (base + ending, base + ending + INDEX):
            if name in present:
                return Chosen.named(name)
    shards, others = _divided(present, ending)
    whole = {name for name in others if name.endswith(ending)}
    indexes = others - whole - {name + INDEX for name in whole}
    if len(indexes) > 1 or (indexes and whole):
        raise _several(sorted(indexes | whole))
    if indexes:
        return Chosen.named(min(indexes))
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
            f"{listed(missing, 5)}; copy them from the origin of the folder"
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
            + listed([f"{name} in {weight_map[name]}" for name in lost], 5)
        )


def in_two_files(file: str, name: str, index: str | None) -> FormatError:
    """Returns the error for a tensor in two files."""
    if index is None:
        return FormatError(
            f"{file}: {name} lies in another file of the folder too, so the files are several "
            "checkpoints; name one of the files"
        )
    return FormatError(
        f"{file}: {name} lies in another file of {index} too, and the index does not name one of "
        "the two"
    )


_Shards = dict[tuple[str, int], dict[int, str]]
"""The names of shards by number; by their base name and count."""


def _divided(names: Iterable[str], ending: str) -> tuple[_Shards, set[str]]:
    """Returns the numbered shards, and the other names."""
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
