"""A background save: the copies in the call or after it, the writing, the commit.

One thread of the trainer does the steps after the call, and mostly waits for the process that
writes and for the other ranks. It touches no process group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ckpt import in_flight
from ckpt.background.save_handle import SaveHandle
from ckpt.background.slots import slots
from ckpt.background.staging import OVERLAPPED, Staging, When
from ckpt.background.step_hooks import held_storages
from ckpt.background.workplace import Workplace, workplace
from ckpt.background.writers import write_here
from ckpt.errors import CkptError
from ckpt.save_protocol import SaveAttempt, finish
from ckpt.state.flatten import Leaf
from ckpt.stores.store import absolute, open_store, place_elsewhere
from ckpt.transfer.read import workers_for
from formats.native.shard import Progress, ShardSummary
from sharding.agreement.ranks import Ranks, result_or_error

T = TypeVar("T")

CALL = "a save in the background"
"""The name of the call in other ranks' errors."""


def begin(
    handle: SaveHandle,
    state: object,
    attempt: SaveAttempt,
    leaves: Sequence[Leaf],
    ranks: Ranks,
    progress: Progress | None,
    options: Mapping[str, Any],
    when: When,
) -> None:
    """Copies the tensors that the call must copy, and starts the rest of the save in a thread.

    `ranks` are those of the continuation, which hear the thread's result. Raises no error: from
    here on errors are the handle's, because the other ranks wait for this rank's report.
    """
    staged: list[_Staged] = []
    to_do = [None]
    """The token of the save: the thread takes it and goes on, or an interrupted call does and ends
    the save."""

    def stage() -> None:
        staged.append(_stage(attempt, leaves, state, when))
        if not staged[0].staging.is_done:
            handle.staging(staged[0].staging.help)
            staged[0].staging.hold_steps()
        else:
            handle.mark_staged()

    try:
        _, error = result_or_error(stage)
        save = _Save(handle, _lasting(attempt), ranks, progress, options, to_do)
        # A daemon, because `in_flight` waits for it at exit, while it can still finish.
        thread = threading.Thread(
            target=save.run, args=(staged, error), name="ckpt-save", daemon=True
        )
        try:
            in_flight.begin(handle, thread)
            thread.start()
        except RuntimeError:  # no thread can be started, for example because the interpreter ends
            save.run(staged, error)
    except BaseException:  # KeyboardInterrupt, for example
        with suppress(IndexError):
            to_do.pop()
            _abandon(handle, staged)
        raise


def _lasting(attempt: SaveAttempt) -> SaveAttempt:
    """Returns an attempt that does not depend on the caller's arguments and current folder."""
    options, base = attempt.options, attempt.options.base
    base = None if base is None else absolute(base)
    kept = replace(options, metadata=dict(options.metadata), base=base)
    return replace(attempt, options=kept)


@dataclass(frozen=True, slots=True)
class _Staged:
    """The content of the arena, during and after the copies."""

    workplace: Workplace
    staging: Staging
    data: memoryview


def _stage(attempt: SaveAttempt, leaves: Sequence[Leaf], state: object, when: When) -> _Staged:
    place, found = workplace(), slots(attempt.plan, leaves)
    data = place.reserve(attempt.plan.nbytes)
    held = held_storages(state) if when == OVERLAPPED else set()
    workers = workers_for(attempt.mesh.size)
    return _Staged(place, Staging(found, data, place.arena, held, workers), data)


@dataclass(frozen=True, slots=True)
class _Save:
    """The part of a save that one thread does."""

    _handle: SaveHandle
    _attempt: SaveAttempt
    _ranks: Ranks
    _progress: Progress | None
    _options: Mapping[str, Any] = field(repr=False)
    _to_do: list[None]

    def run(self, staged: list[_Staged], error: Exception | None) -> None:
        """Copies, writes, commits; the handle tells of errors."""
        try:
            self._to_do.pop()
        except IndexError:  # an interrupt ended the call before this thread ran
            return
        if not self._ranks.begin():  # the call was interrupted, and tells the other ranks itself
            _abandon(self._handle, staged)
            return
        written: list[ShardSummary | None] = []
        if error is None:
            written, error = _attempt(lambda: self._write(staged.pop()))
        _let_go(staged)
        self._handle.mark_staged()
        _, ended = _attempt(lambda: self._end(written[0] if written else None, error))
        _attempt(self._touch)
        self._handle.mark_finished(ended)

    def _write(self, staged: _Staged) -> ShardSummary | None:
        """Writes this rank's shard file; returns None if the rank has nothing to write."""
        url, place = self._handle.url, staged.workplace
        staged.staging.finish()  # first, because the training may wait for the copies
        self._handle.mark_staged()
        if not self._attempt.plan.items:
            return None
        elsewhere = place_elsewhere(url, self._options)
        self._handle.follow(place.arena.progress)
        job = self._attempt.job(*(elsewhere or (url, self._options)))
        if elsewhere is None:
            return write_here(job, staged.data, place.arena, self._progress)
        return place.writer().write(job, self._progress)

    def _touch(self) -> None:
        """Touches the arena if this save filled new memory: the next save has no page faults."""
        workplace().arena.touch(workers_for(self._attempt.mesh.size))

    def _end(self, written: ShardSummary | None, error: Exception | None) -> None:
        """Returns once the checkpoint exists; if a rank has failed, raises on all ranks."""
        with (
            self._ranks.call(CALL),
            open_store(self._handle.url, self._options) as store,
        ):
            finish(store, self._ranks, self._attempt, written, error)


def _abandon(handle: SaveHandle, staged: list[_Staged]) -> None:
    """Ends a save that does not go on: no step waits for its copies, no save for its end."""
    _let_go(staged)
    handle.mark_finished(None)


def _let_go(staged: list[_Staged]) -> None:
    """Lets no optimizer step wait for copies that are never written."""
    while staged:
        _attempt(lambda: staged.pop().staging.finish())


def _attempt(action: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """As `result_or_error`, but also catches exceptions that would silently end the thread."""
    try:
        return result_or_error(action)
    except BaseException as ended:
        error = CkptError(f"{type(ended).__name__} during the save in the background: {ended}")
        error.__cause__ = ended
        return [], error
