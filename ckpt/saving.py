"""Saving: describe, plan, write, commit.

What the ranks exchange, in order: one all-reduce after describing (errors, a hash of the
structure, the attempt's number), summaries only if the structures differ, one record per rank
gathered on rank 0 after writing, one all-reduce after the commit. A failure anywhere before the
commit leaves nothing that a reader would take for a checkpoint.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING
from warnings import warn

import torch

from ckpt.commit import committed_files
from ckpt.errors import ExistsError, StateError, StoreError
from ckpt.flatten import FlatState, Leaf, flatten
from ckpt.memory import is_lazy
from ckpt.ranks import HASH_BITS, Ranks, attempt
from ckpt.save_plan import Described, check_members, stored_layouts
from ckpt.store import Store, open_store
from ckpt.together import described_by, summary, together
from ckpt.version import __version__
from formats.dtypes import DType
from formats.native.manifest import MANIFEST, Manifest, ShardFile, StoredTensor, dump
from formats.native.shard import Progress, ShardSummary, write_shard
from formats.outgoing import OutgoingTensor
from sharding.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STAGE_BYTES = 16 << 20
"""Bytes of a tensor that are copied at once where its memory cannot be written as it lies."""


def save(
    url: str | os.PathLike[str],
    state: object,
    *,
    overwrite: bool = False,
    compress: bool = False,
    metadata: Mapping[str, str] | None = None,
    group: ProcessGroup | None = None,
    progress: Progress | None = None,
) -> None:
    """A committed checkpoint of `state` at `url` when this returns, on every rank.

    To be called by all ranks of `group` (by default of the default process group; one process
    needs none). `state` is a nest of dicts, lists and tuples of tensors, DTensors, plain values,
    modules, optimizers and other objects with `state_dict`. A plain tensor is taken to be the same
    on every rank that has it under its name: give what differs between ranks a name of its own.
    Writes each element once, divided evenly among its replicas; gathers nothing.

    Args:
        url: a folder, on a disk that all ranks see or at any fsspec URL.
        overwrite: replace the checkpoint that is there. It stays readable until the new one is
            complete, and if this fails.
        compress: zstd behind a byte shuffle: about a third smaller for bfloat16, and slower than a
            local disk.
        metadata: text to keep in the manifest, shown by `ckpt inspect`.
        progress: called with numbers of bytes as they are written by this rank.

    Raises:
        StateError: something cannot be stored; the key path is named. Nothing was written.
        ExistsError: there is a checkpoint at `url` and `overwrite` is False.
        RankError: another rank failed; its number and error are named.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/step-1", {"w": torch.ones(2), "step": 1})
    ...     ckpt.read(f"{folder}/step-1")
    {'w': tensor([1., 1.]), 'step': 1}
    """
    ranks = Ranks(group)
    with open_store(url) as store:
        _Save(store, ranks, overwrite, compress, metadata or {}, progress).run(state)


@dataclass(frozen=True)
class _Save:
    """One save on one rank."""

    _store: Store
    _ranks: Ranks
    _overwrite: bool
    _compress: bool
    _metadata: Mapping[str, str]
    _progress: Progress | None

    def run(self, state: object) -> None:
        held = together(
            self._ranks,
            "describing the state",
            lambda: self._flatten(state),
            self._compress.to_bytes(1, "little"),
            secrets.randbits(HASH_BITS),
        )
        described = held.whole
        if not held.same_values:
            self._warn_of_values(described)
        tensors = stored_layouts(described.tensors)
        prefix = f"{held.number:016x}"
        written, error = attempt(lambda: self._write(held.flat, tensors, prefix))
        self._commit(
            Described(tensors, described.aliases, described.tree),
            prefix,
            written[0] if written else None,
            error,
        )

    def _flatten(self, state: object) -> FlatState:
        if self._ranks.rank == 0 and not self._overwrite and self._store.exists(MANIFEST):
            raise ExistsError(
                f"{self._store.url} holds a checkpoint; pass overwrite=True to replace it"
            )
        for key, text in self._metadata.items():
            if not isinstance(key, str) or not isinstance(text, str):
                raise StateError(f"metadata[{key!r}] is {text!r:.80}: metadata holds text only")
        flat = flatten(state, self._ranks.mesh)
        check_members(described_by(flat).tensors, self._ranks.mesh)
        return flat

    def _check_all_are_seen(self, files: list[ShardFile]) -> None:
        """Raise StoreError when ranks wrote to a place of their own that has the same name."""
        names = set(self._store.names()) if files else set()
        unseen = [file.rank for file in files if file.name not in names]
        if unseen:
            raise StoreError(
                f"{self._store.url}: rank 0 does not see what ranks {unseen[:8]} wrote, "
                f"{len(unseen)} of {len(files)} files: save to a disk that all ranks share"
            )

    def _warn_of_values(self, described: Described) -> None:
        mine = summary(described)
        if self._ranks.broadcast(mine, 0) != mine:
            warn(
                f"rank {self._ranks.rank} has other plain values in the state than rank 0, whose "
                "values are stored; give what differs between ranks keys of its own",
                stacklevel=5,
            )

    def _write(
        self, flat: FlatState, tensors: Mapping[str, StoredTensor], prefix: str
    ) -> ShardFile | None:
        """This rank's shard file; None when there is nothing for it to write."""
        rank = self._ranks.here
        outgoing = [
            part
            for name, leaf in flat.leaves.items()
            if (part := outgoing_part(leaf, tensors[name], rank)) is not None
        ]
        if not outgoing:
            return None
        name = f"{prefix}-{rank:05d}.safetensors"
        with self._store.create(name, rewritable=self._compress) as file:
            summary = write_shard(file, outgoing, self._compress, self._progress)
        return summary.named(name, rank)

    def _commit(
        self,
        described: Described,
        prefix: str,
        written: ShardFile | None,
        error: Exception | None,
    ) -> None:
        """All ranks' files become a checkpoint, or none does and all ranks raise."""
        try:
            self._ranks.agree("writing", error)
            records = self._ranks.gather(_record(written))
        except BaseException:
            # Rank 0 commits only after it has this rank's record: nothing refers to the file.
            if written is not None:
                with suppress(OSError):
                    self._store.delete(written.name)
            raise
        failed = None
        if self._ranks.rank == 0:
            _, failed = attempt(lambda: self._write_manifest(described, prefix, records))
        # From here on the manifest may be there, whatever goes wrong: the files stay.
        self._ranks.agree("committing", failed)

    def _write_manifest(self, described: Described, prefix: str, records: list[bytes]) -> None:
        files = []
        for rank, record in enumerate(records):
            if record:
                size, header, table, digest = record.decode().split()
                summary = ShardSummary(int(size), int(header), int(table), digest)
                here = self._ranks.mesh.rank((rank,))
                files.append(summary.named(f"{prefix}-{here:05d}.safetensors", here))
        self._check_all_are_seen(files)
        old = committed_files(self._store) if self._overwrite else []
        writer = {
            "ckpt": __version__,
            "torch": torch.__version__,
            "world_size": str(self._ranks.world_size),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self._metadata,
        }
        manifest = Manifest(described.tensors, described.aliases, described.tree, files, writer)
        self._store.commit(MANIFEST, dump(manifest), replace=self._overwrite)
        for name in old:
            with suppress(OSError):  # the new checkpoint is there; left-overs only take space
                self._store.delete(name)


def _record(written: ShardFile | None) -> bytes:
    """What the manifest needs of a rank's file; nothing where the rank wrote none."""
    if written is None:
        return b""
    w = written
    return f"{w.size} {w.header_bytes} {w.table_bytes} {w.digest}".encode()


def outgoing_part(leaf: Leaf, stored: StoredTensor, rank: int) -> OutgoingTensor | None:
    """What `rank` writes of a tensor: a span of its local array; None when that is empty."""
    lo, hi, shape = _part(stored.layout, rank)
    if lo >= hi:
        return None
    if hi - lo != prod(shape):
        first, _, _ = _part(leaf.layout, rank)  # of what the rank holds, which may be a range too
        lo, hi, shape = lo - first, hi - first, (hi - lo,)
    local = leaf.local
    if local.device.type == "cpu" and local.is_contiguous() and not is_lazy(local):
        data = _bytes_of(local)[lo * leaf.dtype.itemsize : hi * leaf.dtype.itemsize]
        return OutgoingTensor(leaf.name, shape, leaf.dtype, lambda: iter((data,)), stable=True)
    return OutgoingTensor(leaf.name, shape, leaf.dtype, lambda: _staged(local, lo, hi, leaf.dtype))


@lru_cache(1024)
def _part(layout: Layout, rank: int) -> tuple[int, int, tuple[int, ...]]:
    """A rank's span and the shape of its local array. Most tensors of a model share few layouts."""
    return *layout.span(rank), layout.local_shape(rank)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8)
    )
    return memoryview(flat.numpy().data)


def _staged(local: torch.Tensor, lo: int, hi: int, dtype: DType) -> Iterator[memoryview]:
    """Elements `[lo, hi)` of a tensor in row-major order, copied to the CPU block by block."""
    if local.is_contiguous() and not is_lazy(local):
        flat = local.reshape(-1)
        step = max(1, STAGE_BYTES // dtype.itemsize)
        for start in range(lo, hi, step):
            yield _bytes_of(flat[start : min(start + step, hi)].cpu())
        return
    # Rows are the unit here: a strided view cannot be flattened without copying all of it.
    rows = local.shape[0] if local.ndim else 1
    inner = local.numel() // rows
    step = max(1, STAGE_BYTES // max(1, inner * dtype.itemsize))
    for first in range(lo // inner, -(-hi // inner), step):
        last = min(first + step, rows)
        block = local[first:last] if local.ndim else local
        whole = block.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        start, stop = max(lo - first * inner, 0), min(hi - first * inner, whole.numel())
        yield _bytes_of(whole[start:stop])
