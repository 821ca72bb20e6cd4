"""Saving: describe, plan, write, commit; or stage, and the rest in the background.

The ranks communicate three times: in `agreed_attempt`, before anything is written; after writing,
when rank 0 gets one record of each rank; and when the commit has ended. In a save in the background
the call does the first, and `ckpt.background.save` the others. A failure anywhere before the commit
leaves nothing that a reader would take for a checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, get_args, overload

from ckpt import in_flight
from ckpt.arguments import WhenBusy, check_order, check_word
from ckpt.background.save import begin
from ckpt.background.save_handle import SaveHandle
from ckpt.background.staging import When
from ckpt.errors import BusyError, RankError
from ckpt.garbage import collected_later
from ckpt.save_protocol import SaveAttempt, SaveOptions, agreed_attempt, finish
from ckpt.state.flatten import Leaf
from ckpt.stores.local_store import LocalStore
from ckpt.stores.store import Options, Store, absolute, open_store
from ckpt.transfer.read import workers_for
from ckpt.transfer.replica_hashes import Replicas
from ckpt.transfer.write import outgoing
from ckpt.transfer.write_job import Compress, write
from formats.native.shard import Progress, ShardSummary
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import Ranks, result_or_error

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group

__all__ = ["check_free", "save"]


@overload
def save(
    url: str | os.PathLike[str],
    state: object,
    *,
    overwrite: bool = False,
    compress: Compress = False,
    metadata: Mapping[str, str] | None = None,
    base: str | os.PathLike[str] | None = None,
    replicas: Replicas = "sample",
    group: Group = None,
    progress: Progress | None = None,
    blocking: Literal[False],
    staging: When = "copied",
    when_busy: WhenBusy = "wait",
    storage_options: Options = None,
    timeout: float = TIMEOUT_SECONDS,
) -> SaveHandle: ...


@overload
def save(
    url: str | os.PathLike[str],
    state: object,
    *,
    overwrite: bool = False,
    compress: Compress = False,
    metadata: Mapping[str, str] | None = None,
    base: str | os.PathLike[str] | None = None,
    replicas: Replicas = "sample",
    group: Group = None,
    progress: Progress | None = None,
    blocking: bool = True,
    staging: When = "copied",
    when_busy: WhenBusy = "wait",
    storage_options: Options = None,
    timeout: float = TIMEOUT_SECONDS,
) -> SaveHandle | None: ...


def save(
    url: str | os.PathLike[str],
    state: object,
    *,
    overwrite: bool = False,
    compress: Compress = False,
    metadata: Mapping[str, str] | None = None,
    base: str | os.PathLike[str] | None = None,
    replicas: Replicas = "sample",
    group: Group = None,
    progress: Progress | None = None,
    blocking: bool = True,
    staging: When = "copied",
    when_busy: WhenBusy = "wait",
    storage_options: Options = None,
    timeout: float = TIMEOUT_SECONDS,
) -> SaveHandle | None:
    """A committed checkpoint of `state` at `url` when this returns, on every rank.

    With `blocking=False`, a handle when training may go on; the checkpoint is of the state at the
    call, whatever changes it afterwards, and exists when the handle's `wait` returns
    (docs/saving.md).

    To be called by all ranks of `group` (by default of the default process group; one process
    needs none); with `group="self"` by any rank by itself, which stores what it has. `state` is a
    nest of dicts, lists and tuples of tensors, DTensors, plain values, modules, optimizers and
    other objects with `state_dict`. Every key that any rank has is in the checkpoint. A plain
    tensor is a replica on every rank that has it under its name: give what differs between ranks a
    name of its own. Writes each element once, divided evenly among its replicas; gathers nothing.

    Args:
        url: a folder, on a disk that all ranks see or at any fsspec URL.
        overwrite: replace the checkpoint that is there. It stays readable until the new one is
            complete, and if this fails.
        compress: zstd behind a byte shuffle: about a third smaller for bfloat16, and slower than a
            local disk. "delta", with a `base` that was saved with `compress`, stores what chunks
            differ in from the base's, where that is less.
        metadata: text to keep in the manifest, shown by `ckpt inspect`.
        base: an earlier checkpoint in the same folder as `url`. What is unchanged since, chunk by
            chunk by checksum, is not written again: it is read from there, so the base cannot be
            deleted (`ckpt.delete`) before this one. Saved by as many ranks, or nothing is shared.
        replicas: how the ranks compare tensors that several of them have. "sample": by some bytes
            of each. Those that differ are stored as the lowest rank has them, with a
            ReplicasWarning on rank 0 that names them. "check": by every byte. A difference is an
            error.
        progress: called with numbers of bytes as they are written by this rank; by another thread
            where the save is in the background.
        blocking: whether to return only when the checkpoint exists.
        staging: when a save in the background copies the state: all of it in the call ("copied"),
            or what only the steps of optimizers in the state change during the forward and
            backward passes that follow ("overlapped"; docs/saving.md says which changes to it
            are found and which are not).
        when_busy: what to do while a save of this process is in the background: wait until it is
            over, or refuse this one.
        storage_options: what the fsspec driver of `url` is told: addresses, credentials. What its
            environment variables say needs no options (docs/stores.md).
        timeout: seconds that a rank waits for another at most, in the call and in the background.
            Then all raise a RankError that names who has not come.

    Raises:
        ArgumentError: an option has no such value, or the state stands before the URL.
        StateError: something cannot be stored; the key path is named. Or what ranks have cannot be
            united, or replicas differ that were to be checked. Nothing was written.
        ExistsError: there is a checkpoint at `url`, of whatever format, and `overwrite` is False;
            or an InUseError: others beside it borrow from it.
        BusyError: on all ranks, if one was busy and `when_busy` is "refuse".
        BackgroundError: an earlier save in the background failed and nobody was told until now.
        RankError: another rank failed; its number and error are named.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/step-1", {"w": torch.ones(2), "step": 1})
    ...     ckpt.read(f"{folder}/step-1")
    {'w': tensor([1., 1.]), 'step': 1}
    """
    return save_with(
        url,
        state,
        lambda: SaveOptions(
            overwrite,
            compress,
            metadata or {},
            None if base is None else os.fspath(base),
            replicas,
        ),
        group,
        progress,
        blocking,
        staging,
        when_busy,
        storage_options,
        timeout,
    )


def save_with(
    url: str | os.PathLike[str],
    state: object,
    make_options: Callable[[], SaveOptions],
    group: Group,
    progress: Progress | None,
    blocking: bool,
    staging: When,
    when_busy: WhenBusy,
    storage_options: Options,
    timeout: float,
) -> SaveHandle | None:
    """As `save`, with options that are made in the call: other ranks are told of their error."""
    started = time.perf_counter()
    ranks = Ranks(group, timeout)
    later = None if blocking else Ranks(group, timeout, "saves in the background")
    if later is not None and not later.from_any_thread:
        later = None
    name = "ckpt.save" if blocking else "ckpt.save(blocking=False)"
    with in_flight.told_by_this_call() as begun, ranks.call(name, later):
        check_order("ckpt.save", url, state)
        options = make_options()
        if when_busy == "wait":
            in_flight.wait()
        with open_store(url, storage_options) as store, collected_later(), ExitStack() as stack:

            def check() -> None:
                turn = None if blocking else object()
                for _ in range(2):  # an interrupt may come while it is left
                    stack.callback(in_flight.leave_turn, turn)
                check_word("staging", staging, get_args(When))
                check_free(when_busy, turn, ranks.is_single_process)

            try:
                attempt, leaves = agreed_attempt(ranks, store, state, options, check)
            except RankError as error:
                if error.error == BusyError.__name__:
                    raise BusyError(str(error)) from error
                raise
            handle = SaveHandle(absolute(url), attempt.plan.nbytes, started)
            if later is not None:
                later.connect()
                begun.append(handle)
                begin(handle, state, attempt, leaves, later, progress, store.options, staging)
                return handle
            ranks.doing("writing")
            written, failed = result_or_error(lambda: _write(store, attempt, leaves, progress))
            finish(store, ranks, attempt, written[0] if written else None, failed)
            handle.mark_finished(None)
            return None if blocking else handle


def check_free(when_busy: WhenBusy, turn: object, alone: bool) -> None:
    """Raise what stands against any save on this rank; one in the background takes this turn.

    Other threads may have begun one since this one waited. Ranks do not wait for those here: each
    could wait for what the other's threads are about to begin.
    """
    check_word("when_busy", when_busy, get_args(WhenBusy))
    while in_flight.is_busy() if turn is None else not in_flight.take_turn(turn):
        if when_busy == "refuse" or not alone:
            what = in_flight.url() if in_flight.is_busy() else "another thread's checkpoint"
            todo = 'pass when_busy="wait"' if when_busy == "refuse" else "save from one thread"
            raise BusyError(
                f"{what} is still being saved; nothing else was saved. Wait for it with its "
                f"handle, or {todo}"
            )
        in_flight.wait() if turn is None else in_flight.wait_turn()
    in_flight.raise_untold()


def _write(
    store: Store, attempt: SaveAttempt, leaves: Sequence[Leaf], progress: Progress | None
) -> ShardSummary | None:
    """This rank's shard file; None when there is nothing for it to write."""
    items = attempt.plan.items
    if not items:
        return None
    tensors = [outgoing(item, leaves[item.source].local) for item in items]
    # Ranks that share a core hash and write in turn: they wait for the processor, not the disk.
    overlap = workers_for(attempt.mesh.size) > 1 or not isinstance(store, LocalStore)
    return write(attempt.job(store.url, store.options), store, tensors, progress, overlap)
