"""The steps of all saves: the ranks agree on a plan, and make a manifest of the written files.

`agree_on_attempt` communicates once, after describing: errors, hashes of structure, values and
replicas, the attempt's ID. The ranks exchange descriptions, values and hashes of single tensors
only if those hashes differ. `finish` communicates twice: when all ranks have written, and when
rank 0 has committed. It may run in the background, by connections of its own.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard
from warnings import warn

import torch

from ckpt.arguments import DtypeName
from ckpt.errors import ExistsError, NotOwnerError, RankError, ReplicasWarning, StateError
from ckpt.installation import __version__
from ckpt.plan.save_plan import SavePlan, choose_layouts, host_layouts, keeps_last, plan_save
from ckpt.state.flatten import FlatState, Leaf, flatten
from ckpt.state.memory import copy_in_range
from ckpt.state.merged_state import MergedState, agree_on_state, conflict, other_than_first, spec_of
from ckpt.state.state_spec import StateSpec, check_members
from ckpt.stores.local_store import LocalStore
from ckpt.stores.store import Store, check_writable, split_url
from ckpt.transfer.bases import bases_used, check_unused, folder_beside
from ckpt.transfer.commit import check_no_link, check_no_other, commit, is_not_there, now
from ckpt.transfer.facts import Beside
from ckpt.transfer.replica_hashes import WAYS, ReplicaHashes, Replicas, format_names
from ckpt.transfer.write_job import Compress, WriteJob, pack_summary, unpack_summary
from formats.native.manifest import MANIFEST, NONFINITE, SAVE_SECONDS, WRITER_KEYS, Base, Manifest
from formats.native.shard import ShardSummary
from sharding.agreement.ranks import HASH_BITS, Ranks, result_or_error
from sharding.errors import ENDED, LATE, ArgumentError, ArgumentTypeError, without_secrets
from sharding.layout import Mesh

if TYPE_CHECKING:
    from ckpt.state.patterns import Casts

_log = logging.getLogger("ckpt.save")


LOOK_SECONDS = 2.0
"""The most age of the listing that a save begins with: the removal before it may have taken it."""
StoredDtypes = DtypeName | torch.dtype | Mapping[str, DtypeName | torch.dtype | None] | None
"""The dtype of all stored floats, or one for each pattern of names; None leaves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """The user's options of one save."""

    overwrite: bool
    compress: Compress
    metadata: Mapping[str, str]
    base: str | None = None
    replicas: Replicas = "sample"
    host: tuple[int, ...] = ()
    """The ranks of this rank's host if each host has a folder of its own; else empty."""
    look: Callable[[float], Beside] | None = None
    """Lists the folder around the checkpoint, on a rank that commits, before the save begins and
    directly before the commit. The listing before the save may be so many seconds old. Its error
    forbids the save. A link at the place becomes a folder."""
    mark: int | None = None
    """The first 8 hex digits of its files' names, a number below 2**30; by default random."""
    counts: bool = False
    """Whether a background save counts the numbers that are not finite, for the manifest."""
    dtype: StoredDtypes = None

    def attempt_id(self) -> int:
        """Returns a new random number below 2**HASH_BITS for an attempt."""
        if self.mark is None:
            return secrets.randbits(HASH_BITS)
        return self.mark << 32 | secrets.randbits(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAttempt:
    """One rank's view of a save that all ranks agreed on. It holds no tensors."""

    plan: SavePlan
    """This rank's part of the save."""
    described: StateSpec
    """The whole state, in its stored layouts; equal on all ranks."""
    mesh: Mesh
    """The ranks that save, by their rank in the default process group."""
    rank: int
    """The position of this rank among them."""
    attempt_id: int
    """A random number; equal on all ranks."""
    options: SaveOptions
    note: bytes
    """Rank 0's note; equal on all ranks."""
    began: float = 0.0
    """Of a save to a folder: a time before the first write, by `ckpt.transfer.commit.now`."""
    is_new: bool = False
    """Whether the save makes the folder, which a failure then removes again."""

    @property
    def file_name(self) -> str:
        """The name of this rank's shard file."""
        return self.file_of(self.rank)

    def file_of(self, rank: int) -> str:
        """The name of a rank's shard file."""
        return f"{self.attempt_id:016x}-{self.mesh.rank((rank,)):05d}.safetensors"

    def with_note(self, key: str, text: str) -> SaveAttempt:
        """Returns the attempt with a text of the writer for the manifest."""
        metadata = {key: text, **self.options.metadata}
        return replace(self, options=replace(self.options, metadata=metadata))

    def job(self, url: str, options: Mapping[str, Any]) -> WriteJob:
        """The writer's job for this rank: its shard file in the folder `url`."""
        compress, base = self.options.compress, self.options.base
        rank = self.mesh.rank((self.rank,))
        wanted = {} if base is None else self.described.tensors
        how = (compress, self.plan, base, rank, wanted, options, self.options.counts)
        return WriteJob(url, self.file_name, *how)


def agree_on_attempt(
    ranks: Ranks,
    state: object,
    options: SaveOptions,
    check: Callable[[], None],
    arguments: Mapping[str, object] | None = None,
    note: Callable[[], bytes] = bytes,
) -> tuple[SaveAttempt, Sequence[Leaf]]:
    """Returns an attempt to save `state`, and this rank's tensors by their numbers in its plan.

    All ranks call this, and get the same attempt, or all raise if one fails. `check` may raise an
    error that forbids this save on this rank. All ranks have equal `arguments`. Rank 0 makes its
    `note` first.
    """

    def describe() -> FlatState:
        check()
        flat = flatten(state, ranks.mesh)
        if options.dtype is not None:
            flat = _cast(flat, options.dtype)
        _last_check(spec_of(flat).tensors, ranks.mesh)
        return flat

    hashes = ReplicaHashes(options.replicas, ranks.global_rank)
    # Rank 0's manifest names the base from which the other ranks borrow.
    base = None if options.base is None else os.path.basename(options.base.rstrip("/"))
    options_of_call = {
        "replicas": options.replicas,
        "base": base,
        "dtype": str(options.dtype),
        "overwrite": options.overwrite,
        "compress": options.compress,
    }
    arguments = {**options_of_call, **(arguments or {})}
    merged = agree_on_state(
        ranks,
        "describing the state",
        describe,
        options.attempt_id(),
        arguments,
        hashes.weigh,
        note,
    )
    described = merged.whole
    if options.dtype is not None:
        _casts_of(options.dtype).check_all_match(
            [*described.tensors, *described.aliases], "ckpt.save"
        )
    unstored = merged.conflicting_values if merged.same_values else other_than_first(ranks, merged)
    if unstored:
        warn(conflict(ranks, unstored), stacklevel=3)
    to_store = _last_hosts(described.tensors, options.host) if options.host else described.tensors
    tensors = _last_layouts(to_store, tuple(_differing(ranks, merged, hashes)))
    plan = _last_plan(spec_of(merged.flat).tensors, tensors, ranks.global_rank)
    described_as_stored = replace(described, tensors=tensors)
    attempt = SaveAttempt(
        plan=plan,
        described=described_as_stored,
        mesh=ranks.mesh,
        rank=ranks.rank,
        attempt_id=merged.attempt_id,
        options=options,
        note=merged.note,
    )
    return attempt, list(merged.flat.leaves.values())


def _casts_of(dtype: StoredDtypes) -> Casts:
    from ckpt.state.patterns import Casts  # with the parts of a load, which other saves spare

    by_pattern = dtype if isinstance(dtype, Mapping) else {"*": dtype}
    return Casts.of({k: str(v) if isinstance(v, torch.dtype) else v for k, v in by_pattern.items()})


def _cast(flat: FlatState, dtype: StoredDtypes) -> FlatState:
    """Returns a state with its floats in other dtypes, as copies.

    Raises ArgumentError for a dtype or pattern without meaning, and for one dtype of a state with
    an optimizer: it would round the counts of steps. Raises UnsupportedError for a number beyond
    the range of its new dtype.
    """
    from ckpt.state.patterns import FLOATS

    if not isinstance(dtype, Mapping) and flat.optimizers:
        raise ArgumentError(
            f"dtype={str(dtype)!r} would round the state of the optimizer at "
            f"{next(iter(flat.optimizers))!r}, also its counts of steps; leave it out of the "
            f"state, or give patterns, as dtype={{'model.*': {str(dtype)!r}}}"
        )
    casts = _casts_of(dtype)
    for alias, name in flat.aliases.items():
        if casts.of_name(alias) != casts.of_name(name):
            raise ArgumentError(
                f"dtype: {alias} and {name} are one tensor, and get two dtypes; give both names "
                "the same dtype"
            )
    leaves = {}
    for name, leaf in flat.leaves.items():
        to = casts.of_name(name) if leaf.dtype.name in FLOATS else None
        if to is not None and to != leaf.dtype:
            local = torch.empty_like(leaf.local, dtype=getattr(torch, to.torch_name))
            copy_in_range(name, leaf.local, local, "store it in another dtype=")
            leaf = leaf._replace(dtype=to, local=local, given=local)
        leaves[name] = leaf
    return replace(flat, leaves=leaves)


# A training saves the same tensors again and again.
_last_check = keeps_last(check_members)
_last_hosts = keeps_last(host_layouts)
_last_layouts = keeps_last(choose_layouts)
_last_plan = keeps_last(plan_save)


def check_place(store: Store, overwrite: bool, beside: Collection[str] | None = None) -> None:
    """Raises ExistsError if the place is taken, InUseError if other checkpoints borrow from it.

    Rank 0 alone calls this. `beside` has the names in the folder around it, if they are known.
    Raises StoreError if the place is only read.
    """
    check_writable(store)
    if not overwrite:
        names = store.names()
        if MANIFEST in names and store.exists(MANIFEST):  # a listing may be out of date
            raise ExistsError(f"{store.url} holds a checkpoint; pass overwrite=True to replace it")
        check_no_other(store.url, names)
    elif (beside is None or f"{split_url(store.url)[1]}/" in beside) and store.exists(MANIFEST):
        check_no_link(store.url)
        check_unused(store.url, store.options)


def check_options(ranks: Ranks, store: Store, options: SaveOptions) -> None:
    """Raises if this rank's options are wrong, or if the place is taken. All ranks call this."""
    beside = None
    if options.look is not None:
        beside = options.look(LOOK_SECONDS).names
        if isinstance(store, LocalStore):
            store.replace_link()
    if ranks.rank == 0:
        check_place(store, options.overwrite, beside)
    if options.compress not in (False, True, "delta"):
        raise ArgumentError(f"compress is {options.compress!r:.80}; it can be a bool or 'delta'")
    if options.compress == "delta" and options.base is None:
        raise ArgumentError("compress='delta' needs a base= to take the deltas from")
    if options.replicas not in WAYS:
        raise ArgumentError(f"replicas is {options.replicas!r:.80}; it can be {' or '.join(WAYS)}")
    if options.base is not None:
        folder_beside(store.url, options.base)
    if not isinstance(options.metadata, Mapping):
        raise ArgumentTypeError(f"metadata is {options.metadata!r:.80}; give a dict of texts")
    for key, text in options.metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise StateError(f"metadata[{key!r}] is {text!r:.80}; give a text, as by str()")
        if key in WRITER_KEYS:
            raise ArgumentError(
                f"metadata[{key!r}]: ckpt writes this key itself, and {', '.join(WRITER_KEYS)}; "
                "give it another name"
            )


def _differing(ranks: Ranks, merged: MergedState, hashes: ReplicaHashes) -> list[str]:
    """Returns the names of tensors whose replicas differ; rank 0 warns of them.

    Raises StateError on all ranks if the option is "check".
    """
    if merged.balanced:
        return []
    differing = hashes.differing(ranks, merged.whole.tensors)
    if not differing:
        return []
    names = [each.name for each in differing]
    problem = f"not the same on all ranks that have them: {format_names(differing)}"
    if hashes.way == "check":
        raise StateError(
            f"{problem}; nothing was written; make them equal, or give tensors that differ between "
            'ranks different names; replicas="sample" stores the lowest rank\'s, with a warning',
            names=names,
        )
    if ranks.rank == 0:
        warn(
            ReplicasWarning(
                f"{problem}; they are stored as the lowest rank has them, with all of their "
                "modules; give tensors that differ between ranks different names",
                names,
            ),
            stacklevel=4,
        )
    return names


def finish(
    store: Store,
    ranks: Ranks,
    attempt: SaveAttempt,
    written: ShardSummary | None,
    error: Exception | None,
) -> None:
    """Makes a checkpoint of all ranks' files; if that fails, all ranks raise and none exists.

    All ranks call this, each with the result of its own file, or its error.
    """
    try:
        records = ranks.gather("writing", pack_summary(written), error)
    except Exception as failed:
        # Once rank 0 knows of the failure, no manifest will refer to this rank's file.
        if not _is_without_word(failed):
            _clear(store, attempt)
        raise
    failure = None
    ranks.doing("committing")
    if attempt.options.host:
        records, attempt = _record_for_hosts(ranks, attempt, records)
    if ranks.rank == 0 or ranks.global_rank == min(attempt.options.host, default=0):
        _, failure = result_or_error(lambda: write_manifest(store, attempt, records))
        if failure is not None and not attempt.options.host:
            _clear_uncommitted(store, attempt, records, failure)
    # From here on the manifest may exist, so no other rank removes its file after a failure.
    try:
        ranks.agree("committing", failure)
    except Exception as failed:
        kind = failed.error if isinstance(failed, RankError) else type(failed).__name__
        if kind == NotOwnerError.__name__ and not attempt.options.host:
            _clear(store, attempt)  # no manifest has its name; the other hosts may have committed
        if not _is_without_word(failed):
            raise
        message = f"{failed.message}; look whether there is a manifest"
        raise RankError("committing", failed.rank, failed.error, message) from failed


def _clear_uncommitted(
    store: Store, attempt: SaveAttempt, records: Sequence[bytes], failure: Exception
) -> None:
    """Removes the files of all ranks after a failed commit, if no manifest will have their names.

    A full disk needs the space.
    """
    if is_not_there(store, f"{attempt.attempt_id:016x}", failure):
        with suppress(OSError):
            for rank, record in enumerate(records):
                if record:
                    store.delete(attempt.file_of(rank))
            if attempt.is_new:
                store.remove_if_empty()


def _clear(store: Store, attempt: SaveAttempt) -> None:
    """Removes this rank's file, and the last rank the folder if the save has made it."""
    with suppress(OSError):
        store.delete(attempt.file_name)
        if attempt.is_new:
            store.remove_if_empty()


def _is_without_word(error: Exception) -> TypeGuard[RankError]:
    """Whether rank 0 has ended, or is late, without an answer: the manifest may exist."""
    return isinstance(error, RankError) and error.rank == 0 and error.error in (ENDED, LATE)


def _record_for_hosts(
    ranks: Ranks, attempt: SaveAttempt, records: Sequence[bytes]
) -> tuple[list[bytes], SaveAttempt]:
    """Returns all ranks' records, and the attempt with rank 0's metadata. All ranks call this."""
    message = [[record.decode() for record in records], dict(attempt.options.metadata)]
    found, metadata = json.loads(ranks.broadcast(json.dumps(message).encode()))
    options = replace(attempt.options, metadata=metadata)
    return [record.encode() for record in found], replace(attempt, options=options)


def write_manifest(store: Store, attempt: SaveAttempt, records: Sequence[bytes]) -> None:
    """Writes the manifest: the checkpoint exists when this returns. `records` are by rank.

    Rank 0 alone calls this, or one rank of each host, when all ranks have written.
    """
    options = attempt.options
    summaries = {rank: unpack_summary(record) for rank, record in enumerate(records) if record}
    used: dict[str, int] = {}
    for summary in summaries.values():
        if summary.used:
            used[summary.base_digest] = used.get(summary.base_digest, 0) | summary.used
    base = options.base
    bases = bases_used(store.url, base, used, store.options) if base is not None else ()
    attempt = attempt.with_note(SAVE_SECONDS, f"{now() - attempt.began:.3f}")
    if options.counts:
        count = sum(summary.nonfinite or 0 for summary in summaries.values())
        attempt = attempt.with_note(NONFINITE, str(count))
        if count:
            _log.warning("%s: %d numbers are NaN or infinite", without_secrets(store.url), count)
    manifest = manifest_of(attempt, summaries, bases)
    was = None if base is None or not used else (base, next(iter(used)))
    here = [file for file in manifest.files if not options.host or file.rank in options.host]
    commit(store, manifest, attempt.began, options.overwrite, was, here, options.look)


def manifest_of(
    attempt: SaveAttempt, summaries: Mapping[int, ShardSummary], bases: Sequence[Base | None] = ()
) -> Manifest:
    """Returns the manifest of an attempt's files; `summaries` has them by the rank's position."""
    files = [
        summary.to_file(attempt.file_of(rank), attempt.mesh.rank((rank,)))
        for rank, summary in summaries.items()
    ]
    writer = writer_of(attempt.mesh.size, attempt.options.metadata)
    d = attempt.described
    return Manifest(
        d.tensors,
        d.aliases,
        d.tree,
        files,
        writer,
        bases,
        strides=d.strides,
        optimizers=d.optimizers,
        versions=d.versions,
    )


def writer_of(world_size: int, metadata: Mapping[str, str]) -> dict[str, str]:
    """The manifest's entry about the program that wrote it, with the user's metadata."""
    return {
        "ckpt": __version__,
        "torch": torch.__version__,
        "world_size": str(world_size),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **metadata,
    }
