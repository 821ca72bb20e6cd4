"""The saves of a run, one at a time, to its folder and its hosts' folders, and when one is due.

Rules:

1. A save in the background ends in `settle`, which all ranks call: before the next save, once the
   ranks know that none of them saves any more, and at the end.
2. The first rank of a folder removes checkpoints, in a thread of its own, after a newer one was
   committed. It removes no checkpoint from which another borrows, and none once another job owns
   the run.
3. A save that fails is counted, and gives a warning; the next step saves again. Errors for wrong
   arguments and for states that cannot be stored are raised: another try would not help.
4. Other ranks learn of a rank's clock, its signals and the end of its last save only in an
   exchange. Exchanges take place at steps that all ranks know beforehand, about once in
   `EXCHANGE_SECONDS`, so that the steps between them cost nothing.
5. A signal makes the step of its exchange due, and the step after it asks whether the loop ends.

[Note: signals]
A signal announces the end of a job, and the run reacts to it at a step. A handler only notes the
signal: Python runs the handler between two instructions of the main thread, where no rank may
communicate. Rules:

1. The previous handler is called as well, unless it is Python's or the system's own, which would
   end the process before the state is saved.
2. `end` lets Python's or the system's own handler have the signal after all: a loop that never asks
   about the signal ends by it, once its step is saved.
3. The same signal again ends the process at once. A scheduler and torchrun may each send one to the
   ranks for one event, so signals within `SAME_SECONDS` are the same.
4. A forked child has the handlers of before: a worker has no step at which it could react, and its
   parent may wait for its end.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any
from warnings import warn

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.errors import BackgroundError, NotOwnerError, SaveFailedWarning
from ckpt.loading.newest import BEGAN, ORDER
from ckpt.run.exchange import RunRanks
from ckpt.run.owner import Ownership
from ckpt.run.policy import Failures, Keep, check_seconds
from ckpt.run.steps import METRICS, PROVENANCE, STEP, RunCounter, Tidying
from ckpt.run.tiers import HOSTS, LocalTier
from ckpt.saving.agreement import SaveOptions, StoredDtypes
from ckpt.saving.background import SaveHandle
from ckpt.saving.save import prepare, save_with
from ckpt.saving.staging import When, optimizers, runs_hooks
from ckpt.stores.store import Options, local_path, split_url
from ckpt.transfer.facts import Beside, find_known, folder_name
from ckpt.transfer.replica_hashes import Replicas
from ckpt.transfer.write_job import Compress
from formats.native.manifest import MANIFEST
from sharding.errors import ArgumentError, ArgumentTypeError, MisuseError

if TYPE_CHECKING:
    from ckpt.converting.second_output import SecondOutput
    from sharding.agreement.ranks import Group


_log = logging.getLogger("ckpt.run")


@dataclass(frozen=True, slots=True)
class SaveArguments:
    """The arguments of a `Checkpointer` for all of its saves. Raises ArgumentError."""

    blocking: bool
    staging: When
    host_memory: str | int | None
    compress: Compress
    replicas: Replicas
    metadata: Mapping[str, str]
    deadline: float | None
    group: Group
    storage_options: Options
    timeout: float

    def __post_init__(self) -> None:
        check_metadata(self.metadata)
        if self.deadline is not None:
            check_seconds("deadline", self.deadline)


def check_metadata(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Returns a user's metadata. Raises ArgumentError if they have a key of the run's own."""
    if not isinstance(metadata, Mapping):
        raise ArgumentTypeError(f"metadata is {metadata!r:.80}; give a dict of texts")
    own = {STEP, METRICS, PROVENANCE, BEGAN, ORDER, HOSTS} & metadata.keys()
    if own:
        raise ArgumentError(
            f"metadata has the key {min(own)!r}, which the run itself writes; give another key"
        )
    return metadata


class LastGiven:
    """The state that a loop gave to its last call of `save`, for a save after an exception.

    Weights and optimizers are those of the step until an optimizer begins the next step.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.state: object = None
        self.metrics: Mapping[str, object] | None = None
        self.metadata: Mapping[str, str] | None = None
        self.dtype: StoredDtypes = None
        self._has_stepped = False
        self._hook = register_optimizer_step_pre_hook(self._step_begins)

    def note(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, object] | None,
        metadata: Mapping[str, str] | None,
        dtype: StoredDtypes,
    ) -> None:
        """Takes the arguments of a call of `save`. A step that saves nothing pays for this."""
        self.step, self.state, self.metrics = step, state, metrics
        self.metadata, self.dtype = metadata, dtype
        self._has_stepped = False

    def forget(self) -> None:
        self.step = self.state = self.metrics = self.metadata = None

    @property
    def is_whole(self) -> bool:
        """Whether no optimizer has begun a step, as far as their hooks tell."""
        return not self._has_stepped and all(map(runs_hooks, optimizers(self.state)))

    def close(self) -> None:
        """Watches no optimizer any more."""
        self._hook.remove()
        self.forget()

    def _step_begins(self, *_: object) -> None:
        self._has_stepped = True


class RunSaves:
    """The saves of one rank. `keep` is the policy of the run's folder."""

    def __init__(
        self, arguments: SaveArguments, ranks: RunRanks, keep: Keep, failures: Failures
    ) -> None:
        self._arguments, self._ranks, self._keep, self._failures = arguments, ranks, keep, failures
        self.owner = Ownership(ranks.url, ranks.url, arguments.storage_options)
        """The claim on the folder of the run."""
        self._local_owner: Ownership | None = None
        """The claim on the local folder of this host."""
        self._lost: NotOwnerError | None = None
        """The error that told that another job owns the run."""
        self._handle: SaveHandle | None = None
        self._saved: tuple[int, LocalTier | None] = (0, None)
        """The step and the tier of the last save; None for the folder of the run."""
        self.tidying = Tidying()
        self.last_step: int | None = None
        """The step of the last save that began, or of the restored checkpoint."""
        self.is_retrying = False
        """Whether a save to the folder of the run has failed, and none has begun since."""

    @property
    def is_under_way(self) -> bool:
        """Whether the last save has not ended on this rank."""
        return self._handle is not None and not self._handle.done()

    @property
    def is_in_run_folder(self) -> bool:
        """Whether the last save was to the folder of the run."""
        return self._saved[1] is None

    def has_begun(self, step: int, force: bool) -> bool:
        """Whether the last save was that of this step; with `force` another is refused.

        Raises ArgumentError for a step that does not come after the last.
        """
        last = self.last_step
        if last is None or step > last:
            return False
        if step == last and not force and not self.is_retrying:
            return True
        raise ArgumentError(
            f"step {step} comes after step {last}: each save needs a higher step than the last; to "
            "go back, call restore(state, step=...)"
        )

    def own(self, step: int, tier: LocalTier | None, counter: RunCounter) -> bool:
        """Takes the run at the first save; returns False if the store fails. All ranks call this.

        Raises NotOwnerError if a save has told that another job owns the run.
        """
        if self._lost is not None:
            raise NotOwnerError(str(self._lost)) from self._lost
        if not counter.is_taken:
            self._saved = (step, tier)
            try:
                self.owner.epoch = self._ranks.take(self.owner, counter.epoch)
            except Exception as error:
                self._count_failure(error)
                return False
            counter.take(self.owner.epoch)
        return True

    def look(self, tier: LocalTier | None) -> Callable[..., Beside] | None:
        """Returns the look for other owners of a folder, on the rank that commits to it.

        Its argument is the most age of the listing, in seconds.
        """
        if tier is None:
            owner = self.owner
            return (lambda s=0.0: owner.look(None, s)) if self._ranks.is_first else None
        if self._ranks.global_rank != min(tier.host):
            return None
        if self._local_owner is None:
            self._local_owner = Ownership(tier.options.folder, tier.run, None)
        owner, name = self._local_owner, f"{folder_name(self._saved[0])}/"
        has_begun: list[bool] = []

        def look(seconds: float = 0.0) -> Beside:
            if not owner.epoch:
                owner.claim(self.owner.epoch)
                tier.remove_left_overs()
            beside = owner.look(None, seconds)
            if name in beside.names and not has_begun:
                tier.steps()  # raises for a step of another program
            has_begun.append(True)
            return beside

        return look

    def prepare(self, state: object) -> None:
        """Lets a thread allocate the memory of the first save, while training goes on.

        All ranks call this. A state that cannot be stored is an error of the save.
        """
        how = self._arguments
        try:
            prepare(state, host_memory=how.host_memory, group=how.group, timeout=how.timeout)
        except BackgroundError as error:  # of another save, whose caller has not seen it
            warn(str(error), SaveFailedWarning, stacklevel=3)
        except Exception as error:
            _log.info("nothing is prepared for the first save: %s", error)

    def begin(
        self,
        step: int,
        state: object,
        metadata: Mapping[str, str],
        tier: LocalTier | None,
        is_last: bool,
        dtype: StoredDtypes,
        also: SecondOutput | None,
    ) -> bool:
        """Begins a save to the folder of the run, or of this host; returns False if it fails.

        The call waits for the last save, after a signal or an exception, whose ranks wait for each
        other until its deadline.
        """
        how = self._arguments
        seconds = how.timeout
        if is_last and how.deadline is not None:
            seconds = min(seconds, how.deadline)
        options = SaveOptions(
            overwrite=True,
            compress=how.compress if tier is None else False,
            metadata=metadata if tier is None else {**metadata, **tier.metadata},
            replicas=how.replicas,
            host=() if tier is None else tier.host,
            look=self.look(tier),
            mark=None if tier is None else tier.mark,
            counts=tier is None and self._keep.last_finite is not None,
            dtype=dtype,
        )
        self._saved = (step, tier)
        waits = how.blocking or is_last
        try:
            self._handle = save_with(
                self._place(),
                state,
                lambda: options,
                group=how.group,
                progress=None,
                blocking=waits and not options.counts,  # only staged memory is counted
                staging=how.staging,
                host_memory=how.host_memory,
                when_busy="wait",
                storage_options=how.storage_options if tier is None else None,
                timeout=seconds,
                also=also,
                checks_also=False,
            )
        except Exception as error:
            self._count_failure(error)
            return False
        if self._handle is None:
            self._tidy()
        elif waits:
            failures = self._failures.count
            self.settle()
            return self._failures.count == failures
        return True

    def settle(self) -> None:
        """Waits for the background save, and handles its result. All ranks call this."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.wait()
        except Exception as error:
            self._count_failure(error)
            return
        self._tidy()

    def _tidy(self) -> None:
        """Begins the removal of steps that no rule keeps, after a save."""
        _, tier = self._saved
        keep, url, options = self._keep, self._ranks.url, self._arguments.storage_options
        if tier is not None:
            keep, url, options = tier.keep, tier.options.folder, None
        look = self.look(tier)
        if look is None:
            return
        if tier is not None:
            self.tidying.begin(url, keep, options, lambda names: (look(), tier.steps()))
        elif not keep.keeps_all or local_path(url) is None:  # a bucket has an index
            self.tidying.wait()
            folder, name = split_url(self._place())
            self.owner.add(f"{name}/{MANIFEST}", find_known(folder, name))
            self.tidying.begin(url, keep, options, self.owner.look, self.owner)

    def _place(self) -> str:
        """Returns the folder of the last save."""
        step, tier = self._saved
        return self._ranks.place(step) if tier is None else tier.place(step)

    def _count_failure(self, error: Exception) -> None:
        """Counts a failure of the last save and warns of it, or raises its error."""
        step, tier = self._saved
        if isinstance(error, NotOwnerError) or getattr(error, "error", "") == "NotOwnerError":
            self._lost = NotOwnerError(str(error))
        again = "the next step" if tier is None else "the next local step"
        self.last_step = step - 1  # also where the error is raised: the step may be saved again
        self._failures.add(error, self._place(), again, self._ranks.is_first)
        self.is_retrying = self.is_retrying or tier is None


EXCHANGE_SECONDS = 1.0
"""The approximate time between two exchanges: a signal is noticed that late."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rules by which a checkpoint is due. Raises ArgumentError for numbers not above 0."""

    every_steps: int | None = None
    """Due at each step that is a multiple of this."""
    every_seconds: float | None = None
    """Due once so many seconds have passed since the last save began, by the clock of rank 0."""
    continuously: bool = False
    """Due as soon as the last checkpoint is durable."""
    also_every: int | None = None
    """Due, with a second output, at each step that is a multiple of this."""

    def __post_init__(self) -> None:
        numbers, seconds = (self.every_steps, self.also_every), self.every_seconds
        for name, steps in zip(("every_steps", "also_every"), numbers, strict=True):
            if steps is not None and (type(steps) is not int or steps < 1):
                raise ArgumentError(f"{name}={steps!r}: give a whole number of at least 1")
        if seconds is not None:
            check_seconds("every_seconds", seconds)

    def by_step(self, step: int) -> bool:
        """Returns whether the number of the step alone makes a checkpoint due."""
        every = self.every_steps
        return (every is not None and step % every == 0) or self.by_output(step)

    def by_output(self, step: int) -> bool:
        """Returns whether a second output of its own period is due."""
        return self.also_every is not None and step % self.also_every == 0

    def by_clock(self, seconds_since_save: float, is_saving: bool) -> bool:
        """Returns whether the time since the last save makes a save due. Rank 0 calls this."""
        if self.continuously and not is_saving:
            return True
        return self.every_seconds is not None and seconds_since_save >= self.every_seconds


def next_exchange(step: int, last: int, seconds: float) -> int:
    """Returns the step of the next exchange, after those at `last` and, `seconds` later, at `step`.

    The distance at most doubles from one exchange to the next, so that a run that becomes slower
    waits at most twice as long as it should.

    >>> next_exchange(step=10, last=9, seconds=0.01), next_exchange(step=10, last=0, seconds=30.0)
    (12, 11)
    """
    steps = max(1, step - last)
    wanted = steps * EXCHANGE_SECONDS / seconds if seconds > 0 else 2 * steps
    return step + max(1, int(min(wanted, 2 * steps)))


SAME_SECONDS = 1.0
"""Signals of one number within this time announce one event."""
HARMLESS = (signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH)
"""Signals that the system ignores by default."""
_live: weakref.WeakSet[PreemptionSignals] = weakref.WeakSet()


class PreemptionSignals:
    """Notes the given signals until `close`."""

    def __init__(self, signals: Sequence[int]) -> None:
        """Raises MisuseError in another thread than the main one, ArgumentError for no signal."""
        self.received: int | None = None
        """The number of the first signal that has come."""
        self._received_at = 0.0
        self._before: dict[int, Any] = {}
        self._is_closed = False
        if signals and threading.current_thread() is not threading.main_thread():
            raise MisuseError(
                "Checkpointer(signals=...) handles signals, which only the main thread may do: "
                "make it in the main thread, or pass signals=()"
            )
        _live.add(self)
        for number in dict.fromkeys(signals):
            try:
                self._before[number] = signal.signal(number, self._note)
            except (OSError, TypeError, ValueError) as error:
                self.close()
                raise ArgumentError(
                    f"signals has {number!r}, which no program can handle: {error}"
                ) from None

    def close(self) -> None:
        """Restores the previous handlers; not those that a closed object has set."""
        self._is_closed = True
        for number in self._before:
            handler = signal.getsignal(number)
            if handler == self._note:
                while (
                    isinstance(owner := getattr(handler, "__self__", None), PreemptionSignals)
                    and owner._is_closed
                ):
                    handler = owner._before[number]
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ends_process(self, number: int) -> bool:
        """Whether a signal ends the process, or raises KeyboardInterrupt, without this object."""
        return _ends_process(number, self._before_all(number))

    def end(self, number: int) -> None:
        """Lets the handler of before have a signal that ends the process."""
        before = self._before_all(number)
        self.close()
        if _ends_process(number, before):
            signal.signal(number, before)
            signal.raise_signal(number)

    def _before_all(self, number: int) -> Any:
        """Returns the handler from before this object, and before others that it has replaced."""
        handler = self._before.get(number)
        while isinstance(owner := getattr(handler, "__self__", None), PreemptionSignals):
            handler = owner._before[number]
        return handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = number, now
        elif number == self.received and now - self._received_at >= SAME_SECONDS:
            self.end(number)
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _ends_process(number: int, handler: Any) -> bool:
    if handler is signal.default_int_handler:
        return True
    return handler is signal.SIG_DFL and number not in HARMLESS


def _close_in_child() -> None:
    for each in list(_live):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


class Due:
    """Decides at which steps a save to the folder of the run is due, the same on all ranks."""

    def __init__(
        self, schedule: Schedule, signals: Sequence[int], ranks: RunRanks, saves: RunSaves
    ) -> None:
        """Handles the signals until `close`. Raises as `PreemptionSignals` does."""
        self.signals = PreemptionSignals(signals)
        self.preempted_by: int | None = None
        """The signal that the ranks have agreed on."""
        self.is_asked = False
        """Whether the program has asked about the signal, and so ends its loop itself."""
        self._schedule, self._ranks, self._saves = schedule, ranks, saves
        self._decided: tuple[int, bool] | None = None
        """The last step that was asked about, and the answer."""
        self._exchange_at = 0
        self._exchanged = (0, time.monotonic())
        self._began = time.monotonic()
        """The time when the last save began."""

    def at(self, step: int, end: Callable[[int], None]) -> bool:
        """Returns whether a save is due at a step. All ranks call this.

        `end` is called with the signal at the step after its save, unless the program has asked.
        """
        if self._decided is not None and self._decided[0] == step:
            return self._decided[1]
        was_preempted = self.preempted_by is not None
        is_due = self._exchange(step, end) if step >= self._exchange_at else False
        is_due = is_due or self._saves.is_retrying or self._schedule.by_step(step)
        if self.preempted_by is not None and not was_preempted:
            is_due, self._exchange_at = True, 0  # the next step asks whether the loop should end
        self._decided = (step, is_due)
        return is_due

    def saves(self) -> None:
        """A save begins: the seconds between saves count from now."""
        self._saves.is_retrying, self._began = False, time.monotonic()

    def was_saved(self, step: int) -> None:
        """The save of a step has begun: it is due no more."""
        self._decided = (step, False)

    def goes_back(self) -> None:
        """The run is at another step now: all is decided anew."""
        self._decided, self._exchange_at = None, 0

    def _exchange(self, step: int, end: Callable[[int], None]) -> bool:
        """Returns whether rank 0's clock or a failed save makes a save due; notes signals."""
        if self.preempted_by is not None and not self.is_asked and not self._saves.is_retrying:
            end(self.preempted_by)
        is_saving, (last, when) = self._saves.is_under_way, self._exchanged
        now = time.monotonic()
        self._exchanged = (step, now)
        answer = self._ranks.agree_on_step(
            step,
            self.signals.received,
            is_saving,
            lambda is_saving: self._schedule.by_clock(now - self._began, is_saving),
            next_exchange(step, last, now - when),
        )
        self._exchange_at = answer.next_exchange
        if self.preempted_by is None:
            self.preempted_by = answer.received
        if not answer.is_saving:
            self._saves.settle()
        self._saves.tidying.tell(stacklevel=4)
        return answer.is_due
