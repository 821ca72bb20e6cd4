"""A Hugging Face folder of torch.save files: `pytorch_model.bin`, or numbered shards of it.

`formats.huggingface_files` has the rules of names and of the index, which are those of safetensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from formats.catalog import Catalog, FileRecord
from formats.huggingface_files import (
    check_in_their_files,
    choose,
    in_two_files,
    read_weight_map,
    unread_files,
)
from formats.joined import Part, joined
from formats.storage import Reader
from formats.torch_files import read_torch

ENDING = ".bin"


def read(reader: Reader, present: Sequence[str] | None = None) -> Catalog:
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
    catalogs = [read_torch(reader, name) for name in chosen.files or files]
    index = [FileRecord(chosen.index, reader.size(chosen.index))] if chosen.index else []
    names = {each.files[0].name: (*each.tensors, *each.aliases) for each in catalogs}
    check_in_their_files(weight_map, names, chosen.index)
    _check_apart(catalogs, chosen.index)
    found = joined("huggingface", [Part((), catalog) for catalog in catalogs], index)
    return replace(found, notes=chosen.notes, unread=unread_files(there, names))


def is_weights(name: str) -> bool:
    """Whether a `.bin` file or an index of such files has weights, by its name.

    >>> is_weights("pytorch_model-00001-of-00002.bin"), is_weights("training_args.bin")
    (True, False)
    """
    return name.startswith(("pytorch_model", "diffusion_pytorch_model", "adapter_model"))


def _check_apart(catalogs: list[Catalog], index: str | None) -> None:
    """Raises FormatError if two files have a tensor of one name."""
    seen: set[str] = set()
    for catalog in catalogs:
        for name in (*catalog.tensors, *catalog.aliases):
            if name in seen:
                raise in_two_files(catalog.files[0].name, name, index)
        seen.update(catalog.tensors, catalog.aliases)
