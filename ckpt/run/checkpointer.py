"""The checkpoints of a run: saves when one is due, removes those that no rule keeps, restores.

Rules:

1. All ranks call the same methods at the same steps. They agree on all facts that only one rank
   knows: its signals, its clock, the end of its last save (`ckpt.run.saves`).
2. This class decides where to save; `ckpt.run.saves` does it.
3. A restore takes the newest sound step of all tiers, the same on all ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal
from warnings import warn

from ckpt.arguments import CastingRule, Uncopied, bound_bytes
from ckpt.errors import (
    ArgumentError,
    CkptError,
    ClosedError,
    ExistsError,
    MisuseError,
    SaveFailedWarning,
    StoreError,
)
from ckpt.loading.agreement import LoadOptions
from ckpt.loading.load import Patterns, load_once, load_options, load_or_older
from ckpt.mapping.changes import MappingName
from ckpt.run.exchange import RunRanks
from ckpt.run.policy import Failures, Keep, LocalOptions, OnFailure, best_first, local_options
from ckpt.run.saves import Due, LastGiven, RunSaves, SaveArguments, Schedule, check_metadata
from ckpt.run.steps import (
    END_OF_STEPS,
    METRICS,
    PROVENANCE,
    STEP,
    RunCounter,
    check_step,
    metrics_text,
)
from ckpt.run.tiers import LocalTier, Memory, MemoryTier
from ckpt.saving.agreement import StoredDtypes
from ckpt.saving.staging import COPIED, When
from ckpt.state.patterns import Rename
from ckpt.stores.store import Options, absolute
from ckpt.transfer.replica_hashes import Replicas
from ckpt.transfer.write_job import Compress
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import Ranks
from sharding.errors import without_secrets

if TYPE_CHECKING:
    from ckpt.converting.second_output import SecondOutput
    from sharding.agreement.ranks import Group

__all__ = ["Checkpointer"]

EXCEPTION_SECONDS = 30.0
"""The time that a rank waits for the others after an exception, if there is no deadline."""


class Checkpointer(Uncopied):
    """Saves, keeps, removes and restores the checkpoints of one run in the folder `url`.

    >>> import ckpt, tempfile, torch
    >>> state = {"w": torch.zeros(2), "seen": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ckpt.Checkpointer(folder, every_steps=10, keep=ckpt.Keep(last=2)) as run:
    ...         first = run.restore(state)
    ...         for step in range((first or 0) + 1, 41):
    ...             state["w"] += 1
    ...             saved = run.save(step, state)
    ...     with ckpt.Checkpointer(folder, every_steps=10) as run:
    ...         run.restore(state), state["w"], sorted(run.all_steps())
    (40, tensor([40., 40.]), [30, 40])
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: Keep | None = None,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        continuously: bool = False,
        local: str | os.PathLike[str] | None = None,
        local_every_steps: int | None = None,
        local_keep: int = 2,
        memory: Memory | None = None,
        blocking: bool = False,
        staging: When = COPIED,
        host_memory: str | int | None = None,
        compress: Compress = False,
        replicas: Replicas = "sample",
        metadata: Mapping[str, str] | None = None,
        on_failure: OnFailure = "continue",
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        deadline: float | None = None,
        group: Group = None,
        storage_options: Options = None,
        timeout: float = TIMEOUT_SECONDS,
        read_only: bool = False,
        save_on_exception: bool = False,
        also: SecondOutput | None = None,
        also_every: int | None = None,
    ) -> None:
        """All ranks of `group` call this, with equal arguments. Writes no file.

        Args:
            url: the folder of the run, on a disk that all ranks see or at any fsspec URL. The
                checkpoint of a step is its folder `step-N`.
            keep: the checkpoints that stay. By default all stay.
            every_steps: save at each step that is a multiple of this.
            every_seconds: save when so many seconds have passed since the last save began.
            continuously: save as soon as the last checkpoint is durable.
            local: a folder of each host, on a disk or in memory (/dev/shm/run), which may differ
                between hosts. Checkpoints are also saved to this folder. A restore reads it if it
                has the newest step and each host has its part.
            local_every_steps: save to the local folder at each step that is a multiple of this.
            local_keep: the number of checkpoints that stay in the local folder.
            memory: keep the last two steps also in memory that outlives the trainers. A restore
                takes a step from there, without a disk, if no tier has a newer one.
            blocking: whether `save` returns only once the checkpoint exists.
            staging, host_memory, compress, replicas, metadata, storage_options: as `ckpt.save`
                takes them.
            on_failure: "continue" warns of a save that failed and saves again at the next step;
                "raise" raises its error.
            signals: if any rank gets one of these signals, a checkpoint is due at once, and
                `reached_preemption()` is True. Ranks agree on the step within about a second. If
                the loop goes on without asking, the signal has its usual effect: the processes end.
                The same signal a second time ends a process at once.
            deadline: the most seconds that a rank waits for another in the save after a signal or
                an exception. A rank that still writes goes on until it is done, or killed.
            timeout: the most seconds that a rank waits for another.
            read_only: for an evaluator beside the training: restores and lists, in any thread.
                Handles no signals, saves and removes nothing, and has no `local` and `memory`.
            save_on_exception: an exception that leaves the `with` block saves the state of the last
                call of `save`, due or not, unless an optimizer has begun a step since. Other ranks
                must leave by an exception too, within `deadline` or 30 seconds; else nothing is
                saved (docs/runs.md).
            also: a second output of checkpoints, as that of `ckpt.save`, with `{step}` in its
                place: `ckpt.HuggingFace("hf/step-{step}")`. One that fails, also because its place
                is taken, is a warning. `keep` removes none. The save after a signal or an exception
                has none.
            also_every: write it at each step that is a multiple of this, with a checkpoint; by
                default with each checkpoint of the folder.

        Raises:
            ArgumentError: an argument is wrong.
            MisuseError: this is not the main thread, and there are signals to handle.
            ExistsError: the folder has steps that are checkpoints of another format, and no others.
            RankError: another rank failed, or has other arguments.
        """
        self.url = absolute(url)
        self._keep = keep or Keep()
        self._schedule = Schedule(every_steps, every_seconds, continuously, also_every)
        self._also = also
        if also is not None:
            also.check_steps()
        elif also_every is not None:
            raise ArgumentError(f"also_every={also_every} is the period of also=, which is missing")
        if host_memory is not None and not (also is None and memory is None):
            raise ArgumentError(
                "also= and memory= keep copies of the whole state in host memory, which "
                "host_memory= bounds: leave out one of them"
            )
        self._failures = Failures(on_failure)
        self._arguments = SaveArguments(
            blocking=blocking,
            staging=staging,
            host_memory=bound_bytes(host_memory),
            compress=compress,
            replicas=replicas,
            metadata=dict(metadata or {}),
            deadline=deadline,
            group=group,
            storage_options=storage_options,
            timeout=timeout,
        )
        self._ranks = RunRanks(self.url, Ranks(group, timeout, "runs"), storage_options)
        if read_only and not (local is None and memory is None):
            raise ArgumentError(
                "read_only=True reads the folder of the run; omit local= and memory="
            )
        self._saves = RunSaves(self._arguments, self._ranks, self._keep, self._failures)
        self._due = Due(self._schedule, () if read_only else signals, self._ranks, self._saves)
        self._is_restored = self._is_closed = False
        self._is_read_only = self._saves_nothing = read_only
        self._is_prepared = blocking or read_only
        """Whether the memory of a background save is there, or is not needed."""
        self._saves_on_exception = save_on_exception and not read_only
        self._given: LastGiven | None = None
        """The state to save after an exception, inside of the `with` block."""
        self._is_ending = False
        """Whether an exception has ended the loop."""
        self._local: LocalTier | None = None
        self._memory: MemoryTier | None = None
        bound = self._arguments.host_memory
        how = (blocking, staging, bound, compress, replicas, on_failure, memory, save_on_exception)
        local_ones = (local_every_steps, local_keep)
        seconds = (deadline, None if timeout is None else float(timeout))
        arguments = (self.url, self._keep, self._schedule, how, also, local_ones, seconds)
        try:
            options = local_options(local, local_every_steps, local_keep, self.url)
            self._open_tiers(repr(arguments), options, memory)
        except BaseException:
            self._due.signals.close()
            raise

    def _open_tiers(
        self, arguments: str, options: LocalOptions | None, memory: Memory | None
    ) -> None:
        """Opens the tiers, and looks for the steps in them. All ranks call this."""
        self._provenance, steps, places = self._ranks.introduce(
            arguments, options.folder if options else "", self._saves.owner
        )
        if options is not None:
            self._local = self._ranks.local_tier(options, places)
            steps += self._ranks.local_steps(self._local.steps)
        if memory is not None:
            how = self._arguments
            self._memory = self._ranks.memory_tier(memory, how.group, how.timeout, self._failures)
            steps += [memory_step for memory_step, _ in self._ranks.memory_steps(self._memory)]
        self._newest_before = max((step.step for step in steps), default=None)
        self._counter = RunCounter(steps)

    @property
    def failures(self) -> int:
        """The number of saves that have failed so far."""
        return self._failures.count

    def __enter__(self) -> Checkpointer:
        if self._saves_on_exception and self._given is None and not self._is_closed:
            self._given = LastGiven()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            try:
                self._save_after(error)
            finally:
                self._close(is_over=False)
        except Exception as also:
            warn(f"{self.url}: {type(also).__name__}: {also}", SaveFailedWarning, stacklevel=2)

    def save(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, object] | None = None,
        force: bool = False,
        *,
        metadata: Mapping[str, str] | None = None,
        dtype: StoredDtypes = None,
    ) -> bool:
        """Saves `state` if a checkpoint is due, or with `force`; returns whether it did.

        A background save has only begun then. All ranks call this, with rising steps. `metrics` are
        numbers by name, `metadata` texts beside those of the run; rank 0's are stored. `dtype` is
        that of `ckpt.save`, for a last step of weights alone; in memory all is as it is.

        Raises:
            ExistsError: the folder has checkpoints of an earlier run, and `restore` was not called.
            StateError: a value cannot be stored; the error names its key path.
            ArgumentError: `step` is not above the step of the last save, or is no possible step.
            ArgumentTypeError: a metric is not a number.
            ClosedError: this Checkpointer is closed.
            MisuseError: this Checkpointer is read_only.
            NotOwnerError: another job has begun to save to this run since.
            RankError: another rank failed.
        """
        step = self._check_step(step)
        if self._given is not None:
            self._given.note(step, state, metrics, metadata, dtype)
        is_due = force or self._due.at(step, self._end_by)
        tier, memory = self._local, self._memory
        if tier is not None and (is_due or self._due.preempted_by or not tier.is_due(step)):
            tier = None
        if memory is not None and not is_due and not memory.is_due(step):
            memory = None
        if not is_due and tier is None and memory is None:
            if not self._is_prepared:
                self._is_prepared = True
                self._saves.prepare(state)
            return False
        saves = self._saves
        if saves.has_begun(step, force):
            return False
        metrics_as_text = metrics_text(metrics or {})
        checked_metadata = check_metadata(metadata or {})
        if tier is not None:
            is_saving = saves.is_in_run_folder and saves.is_under_way
            tier = tier if self._ranks.can_save_locally(step, is_saving) else None
        if not is_due and tier is None and memory is None:
            return False
        if is_due or tier is not None:
            saves.settle()
        self._check_place(step)
        saves.last_step = step
        if not saves.own(step, tier, self._counter):
            return False
        how = self._arguments
        run = {STEP: str(step), METRICS: metrics_as_text, PROVENANCE: self._provenance}
        written = {**how.metadata, **checked_metadata, **run, **self._counter.next()}
        in_memory = memory is not None and memory.save(step, state, written, how.blocking)
        if not is_due and tier is None:
            return in_memory
        if tier is None:
            self._due.saves()
        is_last = self._due.preempted_by is not None or self._is_ending
        has_output = self._schedule.also_every is None or self._schedule.by_output(step)
        also = None if tier is not None or is_last or not has_output else self._also
        output = None if also is None else also.at(step)
        is_saved = saves.begin(step, state, written, tier, is_last, dtype, output)
        if tier is None:
            self._due.was_saved(step)
            number = self._due.preempted_by
            if is_saved and number is not None and not self._due.is_asked:
                self._ranks.warn(f"step {step} is saved after {signal.Signals(number).name}")
        return is_saved

    def _save_after(self, error: BaseException) -> None:
        """Saves the last given state after an exception of the loop, if the user wants it.

        An error of ckpt itself has come on all ranks, and would come again.
        """
        last_given, how = self._given, self._arguments
        if last_given is None or self._is_closed or isinstance(error, CkptError):
            return
        seconds = min(how.timeout, how.deadline or EXCEPTION_SECONDS)
        ranks = RunRanks(self.url, Ranks(how.group, seconds, "runs"), how.storage_options)
        step, is_whole = ranks.agree_on_last(last_given.step, last_given.is_whole)
        kind, last = type(error).__name__, self._saves.last_step
        if step is None or (step == last and not self._saves.is_retrying):
            return  # no step was given, or the ranks were at different ones, or it is saved
        if not is_whole:
            self._ranks.warn(f"step {step} is not saved after {kind}: the next one had begun")
            return
        self._is_ending = True
        metadata, dtype = last_given.metadata, last_given.dtype
        if self.save(
            step, last_given.state, last_given.metrics, True, metadata=metadata, dtype=dtype
        ):
            self._ranks.warn(f"step {step} is saved after {kind}")

    def should_save(self, step: int) -> bool:
        """Returns whether a checkpoint is due at this step. All ranks call this."""
        return self._due.at(self._check_step(step), self._end_by)

    def _check_step(self, step: int) -> int:
        if self._saves_nothing:
            self._refuse()
        # The quick way: most steps of a run save nothing.
        return step if type(step) is int and 0 <= step < END_OF_STEPS else check_step(step)

    def _refuse(self) -> None:
        """Raises ClosedError or MisuseError if this Checkpointer saves nothing."""
        if self._is_closed:
            raise ClosedError(f"{self.url}: this Checkpointer is closed; make another")
        if self._is_read_only:
            raise MisuseError(f"{self.url}: this Checkpointer is read_only: make one that saves")

    def restore(
        self,
        state: object,
        step: int | None = None,
        *,
        strict: bool = True,
        mapping: MappingName | Sequence[MappingName] = (),
        parameters: Mapping[str, int] | None = None,
        rename: Rename | None = None,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        dtype: Literal["target"] | None = None,
        casting: CastingRule = "same_kind",
    ) -> int | None:
        """Fills `state` from a checkpoint and returns its step; None if the run has none.

        Loads the checkpoint of `step`, or else the newest sound one of both tiers, the same on all
        ranks, with a FallbackWarning for newer ones that are damaged. Tensors, modules, optimizers,
        dicts and lists are filled in place, as by `ckpt.load`. All ranks call this.

        The keyword arguments are those of `ckpt.load`, for a state that has changed since the save:
        `strict=False` skips differing names and shapes, with a warning. The run goes on from this
        step in its folder, and its next save stores the state as it is now.

        Raises:
            ArgumentError: an argument has a wrong value.
            NotACheckpointError: `step` has no checkpoint.
            CorruptError: none of the checkpoints is sound.
            MismatchError: the checkpoint does not fit `state`, which is unchanged.
            RankError: another rank failed.
        """
        self._saves.settle()
        how = self._arguments
        checked = partial(
            load_options, strict, mapping, parameters, rename, include, exclude, dtype, casting
        )
        options = self._load_options("restore", checked, how.storage_options, by_host=True)
        step_at = dict(self._ranks.restorable(step, self._local, self._memory))
        if not step_at:
            self._is_restored = True
            self._ranks.log("no checkpoint to restore, the run begins")
            return None

        def list_again() -> list[str]:
            now = dict(self._ranks.restorable(step, self._local, self._memory))
            step_at.update(now)
            return list(now)

        ranks = Ranks(how.group, how.timeout)
        first, *others = step_at
        once = partial(load_once, ranks, state=state, options=options)
        _, url = load_or_older(ranks, first, others, once, how.storage_options, list_again)
        self._is_restored = True
        restored = step_at[url]
        self._saves.last_step = restored
        self._due.goes_back()
        if self._given is not None:
            self._given.forget()
        self._ranks.log(f"restored step {restored} from {without_secrets(url)}")
        return restored

    def _load_options(
        self, call: str, checked: Callable[[], LoadOptions], storage: Options, *, by_host: bool
    ) -> LoadOptions:
        """Returns the options of a load; a wrong argument of one rank is an error on all."""
        group = None if isinstance(self._arguments.group, str) else self._arguments.group
        options, call = self._ranks.check_on_all(checked), f"Checkpointer.{call}"
        return replace(options, group=group, storage=storage, by_host=by_host, call=call)

    def start_from(
        self,
        url: str | os.PathLike[str],
        state: object,
        *,
        strict: bool = True,
        mapping: MappingName | Sequence[MappingName] = (),
        parameters: Mapping[str, int] | None = None,
        rename: Rename | None = None,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        dtype: Literal["target"] | None = None,
        casting: CastingRule = "same_kind",
        storage_options: Options = None,
    ) -> str:
        """Fills `state` for a new run from another run's newest sound step; returns its place.

        `url` is the folder of the other run, or any checkpoint that `ckpt.load` reads. All ranks
        call this, once `restore` has returned None. The arguments are those of `ckpt.load`;
        `include="model.*"` takes the weights alone. The steps of the new run begin as the program
        counts them, and nothing is written before the first save.

        Raises:
            ExistsError: this run has steps already.
            NotACheckpointError, CorruptError, MismatchError, ArgumentError, RankError: as `restore`
                and `ckpt.load`.

        >>> import ckpt, tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ckpt.save(f"{folder}/base", {"model": {"w": torch.ones(2)}, "optim": {}})
        ...     state = {"model": {"w": torch.zeros(2)}, "optim": {"m": torch.zeros(2)}}
        ...     with ckpt.Checkpointer(f"{folder}/tuned") as run:
        ...         if run.restore(state) is None:
        ...             _ = run.start_from(f"{folder}/base", state, include="model.*")
        ...     state["model"]["w"]
        tensor([1., 1.])
        """
        self._refuse()
        how, place = self._arguments, os.fspath(url)
        checked = partial(
            load_options, strict, mapping, parameters, rename, include, exclude, dtype, casting
        )
        options = self._load_options("start_from", checked, storage_options, by_host=False)
        last = self._newest_before if self._saves.last_step is None else self._saves.last_step
        if last is not None:
            raise ExistsError(
                f"{self.url} has steps already, up to step {last}; call restore(state) to go on, "
                "and start_from only where it returns None"
            )
        ranks = Ranks(how.group, how.timeout)
        first, *others = self._ranks.places_in(place, storage_options)
        once = partial(load_once, ranks, state=state, options=options)
        _, place_taken = load_or_older(ranks, first, others, once, storage_options)
        self._ranks.log(f"begins with the state of {without_secrets(place_taken)}")
        return place_taken

    def latest_step(self) -> int | None:
        """Returns the step that was committed last, or None. All ranks call this."""
        return next(iter(self.all_steps()), None)

    def latest_finite_step(self) -> int | None:
        """Returns the newest step without NaN and infinity, or None. All ranks call this.

        Steps that were saved with `Keep(last_finite=)` tell; a step of another run does not count.
        """
        finite = (step.step for step in self._ranks.steps() if step.nonfinite == 0)
        return next(finite, None)

    def all_steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, the newest first. All ranks call this."""
        return [step.step for step in self._ranks.steps() if not step.is_damaged]

    def best_step(self) -> int | None:
        """Returns the step with the best metric by the policy; None if no step has the metric.

        All ranks call this. Raises ArgumentError if `keep` has no metric.
        """
        metric = self._keep.metric
        if metric is None:
            raise ArgumentError(
                "best_step() needs a metric: Checkpointer(keep=Keep(best=, metric=))"
            )
        ranked = best_first(self._ranks.steps(), metric, self._keep.mode)
        return ranked[0].step if ranked else None

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of a step, also its local copies. All ranks call this.

        Waits for the save in flight before.

        Raises:
            NotACheckpointError: the run has no checkpoint of this step.
            InUseError: it is pinned, or another checkpoint borrows from it.
            MisuseError: it is in memory, which keeps its last steps, or this is `read_only`.
            NotOwnerError: another job owns the run.
            ExistsError: the run is an earlier one, and `restore` was not called.
        """
        step = self._check_step(step)
        self.wait_until_finished()
        memory = [] if self._memory is None else self._ranks.memory_steps(self._memory)
        if any(saved.step == step for saved, _ in memory):
            raise MisuseError(
                f"step {step} is in memory (memory=), which keeps the last two steps and frees "
                "each by itself; delete a step that is in the folder"
            )
        self._check_place(step)
        if not self._saves.own((self._saves.last_step or 0) + 1, None, self._counter):
            raise StoreError(f"{self.url}: step {step} was not deleted: the store fails; try again")
        self._ranks.delete(step, self._local, self._saves.look(None))

    def pin(self, step: int, name: str) -> None:
        """Pins the checkpoint of a step under a name, so that no rule of `keep` removes it.

        A step may have several pins. They outlive the run, and `ckpt ls` shows them. `name` has up
        to 64 letters, digits and `._-`. All ranks call this, once the step is saved: it waits for
        the save in flight.

        Raises:
            NotACheckpointError: the folder of the run has no checkpoint of this step.
            ArgumentError: the name has other characters.
            MisuseError: this Checkpointer is read_only.
        """
        step = self._check_step(step)
        self.wait_until_finished()
        self._ranks.pin(step, name, True)

    def unpin(self, step: int, name: str) -> None:
        """Removes a pin; the rules of `keep` count for the step again. All ranks call this.

        Raises NotACheckpointError if the step has no pin of this name.
        """
        self._ranks.pin(self._check_step(step), name, False)

    def reached_preemption(self) -> bool:
        """Returns whether a signal has come and all ranks have saved: time to end the loop."""
        self._due.is_asked = self._due.preempted_by is not None
        return self._due.is_asked

    def wait_until_finished(self) -> None:
        """Returns once no save and no removal is under way. All ranks call this.

        Raises the error of a save that has failed if `on_failure` is "raise".
        """
        self._saves.settle()
        if self._memory is not None:
            self._memory.settle()
        self._saves.tidying.wait()
        self._saves.tidying.tell(stacklevel=2)

    def close(self) -> None:
        """Waits for saves, frees the memory tier, restores the signals; may be called twice.

        A signal that the loop has not asked about has its usual effect then.
        """
        was_closed = self._is_closed
        self._close(is_over=True)
        signals = self._due.signals
        if signals.received is not None and not self._due.is_asked and not was_closed:
            signals.end(signals.received)

    def _close(self, is_over: bool) -> None:
        if self._is_closed:
            return
        is_saved = False
        try:
            self.wait_until_finished()
            is_saved = not self._saves.is_retrying
        finally:
            self._is_closed = self._saves_nothing = True
            self._due.signals.close()
            if self._given is not None:
                self._given.close()
            if self._memory is not None:
                self._memory.close(is_over and is_saved)

    def _end_by(self, number: int) -> None:
        """Closes this run and lets a signal have its usual effect; returns if it has none.

        All ranks are at the step after the save of the signal, and call this.
        """
        self._due.is_asked = True
        if not self._due.signals.ends_process(number):
            return
        self._ranks.warn(
            f"{signal.Signals(number).name} ends the process; a loop that asks "
            "reached_preemption() ends by itself"
        )
        try:
            self._close(is_over=False)
        finally:
            self._due.signals.end(number)

    def _check_place(self, step: int) -> None:
        """Raises ExistsError if a save could replace a checkpoint of another run."""
        if not self._is_restored and self._newest_before is not None:
            raise ExistsError(
                f"{self.url} has checkpoints of an earlier run, up to step {self._newest_before}; "
                "call restore(state) before the first save to continue it, with strict=False if "
                "the model has changed, or give another folder"
            )
        self._saves.tidying.wait()  # the removal may concern an older checkpoint of this very step
