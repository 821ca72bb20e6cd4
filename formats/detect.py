"""Names the format of a file by its first bytes, and of a folder by the names of its entries.

A `Kind` or a `FolderFormat` has the function that reads it, as `module:function`. The module is
imported when a checkpoint of the format is read. Rules:

1. A file's reader checks the file itself. A kind without a reader is named in an error with the
   remedy, because "no checkpoint here" helps nobody who has a file of another library.
2. `FOLDERS` has specific formats before general ones, because many folders hold another format: a
   Trainer's folder holds a folder of Hugging Face, a folder of Lightning one of DCP.
3. A sign of a folder is pure: it sees the names of files and, with a slash at the end, of
   sub-folders. It returns the entry that shows the format, for messages.
4. Native shard files are no sign: without a manifest they are an unfinished save.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

from formats.catalog import Catalog
from formats.storage import Reader

HEAD_BYTES = 512
"""Bytes at the beginning of a file that decide its kind: a tar has its magic at byte 257."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file."""

    name: str
    """With its article: `an HDF5 file`."""
    advice: str = ""
    """The remedy, if this package does not read it."""
    reader: str = ""
    """The function of this package that reads it, as `module:function`."""

    def read(self, reader: Reader, name: str) -> Catalog:
        """Returns the catalog of a file of this kind. Raises as its reader does."""
        return _function(self.reader)(reader, name)


_SAVE = "load it with its own library, and save the tensors as safetensors or with numpy.savez"
_PAGE = "download it again: it was saved in place of the weights, as a login page or an error is"

GGUF = Kind("a GGUF file", reader="gguf:read")
NPY = Kind("a .npy file", reader="npz:read")
ZIP = Kind("a zip", reader="torch_save:read_zip")
PICKLE = Kind("a pickle", reader="torch_save:read_pickles")
SAFETENSORS = Kind("a safetensors file", reader="safetensors.file:read")
LFS = Kind(
    "a Git LFS pointer in place of the file", "fetch the file: `git lfs pull` in its repository"
)
HTML = Kind("an HTML page", _PAGE)
HDF5 = Kind("an HDF5 file, as of Keras or h5py", _SAVE)
ONNX = Kind("an ONNX model", "read its initializers with the onnx package, and save them as arrays")
MSGPACK = Kind("a msgpack file, as of flax", f"use flax.serialization; {_SAVE}")
TENSORFLOW = Kind("a part of a TensorFlow checkpoint", "use tf.train.load_checkpoint and savez")
SAVED_MODEL = Kind(
    "a SavedModel of TensorFlow",
    "load its folder with tf.saved_model.load, and save its variables with numpy.savez",
)
TFLITE = Kind("a TFLite model", "read it with tf.lite.Interpreter, and save arrays with savez")
COREML = Kind("a Core ML model", "read its weights with coremltools, and save arrays with savez")
OPENVINO = Kind("an OpenVINO model", "convert the model from which it was made")
TAR = Kind("a tar archive", "unpack it with tar, and give the files in it")
GZIP = Kind("compressed by gzip", "decompress it with gunzip")
ZSTD = Kind("compressed by zstd", "decompress it with unzstd")
XZ = Kind("compressed by xz", "decompress it with unxz")
BZIP2 = Kind("compressed by bzip2", "decompress it with bunzip2")
ELF = Kind("a program or library", "give a file of weights")
OLD_PICKLE = Kind("a pickle of protocol 0 or 1", "load it where you trust it, and pickle it again")
JSON = Kind("a JSON file", "give the folder that it belongs to, or the file of weights itself")
TEXT = Kind("a text file", "give a file of weights")
EMPTY = Kind("an empty file", "restore it from another copy")

_BY_START: tuple[tuple[bytes, Kind], ...] = (
    (b"GGUF", GGUF),
    (b"\x93NUMPY", NPY),
    (b"PK\x03\x04", ZIP),
    (b"PK\x05\x06", ZIP),
    (b"\x89HDF\r\n\x1a\n", HDF5),
    (b"\x1f\x8b", GZIP),
    (b"\x28\xb5\x2f\xfd", ZSTD),
    (b"\xfd7zXZ\0", XZ),
    (b"BZh", BZIP2),
    (b"\x7fELF", ELF),
    (b"version https://git-lfs.github.com/spec", LFS),
    *((bytes((0x80, protocol)), PICKLE) for protocol in range(2, 6)),
)
_TENSORFLOW = re.compile(r".*(\.data-\d{5}-of-\d{5}|\.ckpt(-\d+)?\.(index|meta))")
_BY_NAME = (
    (re.compile(r"(openvino_.*|.*\.openvino)\.(bin|xml)"), OPENVINO),
    (re.compile(r".*\.mlmodel"), COREML),
    (re.compile(r".*\.pb"), SAVED_MODEL),
)
"""Names of kinds whose first bytes are those of another one, or any."""


def kind_of(head: bytes, name: str = "") -> Kind | None:
    """Returns the kind of a file by its first `HEAD_BYTES`, and its name; None if it is unknown.

    >>> kind_of(b"GGUF").name, kind_of(b"<!DOCTYPE html>").name
    ('a GGUF file', 'an HTML page')
    """
    if head[5:9] == b"\0\0\0{":  # a length of less than 2**40: its bytes may begin as any magic
        return SAFETENSORS
    for pattern, kind in _BY_NAME:
        if pattern.fullmatch(name):
            return kind
    if head[4:8] == b"TFL3":
        return TFLITE
    for start, kind in _BY_START:
        if head.startswith(start):
            return kind
    if head[8:9] == b"{":
        return SAFETENSORS
    if head[257:262] == b"ustar":
        return TAR
    if _TENSORFLOW.fullmatch(name):
        return TENSORFLOW
    return _of_text(head) or _of_fields(head, name)


def _of_text(head: bytes) -> Kind | None:
    """Returns the kind of a file of text; None for other bytes."""
    if not head:
        return EMPTY
    if re.match(rb"\(?[dl]p[0-9]+\n|c[\w.]+\n\w+\n", head):
        return OLD_PICKLE
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith(b"<?xml") and b"<net " in start:
        return OPENVINO
    if start.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return HTML
    if b"\0" in head or any(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in head):
        return None
    return JSON if start[:1] in (b"{", b"[") else TEXT


_FIELDS = (b"\x1a", b"\x22", b":", b"B")


def _of_fields(head: bytes, name: str) -> Kind | None:
    """Returns the kind of a file that begins with a field of its message."""
    # ir_version, a small number, and then producer_name or another field of text
    is_onnx = head[:1] == b"\x08" and head[1:2] < b" " and head[2:3] in (*_FIELDS, b"\x12")
    if is_onnx and (name.endswith(".onnx") or head[2:3] == b"\x12"):
        return ONNX
    first = head[0]
    is_map = 0x81 <= first <= 0x8F or first in (0xDE, 0xDF)
    key = head[{0xDE: 3, 0xDF: 5}.get(first, 1) :][:1]
    if is_map and key and (0xA0 <= key[0] <= 0xBF or key[0] in (0xD9, 0xDA)):
        return MSGPACK
    return None


WRITTEN = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin"), "torch"),
    ".gguf": "gguf",
    ".npz": "npz",
}
"""The endings of files that are written, with their formats."""

OF_WEIGHTS = (*WRITTEN, ".ckpt", ".pkl")
"""The endings of files of weights that are read."""

SHARD = re.compile(r"([0-9a-f]{16})-([0-9]{5,})\.safetensors")
"""The name of a native shard file: the attempt, and the rank."""

ENDINGS = {
    **dict.fromkeys((".h5", ".hdf5", ".keras"), "HDF5 of Keras"),
    **dict.fromkeys((".msgpack", ".flax"), "msgpack of flax"),
    **dict.fromkeys((".tar", ".nemo", ".tgz", ".gz", ".zst"), "an archive"),
    **dict.fromkeys((".pb", ".index", ".tflite"), "TensorFlow"),
    ".onnx": "ONNX",
    ".pt2": "torch.export",
    ".npy": "one array of numpy (.npz has several)",
    ".pkl": "a pickle (.pt is one that torch.load opens)",
    ".zip": "a zip (.pt and .npz are zips)",
    ".ckpt": "a file of torch.save in some libraries, and a folder in others",
    ".distcp": "a file in a folder of DCP (to='dcp')",
    ".json": "JSON",
    ".mlmodel": "Core ML",
    ".engine": "TensorRT",
}
"""The endings of names that belong to formats which are not written, with these formats."""


_STATE_FILE = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|dl_state_dict|sampler).*"
)
_PART = re.compile(
    r".*\.distcp|.*-\d+-of-\d+\b.*|(mp_rank|(bf16_)?zero_pp_rank|layer)_\d+.*|consolidated\.\d+\..*"
)
"""Files of which a checkpoint has others beside them: one alone would be read as the whole."""
_FILES = (*OF_WEIGHTS, ".npy", *(ENDINGS.keys() - {".json", ".index"}))


def files_of_weights(entries: Iterable[str]) -> list[str]:
    """Returns the files of a folder of no format that may be a checkpoint each, sorted.

    >>> files_of_weights(["README.md", "training_args.bin", "a.pt", "tf_model.h5", "b.pt/"])
    ['a.pt', 'tf_model.h5']
    >>> files_of_weights(["__0_0.distcp", "model-00001-of-00002.safetensors"])
    []
    """
    named = (name for name in entries if name.lower().endswith(_FILES) and not is_shard(name))
    return sorted(
        file for file in named if not _STATE_FILE.match(file) and not _PART.fullmatch(file)
    )


def zip_kind(names: Iterable[str]) -> Kind | None:
    """Returns the kind of a zip by the names of its records; None for a zip of torch.save."""
    inside = list(names)
    if any(name.endswith("/data.pkl") for name in inside):
        return None
    if all(name.endswith(".npy") for name in inside):
        return Kind("a .npz file", reader="npz:read")
    if any(
        name.endswith(("archive_format", "serialized_exported_program.json")) for name in inside
    ):
        return Kind(
            "a program of torch.export (pt2)",
            "save its weights with torch.save(torch.export.load(path).state_dict, ...)",
        )
    if any(name.endswith(("model.weights.h5", "metadata.json")) for name in inside):
        return Kind("a .keras file", "unzip it: model.weights.h5 has the weights, in HDF5")
    if any(name.startswith("META-INF/") or name.endswith(".dist-info/METADATA") for name in inside):
        return Kind("a package of Java or Python", "give a file of weights")
    return Kind(
        f"a zip of other files ({', '.join(inside[:3])})", "unzip it, and give the files in it"
    )


DCP_METADATA = ".metadata"
"""The file that makes a folder a checkpoint of DCP."""

Entries = frozenset[str]
"""The names of the files directly in a folder, and of its sub-folders with a slash at the end."""

Sign = Callable[[Entries], str | None]


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """A row of the table."""

    name: str
    """The format, for messages. The catalog's own `format` may be more general."""
    sign: Sign
    """Returns the entry that shows the format, or None for a folder of another format."""
    reader: str
    """The function of this package that reads it, as `module:function`."""

    def read(self, reader: Reader) -> Catalog:
        """Returns the catalog of a folder of this format. Raises as its reader does."""
        return _function(self.reader)(reader)


def _function(place: str) -> Callable[..., Catalog]:
    """Returns the function at `module:function` of this package, which is imported by now."""
    module, _, name = place.partition(":")
    found: Callable[..., Catalog] = getattr(import_module(f"{__package__}.{module}"), name)
    return found


def has(*wanted: str) -> Sign:
    """Returns the sign of folders with all of these entries; the first one shows the format.

    >>> has(".metadata", "meta.pt")(frozenset({".metadata", "meta.pt", "__0_0.distcp"}))
    '.metadata'
    """
    return lambda entries: wanted[0] if entries.issuperset(wanted) else None


def has_like(pattern: str) -> Sign:
    """Returns the sign of folders with an entry that matches a regular expression as a whole.

    >>> has_like(r"random_states_[0-9]+.pkl")(frozenset({"random_states_0.pkl"}))
    'random_states_0.pkl'
    """
    found = re.compile(pattern)
    return lambda entries: min(filter(found.fullmatch, entries), default=None)


def both(first: Sign, second: Sign) -> Sign:
    """Returns the sign of folders with both signs; the first one shows the format."""
    return lambda entries: first(entries) if second(entries) is not None else None


_TRAINED = has_like(
    r"(optimizer|scheduler)\.(pt|bin)|(optimizer|pytorch_model_fsdp)_0/|rng_state(_[0-9]+)?\.pth"
)
"""A part of the state of a training, which a folder of nothing but weights lacks."""

_MEGATRON = has_like(r"common\.pt|\.metadata")
_DEEPSPEED = r"(zero_pp_rank_[0-9]{1,9}_)?mp_rank_[0-9]{1,9}_model_states\.pt"

FOLDERS: tuple[FolderFormat, ...] = (
    FolderFormat(
        "megatron", both(has("metadata.json"), _MEGATRON), "training_folders:read_megatron"
    ),
    FolderFormat(
        "megatron", has("latest_checkpointed_iteration.txt"), "training_folders:read_megatron"
    ),
    FolderFormat("lightning", has("meta.pt", DCP_METADATA), "training_folders:read_lightning"),
    FolderFormat("dcp", has_like(r"(__[0-9]+)?\.metadata"), "dcp:read"),
    FolderFormat("trainer", both(has("trainer_state.json"), _TRAINED), "training_folders:read"),
    FolderFormat("accelerate", has_like(r"random_states_[0-9]+\.pkl"), "training_folders:read"),
    FolderFormat("orbax", has("_METADATA"), "orbax:read"),
    FolderFormat("orbax", has("_CHECKPOINT_METADATA"), "orbax:read"),
    FolderFormat(
        "torch_checkpointing",
        both(has("metadata.pkl"), has_like(r".+_[0-9]+\.pt")),
        "torch_checkpointing:read",
    ),
    FolderFormat("deepspeed", has_like(_DEEPSPEED), "deepspeed.folder:read"),
    FolderFormat(
        "deepspeed", both(has_like("latest(_universal)?"), has_like(".+/")), "deepspeed.folder:read"
    ),
    FolderFormat("diffusers", has("model_index.json"), "training_folders:read_pipeline"),
    FolderFormat("gguf", has_like(r".+-[0-9]{5}-of-[0-9]{5}\.gguf"), "gguf:read_split"),
    FolderFormat(
        "huggingface", has_like(r".+\.safetensors(\.index\.json)?"), "safetensors.huggingface:read"
    ),
    FolderFormat(
        "huggingface",
        has_like(r"(diffusion_)?pytorch_model.*\.bin(\.index\.json)?|adapter_model\.bin"),
        "safetensors.huggingface:read_bin",
    ),
    FolderFormat("consolidated", has_like(r"consolidated\.[0-9]{2,4}\.pth"), "consolidated:read"),
)


def folder_format(entries: Iterable[str]) -> FolderFormat | None:
    """Returns the format of a folder with these entries, or None.

    >>> folder_format(["config.json", "model.safetensors"]).name
    'huggingface'
    >>> folder_format(["0123456789abcdef-00000.safetensors"])
    """
    own = _without_shards(entries)
    return next((row for row in FOLDERS if row.sign(own) is not None), None)


def sign_of_another_format(entries: Iterable[str]) -> str | None:
    """Returns the entry that makes a folder without a manifest one of another format, or None.

    >>> sign_of_another_format([".metadata", "__0_0.distcp"])
    '.metadata'
    """
    own = _without_shards(entries)
    return next(filter(None, (row.sign(own) for row in FOLDERS)), None)


def is_shard(name: str) -> bool:
    """Whether a name is that of a native shard file: 16 hex digits and the rank."""
    attempt, _, rank = name.removesuffix(".safetensors").partition("-")
    return len(attempt) == 16 and rank.isdecimal() and not set(attempt) - set("0123456789abcdef")


def _without_shards(entries: Iterable[str]) -> Entries:
    return frozenset(name for name in entries if not is_shard(name))
