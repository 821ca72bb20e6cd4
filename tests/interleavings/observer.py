"""The invariants of a run's folder, checked after each change of the store.

1. A manifest names files that are there, in full length: as long as a checkpoint is committed, it
   is readable. Only a removal that a rule allows, or a newer save of its step, ends it.
2. From the first commit on, some checkpoint is there at every moment.
3. A process changes nothing outside of the places that it was given.
4. A run has one owner. A job of a lower epoch commits only what it looked for before the other job
   took the run, and removes at most one checkpoint from then on, in a bucket those that one look
   has shown.
5. A load gives the state of one save that was committed; `latest` gives no step that was saved
   before the newest one of the moment when it began.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import ckpt
from ckpt.loading.newest import ORDER, order_of
from formats.native.manifest import MANIFEST, Manifest, load
from tests.interleavings.simulation import CLOCK_SECONDS, Store, World, here

Order = tuple[int, int]
MOST_CALLS_AFTER_LOOK = 1
"""Between a job's look for another owner and the commit lies the request that commits."""
_OWNER = re.compile(r"owner-(\d+)\.json")
_OF_MEETING = ("StoreError", "NotOwnerError", "InUseError", "ReplacedError")
_OF_RUN = re.compile(r"owner-\d+\.json|ckpt-index\.json")
_parsed: dict[bytes, Manifest] = {}


@dataclass(frozen=True, slots=True)
class Rights:
    """What a process may do beside adding checkpoints to the run."""

    keep_last: int | None = None
    """It removes steps that are not among so many newest."""
    removes: tuple[str, ...] = ()
    """Folders whose checkpoint it may remove."""
    writes: str = "run/"
    """The place in which it makes and removes files."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed checkpoint."""

    order: Order
    files: Mapping[str, int]
    """The sizes of its files by name."""
    at: int
    """The number of calls before it."""


def state(value: float) -> dict[str, Any]:
    """A state whose parts all have one value, which no other save has."""
    return {"a": torch.full((2,), float(value)), "b": torch.full((2,), float(value)), "v": value}


@dataclass
class Observer:
    """What has happened in one world. `rights` are by the name of the process."""

    store: Store
    seed: int
    rights: Mapping[str, Rights] = field(default_factory=dict)
    has_locks: bool = True
    """Whether the store lets one of several commits win."""

    def __post_init__(self) -> None:
        self.world = World(self.store, self.seed, self.changed)
        self.committed: dict[str, Commit] = {}
        self.values: set[float] = set()
        """The values of all saves that were begun."""
        self.taken: dict[int, int] = {}
        """By epoch, the number of calls before the job took the run."""
        self.has_two_owners = False
        """Whether two jobs took the run at once, on a server without conditions (docs/runs.md)."""
        self.widest = 0
        """The most calls of a job between its last look and a commit that came too late."""
        self._epochs: dict[str, int] = {}
        """The epoch of each job that has one."""
        self.at_end: list[Callable[[], None]] = []
        """Checks of a story, once all have ended."""
        self._late_looks: dict[str, tuple[int, int]] = {}
        """By process, the look before its removals that end after a take-over."""

    def changed(self, verb: str, path: str) -> None:
        """Checks the change that the current process has made."""
        rights = self.rights.get(here().name, Rights())
        if not f"{path}/".startswith(rights.writes):
            self.world.fail(f"{here().name} {verb} {path}, outside of {rights.writes}")
        if not path.startswith("run/"):
            return
        folder, _, name = path.removeprefix("run/").partition("/")
        was = self.committed.get(folder)
        if name == MANIFEST:
            if verb == "makes":
                self._commits(folder)
            else:
                self._removes(folder, rights)
        elif verb == "removes" and was is not None and name in was.files:
            self.world.fail(f"{here().name} removes {path}, a file of a committed checkpoint")
        elif verb == "makes" and (owner := _OWNER.fullmatch(folder)):
            self.has_two_owners |= int(owner[1]) in self.taken and not self.has_locks
            self.taken.setdefault(int(owner[1]), self._now)
            self._epochs[here().name] = int(owner[1])

    @property
    def _now(self) -> int:
        return 0 if self.world.scheduler is None else len(self.world.scheduler.trace)

    def newest(self) -> Order:
        """The order of the checkpoint that was saved last, of those that are there."""
        return max((one.order for one in self.committed.values()), default=(0, 0))

    def _commits(self, folder: str) -> None:
        files = self.world.files()
        data = files[f"run/{folder}/{MANIFEST}"]
        manifest = _parsed.get(data) or _parsed.setdefault(data, load(data, folder))
        sizes = {file.name: file.size for file in manifest.files}
        for name, size in sizes.items():
            if len(files.get(f"run/{folder}/{name}", b"")) != size:
                self.world.fail(f"{here().name} commits {folder} without its file {name}")
        order = order_of(manifest.writer.get(ORDER, "")) or (0, 0)
        self.committed[folder] = Commit(order, sizes, self._now)
        self._check_look(f"commits {folder}", order[0])

    def _removes(self, folder: str, rights: Rights) -> None:
        was = self.committed.pop(folder, None)
        if was is None:
            return
        if self.has_two_owners or (rights.keep_last is not None and self._is_late(folder)):
            return
        newer = [one for one in self.committed.values() if one.order > was.order]
        is_old = rights.keep_last is not None and len(newer) >= rights.keep_last
        if not is_old and folder not in rights.removes:
            self.world.fail(f"{here().name} removes {folder}, which no rule allows")
        if not self.committed and folder not in rights.removes:
            self.world.fail(f"{here().name} removes {folder}, the last checkpoint")

    def _check_look(self, doing: str, epoch: int, is_removal: bool = False) -> None:
        """Invariant 4, for a change by a job of this epoch."""
        later = [at for other, at in self.taken.items() if other > epoch > 0]
        if not later or self.world.scheduler is None or self.has_two_owners:
            return
        looked, end = here().looked
        if looked > min(later):
            self.world.fail(f"{here().name} {doing}, and has looked after the take-over")
        own = [call for actor, call in self.world.scheduler.trace[end:] if actor.process is here()]
        if is_removal and self.world.bucket is not None:
            if any(call.name.startswith("LIST") for call in own):
                self.world.fail(f"{here().name} {doing} after a listing that it has not looked at")
            return
        self.widest = max(self.widest, len(own))
        if len(own) > MOST_CALLS_AFTER_LOOK:
            self.world.fail(f"{here().name} {doing} {len(own)} calls after its look: {own}")

    def _is_late(self, folder: str) -> bool:
        """Whether a job removes a checkpoint after another took the run; checks invariant 4.

        Where a store deletes without a condition, this may be a step that the other one has saved
        again, and its only one (docs/runs.md).
        """
        mine = self._epochs.get(here().name, 0)
        if not any(other > mine > 0 for other in self.taken):
            return False
        self._check_look(f"removes {folder}", mine, is_removal=True)
        if self._late_looks.setdefault(here().name, here().looked) != here().looked:
            self.world.fail(f"{here().name} removes {folder} by a second look after the take-over")
        return True

    # For the programs of actors.

    def begins(self, value: float) -> dict[str, Any]:
        """A state to save."""
        self.values.add(value)
        return state(value)

    def check(self, found: Any) -> float:
        """Fails unless a loaded state is that of one save; returns its value (invariant 5)."""
        values = {*found["a"].tolist(), *found["b"].tolist(), float(found["v"])}
        if len(values) != 1 or not values <= self.values:
            self.world.fail(f"a mix was loaded: {found}")
        return values.pop()

    def check_newest(self, place: str, before: Order) -> None:
        """Fails if the checkpoint at a place is older than another that was there all the time."""
        found = self.committed.get(place.rpartition("/")[2])
        is_there = any(one.order == before for one in self.committed.values())
        if found is not None and is_there and found.order < before:
            self.world.fail(f"{place} of {found.order} is told as newest, {before} was there")

    def check_end(self, is_one_ended: bool) -> None:
        """Fails if a check of the story does, or if `ckpt.gc` does not find a file that is left.

        Nothing warns of another error than those of the store and of jobs that meet.
        """
        for warned in map(str, () if is_one_ended else self.world.warned()):
            if not any(error in warned for error in _OF_MEETING):
                raise AssertionError(warned)
        for check in () if is_one_ended else self.at_end:
            check()
        there = set(self.committed)
        with self.world.acting("gc"):
            ckpt.gc(self.world.run, delete=True, older_than=-CLOCK_SECONDS * 2)
        named = {f"run/{folder}/{MANIFEST}" for folder in there}
        for folder in there:
            named |= {f"run/{folder}/{name}" for name in self.committed[folder].files}
        left = {path for path in self.world.files() if path.startswith("run/")}
        over = [path for path in left - named if not _OF_RUN.fullmatch(path.removeprefix("run/"))]
        if over:
            raise AssertionError(f"left over, and gc does not tell: {over}")
