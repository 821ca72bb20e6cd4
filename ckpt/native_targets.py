"""Writes a conversion's result as a checkpoint of ckpt's own format.

Uncompressed files are planned, and copied like those of any other format, by one process or by all
ranks. The sizes of compressed chunks are known only once they are written, so one process
compresses streams. The manifest comes last.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from ckpt.kind_layouts import Division, run_of
from ckpt.outgoing import StoredState
from ckpt.stores.store import Options, Store, local_path, open_store
from ckpt.transfer.commit import commit, is_not_there, now
from ckpt.transfer.copy_shares import write_plans
from ckpt.transfer.copy_streams import streamed
from ckpt.version import __version__
from formats.native.manifest import Manifest, ShardFile
from formats.native.shard import ShardSummary, stored_order
from formats.native.shard_writer import plan_shard, planned_summary, write_shard
from formats.outgoing import FilePlan, OutgoingTensor
from sharding.agreement.ranks import Ranks


def write_native(
    ranks: Ranks | None,
    target: str,
    options: Options,
    state: StoredState,
    division: Division,
    overwrite: bool,
    compress: bool,
) -> None:
    """Writes and commits a checkpoint with the files of a division.

    All `ranks` call this, if there are any. Rank 0 compresses and commits.
    """
    began, attempt = now(), secrets.token_hex(8)
    if ranks is not None:
        attempt = ranks.broadcast(attempt.encode()).decode()
    is_first = ranks is None or ranks.rank == 0
    plans = [
        plan_shard(f"{attempt}-{rank:05d}.safetensors", _parts(state, division, rank))
        for rank in division.parts
    ]
    with open_store(target, options) as store:
        path = local_path(store.url)
        is_new = path is not None and not os.path.lexists(path)
        may_be_there = False
        written: list[ShardSummary] = []
        try:
            if not compress:
                is_far = path is None
                tables = write_plans(ranks, state.copier, lambda: nullcontext(store), plans, is_far)
                written = [planned_summary(*pair) for pair in zip(plans, tables, strict=is_first)]
            elif is_first:
                written = _compressed(store, state, plans)
            if is_first:
                manifest = _manifest(state, division, plans, written)
                may_be_there = True
                commit(store, manifest, began, overwrite)
        except BaseException as error:
            if is_first and (not may_be_there or is_not_there(store, attempt, error)):
                with suppress(OSError):  # left-overs; the first error tells more
                    for plan in plans:
                        store.delete(plan.name)
                    if is_new:
                        store.remove_if_empty()
            raise


def _parts(state: StoredState, division: Division, rank: int) -> list[OutgoingTensor]:
    """Returns the runs of tensors in a rank's file."""
    parts = []
    for name in division.parts[rank]:
        run = run_of(division.stored[name].layout, rank)
        tensor = state.tensors[name]
        parts.append(OutgoingTensor(name, run.shape, tensor.dtype, tensor.blocks, first=run.lo))
    return parts


def _compressed(store: Store, state: StoredState, plans: Sequence[FilePlan]) -> list[ShardSummary]:
    """Writes compressed files, from streams of the tensors of the plans."""
    written = []
    for plan in plans:
        parts = [part for part in plan.parts if isinstance(part, OutgoingTensor)]
        with store.create(plan.name, rewritable=True) as file:
            tensors = streamed(state.copier, stored_order(parts))
            written.append(write_shard(file, tensors, compress=True))
            if plan is plans[-1]:
                state.copier.finish()
    return written


def _manifest(
    state: StoredState,
    division: Division,
    plans: Sequence[FilePlan],
    written: Sequence[ShardSummary],
) -> Manifest:
    files: list[ShardFile] = [
        summary.named(plan.name, rank)
        for rank, plan, summary in zip(division.parts, plans, written, strict=True)
    ]
    writer = {
        "ckpt": __version__,
        "world_size": str(division.world_size),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **state.metadata,
    }
    stored, versions = division.stored, state.versions
    return Manifest(
        stored,
        state.aliases,
        state.tree,
        files,
        writer,
        versions=versions,
        strides=state.strides,
        optimizers=state.optimizers,
    )
