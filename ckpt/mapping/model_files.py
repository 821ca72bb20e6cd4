"""The small files that a model's libraries need beside its weights: configuration, tokenizer, code.

Rules:

1. A Hugging Face folder that a conversion writes gets the small files of the folder that the
   caller names, or else of that of the source: all of them, also in sub-folders, except those that
   are known not to belong. These are weights of any format, files of a training (`_OF_TRAINING`),
   hidden files and caches (`_FOREIGN`), and files of the source itself. No list has the names that
   belong: a model may bring code (`auto_map`), each tokenizer and quantisation has its own files.
2. If the conversion changes names, or takes another part than the weights, the source's files are
   not copied: its `config.json` describes another model. Sizes for a mapping are read from it all
   the same.
3. `config.json` names a dtype. It becomes the dtype to which all floats are cast, or that of all
   written tensors if they have one.
4. With an `adapter_config.json` and no `config.json` the folder is an adapter of PEFT, whose file
   of weights has another name.
5. A file of more than `LARGE_BYTES` stays behind, and so does a sub-folder with weights, with more
   than `FOLDER_FILES` files, or of another training: the report names them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt.errors import NotACheckpointError
from ckpt.state.patterns import FLOATS, Casts
from ckpt.stores.store import open_store, split_url
from formats.catalog import Catalog
from formats.detect import ENDINGS, OF_WEIGHTS
from formats.dtypes import DType
from formats.limits import check, current, decode_object
from formats.storage import Reader
from sharding.errors import without_secrets

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
LARGE_BYTES = 64 << 20
"""The largest size of a file that is copied. The largest tokenizers have half of it."""
FOLDER_FILES = 200
"""The most files of a sub-folder that is copied."""
FOLDER_DEPTH = 3

WEIGHTS = (
    *(*OF_WEIGHTS, ".pickle", ".ggml", ".onnx_data", ".onnx.data", ".data", ".meta", ".params"),
    *(".ot", ".llamafile"),
    *(".index.json", *ENDINGS.keys() - {".json"}),
)
"""The endings of weights of any format, of their indexes, and of archives."""
_OF_TRAINING = re.compile(
    r"(trainer_state|manifest|(all|train|eval|test|predict)_results)\.json|training_args\..*"
    r"|latest(_universal|_checkpointed_iteration\.txt)?|zero_to_fp32\.py|events\.out\.tfevents.*"
    r"|.*\.(log|out|err)(\.\d+)?"
)
"""Files of a training and of its logs; its states have endings of weights."""
_FOREIGN = re.compile(
    r"\..*|__pycache__|.*\.(pyc|lock|tmp|temp|part|incomplete|bak|swp)|.*~|nohup.*"
)
"""Hidden files (`.git`, `.cache`), caches and unfinished files."""
_FOREIGN_FOLDERS = re.compile(
    r"\..*|__pycache__|checkpoint[-_]?\d*|(global_?)?step[-_]?\d+|epoch[-_=]?\d+|runs?|logs?|wandb"
    r"|mlruns|tensorboard|lightning_logs|original|onnx|openvino|coreml|tflite|node_modules"
    r"|(optimizer|pytorch_model_fsdp)_\d+"
)
"""Folders of a training's logs and checkpoints, and of the model in other formats."""

_FIRST = (CONFIG, ADAPTER, "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""The names that come first, and are copied whatever their size."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The small files of a model."""

    content: Mapping[str, bytes] = field(default_factory=dict)
    """By name; in a sub-folder, by the relative path."""
    left: tuple[str, ...] = ()
    """Large files, and sub-folders with a slash at the end, that may belong and are not copied."""


def read_model_files(place: str | os.PathLike[str]) -> ModelFiles:
    """Returns the small files of a model's or adapter's folder; `place` may be the configuration.

    Raises:
        NotACheckpointError: no `config.json` and no `adapter_config.json` is there.
        HostileError: a file is larger than `header_bytes` allows.
    """
    folder = folder_of(place)
    with open_store(folder) as store:
        found = model_files_in(store)
    if not found.content:
        raise _nothing_at(folder)
    return found


def folder_of(place: str | os.PathLike[str]) -> str:
    """Returns the folder of a model; `place` may be its configuration."""
    url = os.fspath(place)
    folder, name = split_url(url)
    return folder if name in (CONFIG, ADAPTER) else url


def _nothing_at(folder: str) -> NotACheckpointError:
    return NotACheckpointError(
        f"{without_secrets(folder)}: no {CONFIG} is there; config= is the folder of a "
        f"model or adapter, as save_pretrained writes it, or its {CONFIG} or {ADAPTER}"
    )


def model_files_in(reader: Reader, catalog: Catalog | None = None) -> ModelFiles:
    """Returns the small files of a folder (rule 1); none without the configuration of a model.

    `catalog` is that of a checkpoint in the folder, whose files are not copied.
    """
    entries = reader.entries()
    if not {CONFIG, ADAPTER} & set(entries):
        return ModelFiles()
    own = set() if catalog is None else {file.name for file in catalog.files}
    modules = () if catalog is None else catalog.unread
    found = _Found(reader, own, modules)
    names = sorted((name for name in entries if name not in _FIRST), key=lambda name: "/" in name)
    found.add("", [*(name for name in _FIRST if name in entries), *names])
    return ModelFiles(found.content, tuple(found.left))


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of a folder that belong to the model, and the names of those that stay."""

    reader: Reader
    own: Collection[str]
    modules: Collection[str]
    """Sub-folders whose weights go along (`formats.safetensors.huggingface.with_modules`)."""
    content: dict[str, bytes] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def add(self, folder: str, entries: Sequence[str]) -> None:
        for entry in entries:
            name = folder + entry
            if not entry.endswith("/"):
                if not is_foreign(entry) and name not in self.own:
                    self._add_file(name)
                continue
            if _FOREIGN_FOLDERS.fullmatch(entry[:-1]) or any(n.startswith(name) for n in self.own):
                continue
            inside = self.reader.entries(name[:-1])
            is_whole = len(inside) <= FOLDER_FILES and name.count("/") <= FOLDER_DEPTH
            is_other = name not in self.modules and any(map(_is_checkpoint, inside))
            if not is_whole or is_other:
                self.left.append(name)
            else:
                self.add(name, inside)

    def _add_file(self, name: str) -> None:
        nbytes = self.reader.size(name)
        largest = current().header_bytes
        if nbytes > min(LARGE_BYTES, largest) and name not in _FIRST:
            self.left.append(name)
            return
        check("header_bytes", nbytes, f"{self.reader.url}/{name}")
        self.content[name] = self.reader.read_whole(name, largest)


def is_foreign(name: str) -> bool:
    """Whether a file is known not to belong to a model's small files (rule 1).

    >>> [name for name in ("tekken.json", "model.bin", "optimizer.pt", ".git") if is_foreign(name)]
    ['model.bin', 'optimizer.pt', '.git']
    """
    is_weights = name.lower().endswith(WEIGHTS)
    return is_weights or any(known.fullmatch(name) for known in (_OF_TRAINING, _FOREIGN))


def _is_checkpoint(name: str) -> bool:
    return name.lower().endswith(WEIGHTS) or name in ("manifest.json", ".metadata")


def config_in(reader: Reader, name: str = CONFIG) -> Mapping[str, object]:
    """Returns the configuration in a folder; empty if there is none."""
    if name not in reader.names():
        return {}
    check("header_bytes", reader.size(name), f"{reader.url}/{name}")
    content = reader.read_whole(name, current().header_bytes)
    return decode_object(content, f"{reader.url}/{name}", nan=True)  # Mamba 2 has Infinity


def adapter_config_in(reader: Reader, catalog: Catalog) -> Mapping[str, object]:
    """Returns the configuration of PEFT's adapter; `save_adapter` has it in the metadata."""
    saved = catalog.metadata.get("peft_config")
    if saved is None:
        return config_in(reader, ADAPTER)
    return decode_object(saved, f"{reader.url}: peft_config")


def read_configs(place: str | os.PathLike[str]) -> ModelFiles:
    """Returns the configurations of a model or adapter, of whose folder no other file is read.

    Raises NotACheckpointError if there is none.
    """
    folder = folder_of(place)
    with open_store(folder) as store:
        there = sorted({CONFIG, ADAPTER} & set(store.names()))
        if not there:
            raise _nothing_at(folder)
        most = current().header_bytes
        return ModelFiles({name: store.read_whole(name, most) for name in there})


def base_name_of(files: ModelFiles) -> str:
    """Returns the name that the files of weights have without their ending (rule 4)."""
    found = files.content
    return "adapter_model" if ADAPTER in found and CONFIG not in found else "model"


def config_of(files: ModelFiles, where: str) -> Mapping[str, object]:
    """Returns the configuration of a model; empty if there is none. Raises for damaged JSON."""
    content = files.content.get(CONFIG)
    return {} if content is None else decode_object(content, f"{where}/{CONFIG}", nan=True)


def content_beside(
    files: ModelFiles, casts: Casts, written: Collection[DType], where: str
) -> dict[str, bytes]:
    """Returns the files to write beside weights of the `written` dtypes (rule 3)."""
    content = dict(files.content)
    config = dict(config_of(files, where))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    dtype = casts.of_all
    if dtype is None and config.get(key) is not None and len(written) == 1:
        dtype = next(
            (written_dtype for written_dtype in written if written_dtype.name in FLOATS), None
        )
    if dtype is not None and CONFIG in content and config.get(key) != dtype.torch_name:
        config[key] = dtype.torch_name
        content[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return content
