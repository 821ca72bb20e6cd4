"""The checkpoints of a run, listed from its folder: steps, commit times, metrics, provenance.

Rules:

1. A checkpoint of a run is a folder `step-N` with a manifest of ckpt's own format. Other folders do
   not belong to the run, and the run never touches them. Where each `step-N` is a checkpoint of
   another format, no run begins.
2. Step, metrics and provenance are text at the beginning of the manifest: a listing reads a few KiB
   of each checkpoint.
3. A checkpoint whose manifest cannot be read is damaged. `restore` warns of it and skips it. No
   policy counts or removes it, because only the manifest names its files.
"""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple
from warnings import warn

from ckpt.errors import ExistsError, UnreadableWarning
from ckpt.loading.newest import BEGAN, ORDER, Committed, list_checkpoints
from ckpt.run.policy import RunStep, newest_steps
from ckpt.step_names import pins_in, step_of
from ckpt.stores.store import Options, open_store
from ckpt.transfer.facts import Checkpoints, Listing
from formats.detect import folder_format
from formats.native.manifest import NONFINITE
from sharding.errors import ArgumentError, ArgumentTypeError, format_names, without_secrets

__all__ = ["RunStep", "run_steps"]

STEP, METRICS, PROVENANCE = "step", "metrics", "run"
"""Keys of the metadata in a manifest, beside BEGAN and ORDER."""
SHOWN = 3
"""The most steps in a warning."""
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
    steps = [step for one in seen.newest if (step := run_step(one)) is not None]
    wrong = {name: e for name, e in seen.found.unreadable.items() if step_of(name) is not None}
    if not steps:
        for error in wrong.values():
            raise error
    bare = seen.found.is_bare
    pinned = (replace(one, pins=pins.get(one.step, ()), is_bare=bare(one.name)) for one in steps)
    reasons = {name: str(error) for name, error in wrong.items()}
    return RunListing(newest_steps(pinned), reasons, seen.found)


def unreadable_warning(url: str, unreadable: Mapping[str, str]) -> UnreadableWarning:
    """Returns the warning that names steps that cannot be read, with the reasons."""
    reasons = [*unreadable.values()]
    said = "; ".join(reasons[:SHOWN])
    more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return UnreadableWarning(
        f"{without_secrets(url)}: left out: {format_names([*unreadable], SHOWN)}, which "
        "cannot be read: "
        f"{said}{more}"
    )


def check_no_foreign_steps(url: str, options: Options) -> None:
    """Raises ExistsError if the folder of a step is a checkpoint of another format."""
    with suppress(FileNotFoundError), open_store(url, options) as store:
        for name in store.folders():
            found = None if step_of(name) is None else folder_format(store.entries(name))
            if found is not None:
                raise ExistsError(
                    f"{url}: its {name} is a checkpoint of another format ({found.name}), which a "
                    f"Checkpointer neither restores nor replaces; convert it to the folder of a "
                    f"new run: ckpt.convert('{url}/{name}', 'NEW/{name}', to='ckpt')"
                )


def run_step(found: Committed) -> RunStep | None:
    """Returns a checkpoint as one of a run; None if its folder is not that of a step."""
    step = step_of(found.name)
    if step is None:
        return None
    said = found.metadata
    metrics, program = metrics_of(said), program_of(said)
    age = found.age
    one = RunStep(step, found.name, age.time, metrics, program, not said, age.order)
    count = said.get(NONFINITE, "")
    return replace(one, nonfinite=int(count)) if count.isdecimal() and len(count) < 20 else one


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
        self.epoch = 1 + max((one.order[0] for one in known if one.order is not None), default=0)
        """The epoch of this start; `is_taken` tells whether it owns the run, and it is final."""
        self.is_taken = False
        self._number = 0
        self._began = max((one.time for one in known), default=0.0)

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
        found = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def metrics_text(metrics: Mapping[str, object]) -> str:
    """Returns metrics as text for a manifest. Raises ArgumentTypeError unless they are numbers.

    >>> metrics_text({"loss": 0.5, "best": float("inf")})
    '{"best": Infinity, "loss": 0.5}'
    """
    if not isinstance(metrics, Mapping):
        raise ArgumentTypeError(f"metrics is a {type(metrics).__name__}; give numbers by name")
    return json.dumps({n: _number(n, value) for n, value in metrics.items()}, sort_keys=True)


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
