"""A background save: the copies in the call or after it, the writing, the commit.

One thread of the trainer does the steps after the call, and mostly waits for the process that
writes and for the other ranks. It touches no process group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from ckpt.background.save_handle import SaveHandle
from ckpt.background.slots import slots
from ckpt.background.staging import OVERLAPPED, Staging, When
from ckpt.background.step_hooks import held_storages
from ckpt.background.workplace import Workplace, workplace
from ckpt.background.writers import write_here
from ckpt.errors import CkptError, StoreError
from ckpt.in_flight import Lane, saves
from ckpt.save_protocol import SaveAttempt, finish
from ckpt.state.flatten import Leaf
from ckpt.stores.store import absolute, open_store, place_elsewhere
from ckpt.transfer.read import workers_for
from formats.native.manifest import STAGED_SECONDS
from formats.native.shard import Progress, ShardSummary
from sharding.agreement.call_events import Clock
from sharding.agreement.ranks import Ranks, result_or_error

T = TypeVar("T")

CALL = "a save in the background"
"""The name of the call in events, and in other ranks' errors."""


def lasting(attempt: SaveAttempt) -> SaveAttempt:
    """Returns an attempt that does not depend on the caller's arguments and current folder."""
    options, base = attempt.options, attempt.options.base
    base = None if base is None else absolute(base)
    kept = replace(options, metadata=dict(options.metadata), base=base)
    return replace(attempt, options=kept)


class Target(Protocol):
    """The place that a background save goes to."""

    @property
    def handle(self) -> SaveHandle:
        """The save's handle."""
        ...

    @property
    def attempt(self) -> SaveAttempt:
        """The ranks' agreement."""
        ...

    @property
    def lane(self) -> Lane:
        """The saves that this one follows."""
        ...

    def workplace(self) -> Workplace:
        """Returns the arena to stage in, and its writer."""
        ...

    def write(self, data: memoryview, place: Workplace) -> ShardSummary:
        """Returns the facts of this rank's file, with the staged bytes `data` in it."""
        ...

    def end(self, ranks: Ranks, written: ShardSummary | None, error: Exception | None) -> None:
        """Returns once the checkpoint exists; if a rank has failed, raises on all ranks.

        All ranks call this in one call of `ranks`, each with its file's facts or its error.
        """
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a store."""

    handle: SaveHandle
    attempt: SaveAttempt
    options: Mapping[str, Any] = field(repr=False)
    """The options of the store's driver."""
    progress: Progress | None
    lane: Lane = saves

    def workplace(self) -> Workplace:
        """Returns the workplace of all saves to stores."""
        return workplace()

    def write(self, data: memoryview, place: Workplace) -> ShardSummary:
        """Writes this rank's shard file, by the writer process if it can reach the store.

        This thread writes the file where the system has no process or descriptor left for that one.
        """
        elsewhere = place_elsewhere(self.handle.url, self.options)
        job = self.attempt.job(*(elsewhere or (self.handle.url, self.options)))
        writer = None
        if elsewhere is not None:
            with suppress(StoreError):
                writer = place.writer()
        if writer is None:
            return write_here(job, data, place.arena, self.progress)
        return writer.write(job, self.progress)

    def end(self, ranks: Ranks, written: ShardSummary | None, error: Exception | None) -> None:
        """Commits the checkpoint."""
        attempt = self.attempt.noted(STAGED_SECONDS, f"{self.handle.staged_seconds:.3f}")
        with open_store(self.handle.url, self.options) as store:
            finish(store, ranks, attempt, written, error)


def begin(
    target: Target,
    state: object,
    leaves: Sequence[Leaf],
    ranks: Ranks,
    when: When,
    in_thread: bool = True,
) -> None:
    """Copies the tensors that the call must copy, and starts the rest of the save in a thread.

    Without `in_thread` the call does the rest too.

    `ranks` are those of the continuation, which hear the thread's result. Raises no error: from
    here on errors are the handle's, because the other ranks wait for this rank's report.
    """
    handle = target.handle
    staged: list[_Staged] = []
    to_do = [None]
    """The token of the save: the thread takes it and goes on, or an interrupted call does and ends
    the save."""

    def stage() -> None:
        staged.append(_stage(target, leaves, state, when))
        if not staged[0].staging.is_done:
            handle.staging(staged[0].staging.help)
            staged[0].staging.hold_steps()
        else:
            handle.mark_staged()

    try:
        _, error = result_or_error(stage)
        save = _Save(target, ranks, to_do)
        # A daemon, because `ckpt.in_flight` waits for it at exit, while it can still finish.
        thread = threading.Thread(
            target=save.run, args=(staged, error), name="ckpt-save", daemon=True
        )
        try:
            target.lane.begin(handle, thread)
            if in_thread:
                thread.start()
        except RuntimeError:  # no thread can be started, for example because the interpreter ends
            in_thread = False
        if not in_thread:
            save.run(staged, error)
    except BaseException:  # KeyboardInterrupt, for example
        with suppress(IndexError):
            to_do.pop()
            _abandon(handle, staged)
        raise


@dataclass(frozen=True, slots=True)
class _Staged:
    """The content of the arena, during and after the copies."""

    workplace: Workplace
    staging: Staging
    data: memoryview


def _stage(target: Target, leaves: Sequence[Leaf], state: object, when: When) -> _Staged:
    plan = target.attempt.plan
    place, found = target.workplace(), slots(plan, leaves)
    data = place.reserve(plan.nbytes)
    held = held_storages(state) if when == OVERLAPPED else set()
    workers = workers_for(target.attempt.mesh.size)
    return _Staged(place, Staging(found, data, place.arena, held, workers), data)


@dataclass(frozen=True, slots=True)
class _Save:
    """The part of a save that one thread does."""

    _target: Target
    _ranks: Ranks
    _to_do: list[None]

    def run(self, staged: list[_Staged], error: Exception | None) -> None:
        """Copies, writes, commits; the handle tells of errors."""
        try:
            self._to_do.pop()
        except IndexError:  # an interrupt ended the call before this thread ran
            return
        handle = self._target.handle
        if not self._ranks.begin():  # the call was interrupted, and tells the other ranks itself
            _abandon(handle, staged)
            return
        clock = Clock(CALL, self._ranks.rank, self._ranks.world_size)
        place = staged[0].workplace if staged else None
        written: list[ShardSummary | None] = []
        if error is None:
            written, error = _attempt(lambda: self._write(staged.pop(), clock))
            clock.end_stage(_name_of(error))
        _let_go(staged)
        handle.mark_staged()
        _, ended = _attempt(lambda: self._end(written[0] if written else None, error, clock))
        clock.end(_name_of(ended))
        if place is not None:
            _attempt(lambda: self._touch(place))
        handle.mark_finished(ended)

    def _write(self, staged: _Staged, clock: Clock) -> ShardSummary | None:
        """Writes this rank's shard file; returns None if the rank has nothing to write."""
        handle, place = self._target.handle, staged.workplace
        if not staged.staging.is_done:
            clock.doing("copying the state")
        staged.staging.finish()  # first, because the training may wait for the copies
        handle.mark_staged()
        if not self._target.attempt.plan.items:
            return None
        handle.follow(place.arena.progress)
        clock.doing("writing")
        clock.count(self._target.attempt.plan.nbytes)
        return self._target.write(staged.data, place)

    def _touch(self, place: Workplace) -> None:
        """Touches the arena if this save filled new memory: the next save has no page faults."""
        place.arena.touch(workers_for(self._target.attempt.mesh.size))

    def _end(self, written: ShardSummary | None, error: Exception | None, clock: Clock) -> None:
        with self._ranks.call(CALL, clock=clock):
            self._target.end(self._ranks, written, error)


def _abandon(handle: SaveHandle, staged: list[_Staged]) -> None:
    """Ends a save that does not go on: no step waits for its copies, no save for its end."""
    _let_go(staged)
    handle.mark_finished(None)


def _let_go(staged: list[_Staged]) -> None:
    """Lets no optimizer step wait for copies that are never written."""
    while staged:
        _attempt(lambda: staged.pop().staging.finish())


def _name_of(error: Exception | None) -> str:
    return "" if error is None else type(error).__name__


def _attempt(action: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """As `result_or_error`, but also catches exceptions that would silently end the thread."""
    try:
        return result_or_error(action)
    except BaseException as ended:
        error = CkptError(f"{type(ended).__name__} during the save in the background: {ended}")
        error.__cause__ = ended
        return [], error
