"""The removal of a run's checkpoints that no rule of a policy keeps, for a run and for `ckpt rm`.

Rules:

1. Newer checkpoints are removed first: a checkpoint before its base.
2. A checkpoint from which another borrows stays, until the other is removed. Of a link to a
   checkpoint of another run only the link is removed.
3. After a failure at one checkpoint, the others are still removed. The first error is raised at the
   end.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from warnings import warn

from ckpt.errors import CkptError, InUseError, NotACheckpointError, NotOwnerError, SaveFailedWarning
from ckpt.removing.delete import delete_step
from ckpt.run.history import list_steps
from ckpt.run.owner import FRESH_SECONDS, Ownership
from ckpt.run.policy import Keep, RunStep, removable
from ckpt.step_names import folder_name, pin_file
from ckpt.stores.store import Options, Store, join_url, local_path, open_store
from ckpt.transfer.bases import base_files, borrowers_among, borrowing, check_readable
from ckpt.transfer.facts import Checkpoints, checkpoints_in, write_index
from formats.errors import FormatError
from formats.native.manifest import MANIFEST, load, read_manifest
from sharding.errors import without_secrets

Look = Callable[[Collection[str] | None], object]
"""Looks for another owner of the folder, by the names in it if they are known."""

_log = logging.getLogger("ckpt.run")


@dataclass(frozen=True, slots=True)
class Removal:
    """One checkpoint that no rule keeps."""

    step: RunStep
    needed_by: str = ""
    """The reason why it stayed; empty if it was removed."""


def set_pin(url: str, step: int, name: str, is_pinned: bool, options: Options) -> None:
    """Pins a step of the run at `url` under a name, or removes the pin. One process calls this.

    Raises NotACheckpointError if the folder lacks the step, or the step the pin.
    """
    file, folder = pin_file(step, name), folder_name(step)
    place = join_url(url, folder)
    with open_store(url, options) as store:
        if not is_pinned:
            if file not in store.names():
                raise NotACheckpointError(
                    f"{place}: it is not pinned as {name!r}; `ckpt ls` shows the pins"
                )
            store.delete(file)
        elif f"{folder}/" not in store.entries() or not store.exists(f"{folder}/{MANIFEST}"):
            raise NotACheckpointError(
                f"{place}: there is no checkpoint to pin; `ckpt ls` shows the steps"
            )
        elif file not in store.names():
            store.commit(file, json.dumps({"step": step, "name": name}).encode(), True)


def removals(
    url: str,
    keep: Keep,
    options: Options,
    *,
    dry_run: bool = False,
    look: Look | None = None,
    owner: Ownership | None = None,
) -> Iterator[Removal]:
    """Removes checkpoints that no rule keeps, and yields each; with `dry_run`, only yields them.

    One process calls this. Raises StoreError if the store fails. `look` is called directly before a
    removal, with the names in the folder if a listing has just shown them; its error forbids it.
    With an `owner`, its last listing serves if it is fresh, and the index of the run is written at
    the end, where the store has use for one.
    """
    listing = None if owner is None else owner.listing(FRESH_SECONDS)
    run = list_steps(url, options, with_bases=local_path(url) is None, listing=listing)
    steps, checkpoints = removable(run.steps, keep, time.time()), run.found
    if checkpoints is None:
        return
    if checkpoints.files is None:
        yield from _one_by_one(url, steps, options, dry_run, look)
        return
    with open_store(url, options) as store:
        done, stay = _split_unneeded(url, store, steps, checkpoints)
        yield from stay
        if done and not dry_run:
            if look is not None:
                look(checkpoints.names() if checkpoints.is_recent else None)
            checkpoints = remove_together(store, done, checkpoints)
        yield from (Removal(one) for one in done)
        if owner is not None:
            if listing is None or done:
                owner.note(checkpoints.listing)
            try:
                write_index(store, checkpoints)
            except OSError as error:  # without an index all is right, by more requests
                _log.info("%s: the index was not written: %s", without_secrets(url), error)


def _split_unneeded(
    url: str, store: Store, steps: Sequence[RunStep], checkpoints: Checkpoints
) -> tuple[list[RunStep], list[Removal]]:
    """Returns the steps from which none borrows that stays, and those that must stay."""
    gone: set[str] = set()
    done, stay = [], []
    for step in steps:
        users = [name for name in borrowers_among(checkpoints, step.name) if name not in gone]
        try:
            if users:
                raise InUseError(f"{borrowing(users)} and cannot be read without it")
            check_readable(checkpoints, store, join_url(url, step.name), step.name, gone)
        except InUseError as error:
            stay.append(Removal(step, str(error).removeprefix(f"{join_url(url, step.name)}: ")))
        else:
            gone.add(step.name)
            done.append(step)
    return done, stay


def remove_together(
    store: Store, steps: Sequence[RunStep], checkpoints: Checkpoints
) -> Checkpoints:
    """Removes checkpoints together; returns those that are left. Raises OSError or FormatError.

    All manifests go first. A save that takes one of these checkpoints as its base meanwhile finds
    that its manifest is gone, and commits nothing; or it has committed before, the second listing
    shows it, and the files that it needs stay.
    """
    files: dict[str, list[str]] = {}
    failed: Exception | None = None
    for step in steps:
        its_files = (checkpoints.files or {}).get(step.name, {})
        try:
            files[step.name] = checkpoints.facts[step.name].files_among(its_files) or _files_of(
                store, step.name
            )
        except (OSError, FormatError) as error:
            failed = failed or error
    try:
        tags = {
            f"{name}/{MANIFEST}": checkpoints.known[name].tag
            for name in files
            if name in checkpoints.known
        }
        store.delete_all([f"{name}/{MANIFEST}" for name in files], tags)
    except OSError as error:
        failed = failed or error
    remaining = checkpoints_in(store)
    needed = base_files(store, remaining)
    if {*remaining.unclear} <= {*checkpoints.unclear}:
        store.delete_all(
            [
                f"{name}/{file}"
                for name, its in files.items()
                if name not in remaining.facts and name not in remaining.unreadable
                for file in its
                if (name, file) not in needed.files
                and not any(json.dumps(name).encode() in data for data in needed.damaged)
            ]
        )
    if failed is not None:
        raise failed
    return remaining


def _files_of(store: Store, name: str) -> list[str]:
    """Returns the files that the manifest of a checkpoint names; none without a manifest."""
    try:
        data = read_manifest(store, f"{name}/{MANIFEST}")
    except FileNotFoundError:
        return []
    return [file.name for file in load(data, f"{store.url}/{name}/{MANIFEST}").files]


def _one_by_one(
    url: str,
    steps: Sequence[RunStep],
    options: Options,
    dry_run: bool,
    look: Look | None,
) -> Iterator[Removal]:
    """Removes checkpoints on a store without a listing of all files, as `removals` does."""
    failed: Exception | None = None
    gone: set[str] | None = set() if dry_run else None
    for one in steps:
        place = join_url(url, one.name)
        needed_by = ""
        try:
            delete_step(place, True, options, gone, look and partial(look, None))
        except NotOwnerError:
            raise
        except InUseError as error:
            needed_by = str(error).removeprefix(f"{place}: ")
        except (CkptError, OSError) as error:
            failed = failed or error
            continue
        yield Removal(one, needed_by)
    if failed is not None:
        raise failed


class Tidying:
    """Removals in a thread, one after the other, for one rank of a run; each writes the index."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failed: tuple[str, Exception] | None = None

    def begin(
        self,
        url: str,
        keep: Keep,
        options: Options,
        look: Look,
        owner: Ownership | None = None,
    ) -> None:
        """Begins to remove checkpoints that no rule keeps, once the previous removal is over.

        `look` raises NotOwnerError if another job owns the folder. `owner`: as for `removals`.
        """
        self.wait()
        if owner is not None:
            with suppress(OSError):  # in this thread: a save that begins now needs it, too
                owner.listing(FRESH_SECONDS)
        arguments = (url, keep, options, look, owner)
        thread = threading.Thread(target=self._run, args=arguments, name="ckpt-keep", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            self._run(*arguments)
        else:
            self._thread = thread

    def wait(self) -> None:
        """Returns once no removal is under way."""
        if self._thread is not None:
            self._thread.join()

    def tell(self, stacklevel: int) -> None:
        """Warns of a removal that has failed since the last call."""
        failed, self._failed = self._failed, None
        if failed is not None:
            url, error = failed
            more = "" if isinstance(error, NotOwnerError) else "; the next save tries again"
            warn(
                f"{url}: checkpoints that no rule keeps were not removed: "
                f"{type(error).__name__}: {error}{more}",
                SaveFailedWarning,
                stacklevel=stacklevel + 1,
            )

    def _run(
        self, url: str, keep: Keep, options: Options, look: Look, owner: Ownership | None
    ) -> None:
        try:
            for _ in removals(url, keep, options, look=look, owner=owner):
                pass
        except Exception as error:
            if not keep.keeps_all:
                self._failed = url, error
