"""A save after the call has returned: the rest of the copies, the writing, the commit.

One thread of the trainer does the copies and then mostly waits: for the process that writes, for
the other ranks. It touches no process group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ckpt import in_flight
from ckpt.background.save_handle import SaveHandle
from ckpt.background.staging import Staging, optimizers, slots
from ckpt.background.workplace import Workplace, workplace
from ckpt.errors import CkptError
from ckpt.ranks import Ranks, attempt
from ckpt.states.sections import summary
from ckpt.stores.store import absolute, open_store, place_elsewhere
from ckpt.writing.save_steps import Plan, finish
from ckpt.writing.write_job import WriteJob
from ckpt.writing.writers import write_here
from formats.native.shard import Progress, ShardSummary

T = TypeVar("T")

CALL = "a save in the background"
"""What other ranks are told that this one is in."""


def begin(
    handle: SaveHandle,
    state: object,
    plan: Plan,
    ranks: Ranks,
    progress: Progress | None,
    options: Mapping[str, Any],
) -> None:
    """Let a save go on by itself, once what must be copied at once has been.

    `ranks` are those that this call goes on with: a thread tells them how it went. Raises no error:
    from here on errors are the handle's, because the other ranks count on this one's report.
    """
    staged: list[_Staged] = []
    thread: threading.Thread | None = None

    def stage() -> None:
        staged.append(_stage(plan, state))
        handle.staging(staged[0].staging.help)
        staged[0].staging.hold_steps()

    try:
        _, error = attempt(stage)
        save = _Save(handle, _lasting(plan), ranks, progress, options)
        # A daemon, because `in_flight` waits for it at exit, while it still can finish.
        thread = threading.Thread(
            target=save.run, args=(staged, error), name="ckpt-save", daemon=True
        )
        try:
            in_flight.begin(handle, thread)
            thread.start()
        except RuntimeError:  # no thread can be started, as when the interpreter ends
            save.run(staged, error)
    except BaseException:  # as KeyboardInterrupt is
        if thread is None or thread.ident is None:  # else it does so itself
            _abandon(handle, staged)
        raise


def _lasting(plan: Plan) -> Plan:
    """What is left of a plan for later, whatever the caller does with its arguments and folder."""
    settings, base = plan.settings, plan.settings.base
    base = None if base is None else absolute(base)
    kept = replace(settings, metadata=dict(settings.metadata), base=base)
    return replace(plan, parts=(), settings=kept)


@dataclass(frozen=True, slots=True)
class _Staged:
    """What the arena is being filled with."""

    workplace: Workplace
    staging: Staging
    data: memoryview
    tensors: list[tuple[str, tuple[int, ...], str]]


def _stage(plan: Plan, state: object) -> _Staged:
    place, found = workplace(), slots(plan.parts)
    data = place.arena.reserve(found[-1].hi if found else 0)
    tensors = [(slot.part.name, slot.part.shape, slot.part.dtype.name) for slot in found]
    return _Staged(
        place, Staging(found, data, list(optimizers(state)), place.arena.touched), data, tensors
    )


@dataclass(frozen=True, slots=True)
class _Save:
    """The part of a save that one thread does."""

    _handle: SaveHandle
    _plan: Plan
    _ranks: Ranks
    _progress: Progress | None
    _options: Mapping[str, Any] = field(repr=False)

    def run(self, staged: list[_Staged], error: Exception | None) -> None:
        """Copy, write, commit; what goes wrong is the handle's to tell."""
        if not self._ranks.begin():  # the call was interrupted, and says so itself
            _abandon(self._handle, staged)
            return
        written: list[ShardSummary | None] = []
        if error is None:
            written, error = _attempt(lambda: self._write(staged.pop()))
        _let_go(staged)
        self._handle.mark_staged()
        _, ended = _attempt(lambda: self._end(written[0] if written else None, error))
        self._handle.mark_finished(ended)

    def _write(self, staged: _Staged) -> ShardSummary | None:
        """This rank's shard file; None when there is nothing for it to write."""
        url, place = self._handle.url, staged.workplace
        staged.staging.finish()  # before all else: training may wait for it
        self._handle.mark_staged()
        if not staged.tensors:
            return None
        elsewhere = place_elsewhere(url, self._options)
        self._handle.follow(place.arena.progress)
        job = self._job(*(elsewhere or (url, self._options)), staged.tensors)
        if elsewhere is None:
            return write_here(job, staged.data, place.arena, self._progress)
        return place.writer().write(job, self._progress)

    def _job(
        self,
        url: str,
        options: Mapping[str, Any],
        tensors: Sequence[tuple[str, tuple[int, ...], str]],
    ) -> WriteJob:
        plan, base = self._plan, self._plan.settings.base
        job = WriteJob(url, plan.file_name, plan.settings.compress, tensors, options=options)
        if base is None:
            return job
        layouts = summary(plan.described).decode()
        return replace(job, base=base, rank=plan.mesh.rank((plan.rank,)), layouts=layouts)

    def _end(self, written: ShardSummary | None, error: Exception | None) -> None:
        """The checkpoint exists, or this raises what stands against it, as on all ranks."""
        with (
            self._ranks.call(CALL),
            open_store(self._handle.url, self._options) as store,
        ):
            finish(store, self._ranks, self._plan, written, error)


def _abandon(handle: SaveHandle, staged: list[_Staged]) -> None:
    """Let nobody wait for what does not go on: no step for its copies, no save for its end."""
    _let_go(staged)
    handle.mark_finished(None)


def _let_go(staged: list[_Staged]) -> None:
    """Let no step wait for copies that nobody will write."""
    while staged:
        _attempt(lambda: staged.pop().staging.finish())


def _attempt(action: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """As `attempt`; what would only end a thread is an error too: somebody waits for it."""
    try:
        return attempt(action)
    except BaseException as ended:
        error = CkptError(f"{type(ended).__name__} while it was saved in the background: {ended}")
        error.__cause__ = ended
        return [], error
