"""The fast tier of a run: a folder of each host, on a disk or in memory, saved more often.

Rules:

1. All ranks save together. A rank's file lies in the folder of its host, and each host writes a
   manifest that names the files of all. Plain tensors are stored on each host. So a rank reads the
   files of its host alone (`ckpt.plan.host_plan`).
2. A step counts where every host has it, of the same save, and every rank is on the host that it
   was on. The folder of a host that was replaced is empty, and then no local step counts.
3. A step that is saved to the folder of the run is not saved here too, and none begins here while
   such a save is under way: training does not wait for the slow store.
4. Each host keeps the newest steps, and removes others after all hosts have a newer one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt.collecting import gc
from ckpt.errors import CkptError
from ckpt.newest import committed
from ckpt.run.history import BEGAN, folder_name, step_of
from ckpt.run.retention import Keep
from ckpt.stores.store import join_url, local_path
from sharding.errors import ArgumentError
from sharding.url_secrets import without_secrets

HOSTS = "hosts"
"""The key of the metadata of a local checkpoint: which run, and which ranks are on which host."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """The arguments of a `Checkpointer` for its local folder. Raises ArgumentError."""

    folder: str
    every_steps: int
    keep: int

    def __post_init__(self) -> None:
        for name, number in (("every_steps", self.every_steps), ("keep", self.keep)):
            if type(number) is not int or number < 1:
                raise ArgumentError(f"local_{name}={number!r}: give a whole number of at least 1")


def local_options(
    folder: str | os.PathLike[str] | None, every_steps: int | None, keep: int
) -> LocalOptions | None:
    """The arguments, checked; None where there is no local folder."""
    if (folder is None) != (every_steps is None):
        raise ArgumentError("local= and local_every_steps= belong together; give both or none")
    if folder is None or every_steps is None:
        return None
    path = local_path(folder)
    if path is None:
        raise ArgumentError(f"local={os.fspath(folder)!r}: give a folder on a disk or in memory")
    return LocalOptions(os.path.abspath(path), every_steps, keep)


@dataclass(frozen=True, slots=True)
class LocalTier:
    """The folder of this host, as one rank sees it."""

    options: LocalOptions
    run: str
    """The URL of the run."""
    hosts: Sequence[Sequence[int]]
    """The ranks on each host, by their rank in the default process group."""
    host: tuple[int, ...]
    """Those on this host."""

    @classmethod
    def of(
        cls, options: LocalOptions, run: str, places: Sequence[str], ranks: Sequence[int], rank: int
    ) -> LocalTier:
        """The tier for `ranks[rank]`, where each of the ranks has told its host and folder."""
        by_place: dict[str, list[int]] = {}
        for place, member in zip(places, ranks, strict=True):
            by_place.setdefault(place, []).append(member)
        return cls(options, run, [*by_place.values()], tuple(by_place[places[rank]]))

    def is_due(self, step: int) -> bool:
        """Whether a local checkpoint is due at this step."""
        return step % self.options.every_steps == 0

    def place(self, step: int) -> str:
        """The folder of a step on this host."""
        return join_url(self.options.folder, folder_name(step))

    @property
    def keep(self) -> Keep:
        """The steps that stay on each host."""
        return Keep(last=self.options.keep)

    @property
    def metadata(self) -> dict[str, str]:
        """What the manifests say of the hosts."""
        return {HOSTS: json.dumps({"run": without_secrets(self.run), "ranks": self.hosts})}

    def steps(self) -> list[tuple[str, int]]:
        """The steps that this host has, of this run and these hosts, with the beginnings of saves.

        Raises ArgumentError where the folder has steps of another run.
        """
        try:
            found = committed(self.options.folder, None)
        except FileNotFoundError:
            return []
        mine, steps = self.metadata[HOSTS], []
        for one in found:
            step = step_of(one.name)
            if step is None or not one.metadata:
                continue
            said = one.metadata.get(HOSTS, "")
            self._check_own(one.name, said)
            if said == mine:
                steps.append((one.metadata.get(BEGAN, ""), step))
        return steps

    def remove_left_overs(self) -> None:
        """Remove the files of saves that were killed: they may be in memory.

        Nobody else saves here, as the folder belongs to this run. A failure costs only space.
        """
        with suppress(CkptError, OSError):
            gc(self.options.folder, delete=True, older_than=0.0)

    def _check_own(self, name: str, said: str) -> None:
        """Raise ArgumentError for a step of another run."""
        try:
            run = json.loads(said)["run"]
        except (ValueError, TypeError, KeyError):
            run = None
        if run != without_secrets(self.run):
            whose = "no run's local folder" if run is None else f"the run {run}"
            raise ArgumentError(
                f"{join_url(self.options.folder, name)} belongs to {whose}; give each run a local "
                "folder of its own"
            )
