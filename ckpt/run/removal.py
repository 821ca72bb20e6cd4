"""The removal of a run's checkpoints that no rule of a policy keeps: by a run, or by `ckpt rm`.

Rules:

1. Newer checkpoints go first: of two that a base joins, the borrower goes before its base.
2. A checkpoint that another one borrows from stays, until that one has gone.
3. A failure at one checkpoint does not save the others. The first error is raised at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.deleting import was_deleted
from ckpt.errors import CkptError, InUseError
from ckpt.run.history import run_steps
from ckpt.run.retention import Keep, RunStep, removable
from ckpt.stores.store import Options, join_url
from ckpt.transfer.bases import borrowers


@dataclass(frozen=True, slots=True)
class Removal:
    """One checkpoint that no rule keeps."""

    step: RunStep
    needed_by: str = ""
    """Why it stayed; empty where it was removed."""


def removals(url: str, keep: Keep, options: Options, *, dry_run: bool = False) -> Iterator[Removal]:
    """Remove what no rule keeps, one checkpoint for each value; with `dry_run` only tell.

    One process calls this. Raises StoreError where the store fails.
    """
    failed: Exception | None = None
    gone: set[str] = set()
    for one in removable(run_steps(url, storage_options=options), keep, time.time()):
        place = join_url(url, one.name)
        try:
            if dry_run:
                users = [name for name in borrowers(place, options) if name not in gone]
                needed_by = f"{', '.join(users)} beside it borrow from it" if users else ""
            else:
                was_deleted(place, True, options)
                needed_by = ""
        except InUseError as error:
            needed_by = str(error)
        except (CkptError, OSError) as error:
            failed = failed or error
            continue
        if not needed_by:
            gone.add(one.name)
        yield Removal(one, needed_by)
    if failed is not None:
        raise failed
