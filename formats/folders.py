"""The formats that are folders, decided by the names of a folder's entries alone.

`FOLDERS` is the one table: the name of a format, its sign, and the module whose `read(reader)`
returns the catalog. Specific formats stand before general ones, because many folders hold another
format: a Trainer's folder holds a folder of Hugging Face, a folder of Lightning one of DCP. Rules:

1. A sign is pure: it sees the names of files and, with a slash at the end, of sub-folders. It
   returns the entry that shows the format, for messages.
2. A module is imported when a folder of its format is read.
3. Native shard files are no sign: without a manifest they are an unfinished save.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

from formats.catalog import Catalog
from formats.storage import Reader

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
    module: str
    """The module of this package with `read(reader) -> Catalog`."""

    def read(self, reader: Reader) -> Catalog:
        """Returns the catalog of a folder of this format. Raises as its module does."""
        catalog: Catalog = import_module(f"{__package__}.{self.module}").read(reader)
        return catalog


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
    FolderFormat("megatron", both(has("metadata.json"), _MEGATRON), "megatron"),
    FolderFormat("megatron", has("latest_checkpointed_iteration.txt"), "megatron"),
    FolderFormat("lightning", has("meta.pt", DCP_METADATA), "lightning"),
    FolderFormat("dcp", has_like(r"(__[0-9]+)?\.metadata"), "dcp"),
    FolderFormat("trainer", both(has("trainer_state.json"), _TRAINED), "training_folders"),
    FolderFormat("accelerate", has_like(r"random_states_[0-9]+\.pkl"), "training_folders"),
    FolderFormat("orbax", has("_METADATA"), "orbax"),
    FolderFormat("orbax", has("_CHECKPOINT_METADATA"), "orbax"),
    FolderFormat(
        "torch_checkpointing",
        both(has("metadata.pkl"), has_like(r".+_[0-9]+\.pt")),
        "torch_checkpointing",
    ),
    FolderFormat("deepspeed", has_like(_DEEPSPEED), "deepspeed"),
    FolderFormat("deepspeed", both(has_like("latest(_universal)?"), has_like(".+/")), "deepspeed"),
    FolderFormat("huggingface", has_like(r".+\.safetensors(\.index\.json)?"), "huggingface"),
    FolderFormat(
        "huggingface",
        has_like(r"(diffusion_)?pytorch_model.*\.bin(\.index\.json)?|adapter_model\.bin"),
        "huggingface_bin",
    ),
    FolderFormat("consolidated", has_like(r"consolidated\.[0-9]{2,4}\.pth"), "consolidated"),
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
