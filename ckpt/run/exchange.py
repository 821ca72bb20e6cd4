"""What the ranks of a run tell one another, beside the states that they save.

Every method is called by all ranks. Rank 0 looks into the folder and at its clock for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.run.history import run_steps
from ckpt.run.provenance import host_name, provenance
from ckpt.run.retention import RunStep
from ckpt.stores.store import Options
from sharding.agreement.ranks import Ranks
from sharding.errors import ArgumentError

CALL = "ckpt.Checkpointer"
"""The name of the call that other ranks see in errors."""


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """The facts that all ranks know after an exchange."""

    has_signal: bool
    """Whether any rank got a signal."""
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

    def introduce(self, arguments: str) -> tuple[str, int | None]:
        """The provenance for manifests, and the newest step that the folder already has.

        Raises ArgumentError where the arguments of a rank differ from those of rank 0.
        """

        def join(records: Sequence[bytes]) -> bytes:
            rows = [json.loads(record) for record in records]
            others = [rank for rank, row in enumerate(rows) if row[1] != arguments]
            steps = run_steps(self.url, storage_options=self._options)
            newest = steps[0].step if steps else None
            return json.dumps([others, provenance([row[0] for row in rows]), newest]).encode()

        others, text, newest = self._joined("comparing arguments", [host_name(), arguments], join)
        if others:
            raise ArgumentError(
                f"{self.url}: rank {others[0]} made its Checkpointer with other arguments than "
                "rank 0; make all of them alike"
            )
        return text, newest

    def agree_on_step(
        self,
        step: int,
        received: int | None,
        is_saving: bool,
        is_due: Callable[[bool], bool],
        next_exchange: int,
    ) -> StepAgreement:
        """What the ranks agree on at a step.

        `received` is the signal that this rank got, `is_saving` whether its last save is under way.
        `is_due`, of whether any rank saves, and `next_exchange` are rank 0's to decide. Raises
        ArgumentError where a rank is at another step than rank 0.
        """

        def join(records: Sequence[bytes]) -> bytes:
            rows = [json.loads(record) for record in records]
            others = [[rank, row[0]] for rank, row in enumerate(rows) if row[0] != step]
            saving = any(row[2] for row in rows)
            has_signal = any(row[1] for row in rows)
            return json.dumps([others, has_signal, saving, is_due(saving), next_exchange]).encode()

        record = [step, received, is_saving]
        others, *agreed = self._joined("agreeing on a step", record, join)
        if others:
            rank, other = others[0]
            raise ArgumentError(
                f"rank {rank} is at step {other} where rank 0 is at another; call save() and "
                "should_save() with the same steps on all ranks"
            )
        return StepAgreement(*agreed)

    def steps(self) -> list[RunStep]:
        """The committed checkpoints as rank 0 sees them, newest first, without their programs."""

        def listed(records: Sequence[bytes]) -> bytes:
            found = run_steps(self.url, storage_options=self._options)
            return json.dumps(
                [[one.step, one.name, one.time, dict(one.metrics), one.is_damaged] for one in found]
            ).encode()

        rows = self._joined("listing the checkpoints of the run", None, listed)
        return [
            RunStep(step, name, time, metrics, is_damaged=is_damaged)
            for step, name, time, metrics, is_damaged in rows
        ]

    def _joined(
        self, stage: str, record: object, join: Callable[[Sequence[bytes]], bytes]
    ) -> list[Any]:
        with self._ranks.call(CALL):
            answer: list[Any] = json.loads(
                self._ranks.joined(stage, json.dumps(record).encode(), join)
            )
        return answer
