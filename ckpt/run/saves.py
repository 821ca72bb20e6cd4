"""The saves of a run, one at a time, to its folder and its hosts' folders.

Rules:

1. A save in the background ends in `settle`, which all ranks call: before the next save, once the
   ranks know that none of them saves any more, and at the end.
2. The first rank of a folder removes checkpoints, in a thread of its own, after a newer one was
   committed. It removes no checkpoint from which another borrows, and none once another job owns
   the run.
3. A save that fails is counted, and gives a warning; the next step saves again. Errors for wrong
   arguments and for states that cannot be stored are raised: another try would not help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.errors import NotOwnerError
from ckpt.loading.newest import BEGAN, ORDER
from ckpt.run.exchange import RunRanks
from ckpt.run.history import METRICS, PROVENANCE, STEP, RunCounter
from ckpt.run.local_tier import HOSTS, LocalTier
from ckpt.run.owner import Ownership
from ckpt.run.policy import Failures, Keep, check_seconds
from ckpt.run.removal import Tidying
from ckpt.saving.agreement import SaveOptions, StoredDtypes
from ckpt.saving.background import Also, SaveHandle
from ckpt.saving.save import save_with
from ckpt.saving.staging import When, optimizers, runs_hooks
from ckpt.step_names import folder_name
from ckpt.stores.store import Options, local_path, split_url
from ckpt.transfer.facts import Beside, find_known
from ckpt.transfer.replica_hashes import Replicas
from ckpt.transfer.write_job import Compress
from formats.native.manifest import MANIFEST
from sharding.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group


@dataclass(frozen=True, slots=True)
class SaveArguments:
    """The arguments of a `Checkpointer` for all of its saves. Raises ArgumentError."""

    blocking: bool
    staging: When
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
        """Drops the state."""
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

    def begin(
        self,
        step: int,
        state: object,
        metadata: Mapping[str, str],
        tier: LocalTier | None,
        is_last: bool,
        dtype: StoredDtypes,
        also: Also | None,
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
