"""The differences of two versions of weights, in the layout that reinforcement learning reads.

`ckpt.convert(new, ".../weight_v000007", to="hf", since=old)` writes a version as slime publishes
it, and as SGLang's `pull_weights` takes it:

1. `model.safetensors` has, for each tensor that has changed, bytes (U8) under its name: a zstd
   frame with old XOR new of all its bytes. The file's metadata has the xxh3_128 of the new bytes,
   in hex, by the name.
2. `model.safetensors.index.json` tells the version, the one before, and how both are stored.
3. A version without `delta_encoding` in its index is an ordinary folder of Hugging Face. A reader
   that has no earlier version begins from it.

Source: https://github.com/THUDM/slime/pull/2181.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import xxhash
import zstandard

from ckpt.converting.native_target import StoredState, paired
from ckpt.stores.store import split_url
from ckpt.transfer.copy_shares import stream_tensors
from formats.catalog import OutgoingTensor
from formats.safetensors.file import build
from formats.storage import Writer
from sharding.errors import ArgumentError, without_secrets

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
COPY_BYTES = 4 << 20


def version_in(url: str) -> int:
    """Returns the number of a version, from the name of its folder. Raises ArgumentError."""
    found = re.fullmatch(r"weight_v([0-9]+)", split_url(url)[1])
    if found is None or not int(found[1]):
        raise ArgumentError(
            f"{without_secrets(url)}: name a folder with differences after its version, such as "
            "weight_v000007: readers take one version after the other, and have version 0"
        )
    return int(found[1])


def check_alike(new: StoredState, old: StoredState) -> None:
    """Raises ArgumentError unless both versions have the same names, shapes and dtypes."""
    for name in {**old.tensors, **new.tensors}:
        here, there = (state.tensors.get(name) for state in (new, old))
        if here is None or there is None or (here.shape, here.dtype) != (there.shape, there.dtype):
            words = (
                "missing" if each is None else f"{each.dtype} {list(each.shape)}"
                for each in (here, there)
            )
            raise ArgumentError(
                f"{name} is {' here, and '.join(words)} in the checkpoint of since=: give an "
                "earlier version of the same weights, or write this one whole, without since="
            )


def write_delta(
    version: int,
    new: StoredState,
    old: StoredState,
    open_writer: Callable[[], AbstractContextManager[Writer]],
) -> None:
    """Writes the differences of a version from the one before. Raises as `FileCopier.write`.

    Compressed bytes wait in a temporary file, which becomes as large as the result.
    """
    entries = list[tuple[str, str, tuple[int], int]]()
    sums, names = dict[str, str](), [*new.tensors]
    with TemporaryFile() as spool:
        with (
            stream_tensors(new.copier, [new.tensors[name] for name in names]) as ours,
            stream_tensors(old.copier, [old.tensors[name] for name in names]) as theirs,
        ):
            for tensor, other in zip(ours, theirs, strict=True):
                begin = spool.tell()
                digest = _add(spool, tensor, other)
                if digest is None:
                    spool.seek(begin)
                    continue
                nbytes = spool.tell() - begin
                entries.append((tensor.name, "U8", (nbytes,), nbytes))
                sums[tensor.name] = digest
        new.copier.finish()
        old.copier.finish()
        spool.truncate()
        spool.seek(0)
        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        index = {"metadata": metadata, "weight_map": dict.fromkeys(sums, FILE)}
        with open_writer() as writer:
            with writer.create(FILE) as file:
                file.write([build(entries, sums)])
                while block := spool.read(COPY_BYTES):
                    file.write([block])
            with writer.create(INDEX) as file:
                file.write([json.dumps(index, indent=2).encode()])


def _add(spool: IO[bytes], tensor: OutgoingTensor, other: OutgoingTensor) -> str | None:
    """Adds the frame of a tensor; returns the checksum of its new bytes, None without a change."""
    compressor, digest = zstandard.ZstdCompressor(1).compressobj(), xxhash.xxh3_128()
    is_changed = False
    for ours, theirs in paired(tensor.blocks(), other.blocks()):
        differences = np.bitwise_xor(np.frombuffer(ours, "u1"), np.frombuffer(theirs, "u1"))
        is_changed |= bool(differences.any())
        digest.update(ours)
        spool.write(compressor.compress(differences.data))
    spool.write(compressor.flush())
    return digest.hexdigest() if is_changed else None
