"""Turns a catalog into the tensors that a conversion writes.

Rules:

1. Before a byte is written, the headers prove that all elements are in files of the right length.
   An incomplete checkpoint is thus an error before the conversion writes.
2. Tensors are copied by `ckpt.transfer.copy_files`. Their own streams are for callers that take
   bytes in order; `ckpt.transfer.copy_streams` reads many streams ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod

from ckpt.mapping.casts import NO_CASTS, Casts
from ckpt.match.selection import Selection, map_selected
from ckpt.plan.copy_plan import CopySource
from ckpt.structure import names_of
from ckpt.transfer.copy_files import FileCopier
from ckpt.transfer.copy_streams import streamed
from formats.catalog import Catalog, TensorRecord, TensorRef, Tree
from formats.dtypes import DType
from formats.native.manifest import WRITER_KEYS
from formats.outgoing import Outgoing, OutgoingTensor
from formats.storage import Reader
from sharding.errors import ArgumentError
from sharding.layout import HoleError, row_major
from sharding.url_secrets import without_secrets

_WRITTEN = {"ckpt": WRITER_KEYS, "safetensors": ("format",), "huggingface": ("format",), "gguf": ()}
"""Formats with metadata, and the keys that their writers add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState(Outgoing):
    """A whole checkpoint to write, whose bytes are stored in another."""

    copier: FileCopier
    """Copies the tensors by their names, and compares all checksums."""
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For the native format, as `Manifest.strides`."""
    optimizers: Mapping[str, str | None] = field(default_factory=dict)
    """For the native format, as `Manifest.optimizers`."""
    modules: tuple[str, ...] = ()
    """The sub-folders of a Hugging Face folder, which begin the names of their tensors."""


def outgoing(
    url: str,
    reader: Reader,
    catalog: Catalog,
    casts: Casts = NO_CASTS,
    progress: Callable[[int], None] | None = None,
    untied: bool = False,
) -> StoredState:
    """Returns the tensors of a catalog to write, under the names in its tree.

    With `untied`, each tied name is a tensor of its own.

    Raises:
        ArgumentError: a pattern of `casts` matches no name, or tied names get two dtypes.
        CorruptError, FormatError: a needed file is missing, has another length, or contradicts the
            description of the checkpoint.
        HoleError: elements of a tensor are not stored.
    """
    casts.check_all_match(names_of(catalog.tree), without_secrets(url))
    tensors: dict[str, OutgoingTensor] = {}
    sources: dict[str, CopySource] = {}
    aliases: dict[str, str] = {}
    first_names: dict[str, str] = {}
    strides: dict[str, tuple[int, ...]] = {}
    copier = FileCopier(reader, sources.__getitem__, "all", progress)

    def placed(leaf: Tree, path: str) -> Tree:
        if not isinstance(leaf, TensorRef):
            return leaf
        record = catalog.tensors[leaf.name]
        first = first_names.setdefault(leaf.name, path)
        if first != path and not untied:
            if casts.names(path):
                _check_alike(path, casts.written(path, record), first, sources[first].dtype)
            aliases[path] = first
            return TensorRef(first)
        check_located(record)
        if record.strides is not None and record.strides != row_major(record.shape):
            strides[path] = record.strides
        source = sources[path] = CopySource(record, casts.written(path, record))
        tensors[path] = OutgoingTensor(
            path, record.shape, source.dtype, partial(_blocks, copier, tensors, path)
        )
        return TensorRef(path)

    tree: Tree = map_selected(catalog.tree, Selection.of(None, None), placed)
    modules = tuple(folder for folder, _ in catalog.parts if folder)
    return StoredState(
        tensors,
        tree,
        aliases,
        _kept_metadata(catalog),
        catalog.versions,
        copier=copier,
        strides=strides,
        optimizers=catalog.optimizers,
        modules=modules if catalog.format == "huggingface" else (),
    )


def _check_alike(name: str, dtype: DType, first: str, written: DType) -> None:
    """Raises ArgumentError if a tied name would get another dtype than the stored tensor."""
    if dtype != written:
        raise ArgumentError(
            f"{name} is tied to {first}, and dtype= makes it {dtype} and {first} {written}; give "
            "both names one dtype, or leave one out (exclude=)"
        )


def _blocks(
    copier: FileCopier, tensors: Mapping[str, OutgoingTensor], name: str
) -> Iterator[memoryview]:
    (alone,) = streamed(copier, [tensors[name]])
    return alone.blocks()


def _kept_metadata(catalog: Catalog) -> dict[str, str]:
    """Returns the metadata without the keys that the writer of the format added."""
    written = _WRITTEN.get(catalog.format)
    if written is None:
        return {}
    return {key: text for key, text in catalog.metadata.items() if key not in written}


def check_located(record: TensorRecord) -> None:
    """Raises as `outgoing` does unless all elements are stored. Reads no data (rule 1)."""
    found = sum(stored.piece.box.numel for stored in record.pieces)
    if found != prod(record.shape):
        raise HoleError(
            f"{record.name}: {found} of its {prod(record.shape)} elements are in the checkpoint"
        )
