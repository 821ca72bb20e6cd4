"""The small files that a model's libraries need beside its weights: configuration and tokenizer.

Rules:

1. A Hugging Face folder that a conversion writes gets the files with the known names (`NAMES`) from
   the folder that the caller names, or else from that of the source.
2. If the conversion changes names, or takes another part than the weights, the source's files are
   not copied: its `config.json` describes another model. Sizes for a mapping are read from it all
   the same.
3. `config.json` names a dtype. It becomes the dtype to which all floats are cast, or that of all
   written tensors if they have one.
4. With an `adapter_config.json` and no `config.json` the folder is an adapter of PEFT, whose file
   of weights has another name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping

from ckpt.errors import NotACheckpointError
from ckpt.mapping.casts import FLOATS, Casts
from ckpt.stores.store import Options, open_store, split_url
from formats.dtypes import DType
from formats.file_plan import FilePlan
from formats.limits import check, current
from formats.storage import Reader
from formats.strict_json import decode_object
from sharding.url_secrets import without_secrets

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
NAMES = (
    CONFIG,
    ADAPTER,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""The files that `save_pretrained` of transformers and PEFT writes beside weights."""

ModelFiles = Mapping[str, bytes]
"""The content of each file, by its name."""


def read_model_files(place: str | os.PathLike[str], options: Options = None) -> ModelFiles:
    """Returns the small files of a model's or adapter's folder; `place` may be the configuration.

    Raises:
        NotACheckpointError: no `config.json` and no `adapter_config.json` is there.
        HostileError: a file is larger than `header_bytes` allows.
    """
    url = os.fspath(place)
    folder, name = split_url(url)
    folder = folder if name in (CONFIG, ADAPTER) else url
    with open_store(folder, options) as store:
        found = model_files_in(store)
    if not found:
        raise NotACheckpointError(
            f"{without_secrets(folder)}: no {CONFIG} is there; config= is the folder of a "
            f"model or adapter, as save_pretrained writes it, or its {CONFIG} or {ADAPTER}"
        )
    return found


def model_files_in(reader: Reader) -> ModelFiles:
    """Returns the small files of a folder; none without the configuration of model or adapter."""
    there = set(reader.names())
    is_there = not there.isdisjoint((CONFIG, ADAPTER))
    return {name: _content(reader, name) for name in NAMES if is_there and name in there}


def base_name_of(files: ModelFiles) -> str:
    """Returns the name that the files of weights have without their ending (rule 4)."""
    return "adapter_model" if ADAPTER in files and CONFIG not in files else "model"


def config_of(files: ModelFiles, where: str) -> Mapping[str, object]:
    """Returns the configuration of a model; empty if there is none. Raises for damaged JSON."""
    return decode_object(files[CONFIG], f"{where}/{CONFIG}") if CONFIG in files else {}


def plans_of(
    files: ModelFiles, casts: Casts, written: Collection[DType], where: str
) -> list[FilePlan]:
    """Returns the files to write beside weights of the `written` dtypes (rule 3)."""
    content = dict(files)
    config = dict(config_of(files, where))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    dtype = casts.of_all
    if dtype is None and config.get(key) is not None and len(written) == 1:
        dtype = next((one for one in written if one.name in FLOATS), None)
    if dtype is not None and CONFIG in content and config.get(key) != dtype.torch_name:
        config[key] = dtype.torch_name
        content[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return [FilePlan(name, [data]) for name, data in content.items()]


def _content(reader: Reader, name: str) -> bytes:
    check("header_bytes", reader.size(name), f"{reader.url}/{name}")
    return reader.read_whole(name, current().header_bytes)
