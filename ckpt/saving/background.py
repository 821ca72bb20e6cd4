"""A background save: the copies in the call or after it, the writing, the commit.

One thread of the trainer does the steps after the call, and mostly waits for the process that
writes and for the other ranks. It touches no process group.

The handle that `ckpt.save(..., blocking=False)` returns: the progress and result of the save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from warnings import warn

from ckpt.arguments import Uncopied, workers_for
from ckpt.display import printable, size
from ckpt.errors import CkptError, SecondOutputWarning, StoreError, WaitTimeoutError
from ckpt.opening.in_flight import SaveQueue, saves
from ckpt.saving.agreement import SaveAttempt, finish
from ckpt.saving.staging import OVERLAPPED, Staging, When, slots, waiting
from ckpt.saving.writers import ArenaWriter, CommittedSave, Fill, arena_writer, write_here
from ckpt.state.flatten import Leaf
from ckpt.stores.store import absolute, open_store, place_elsewhere
from ckpt.transfer.write_job import Ring
from formats.native.manifest import STAGED_SECONDS
from formats.native.shard import Progress, ShardSummary
from sharding.agreement.call_events import Clock
from sharding.agreement.ranks import Ranks, result_or_error
from sharding.errors import without_secrets

if TYPE_CHECKING:  # an annex, of which a save gets a value
    from ckpt.converting.second_output import SecondOutput

__all__ = ["SaveHandle", "Saved"]

T = TypeVar("T")

CALL = "a save in the background"
"""The name of the call in events, and in other ranks' errors."""


def write_also(also: SecondOutput, ranks: Ranks, save: CommittedSave) -> SecondOutputWarning | None:
    """Writes a second output. Returns the warning if that fails, on all ranks."""
    _, error = result_or_error(lambda: also.write(ranks, save))
    if error is None:
        return None
    place = without_secrets(str(also.place))
    return SecondOutputWarning(
        f"{without_secrets(save.url)} is complete, and its second output {place} was not "
        f"written: {type(error).__name__}: {error}; `ckpt convert` writes it from the "
        "checkpoint"
    )


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

    @property
    def attempt(self) -> SaveAttempt:
        """The ranks' agreement."""

    @property
    def queue(self) -> SaveQueue:
        """The saves that this one follows."""

    def arena_writer(self) -> ArenaWriter:
        """Returns the arena to stage in, and its writer."""

    def write(
        self, data: memoryview, place: ArenaWriter, ring: Ring | None, fill: Fill
    ) -> ShardSummary:
        """Returns the facts of this rank's file, with the staged bytes `data` in it.

        With a ring, `fill` brings the bytes that pass it.
        """

    def end(
        self,
        ranks: Ranks,
        written: ShardSummary | None,
        error: Exception | None,
        data: memoryview,
    ) -> None:
        """Returns once the checkpoint exists; if a rank has failed, raises on all ranks.

        All ranks call this in one call of `ranks`, each with its file's facts or its error, and
        with the staged bytes.
        """


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a store."""

    handle: SaveHandle
    attempt: SaveAttempt
    options: Mapping[str, Any] = field(repr=False)
    """The options of the store's driver."""
    progress: Progress | None
    queue: SaveQueue = saves
    also: SecondOutput | None = None

    def arena_writer(self) -> ArenaWriter:
        return arena_writer()

    def write(
        self, data: memoryview, place: ArenaWriter, ring: Ring | None, fill: Fill
    ) -> ShardSummary:
        """Writes this rank's shard file, by the writer process if it can reach the store.

        This thread writes the file where the system has no process or descriptor left for that one.
        """
        elsewhere = place_elsewhere(self.handle.url, self.options)
        job = self.attempt.job(*(elsewhere or (self.handle.url, self.options)))
        job = replace(job, ring=ring)
        used = None if ring is None else fill
        writer = None
        if elsewhere is not None:
            with suppress(StoreError):
                writer = place.writer()
        if writer is None:
            return write_here(job, data, place.arena, self.progress, used)
        return writer.write(job, self.progress, used)

    def end(
        self,
        ranks: Ranks,
        written: ShardSummary | None,
        error: Exception | None,
        data: memoryview,
    ) -> None:
        """Commits the checkpoint. Then writes the second output, if there is one."""
        attempt = self.attempt.with_note(STAGED_SECONDS, f"{self.handle.staged_seconds:.3f}")
        with open_store(self.handle.url, self.options) as store:
            finish(store, ranks, attempt, written, error)
        if self.also is not None:
            how = (self.handle.url, self.options, self.attempt, data, self.arena_writer())
            warning = write_also(self.also, ranks, CommittedSave(*how))
            self.handle.note_also("" if warning else str(self.also.place), warning)


def begin(
    target: Target,
    state: object,
    leaves: Sequence[Leaf],
    ranks: Ranks,
    when: When,
    ring: Ring | None = None,
) -> None:
    """Copies the tensors that the call must copy, and starts the rest of the save in a thread.

    `ranks` are those of the continuation, which hear the thread's result. Raises no error: from
    here on errors are the handle's, because the other ranks wait for this rank's report. A `ring`
    divides the memory of a rank's part that is larger.
    """
    handle = target.handle
    staged: list[_Staged] = []
    taken = threading.Lock()
    """The thread takes the save and goes on, or an interrupted call does and ends it."""

    def stage() -> None:
        staged.append(_stage(target, leaves, state, when, ring))
        if not staged[0].staging.is_done:
            handle.staging(staged[0].staging.help)
            staged[0].staging.hold_steps()
        else:
            handle.mark_staged()

    try:
        _, error = result_or_error(stage)
        save = _Save(target, ranks, taken)
        # A daemon: `ckpt.opening.in_flight` waits for it at exit, while it can still finish.
        thread = threading.Thread(
            target=save.run, args=(staged, error), name="ckpt-save", daemon=True
        )
        try:
            target.queue.begin(handle, thread)
            thread.start()
        except RuntimeError:  # no thread can be started, for example because the interpreter ends
            save.run(staged, error)
    except BaseException:  # KeyboardInterrupt, for example
        if taken.acquire(blocking=False):
            _abandon(handle, staged)
        raise


@dataclass(frozen=True, slots=True)
class _Staged:
    """The content of the arena, during and after the copies."""

    arena_writer: ArenaWriter
    staging: Staging
    data: memoryview


def _stage(
    target: Target, leaves: Sequence[Leaf], state: object, when: When, ring: Ring | None
) -> _Staged:
    plan = target.attempt.plan
    place, found = target.arena_writer(), slots(plan, leaves, ring)
    data = place.reserve(plan.nbytes if ring is None else ring.start + ring.nbytes)
    later = waiting(found, state) if when == OVERLAPPED and ring is None else ()
    workers = workers_for(target.attempt.mesh.size)
    return _Staged(place, Staging(found, data, place.arena, later, workers, ring), data)


@dataclass(frozen=True, slots=True)
class _Save:
    """The part of a save that one thread does."""

    _target: Target
    _ranks: Ranks
    _taken: threading.Lock

    def run(self, staged: list[_Staged], error: Exception | None) -> None:
        """Copies, writes, commits; the handle tells of errors."""
        if not self._taken.acquire(blocking=False):
            return  # an interrupt ended the call before this thread ran
        handle = self._target.handle
        if not self._ranks.begin():  # the call was interrupted, and tells the other ranks itself
            _abandon(handle, staged)
            return
        clock = Clock(CALL, self._ranks.rank, self._ranks.world_size)
        place = staged[0].arena_writer if staged else None
        kept = [part.data for part in staged]
        written = None
        if error is None:
            written, error = _attempt(lambda: self._write(staged.pop(), clock))
            clock.end_stage(_name_of(error))
        _let_go(staged)
        handle.mark_staged()
        _, ended = _attempt(lambda: self._end(written, error, clock, kept))
        kept.clear()  # the next save may take other memory
        clock.end(_name_of(ended))
        if place is not None:  # touches new memory: the next save has no page faults
            _attempt(lambda: place.arena.touch(workers_for(self._target.attempt.mesh.size)))
        handle.mark_finished(ended)

    def _write(self, staged: _Staged, clock: Clock) -> ShardSummary | None:
        """Writes this rank's shard file; returns None if the rank has nothing to write."""
        handle, place, staging = self._target.handle, staged.arena_writer, staged.staging
        if staging.ring is None:
            if not staging.is_done:
                clock.doing("copying the state")
            staging.finish()  # first, because the training may wait for the copies
            handle.mark_staged()
        if not self._target.attempt.plan.items:
            return None

        def fill(freed: int) -> int:
            copied = staging.fill(freed)
            if staging.is_done:
                handle.mark_staged()
            return copied

        handle.follow(place.arena.progress)
        clock.doing("writing")
        clock.count(self._target.attempt.plan.nbytes)
        try:
            return self._target.write(staged.data, place, staging.ring, fill)
        finally:
            staging.end()

    def _end(
        self,
        written: ShardSummary | None,
        error: Exception | None,
        clock: Clock,
        kept: Sequence[memoryview],
    ) -> None:
        with self._ranks.call(CALL, clock=clock):
            self._target.end(self._ranks, written, error, *kept or (memoryview(b""),))


def _abandon(handle: SaveHandle, staged: list[_Staged]) -> None:
    """Ends a save that does not go on: no step waits for its copies, no save for its end."""
    _let_go(staged)
    handle.mark_finished(None)


def _let_go(staged: list[_Staged]) -> None:
    """Lets no optimizer step wait for copies that are never written."""
    while staged:
        _attempt(lambda: staged.pop().staging.finish())  # no thread that helps copies on


def _name_of(error: Exception | None) -> str:
    return "" if error is None else type(error).__name__


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """As `result_or_error`, but also catches exceptions that would silently end the thread."""
    try:
        return result_or_error(action)
    except BaseException as ended:
        error = CkptError(f"{type(ended).__name__} during the save in the background: {ended}")
        error.__cause__ = ended
        return None, error


@dataclass(frozen=True, slots=True)
class Saved:
    """One rank's figures of a successful save."""

    url: str
    nbytes: int
    """Bytes of tensors that this rank wrote."""
    staged_seconds: float
    """The time from the call until everything was copied."""
    seconds: float
    """The time from the call until the checkpoint, and its second output, existed."""
    also: str = ""
    """The place of the second output, if it was written."""


class SaveHandle(Uncopied):
    """A background save. Only the thread that called `ckpt.save` uses the public methods."""

    url: str
    """The URL of the checkpoint."""

    def __init__(self, url: str, nbytes: int, started: float) -> None:
        self.url = url
        self._nbytes = nbytes
        self._started = started
        self._staged_seconds = 0.0
        self._staged = threading.Event()
        self._finished = threading.Event()
        self._progress: Callable[[], int] = lambda: 0
        self._help: Callable[[], None] = lambda: None
        self._error: Exception | None = None
        self._saved: Saved | None = None
        self._also = ""
        self._warning: SecondOutputWarning | None = None
        self._is_told = False
        self._lock = threading.Lock()
        self._followers: list[Callable[[Exception | None], None]] = []

    def __repr__(self) -> str:
        return f"<SaveHandle of {printable(without_secrets(self.url))}: {self._state()}>"

    def _repr_html_(self) -> str:
        done, total = self.progress()
        bar = f"<progress value={done} max={max(total, 1)}></progress>"
        return f"{escape(repr(self)[1:-1])} {bar} {size(done)} of {size(total)}"

    def _state(self) -> str:
        if not self.done():
            return "in flight"
        return "failed" if self._error else "done"

    def done(self) -> bool:
        """Returns whether the save is over, successful or not. Never waits, never raises."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Returns once the checkpoint exists, on every rank that waits, and its second output.

        Warns if the second output failed. Raises WaitTimeoutError after `timeout` seconds, while
        the save goes on. If the save has failed, raises its error; RankError if another rank
        failed.
        """
        if not self._finished.wait(timeout):
            done, total = self.progress()
            raise WaitTimeoutError(
                f"{self.url}: the save is not complete after {timeout:g} s; this rank has written "
                f"{done:,} of {total:,} bytes; wait again"
            )
        error = self.untold() or self._error
        if error is not None:
            raise error
        self.warn_untold(stacklevel=3)

    def result(self, timeout: float | None = None) -> Saved:
        """Waits as `wait` does, and returns the figures of the save."""
        self.wait(timeout)
        assert self._saved is not None
        return self._saved

    def wait_staged(self, timeout: float | None = None) -> None:
        """Returns once everything is copied, so that the state may change in any way.

        Optimizers in the state wait before their steps without this call. Raises WaitTimeoutError
        after `timeout` seconds. Only `wait` raises an error of the save.
        """
        if timeout is None:
            self._help()
        if not self._staged.wait(timeout):
            raise WaitTimeoutError(
                f"{self.url}: the state is not copied after {timeout:g} s; wait again"
            )

    def progress(self) -> tuple[int, int]:
        """Returns the bytes of tensors that this rank has written, and the bytes of all of them."""
        return self._progress(), self._nbytes

    @property
    def staged_seconds(self) -> float:
        """The time from the call until everything was copied; 0 until then."""
        return self._staged_seconds

    def finished(self, timeout: float | None = None) -> bool:
        """Whether the save is over within so many seconds; its error stays unseen."""
        return self._finished.wait(timeout)

    def untold(self) -> Exception | None:
        """Returns the error of the save, once."""
        was_told, self._is_told = self._is_told, True
        return None if was_told else self._error

    def warn_untold(self, stacklevel: int = 2) -> None:
        """Gives the warning about the second output, once."""
        warning, self._warning = self._warning, None
        if warning is not None:
            warn(warning, stacklevel=stacklevel)

    def when_finished(self, follow: Callable[[Exception | None], None]) -> None:
        """Calls `follow` with the error, or None, once the save is over; the error stays unseen.

        The save's thread calls `follow`; if the save is over, this thread calls it at once.
        """
        with self._lock:
            if not self._finished.is_set():
                self._followers.append(follow)
                return
        follow(self._error)

    # The methods below are for the save's own thread.

    def staging(self, help_copying: Callable[[], None]) -> None:
        """From now on a thread that waits for the copies helps by `help_copying`."""
        self._help = help_copying

    def follow(self, progress: Callable[[], int]) -> None:
        """From now on `progress` returns the bytes that are written."""
        self._progress = progress

    def mark_staged(self) -> None:
        """Notes that everything is copied, or that the copies have failed."""
        if self._staged.is_set():
            return
        self._help = lambda: None
        self._staged_seconds = time.perf_counter() - self._started
        self._staged.set()

    def note_also(self, place: str, warning: SecondOutputWarning | None) -> None:
        self._also, self._warning = place, warning

    def mark_finished(self, error: Exception | None) -> None:
        """Notes that the save is over, with its error if it failed."""
        self.mark_staged()
        written = 0 if error else self._nbytes
        self._progress = lambda: written
        seconds = time.perf_counter() - self._started
        self._error = error
        figures = (self.url, written, self._staged_seconds, seconds, self._also)
        self._saved = None if error else Saved(*figures)
        with self._lock:
            self._finished.set()
            followers, self._followers = self._followers, []
        for follow in followers:
            follow(error)
