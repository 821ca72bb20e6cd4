"""Reads the distributed checkpoints of Megatron-core: folders of DCP with two files beside them.

    latest_checkpointed_iteration.txt    the number of the newest iteration, or `release`
    iter_0000500/.metadata, *.distcp     the sharded tensors and objects, as DCP stores them
    iter_0000500/common.pt               equal on all ranks: arguments, options of the optimizer
    iter_0000500/metadata.json           the names of the formats of both

Rules:

1. Names are Megatron's keys. A `ShardedObject` is an item for each of its parts: `key/shard_0_2` is
   part 0 of 2.
2. The values of common.pt stand beside the tensors.
3. Only the formats `torch_dist` and `fsdp_dtensor` are folders of DCP. Others are refused by name.
"""

from __future__ import annotations

from dataclasses import replace

from formats import dcp, torch_save
from formats.catalog import Catalog, FileRecord
from formats.errors import UnsupportedError
from formats.joined import Part, below, join_catalogs
from formats.limits import decode_object
from formats.storage import Reader

COMMON = "common.pt"
METADATA = "metadata.json"
LATEST = "latest_checkpointed_iteration.txt"
SMALL_BYTES = 1 << 20
"""The limit of the two small files."""
FORMATS = ("torch_dist", "fsdp_dtensor")


def read(reader: Reader) -> Catalog:
    """Reads the catalog of an iteration's folder, or of the newest one: no tensor.

    Raises:
        UnsupportedError: the tensors have another format.
        FormatError: a file is invalid. Further errors are those of `formats.dcp.reader`.
    """
    entries = reader.entries()
    if METADATA in entries:
        return _iteration(reader, COMMON in entries)
    told = reader.read_whole(LATEST, SMALL_BYTES).decode("utf-8", "replace").strip()
    folder = f"iter_{int(told):07d}" if told.isdecimal() and len(told) < 10 else told
    if f"{folder}/" not in entries or METADATA not in reader.entries(folder):
        raise UnsupportedError(
            f"{reader.url}: its file {LATEST} says {told!r:.200}, and there is no folder of that "
            "iteration with a distributed checkpoint of Megatron-core; open the folder of an "
            "iteration by its name, or save with --ckpt-format torch_dist"
        )
    return below(reader, folder, read)


def _iteration(reader: Reader, has_common: bool) -> Catalog:
    size = reader.size(METADATA)
    told = decode_object(reader.read_whole(METADATA, SMALL_BYTES), METADATA)
    backend = told.get("sharded_backend")
    if not isinstance(backend, str):  # a file of another program
        return dcp.read(reader)
    if backend not in FORMATS:
        raise UnsupportedError(
            f"{reader.url}: its tensors have Megatron-core's format {backend!r:.200}, which this "
            f"version cannot read; load it with Megatron and save with --ckpt-format {FORMATS[0]}"
        )
    parts = [Part((), dcp.read(reader))]
    if has_common:
        parts.append(Part((), torch_save.read(reader, COMMON)))
    found = join_catalogs(
        "megatron", parts, [FileRecord(METADATA, size)], {"sharded_backend": backend}
    )
    is_cut = backend == FORMATS[0] and not has_common
    note = f"{COMMON} is missing, with the arguments and the options of the optimizer"
    return replace(found, notes=(note,)) if is_cut else found
