"""`ckpt rm`: deletes whole checkpoints, unless others borrow from them.

With `--keep` its arguments are runs, and it deletes checkpoints that no rule of a policy keeps, by
the code of `ckpt.Checkpointer(keep=...)`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ckpt.display import count, printable
from ckpt.errors import CkptError, NotACheckpointError
from ckpt.run.policy import Keep
from ckpt.stores.store import join_url, split_url
from formats.errors import FormatError
from sharding.errors import ArgumentError, format_names
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_quiet, add_storage_options, mapping
from tools.text import json_text, keep_of, place, versions_kept

SHOWN_NAMES = 3
HELP = Help(
    summary="delete checkpoints of ckpt's own format, unless others borrow from them",
    description="""\
Deletes checkpoints of ckpt's own format, unless others borrow from them or they are pinned. With
--keep it deletes those of a run that no rule keeps. On a terminal it asks before it deletes
several checkpoints, or the newest one of a folder.""",
    examples=(
        ("ckpt rm runs/gpt/step-100", "deletes one checkpoint"),
        (
            "ckpt rm runs/gpt --keep last=3,every=1000 --dry-run",
            "the checkpoints of a run that these rules would delete",
        ),
    ),
    codes=(*OF_A_READER, ExitCode.EXISTS),
)


@dataclass(frozen=True, slots=True)
class Options:
    """The checkpoints or runs, and the policy."""

    urls: list[str]
    missing_ok: bool
    keep: Keep | None
    dry_run: bool
    yes: bool
    quiet: bool
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "urls",
        metavar="CHECKPOINT",
        nargs="+",
        help="paths or URLs, in order; with --keep, folders of runs",
    )
    parser.add_argument(
        "--missing-ok", action="store_true", help="go on where there is no checkpoint"
    )
    parser.add_argument(
        "--keep",
        metavar="RULES",
        type=keep_of,
        help="delete the checkpoints of runs that none of these rules keeps: last=3, every=1000, "
        "best=2 with metric=loss and mode=max, younger_than=2d, one_per=1h, last_finite=1, joined "
        "by commas; the newest stays",
    )
    parser.add_argument(
        "-n", "--dry-run", action="store_true", help="only list the checkpoints to delete"
    )
    parser.add_argument(
        "-y", "--yes", action="store_true", help="do not ask; a pipe is never asked"
    )
    add_quiet(parser)
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="the deleted checkpoints as JSON"
    )
    add_storage_options(parser)


@dataclass(slots=True)
class _Report:
    """The outcome, printed line by line or kept for JSON."""

    options: Options
    found: dict[str, list[str]] = field(
        default_factory=lambda: {"deleted": [], "kept": [], "not_there": []}
    )

    def add(self, kind: str, url: str, text: str) -> None:
        """Notes one checkpoint, and prints its line."""
        self.found[kind].append(url)
        self.say(text)

    def say(self, text: str) -> None:
        """Prints a line for people."""
        if not (self.options.as_json or self.options.quiet):
            print(text)


def run(options: Options) -> int:
    """Deletes the checkpoints in order; the first that cannot be deleted ends the command."""
    report = _Report(options)
    if not options.dry_run and not options.yes and not _is_confirmed(options):
        raise ArgumentError("nothing was deleted")
    if options.keep is not None:
        for url in options.urls:
            _thin(url, options.keep, report)
    else:
        _delete(report)
    if options.as_json:
        print(json_text({**report.found, "dry_run": options.dry_run}))
    return ExitCode.FINE


def _is_confirmed(options: Options) -> bool:
    """Whether a person agrees to delete several checkpoints, or the newest; a pipe is not asked."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    storage = mapping(options.storage_options)
    if options.keep is None:
        places = options.urls
    else:
        from ckpt.run.steps import removals

        places = [
            join_url(url, removal.step.name)
            for url in options.urls
            for removal in removals(url, options.keep, storage, dry_run=True)
            if not removal.needed_by
        ]
    newest = [url for url in places if options.keep is None and _is_newest(url, storage)]
    if len(places) < 2 and not newest:
        return True
    which = f"{count(len(places), 'checkpoint')} ({place(format_names(places, SHOWN_NAMES))})"
    if newest:
        which += f"; {place(newest[0])} is the newest of its folder"
    print(f"ckpt: delete {which}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _is_newest(url: str, storage: Mapping[str, object] | None) -> bool:
    """Whether no checkpoint beside this one is newer; False where the folder cannot be listed."""
    from ckpt.loading.newest import list_committed

    above, name = split_url(url.rstrip("/"))
    with suppress(CkptError, FormatError, OSError):
        return [checkpoint.name for checkpoint in list_committed(above, storage)[:1]] == [name]
    return False


def _delete(report: _Report) -> None:
    from ckpt.removing.delete import was_deleted

    options = report.options
    storage = mapping(options.storage_options)
    gone: set[str] | None = set() if options.dry_run else None
    for url in options.urls:
        found = was_deleted(url, options.missing_ok, storage, gone)
        kind = "deleted" if found else "not_there"
        report.add(kind, url, f"{_done(options) if found else 'not there'} {printable(url)}")
        if found and gone is None:
            _tell_left_overs(report, url, storage)


def _tell_left_overs(report: _Report, url: str, storage: Mapping[str, object] | None) -> None:
    """Names the files that no checkpoint owned in the folder of a deleted one."""
    from ckpt.stores.store import open_store

    with open_store(url, storage) as store:
        names = store.names()
    if names:
        report.say(
            f"note: {count(len(names), 'file')} of no checkpoint left in "
            f"{printable(url)}: {printable(format_names(names, SHOWN_NAMES))}; `ckpt gc` "
            "tells of those "
            "of unfinished saves"
        )


def _thin(url: str, keep: Keep, report: _Report) -> None:
    """Deletes checkpoints of a run that no rule keeps. Raises NotACheckpointError without a run."""
    from ckpt.opening.sources import similar_path
    from ckpt.run.steps import removals, run_steps

    options = report.options
    storage = mapping(options.storage_options)
    steps = len(run_steps(url, storage_options=storage))
    if not steps and not options.missing_ok:
        near = similar_path(url)
        raise NotACheckpointError(f"{url}: no run is here: it has no checkpoint named step-N{near}")
    gone = 0
    for removal in removals(url, keep, storage, dry_run=options.dry_run):
        where = join_url(url, removal.step.name)
        if removal.needed_by:
            report.add("kept", where, f"kept {printable(where)}: {printable(removal.needed_by)}")
        else:
            gone += 1
            report.add("deleted", where, f"{_done(options)} {printable(where)}")
    report.say(f"{printable(url)}: {steps - gone:,} of {count(steps, 'checkpoint')} stay")
    if gone and not (options.as_json or options.quiet) and (kept := versions_kept(url, storage)):
        report.say(kept)


def _done(options: Options) -> str:
    return "would delete" if options.dry_run else "deleted"
