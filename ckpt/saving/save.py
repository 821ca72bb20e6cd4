"""Saving: describe, plan, write, commit; or stage, and do the rest in the background.

The ranks communicate three times: in `agree_on_attempt`, before anything is written; after writing,
when rank 0 gets one record of each rank; and when the commit has ended. In a background save the
call does the first, and `ckpt.saving.background` the others. A failure before the commit leaves
nothing that a reader would take for a checkpoint.

The memory and the process for the first background save, made in advance.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, get_args, overload
from warnings import warn

from ckpt.arguments import WhenBusy, bound_bytes, check_order, check_word, workers_for
from ckpt.errors import ArgumentError, BusyError, RankError
from ckpt.opening import in_flight
from ckpt.plan.save_plan import WriteItem, choose_layouts, plan_save
from ckpt.saving.agreement import (
    SaveAttempt,
    SaveOptions,
    StoredDtypes,
    agree_on_attempt,
    check_options,
    finish,
)
from ckpt.saving.background import Folder, SaveHandle, begin, lasting, write_also
from ckpt.saving.staging import When, divide, slots
from ckpt.saving.writers import CommittedSave, arena_writer
from ckpt.state.flatten import FlatState, Leaf, flatten
from ckpt.state.memory import blocks, outgoing
from ckpt.state.merged_state import agree_on_state, spec_of
from ckpt.stores.local_store import LocalStore
from ckpt.stores.store import Options, Store, absolute, local_path, open_store
from ckpt.transfer.commit import now
from ckpt.transfer.replica_hashes import Replicas
from ckpt.transfer.write_job import Compress, write
from formats.native.shard import Progress, ShardSummary
from sharding.agreement.call_events import pause_collection
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import Ranks, result_or_error

if TYPE_CHECKING:
    from ckpt.converting.second_output import SecondOutput
    from sharding.agreement.ranks import Group

__all__ = ["prepare", "save"]


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
    dtype: StoredDtypes = None,
    group: Group = None,
    progress: Progress | None = None,
    blocking: Literal[False],
    staging: When = "copied",
    host_memory: str | int | None = None,
    when_busy: WhenBusy = "wait",
    storage_options: Options = None,
    timeout: float = TIMEOUT_SECONDS,
    also: SecondOutput | None = None,
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
    dtype: StoredDtypes = None,
    group: Group = None,
    progress: Progress | None = None,
    blocking: bool = True,
    staging: When = "copied",
    host_memory: str | int | None = None,
    when_busy: WhenBusy = "wait",
    storage_options: Options = None,
    timeout: float = TIMEOUT_SECONDS,
    also: SecondOutput | None = None,
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
    dtype: StoredDtypes = None,
    group: Group = None,
    progress: Progress | None = None,
    blocking: bool = True,
    staging: When = "copied",
    host_memory: str | int | None = None,
    when_busy: WhenBusy = "wait",
    storage_options: Options = None,
    timeout: float = TIMEOUT_SECONDS,
    also: SecondOutput | None = None,
) -> SaveHandle | None:
    """Returns, on every rank, once a committed checkpoint of `state` exists at `url`.

    With `blocking=False`, returns a handle as soon as training may go on. The checkpoint has the
    state at the time of the call, and exists when the handle's `wait` returns (docs/saving.md).

    All ranks of `group` call this (None is the default process group; a single process needs no
    group); with `group="self"` one rank calls it alone, and stores its own state. `state` is a
    nest of dicts, lists and tuples of tensors, DTensors, plain values, modules, optimizers and
    other objects with `state_dict`. The checkpoint has every key of every rank. Plain tensors of
    one name are replicas: give tensors that differ between ranks different names. Each element is
    written once, and the replicas share the work evenly; no rank gathers whole tensors.

    Args:
        url: a folder, on a disk that all ranks see or at any fsspec URL.
        overwrite: replace the checkpoint at `url`. The old one stays readable until the new one is
            complete, and if the save fails.
        compress: zstd behind a byte shuffle: about a third smaller for bfloat16, and slower than a
            local disk. "delta", with a `base` that was saved with `compress`, stores a chunk as
            its difference from the base's chunk if the difference is smaller.
        metadata: text to keep in the manifest, shown by `ckpt inspect`, under keys that the
            manifest does not have itself, such as `time`.
        base: an earlier checkpoint in the same folder as `url`. Chunks whose checksums are
            unchanged since then are not written again, but read from the base, so the base
            cannot be deleted (`ckpt.delete`) before this checkpoint. Chunks are shared only if as
            many ranks saved the base.
        replicas: how the ranks compare a tensor's replicas. "sample": by a sample of the bytes. If
            they differ, the lowest rank's tensor is stored, and rank 0 gives a ReplicasWarning that
            names the tensor. "check": by every byte. A difference is an error.
        dtype: the dtype in which floats of 16 bits and more are stored, or one for each pattern of
            names, as `{"model.*": "bfloat16"}`; the first pattern that matches counts. The state
            itself stays as it is, and the casts take memory until they are written.
        progress: called with numbers of bytes as this rank writes them; in a background save by
            another thread.
        blocking: whether to return only once the checkpoint exists.
        staging: when a background save copies the state. "copied": all of it in the call.
            "overlapped": the tensors that only the optimizers' steps change are copied during the
            next forward and backward pass (docs/saving.md lists the changes that are found, and
            those that are not).
        host_memory: the most bytes of host memory, as "8GB" or a number, in which this rank keeps
            its part for a background save. A larger part passes through it in waves: tensors that
            only optimizers' steps change are copied while the file is written, and a step waits
            until they are (docs/saving.md).
        when_busy: while a background save of this process is in flight, "wait" until it is over, or
            "refuse" this one.
        storage_options: options of the fsspec driver of `url`: addresses, credentials. Settings in
            the driver's environment variables need no options (docs/stores.md).
        timeout: the most seconds that a rank waits for another, in the call and in the background.
            Then all raise a RankError that names the missing rank.
        also: a second output: the weights for `from_pretrained` (`ckpt.HuggingFace`), or a file or
            folder of another format (`ckpt.SecondOutput`), written from the same copy of the state
            once the checkpoint is committed. A failure then is a SecondOutputWarning on all ranks,
            and the checkpoint stays.

    Raises:
        ArgumentError: an option does not have such a value, or the state stands before the URL.
        UnsupportedError: a number is beyond the range of its `dtype`.
        StateError: a value cannot be stored (the error names its key path), the ranks' states
            contradict each other, or checked replicas differ. Nothing was written.
        ExistsError: a checkpoint of any format is at `url`, and `overwrite` is False. InUseError, a
            subclass: checkpoints beside it borrow from it.
        BusyError: on all ranks, if a rank was busy and `when_busy` is "refuse".
        BackgroundError: an earlier background save failed, and no caller has seen its error.
        RankError: another rank failed; the error names the rank and its error.

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
            overwrite=overwrite,
            compress=compress,
            metadata=metadata or {},
            base=None if base is None else os.fspath(base),
            replicas=replicas,
            dtype=dtype,
        ),
        group=group,
        progress=progress,
        blocking=blocking,
        staging=staging,
        host_memory=host_memory,
        when_busy=when_busy,
        storage_options=storage_options,
        timeout=timeout,
        also=also,
    )


def save_with(
    url: str | os.PathLike[str],
    state: object,
    make_options: Callable[[], SaveOptions],
    *,
    group: Group,
    progress: Progress | None,
    blocking: bool,
    staging: When,
    host_memory: str | int | None,
    when_busy: WhenBusy,
    storage_options: Options,
    timeout: float | None,
    also: SecondOutput | None = None,
    checks_also: bool = True,
) -> SaveHandle | None:
    """As `save`, but makes the options inside the call, so that all ranks hear of a wrong one.

    Unless `checks_also`, a second output that cannot be written is a warning after the save.
    """
    started = time.perf_counter()
    ranks = Ranks(group, timeout)
    later = None if blocking else Ranks(group, timeout, "saves in the background")
    name = "ckpt.save" if blocking else "ckpt.save(blocking=False)"
    with in_flight.mark_errors_seen() as begun, ranks.call(name, later):
        check_order("ckpt.save", url, state)
        options = make_options()
        bound = bound_bytes(host_memory)
        if when_busy == "wait":
            in_flight.saves.wait()
        with open_store(url, storage_options) as store, pause_collection(), ExitStack() as stack:

            def check() -> None:
                turn = None if blocking else stack
                check_word("staging", staging, get_args(When))
                if bound is not None and also is not None:
                    raise ArgumentError(
                        "also= writes from a copy of the whole state, which host_memory= may not "
                        "hold: leave out one of them; `ckpt convert` writes a second output later"
                    )
                check_word("when_busy", when_busy, get_args(WhenBusy))
                in_flight.saves.check_free(when_busy, turn, ranks.is_single_process)
                check_options(ranks, store, options)
                if also is not None and checks_also:
                    also.check(store, ranks.rank == 0)

            seconds = None if timeout is None else float(timeout)
            arguments = {
                "staging": staging,
                "host_memory": bound,
                "when_busy": when_busy,
                "timeout": seconds,
            }
            path = local_path(store.url)
            began = now()
            is_new = path is None or not os.path.lexists(path)  # no rank writes before all agree
            try:
                attempt, leaves = agree_on_attempt(ranks, state, options, check, arguments)
            except RankError as error:
                if error.error == BusyError.__name__:
                    raise BusyError(str(error)) from error
                raise
            attempt = replace(attempt, began=began, is_new=is_new)
            if also is not None and checks_also:
                also.plan(store, attempt.described)
            if later is not None:
                ring = None
                if bound is not None:
                    ring = ranks.run_on_all(
                        "dividing the host memory",
                        lambda: divide(slots(attempt.plan, leaves), state, bound),
                    )
                later.connect()
                handle = SaveHandle(absolute(url), attempt.plan.nbytes, started)
                begun.append(handle)
                target = Folder(handle, lasting(attempt), store.options, progress, also=also)
                ranks.doing("copying the state")
                begin(target, state, leaves, later, staging, ring)
                return handle
            ranks.doing("writing")
            written, failed = result_or_error(lambda: _write(store, attempt, leaves, progress))
            ranks.count(attempt.plan.nbytes)
            finish(store, ranks, attempt, written, failed)
            if also is not None:
                url, fill = absolute(url), partial(_fill, attempt.plan.items, leaves)
                committed = CommittedSave(url, store.options, attempt, fill)
                warning = write_also(also, ranks, committed)
                if warning is not None:
                    warn(warning, stacklevel=3)
            return None


def _fill(
    items: Sequence[WriteItem], leaves: Sequence[Leaf], offset: int, target: memoryview
) -> None:
    """Fills memory with the bytes of items, end to end, from byte `offset` on."""
    at = bisect_right(items, offset, key=attrgetter("offset")) - 1
    while len(target):
        item = items[at]
        size = item.dtype.itemsize
        lo = item.lo + (offset - item.offset) // size
        hi = min(item.hi, lo + len(target) // size)
        for block in blocks(leaves[item.source].local, lo, hi, item.dtype):
            target[: len(block)] = block
            target, offset = target[len(block) :], offset + len(block)
        at += 1


def _write(
    store: Store, attempt: SaveAttempt, leaves: Sequence[Leaf], progress: Progress | None
) -> ShardSummary | None:
    """Writes this rank's shard file; returns None if the rank has nothing to write."""
    items = attempt.plan.items
    if not items:
        return None
    tensors = [outgoing(item, leaves[item.source].local) for item in items]
    # Ranks that share a core do not overlap hashes with writes: they wait for the core alone.
    overlap = workers_for(attempt.mesh.size) > 1 or not isinstance(store, LocalStore)
    return write(attempt.job(store.url, store.options), store, tensors, progress, overlap)


def prepare(
    state: object,
    *,
    host_memory: str | int | None = None,
    group: Group = None,
    timeout: float | None = TIMEOUT_SECONDS,
) -> None:
    """Prepares this process so that its first background save of `state` waits for no new memory.

    Returns once the ranks have a plan, which takes as long as a save's description of the state. A
    thread then allocates the memory for this rank's part, page by page, and starts the process
    that writes. A save that begins earlier waits for the thread.

    All ranks of `group` call this as they call `ckpt.save`, with a state of the same shapes. Most
    optimizers have no state before their first step. From now on this process keeps the memory: as
    much as the rank writes, or `host_memory` if that is less. Without this call the first save
    allocates it, and takes several times as long as a later one.

    Raises:
        StateError: a value cannot be stored; the error names its key path.
        BackgroundError: an earlier background save failed, and no caller has seen its error.
        RankError: another rank failed; the error names the rank and its error.

    >>> import ckpt, torch
    >>> ckpt.prepare({"w": torch.ones(2)})
    """
    ranks = Ranks(group, timeout)
    with ranks.call("ckpt.prepare"), pause_collection(), ExitStack() as stack:
        bound = bound_bytes(host_memory)
        in_flight.saves.wait()

        def describe() -> FlatState:
            in_flight.saves.check_free("wait", stack, ranks.is_single_process)
            return flatten(state, ranks.mesh)

        merged = agree_on_state(ranks, "describing the state", describe)
        stored = choose_layouts(merged.whole.tensors)
        plan = plan_save(spec_of(merged.flat).tensors, stored, ranks.global_rank)
        leaves = list(merged.flat.leaves.values())
        locals_ = (leaves[item.source].local for item in plan.items)
        device = next((local.device for local in locals_ if local.is_cuda), None)
        nbytes = plan.nbytes if bound is None else min(plan.nbytes, bound)
        arena_writer().prepare(nbytes, workers_for(ranks.world_size), device)
