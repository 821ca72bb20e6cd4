"""`ckpt top`: the saves and conversions under way, live, and the last checkpoints of a run.

All figures come from the files of the run (`ckpt.removing.progress_files`), so the command works
from each host that sees the folder, and costs the run nothing.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import time
from argparse import ArgumentParser
from calendar import timegm
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ckpt.display import count, printable, size
from tools.exit_codes import ExitCode, Help
from tools.options import Option, add_storage_options, mapping
from tools.text import age, columns, duration, has_answered, json_text, place

if TYPE_CHECKING:
    from ckpt.loading.newest import Committed
    from ckpt.removing.progress_files import FileUnderWay, UnderWay

HELP = Help(
    summary="watch the saves and conversions under way in a folder, and its last checkpoints",
    description="""\
Watches the saves and conversions under way in a folder, file by file, and the last checkpoints. It
reads the files of the run alone: any host that sees the folder can watch, and the run does not
notice it.""",
    examples=(
        ("ckpt top runs/gpt", "a view that is drawn anew each second, until Ctrl-C"),
        ("ckpt top runs/gpt --once --json", "one view, for a program"),
    ),
    codes=(ExitCode.NOT_A_CHECKPOINT, ExitCode.DAMAGED, ExitCode.STORE),
)
FILES_SHOWN = 16
"""Files of one save that are shown: those that need most time."""
ATTEMPTS_SHOWN = 4
CHECKPOINTS_SHOWN = 10
LOOKS = 6
"""Rates are averages over the time of so many looks."""
REREAD_EVERY = 10
"""Looks after which the checkpoints are listed again: the run removes old ones."""
_SECONDS = re.compile(r"\d{1,9}\.\d{3}")
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, slots=True)
class Options:
    """The place, and the form of the view."""

    url: str
    once: bool
    interval: float
    as_json: bool
    verbose: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint of the folder."""

    name: str
    bytes: int
    """The sizes of its files."""
    world_size: str
    """The number of ranks that saved it; empty if the manifest does not tell."""
    committed: float | None
    """The time of its commit, in seconds since 1970."""
    save_seconds: float | None
    """The time from the call to the commit; None if the manifest does not tell."""
    stall_seconds: float | None
    """The part of it in which the state was copied, and training had to wait."""


@dataclass(frozen=True, slots=True)
class Look:
    """All that is under way at one time."""

    at: float
    under_way: Sequence[UnderWay]


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "url",
        metavar="RUN",
        nargs="?",
        default=".",
        help="the folder of a run, a checkpoint, or the target of a conversion; default: here",
    )
    add("--once", action="store_true", help="print one view and end; so does a pipe")
    add(
        "--interval",
        type=duration,
        default=1.0,
        metavar="SECONDS",
        help="the time between two looks; default: 1",
    )
    add("--json", dest="as_json", action="store_true", help="one view as JSON")
    add("-v", "--verbose", action="store_true", help="all files, not only the slowest")
    add_storage_options(parser)


def run(options: Options) -> int:
    """Prints a view after two looks, or on a terminal one after each look until Ctrl-C.

    Raises NotACheckpointError if the folder does not exist and nothing is under way to it.
    """
    views = _views(options)
    is_watched = sys.stdout is not None and sys.stdout.isatty()  # None after `>&-`
    if options.once or options.as_json or not is_watched:
        next(views)  # without rates
        looks, found = next(views)
        if options.as_json:
            print(json_text(_summary(options, looks, found)))
        else:
            print("\n".join(_lines(options, looks, found)))
        return ExitCode.FINE
    with suppress(KeyboardInterrupt):
        for looks, found in views:
            _refresh(list(_lines(options, looks, found)))
    return ExitCode.FINE


def _views(options: Options) -> Iterator[tuple[Sequence[Look], list[Checkpoint]]]:
    """Yields the last looks and the checkpoints, again and again."""
    from ckpt.errors import NotACheckpointError
    from ckpt.opening.sources import similar_path
    from ckpt.removing.gc import is_folder
    from ckpt.removing.progress_files import Watch

    settings = mapping(options.storage_options)
    watch, looks = Watch(options.url, settings), deque[Look](maxlen=LOOKS)
    looks.append(Look(time.monotonic(), watch.look()))
    checkpoints = _checkpoints(options.url, settings)
    if not (looks[0].under_way or checkpoints or is_folder(options.url, settings)):
        raise NotACheckpointError(
            f"{options.url}: there is no such folder, and no conversion to it is under way; give "
            f"the folder of a run, or the target of a conversion{similar_path(options.url)}"
        )
    for number in itertools.count(1):
        yield looks, checkpoints
        time.sleep(options.interval)
        looks.append(Look(time.monotonic(), watch.look()))
        has_changed = _names(looks[-2]) != _names(looks[-1])  # a save has ended, or begun
        if has_changed or number % REREAD_EVERY == 0:
            checkpoints = _checkpoints(options.url, settings)


def _names(look: Look) -> set[tuple[str, str]]:
    return {(save.name, save.attempt) for save in look.under_way}


def _checkpoints(url: str, settings: Mapping[str, object] | None) -> list[Checkpoint]:
    """Returns the last checkpoints of a folder, newest first."""
    from ckpt.loading.newest import list_committed
    from ckpt.stores.store import is_file, join_url, open_store

    if is_file(url, settings):
        return []
    found = []
    for checkpoint in list_committed(url, settings)[:CHECKPOINTS_SHOWN]:
        with open_store(join_url(url, checkpoint.name), settings) as store:
            found.append(_checkpoint(checkpoint, sum(store.sizes().values())))
    return found


def _checkpoint(committed: Committed, nbytes: int) -> Checkpoint:
    from formats.native.manifest import SAVE_SECONDS, STAGED_SECONDS

    took = _seconds(committed.metadata.get(SAVE_SECONDS))
    staged = _seconds(committed.metadata.get(STAGED_SECONDS))
    ended = None
    with suppress(ValueError):
        ended = float(timegm(time.strptime(committed.time, _TIME_FORMAT)))
    ranks = committed.metadata.get("world_size", "")
    return Checkpoint(
        committed.name, nbytes, ranks, ended, took, took if staged is None else staged
    )


def _seconds(text: str | None) -> float | None:
    """Returns a time of a manifest; None for any other text."""
    return float(text) if text is not None and _SECONDS.fullmatch(text) else None


def _rates(looks: Sequence[Look]) -> dict[tuple[str, str, str], float]:
    """Returns the rates since the first look that has the file."""
    from ckpt.removing.progress_files import rates

    found: dict[tuple[str, str, str], float] = {}
    for before in list(looks)[:-1]:
        now = looks[-1]
        found = {**rates(before.under_way, now.under_way, now.at - before.at), **found}
    return found


def _refresh(lines: list[str]) -> None:
    """Puts the lines in the place of those on the terminal."""
    has_answered()
    width, height = shutil.get_terminal_size()
    shown = [line[:width] + _REST_OF_LINE for line in lines[: height - 1]]
    print(_HOME + "\n".join(shown) + "\n" + _REST_OF_SCREEN, end="", flush=True)


def _lines(
    options: Options, looks: Sequence[Look], checkpoints: Sequence[Checkpoint]
) -> Iterator[str]:
    """Yields the view for people."""
    known, under_way = _rates(looks), looks[-1].under_way
    later = [_later(save, checkpoints) for save in under_way]
    yield f"{place(options.url)} at {time.strftime('%H:%M:%S')}"
    if all(later):
        yield "nothing is under way"
    for save, name in list(zip(under_way, later, strict=True))[:ATTEMPTS_SHOWN]:
        lines = (
            _attempt_lines(options, save, known)
            if name is None
            else [_describe_outdated(save, name)]
        )
        yield from ("", *lines)
    if len(under_way) > ATTEMPTS_SHOWN:
        yield f"and {len(under_way) - ATTEMPTS_SHOWN} more, whose last writes are older"
    if checkpoints:
        yield ""
        head = ("CHECKPOINT", "SIZE", "RANKS", "AGE", "TOOK", "STALL")
        yield from columns([head, *map(_cells, checkpoints)], right=[1, 2, 3, 4, 5])


def _cells(checkpoint: Checkpoint) -> tuple[str, ...]:
    return (
        printable(checkpoint.name),
        size(checkpoint.bytes),
        printable(checkpoint.world_size or "-"),
        "-" if checkpoint.committed is None else age(time.time() - checkpoint.committed),
        _time(checkpoint.save_seconds),
        _time(checkpoint.stall_seconds),
    )


def _later(save: UnderWay, checkpoints: Sequence[Checkpoint]) -> str | None:
    """Returns a checkpoint that was committed after the last write of one without a manifest.

    A run saves in order, so these files belong to a removal under way or to a killed save.
    """
    is_whole = save.attempt and all(file.phase == "written" for file in save.files)
    if not is_whole or save.is_committing or not save.changed:
        return None
    later = (other for other in checkpoints if other.name != save.name)
    return next((other.name for other in later if (other.committed or 0.0) > save.changed), None)


def _describe_outdated(save: UnderWay, later: str) -> str:
    nbytes = size(sum(file.nbytes or 0 for file in save.files))
    return (
        f"{printable(save.name)}: {count(len(save.files), 'file')}, {nbytes}, without a manifest "
        f"and older than {printable(later)}: being removed, or left over (ckpt gc)"
    )


def _attempt_lines(
    options: Options, save: UnderWay, known: Mapping[tuple[str, str, str], float]
) -> Iterator[str]:
    """Yields a line on a save or conversion, and one for each of its slowest files."""
    rows = _slowest_first(save, known)
    yield f"{printable(save.name)}: {_describe_progress(save, rows)}"
    if all(file.phase == "written" for file in save.files):
        return
    shown = rows if options.verbose else rows[:FILES_SHOWN]
    head = ("RANK" if save.attempt else "FILE", "PHASE", "DONE", "OF", "RATE", "LEFT", "LAST WRITE")
    yield from columns([head, *(_file_cells(*row) for row in shown)], right=[2, 3, 4, 5, 6])
    if len(rows) > len(shown):
        yield f"and {len(rows) - len(shown)} more, which need less time"


_Row = tuple["FileUnderWay", "float | None", "float | None"]
"""A file, its rate, and the seconds that it still needs."""


def _slowest_first(save: UnderWay, known: Mapping[tuple[str, str, str], float]) -> list[_Row]:
    """Returns the files with their rates: those that need most time first, complete ones last."""
    from ckpt.removing.progress_files import key, seconds_left

    rows: list[_Row] = []
    for file in save.files:
        rate = known.get(key(save, file))
        rows.append((file, rate, seconds_left(file, rate)))

    def needs(row: _Row) -> tuple[bool, float]:
        file, _, left = row
        return file.phase == "written", -(float("inf") if left is None else left)

    return sorted(rows, key=needs)


def _file_cells(file: FileUnderWay, rate: float | None, left: float | None) -> tuple[str, ...]:
    is_written = file.phase == "written"
    return (
        printable(file.name) if file.rank is None else str(file.rank),
        file.phase,
        _size(file.nbytes),
        _size(file.planned_bytes),
        "-" if is_written or rate is None else f"{size(round(rate))}/s",
        "-" if is_written else _time(left),
        _ago(file.changed),
    )


def _describe_progress(save: UnderWay, rows: Sequence[_Row]) -> str:
    """Returns a line on a save or conversion as a whole."""
    total = _total(rows)
    written = sum(file.phase == "written" for file in save.files)
    done = size(total.nbytes)
    if written == len(save.files):
        ended = "the manifest is being written" if save.is_committing else "not committed"
        last = _ago(save.changed or None)
        ago = "" if last == "-" else f"; last write {last}"
        return f"{count(written, 'file')} written, {done}; {ended}{ago}"
    parts = [f"{written} of {count(len(save.files), 'file')} written", done]
    if total.planned_bytes is not None:
        parts[1] += f" of {size(total.planned_bytes)}"
    if total.rate is not None:
        parts.append(f"{size(round(total.rate))}/s")
    if total.left is not None:
        parts.append(f"{_time(total.left)} left")
    if total.rate is not None and total.planned_bytes is not None:
        slowest = rows[0][0]
        who = printable(slowest.name) if slowest.rank is None else f"rank {slowest.rank}"
        parts.append(f"slowest: {who}")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class _Total:
    """The sums of a save or conversion."""

    nbytes: int
    planned_bytes: int | None
    """None if a file does not tell."""
    rate: float | None
    left: float | None
    """The time of the slowest file; None if a file does not tell."""


def _total(rows: Sequence[_Row]) -> _Total:
    planned = [file.planned_bytes for file, _, _ in rows]
    speeds = [rate for file, rate, _ in rows if rate is not None and file.phase != "written"]
    lefts = [left for _, _, left in rows]
    return _Total(
        sum(file.nbytes or 0 for file, _, _ in rows),
        None if None in planned else sum(number for number in planned if number is not None),
        sum(speeds) if speeds else None,
        None
        if None in lefts
        else max((number for number in lefts if number is not None), default=None),
    )


def _summary(
    options: Options, looks: Sequence[Look], checkpoints: Sequence[Checkpoint]
) -> dict[str, object]:
    """Returns the view for programs."""
    known, saves = _rates(looks), []
    for save in looks[-1].under_way:
        rows = _slowest_first(save, known)
        files = [
            {**asdict(file), "bytes_per_second": rate, "seconds_left": left}
            for file, rate, left in rows
        ]
        total = _total(rows)
        saves.append(
            {
                "name": save.name,
                "attempt": save.attempt,
                "is_committing": save.is_committing,
                "committed_later": _later(save, checkpoints),
                "bytes": total.nbytes,
                "planned_bytes": total.planned_bytes,
                "bytes_per_second": total.rate,
                "seconds_left": total.left,
                "files": files,
            }
        )
    kept = [asdict(checkpoint) for checkpoint in checkpoints]
    return {"url": options.url, "under_way": saves, "checkpoints": kept}


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else size(nbytes)


def _time(seconds: float | None) -> str:
    """Returns a time with the digits that a reader needs.

    >>> _time(0.0123), _time(7.26), _time(200), _time(None)
    ('0.012 s', '7.3 s', '3 m', '-')
    """
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds:.3f} s"
    return f"{seconds:.1f} s" if seconds < 60 else age(seconds)


def _ago(changed: float | None) -> str:
    """Returns the time since a write, by the clock of this host."""
    return "-" if changed is None else f"{age(time.time() - changed)} ago"
