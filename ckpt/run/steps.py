"""The checkpoints of a run: listed with their metrics, pinned, and removed by a policy.

Rules:

1. A checkpoint of a run is a folder `step-N` with a manifest of ckpt's own format. Other folders do
   not belong to the run, and the run never touches them. No run begins where each `step-N` is a
   checkpoint of another format, or where the checkpoints have other names with a number.
2. Step, metrics and provenance are text at the beginning of the manifest: a listing reads a few KiB
   of each checkpoint.
3. A checkpoint whose manifest cannot be read is damaged. `restore` warns of it and skips it. No
   policy counts or removes it, because only the manifest names its files.
4. Newer checkpoints are removed first: a checkpoint before its base.
5. A checkpoint from which another borrows stays, until the other is removed. Of a link to a
   checkpoint of another run only the link is removed.
6. After a failure at one checkpoint, the others are still removed. The first error is raised at the
   end.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from warnings import warn

from ckpt.errors import (
    CkptError,
    ExistsError,
    InUseError,
    NotACheckpointError,
    NotOwnerError,
    SaveFailedWarning,
    UnreadableWarning,
)
from ckpt.loading.newest import BEGAN, ORDER, Committed, list_checkpoints
from ckpt.removing.delete import delete_step
from ckpt.run.owner import FRESH_SECONDS, Ownership
from ckpt.run.policy import Keep, RunStep, newest_steps, removable
from ckpt.stores.store import Options, Store, join_url, local_path, natural, open_store
from ckpt.transfer.bases import base_files, borrowers_among, borrowing, check_readable
from ckpt.transfer.facts import (
    Checkpoints,
    Listing,
    checkpoints_in,
    folder_name,
    pin_file,
    pins_in,
    step_of,
    write_index,
)
from formats.detect import folder_format
from formats.errors import FormatError
from formats.native.manifest import MANIFEST, NONFINITE, file_names, read_manifest
from sharding.errors import ArgumentError, ArgumentTypeError, format_names, without_secrets

__all__ = ["RunStep", "run_steps"]

STEP, METRICS, PROVENANCE = "step", "metrics", "run"
"""Keys of the metadata in a manifest, beside BEGAN and ORDER."""
SHOWN = 3
"""The most steps in a warning."""
LOOKS = 8
END_OF_STEPS = 10**18
"""The first step that is too large for the name of a folder."""
MOST = 1 << 1000
"""Larger integers cannot be metrics: they exceed all floats."""


def check_step(step: object) -> int:
    """Returns a step as an int.

    Raises ArgumentTypeError unless it is a whole number, ArgumentError for one whose folder
    `step_of` does not know.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"step is {step!r:.80}; give a whole number") from None
    if not 0 <= number < END_OF_STEPS:
        raise ArgumentError(f"step is {number}; give a number from 0 to {END_OF_STEPS - 1}")
    return number


def run_steps(url: str | os.PathLike[str], *, storage_options: Options = None) -> list[RunStep]:
    """Returns the committed checkpoints of the run at `url`, newest first. Does not communicate.

    Raises OSError if the folder cannot be listed; a folder that does not exist has no steps.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ckpt.Checkpointer(folder, every_steps=2) as run:
    ...         saved = [run.save(n, {"w": torch.ones(2)}, {"loss": 1 / n}) for n in (1, 2, 3, 4)]
    ...     [(one.step, one.metrics["loss"]) for one in ckpt.run_steps(folder)]
    [(4, 0.25), (2, 0.5)]
    """
    run = list_steps(url, storage_options)
    if run.unreadable:
        warn(unreadable_warning(os.fspath(url), run.unreadable), stacklevel=2)
    return run.steps


class RunListing(NamedTuple):
    """The folder of a run."""

    steps: list[RunStep]
    """The committed checkpoints, newest first."""
    unreadable: dict[str, str]
    """Why other steps cannot be read, by the names of their folders."""
    found: Checkpoints | None
    """All checkpoints in the folder; None if there is no folder."""


def list_steps(
    url: str | os.PathLike[str],
    options: Options,
    with_bases: bool = False,
    listing: Listing | None = None,
) -> RunListing:
    """Returns the steps of a run. `listing` is one of all files, if the caller has it.

    Raises OSError if the only steps are some that cannot be read: a run does not begin anew there.
    """
    try:
        seen = list_checkpoints(url, options, with_bases, listing)
        with open_store(url, options) as store:
            names = seen.found.names()
            pins = pins_in(store.names() if names is None else names)
    except FileNotFoundError:
        return RunListing([], {}, None)
    steps = [step for checkpoint in seen.newest if (step := run_step(checkpoint)) is not None]
    wrong = {name: e for name, e in seen.found.unreadable.items() if step_of(name) is not None}
    if not steps:
        for error in wrong.values():
            raise error
    bare = seen.found.is_bare
    pinned = (replace(s, pins=pins.get(s.step, ()), is_bare=bare(s.name)) for s in steps)
    reasons = {name: str(error) for name, error in wrong.items()}
    return RunListing(newest_steps(pinned), reasons, seen.found)


def unreadable_warning(url: str, unreadable: Mapping[str, str]) -> UnreadableWarning:
    """Returns the warning that names steps that cannot be read, with the reasons."""
    reasons = [*unreadable.values()]
    shown = "; ".join(reasons[:SHOWN])
    more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return UnreadableWarning(
        f"{without_secrets(url)}: left out: {format_names([*unreadable], SHOWN)}, which "
        "cannot be read: "
        f"{shown}{more}"
    )


def check_no_foreign_steps(url: str, options: Options) -> None:
    """Raises ExistsError if a folder looks like a step, and is none that a run restores.

    It is a checkpoint of another format, or one with a number in another name than `step-N`. Looks
    at the last `LOOKS` folders with a number.
    """
    with suppress(FileNotFoundError), open_store(url, options) as store:
        numbered = [name for name in store.folders() if any(map(str.isdecimal, name))]
        for name in sorted(numbered, key=natural, reverse=True)[:LOOKS]:
            entries = store.entries(name)
            other = folder_format(entries)
            if step_of(name) is not None and other is not None:
                raise ExistsError(
                    f"{url}: its {name} is a checkpoint of another format ({other.name}), which a "
                    f"Checkpointer neither restores nor replaces; convert it to the folder of a "
                    f"new run: ckpt.convert('{url}/{name}', 'NEW/{name}', to='ckpt')"
                )
            if step_of(name) is None and (other is not None or MANIFEST in entries):
                raise ExistsError(
                    f"{url}: its {name} is a checkpoint, but no step of a run, whose folders are "
                    f"named step-N: a Checkpointer here would begin anew; give the run another "
                    f"folder, and begin it with run.start_from('{url}/{name}', state)"
                )


def run_step(found: Committed) -> RunStep | None:
    """Returns a checkpoint as one of a run; None if its folder is not that of a step."""
    step = step_of(found.name)
    if step is None:
        return None
    metadata, age = found.metadata, found.age
    count = metadata.get(NONFINITE, "")
    nonfinite = int(count) if count.isdecimal() and len(count) < 20 else None
    metrics, program = metrics_of(metadata), program_of(metadata)
    return RunStep(
        step, found.name, age.time, metrics, program, not metadata, age.order, nonfinite=nonfinite
    )


class RunCounter:
    """The order of the saves of one start of a run, which no clock decides.

    The epoch of a start is above those of all checkpoints that it found. The begin of a save, by
    the clock, is after that of every save before it, so that programs that know no counter order
    them alike.

    >>> counter = RunCounter([RunStep(7, "step-7", time=4e9, order=(2, 5))])
    >>> [text for _ in range(2) for text in counter.next().values()]
    ['3.1', '4000000000.000001', '3.2', '4000000000.000002']
    """

    def __init__(self, before: Iterable[RunStep]) -> None:
        known = list(before)
        self.epoch = 1 + max((step.order[0] for step in known if step.order is not None), default=0)
        """The epoch of this start; `is_taken` tells whether it owns the run, and it is final."""
        self.is_taken = False
        self._number = 0
        self._began = max((step.time for step in known), default=0.0)

    def take(self, epoch: int) -> None:
        """Notes that this start owns the run with this epoch (`ckpt.run.owner`)."""
        self.epoch, self.is_taken = epoch, True

    def next(self) -> dict[str, str]:
        """Returns the metadata of the next save that tells its order."""
        self._number += 1
        self._began = max(time.time(), self._began + 1e-6)
        return {ORDER: f"{self.epoch}.{self._number}", BEGAN: f"{self._began:.6f}"}


def metrics_of(metadata: Mapping[str, str]) -> dict[str, float]:
    """Returns the metrics in a manifest's metadata; empty if they are not numbers by name."""
    return {
        name: float(value)
        for name, value in _object(metadata, METRICS).items()
        if isinstance(value, float) or (type(value) is int and abs(value) < MOST)
    }


def program_of(metadata: Mapping[str, str]) -> dict[str, object]:
    """Returns the program that saved, from a manifest's metadata; empty if it is unknown."""
    return _object(metadata, PROVENANCE)


def _object(metadata: Mapping[str, str], key: str) -> dict[str, object]:
    try:
        document = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def metrics_text(metrics: Mapping[str, object]) -> str:
    """Returns metrics as text for a manifest. Raises ArgumentTypeError unless they are numbers.

    >>> metrics_text({"loss": 0.5, "best": float("inf")})
    '{"best": Infinity, "loss": 0.5}'
    """
    if not isinstance(metrics, Mapping):
        raise ArgumentTypeError(f"metrics is a {type(metrics).__name__}; give numbers by name")
    numbers = {n: _number(n, value) for n, value in metrics.items()}
    return json.dumps(numbers, sort_keys=True) if numbers else "{}"


def _number(name: object, value: object) -> float:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) is not None:  # a tensor, or of numpy
        with suppress(RuntimeError, ValueError):  # it has several elements, or no memory
            value = item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"metrics[{name!r}] is a {type(value).__name__}; give a number")
    if not isinstance(name, str):
        raise ArgumentTypeError(f"metrics has the name {name!r:.80}; give a text")
    if isinstance(value, int) and abs(value) >= MOST:
        raise ArgumentTypeError(f"metrics[{name!r}] is an integer above all floats")
    return float(value)


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
        yield from (Removal(step) for step in done)
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
    return file_names(data, f"{store.url}/{name}/{MANIFEST}")


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
    for step in steps:
        place = join_url(url, step.name)
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
        yield Removal(step, needed_by)
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
