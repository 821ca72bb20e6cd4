"""The exchanges between the ranks of a run, beside those of saves and loads.

All ranks call every method. Rank 0 reads the folder and its clock for all of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.errors import CkptError
from ckpt.loading.newest import newest_first, order_of, seconds_of
from ckpt.removing.delete import delete_step
from ckpt.run.owner import Ownership, host_name, machine, provenance
from ckpt.run.policy import Failures, LocalOptions, RunStep, newest_steps
from ckpt.run.steps import check_no_foreign_steps, run_steps, set_pin
from ckpt.run.tiers import LocalTier, Memory, MemoryTier, open_live_state
from ckpt.stores.store import Options, join_url, open_store
from ckpt.transfer.facts import folder_name
from formats.detect import folder_format
from formats.native.manifest import MANIFEST
from sharding.agreement.ranks import Ranks
from sharding.errors import ArgumentError, without_secrets

if TYPE_CHECKING:
    from ckpt.live.publish import LiveState
    from sharding.agreement.ranks import Group

T = TypeVar("T")

_log = logging.getLogger("ckpt.run")
CALL = "ckpt.Checkpointer"
"""The name of the call that other ranks see in errors."""


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """The result of an exchange, equal on all ranks."""

    received: int | None
    """A signal that any rank got."""
    is_saving: bool
    """Whether the last save is still under way on any rank."""
    is_due: bool
    """Whether rank 0's clock makes a checkpoint due."""
    next_exchange: int
    """The step of the next exchange."""


@dataclass(frozen=True, slots=True)
class RunRanks:
    """The ranks of the run in one folder."""

    url: str
    _ranks: Ranks
    _options: Options

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the run."""
        return self._ranks.rank == 0

    @property
    def global_rank(self) -> int:
        """The rank of this process in the default process group."""
        return self._ranks.global_rank

    def local_tier(self, options: LocalOptions, places: Sequence[str]) -> LocalTier:
        """Returns the tier of this host; `places` has the place of each rank."""
        ranks = [self._ranks.mesh.rank((at,)) for at in range(self._ranks.world_size)]
        return LocalTier.of(options, self.url, places, ranks, self._ranks.rank)

    def memory_tier(
        self, options: Memory, group: Group, timeout: float, failures: Failures
    ) -> MemoryTier:
        """Returns the memory tier of the run. All ranks call this."""

        def open_live() -> LiveState:
            with self._ranks.call(CALL):
                return open_live_state(options, self.url, self._ranks, group, timeout)

        return MemoryTier(options, open_live, failures, self.is_first)

    def memory_steps(self, tier: MemoryTier) -> list[tuple[RunStep, str]]:
        """Returns the steps in memory with their URLs for this rank. All ranks call this."""
        with self._ranks.call(CALL):
            return tier.steps(self._ranks)

    def introduce(
        self, arguments: str, folder: str, owner: Ownership
    ) -> tuple[str, list[RunStep], list[str]]:
        """Returns the provenance for manifests, the run's steps, newest first, and ranks' places.

        Ranks of one host with the same local `folder` have equal places. `owner` starts.

        Raises:
            ArgumentError: the arguments of a rank differ from those of rank 0.
            ExistsError: the run has no step, but steps of another format.
        """

        def join(rows: Sequence[Any]) -> object:
            others = [rank for rank, row in enumerate(rows) if row[1] != arguments]
            owner.start()
            steps = run_steps(self.url, storage_options=self._options)
            if not steps:
                check_no_foreign_steps(self.url, self._options)
            program = provenance([row[0] for row in rows])
            return [others, program, [_row(step) for step in steps], [row[2] for row in rows]]

        place = f"{host_name()} {machine()} {folder}"
        record = [host_name(), arguments, place if folder else ""]
        others, text, steps, places = self._exchange("comparing arguments", lambda: record, join)
        if others:
            raise ArgumentError(
                f"{self.url}: rank {others[0]} made its Checkpointer with other arguments than "
                "rank 0; give all of them the same arguments"
            )
        return text, [_of_row(row) for row in steps], places

    def take(self, owner: Ownership, least: int) -> int:
        """Makes this start the owner of the run; returns its epoch, equal on all ranks."""
        return int(self._exchange("taking the run", lambda: None, lambda _: owner.take(least)))

    def agree_on_step(
        self,
        step: int,
        received: int | None,
        is_saving: bool,
        is_due: Callable[[bool], bool],
        next_exchange: int,
    ) -> StepAgreement:
        """Returns the facts that the ranks agree on at a step.

        `received` is the signal that this rank got, `is_saving` whether its last save is under way.
        Rank 0 decides by its `is_due`, called with whether any rank saves, and by its
        `next_exchange`. Raises ArgumentError if a rank is at another step than rank 0.
        """

        def join(rows: Sequence[Any]) -> object:
            saving = any(row[2] for row in rows)
            signals = [row[1] for row in rows if row[1] is not None]
            received = signals[0] if signals else None
            return [received, saving, is_due(saving), next_exchange]

        record = [step, received, is_saving]
        return StepAgreement(*self._exchange_at_step("agreeing on a step", record, join))

    def agree_on_last(self, step: int | None, is_whole: bool) -> tuple[int | None, bool]:
        """Returns the step that all ranks gave last, and whether its state is whole on all.

        The step is None if they differ. All ranks call this after an exception of the loop.
        """

        def join(rows: Sequence[Any]) -> object:
            is_one = all(row[0] == rows[0][0] for row in rows)
            return [rows[0][0] if is_one else None, all(row[1] for row in rows)]

        record = [step, is_whole]
        last, all_whole = self._exchange("agreeing after an exception", lambda: record, join)
        return last, all_whole

    def can_save_locally(self, step: int, is_saving: bool) -> bool:
        """Returns whether no rank is saving.

        Raises ArgumentError if a rank is at another step than rank 0.
        """
        stage, record = "agreeing on a local step", [step, is_saving]
        return not self._exchange_at_step(stage, record, lambda rows: any(row[1] for row in rows))

    def local_steps(self, own: Callable[[], list[tuple[str, str, int]]]) -> list[RunStep]:
        """Returns the steps that all ranks have, newest first.

        `own` returns those of this rank. If it raises on one rank, all ranks raise.
        """

        def join(steps: Sequence[Any]) -> object:
            first, *others = ({tuple(row) for row in each} for each in steps)
            return sorted(first.intersection(*others))

        rows = self._exchange("comparing local steps", own, join)
        return newest_steps(
            RunStep(step, folder_name(step), seconds_of(began), order=order_of(order))
            for began, order, step in rows
        )

    def steps(self) -> list[RunStep]:
        """Returns the committed checkpoints that rank 0 sees, newest first, without `program`."""

        def list_steps(_: object) -> object:
            return [_row(saved) for saved in run_steps(self.url, storage_options=self._options)]

        rows = self._exchange("listing the checkpoints of the run", lambda: None, list_steps)
        return [_of_row(row) for row in rows]

    def run_on_first(self, stage: str, action: Callable[[], object]) -> None:
        """Runs an action on rank 0; its error is raised on all ranks. All ranks call this."""
        with self._ranks.call(CALL):
            self._ranks.run_on_all(stage, action if self.is_first else lambda: None)

    def delete(self, step: int, tier: LocalTier | None, look: Callable[[], object] | None) -> None:
        """Deletes a step from the folder of the run, then from those of the hosts.

        All ranks call this. `look`, on rank 0, raises if another job owns the run.

        Raises:
            NotACheckpointError: no folder has the step.
            InUseError: another checkpoint borrows from it, or it is pinned.
        """
        near = [] if tier is None else self.local_steps(tier.steps)
        is_near = any(saved.step == step for saved in near)

        def delete() -> None:
            delete_step(self.place(step), is_near, self._options, None, look)

        def delete_near() -> None:
            if tier is not None and self.global_rank == min(tier.host):
                delete_step(tier.place(step), True, None)

        self.run_on_first("deleting a checkpoint", delete)
        if near:
            with self._ranks.call(CALL):
                self._ranks.run_on_all("deleting a local checkpoint", delete_near)

    def pin(self, step: int, name: str, is_pinned: bool) -> None:
        """Pins a step of the run's folder under a name, or unpins it. All ranks call this.

        Raises NotACheckpointError if the folder lacks the step, or the step the pin.
        """
        write = partial(set_pin, self.url, step, name, is_pinned, self._options)
        self.run_on_first("pinning a checkpoint", write)

    def place(self, step: int) -> str:
        return join_url(self.url, folder_name(step))

    def restorable(
        self, step: int | None, tier: LocalTier | None, memory: MemoryTier | None
    ) -> list[tuple[str, int]]:
        """Returns the places to restore from and their steps, the best first; `step` or all."""
        candidates = [] if memory is None else self.memory_steps(memory)
        near = [] if tier is None else self.local_steps(tier.steps)
        candidates += [(pair, tier.place(pair.step)) for pair in near if tier is not None]
        candidates += [(pair, self.place(pair.step)) for pair in self.steps()]
        candidates = newest_first(candidates, lambda pair: pair[0].age)
        places = [(place, pair.step) for pair, place in candidates if step in (None, pair.step)]
        return places if places or step is None else [(self.place(step), step)]

    def places_in(self, url: str, options: Options) -> list[str]:
        """Returns the checkpoints to begin from, the best first, as rank 0 finds them.

        These are the steps of the run at `url`, newest first. Any other place is one checkpoint.
        """

        def list_places(_: object) -> object:
            with suppress(CkptError, OSError):  # the load has the better error
                steps = run_steps(url, storage_options=options)
                with open_store(url, options) as store:
                    entries = store.entries()
                if steps and MANIFEST not in entries and folder_format(entries) is None:
                    return [join_url(url, step.name) for step in steps]
            return [url]

        stage = "listing the run to begin from"
        places: list[str] = self._exchange(stage, lambda: None, list_places)
        return places

    def check_on_all(self, make: Callable[[], T]) -> T:
        """Returns the result of `make`, which checks arguments; its error on one rank is on all."""
        try:
            return make()
        except Exception:
            with self._ranks.call(CALL):  # tells the other ranks, which wait in their next call
                raise

    def log(self, text: str) -> None:
        """Logs a line about the run at the level INFO, on rank 0."""
        if self.is_first:
            _log.info("%s: %s", without_secrets(self.url), text)

    def warn(self, text: str) -> None:
        """Logs a line about the run at the level WARNING, on rank 0."""
        if self.is_first:
            _log.warning("%s: %s", without_secrets(self.url), text)

    def _exchange(
        self, stage: str, record: Callable[[], object], join: Callable[[Sequence[Any]], object]
    ) -> Any:
        """Returns what `join` makes on rank 0 of the records of all ranks. All are JSON."""

        def merge(records: Sequence[bytes]) -> bytes:
            return json.dumps(join([json.loads(data) for data in records])).encode()

        with self._ranks.call(CALL):
            data = json.dumps(record()).encode()
            return json.loads(self._ranks.merge_records(stage, data, merge))

    def _exchange_at_step(
        self, stage: str, record: Sequence[object], join: Callable[[Sequence[Any]], object]
    ) -> Any:
        """As `_exchange`, of records that begin with the step of the rank.

        Raises ArgumentError if a rank is at another step than rank 0.
        """

        def join_at_step(rows: Sequence[Any]) -> object:
            others = [(rank, row[0]) for rank, row in enumerate(rows) if row[0] != rows[0][0]]
            return [others, join(rows)]

        others, answer = self._exchange(stage, lambda: record, join_at_step)
        for rank, other in others:
            raise ArgumentError(
                f"rank {rank} is at step {other}, and rank 0 is at another; call save() and "
                "should_save() with the same steps on all ranks"
            )
        return answer


def _row(step: RunStep) -> list[object]:
    age = [step.step, step.name, step.time, step.order]
    return [*age, dict(step.metrics), step.is_damaged, step.nonfinite]


def _of_row(row: Sequence[Any]) -> RunStep:
    step, name, time, order, metrics, is_damaged, nonfinite = row
    counted = None if order is None else (int(order[0]), int(order[1]))
    run_step = RunStep(step, name, time, metrics, is_damaged=is_damaged, order=counted)
    return replace(run_step, nonfinite=nonfinite)
