"""`ckpt rm`: deletes whole checkpoints, unless others borrow from them.

With `--keep` its arguments are runs, and it deletes checkpoints that no rule of a policy keeps, by
the code of `ckpt.Checkpointer(keep=...)`.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.display import count, printable
from ckpt.errors import NotACheckpointError
from ckpt.run.retention import Keep
from sharding.errors import listed
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_storage_options, mapping
from tools.text import keep_of

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
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the arguments."""
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
    add_storage_options(parser)


def run(options: Options) -> int:
    """Deletes the checkpoints in order; the first that cannot be deleted ends the command."""
    if options.keep is not None:
        for url in options.urls:
            _thin(url, options.keep, options)
        return ExitCode.FINE
    from ckpt.removing.delete import was_deleted

    storage = mapping(options.storage_options)
    gone: set[str] | None = set() if options.dry_run else None
    for url in options.urls:
        found = was_deleted(url, options.missing_ok, storage, gone)
        print(f"{_done(options) if found else 'not there'} {printable(url)}")
        if found and gone is None:
            _tell_left_overs(url, storage)
    return ExitCode.FINE


def _tell_left_overs(url: str, storage: Mapping[str, object] | None) -> None:
    """Names the files that no checkpoint owned in the folder of a deleted one."""
    from ckpt.stores.store import open_store

    with open_store(url, storage) as store:
        names = store.names()
    if names:
        print(
            f"note: {count(len(names), 'file')} of no checkpoint left in "
            f"{printable(url)}: {printable(listed(names, SHOWN_NAMES))}; `ckpt gc` tells of those "
            "of unfinished saves"
        )


def _thin(url: str, keep: Keep, options: Options) -> None:
    """Deletes checkpoints of a run that no rule keeps. Raises NotACheckpointError without a run."""
    from ckpt.opening.sources import similar_path
    from ckpt.run.history import run_steps
    from ckpt.run.removal import removals
    from ckpt.stores.store import join_url

    storage = mapping(options.storage_options)
    steps = len(run_steps(url, storage_options=storage))
    if not steps and not options.missing_ok:
        near = similar_path(url)
        raise NotACheckpointError(f"{url}: no run is here: it has no checkpoint named step-N{near}")
    gone = 0
    for one in removals(url, keep, storage, dry_run=options.dry_run):
        place = printable(join_url(url, one.step.name))
        if one.needed_by:
            print(f"kept {place}: {printable(one.needed_by)}")
        else:
            gone += 1
            print(f"{_done(options)} {place}")
    print(f"{printable(url)}: {steps - gone:,} of {count(steps, 'checkpoint')} stay")


def _done(options: Options) -> str:
    return "would delete" if options.dry_run else "deleted"
