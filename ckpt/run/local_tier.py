"""The fast tier of a run: frequent checkpoints in a folder of each host, on a disk or in memory.

Rules:

1. All ranks save together. A rank's file lies in the folder of its host, and each host writes a
   manifest that names the files of all ranks. Plain tensors are stored on each host. A rank
   therefore reads files of its own host only (`ckpt.plan.save_plan`).
2. A local step is valid if every host has it, of the same save, and every rank is on the host of
   that save. A new host's folder is empty, so that no local step is valid.
3. A step that is saved to the folder of the run is not saved locally too. No local save begins
   while a save to the folder of the run is in flight: training does not wait for the slow store.
4. Each host keeps the newest steps, and removes others once all hosts have a newer one.
5. The names of a run's files begin with its mark. Other programs may save to the folder too, below
   other names: their files, finished or not, are never removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt.errors import CkptError
from ckpt.loading.newest import BEGAN, ORDER, list_committed
from ckpt.removing.gc import remove_marked
from ckpt.run.policy import Keep, LocalOptions
from ckpt.stores.store import join_url, one_spelling
from ckpt.transfer.facts import folder_name, step_of
from sharding.errors import ArgumentError, without_secrets

HOSTS = "hosts"
"""The key of a local checkpoint's metadata for the URL of the run and the ranks on each host."""


@dataclass(frozen=True, slots=True)
class LocalTier:
    """One rank's view of the folder of its host."""

    options: LocalOptions
    run: str
    """The URL of the run."""
    hosts: Sequence[Sequence[int]]
    """The ranks on each host, by their rank in the default process group."""
    host: tuple[int, ...]
    """The ranks on this host."""

    @classmethod
    def of(
        cls, options: LocalOptions, run: str, places: Sequence[str], ranks: Sequence[int], rank: int
    ) -> LocalTier:
        """Returns the tier for `ranks[rank]`; `places` has the host and folder of each rank."""
        by_place: dict[str, list[int]] = {}
        for place, member in zip(places, ranks, strict=True):
            by_place.setdefault(place, []).append(member)
        return cls(options, run, [*by_place.values()], tuple(by_place[places[rank]]))

    def is_due(self, step: int) -> bool:
        """Returns whether a local checkpoint is due at this step."""
        return step % self.options.every_steps == 0

    def place(self, step: int) -> str:
        """Returns the folder of a step on this host."""
        return join_url(self.options.folder, folder_name(step))

    @property
    def keep(self) -> Keep:
        """The policy for the steps that stay on each host."""
        return Keep(last=self.options.keep)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata about the hosts for manifests."""
        return {HOSTS: json.dumps({"run": without_secrets(self.run), "ranks": self.hosts})}

    def steps(self) -> list[tuple[str, str, int]]:
        """Returns this host's steps of this run and these hosts, each after its begin and order.

        Raises ArgumentError if the folder has steps of another run.
        """
        try:
            found = list_committed(self.options.folder, None)
        except FileNotFoundError:
            return []
        mine, steps = self.metadata[HOSTS], []
        for one in found:
            step = step_of(one.name)
            if step is None or not one.metadata:
                continue
            hosts = one.metadata.get(HOSTS, "")
            self._check_own(one.name, hosts)
            if hosts == mine:
                began, order = (one.metadata.get(key, "") for key in (BEGAN, ORDER))
                steps.append((began, order, step))
        return steps

    @property
    def mark(self) -> int:
        """The mark of this run in the names of its files, a number below 2**30."""
        run = without_secrets(self.run).encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(run, digest_size=4).digest(), "big") >> 2

    def remove_left_overs(self) -> None:
        """Removes the files of this run's saves that were killed, because they may take memory.

        The owner of the folder calls this before its first save. Files of other programs stay. A
        failure costs only space.
        """
        with suppress(CkptError, OSError):
            remove_marked(one_spelling(self.options.folder), f"{self.mark:08x}")

    def _check_own(self, name: str, said: str) -> None:
        """Raises ArgumentError for a step of another run."""
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
