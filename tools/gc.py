"""`ckpt gc`: lists the left-overs of unfinished saves and conversions, or removes them."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ckpt.display import count, printable, size
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_quiet, add_storage_options, mapping
from tools.text import age, columns, duration, json_text, versions_kept

if TYPE_CHECKING:
    from ckpt.removing.gc import LeftOver

HELP = Help(
    summary="list what unfinished saves have left behind, and remove it with --delete",
    description="""\
Lists the files that unfinished saves and conversions have left behind. With --delete it removes
those that no save can need any more.""",
    examples=(
        ("ckpt gc runs/gpt", "lists them, and changes nothing"),
        ("ckpt gc runs/gpt --delete", "removes those that are older than 25 hours"),
    ),
    codes=OF_A_READER,
)


@dataclass(frozen=True, slots=True)
class Options:
    """The folder, and whether to delete."""

    url: str
    delete: bool
    older_than: float | None
    quiet: bool
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="FOLDER", help="a checkpoint or a folder of checkpoints, as a path or URL"
    )
    parser.add_argument("--delete", action="store_true", help="remove the old ones")
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        type=duration,
        help="the least age of an old one: 90m, 2h or 3d; default 25h, when no save can need it "
        "any more; use less only while no save to the folder runs",
    )
    add_quiet(parser)
    parser.add_argument("--json", dest="as_json", action="store_true", help="the list as JSON")
    add_storage_options(parser)


def run(options: Options) -> int:
    from ckpt.errors import NotACheckpointError
    from ckpt.opening.sources import similar_path
    from ckpt.removing.gc import gc, is_folder

    storage = mapping(options.storage_options)
    left_overs = gc(
        options.url, delete=options.delete, older_than=options.older_than, storage_options=storage
    )
    if not left_overs and not is_folder(options.url, storage):
        raise NotACheckpointError(
            f"{options.url}: there is no such folder{similar_path(options.url)}"
        )
    if options.as_json:
        print(json_text({"url": options.url, "left_overs": [asdict(file) for file in left_overs]}))
        return ExitCode.FINE
    if options.quiet:
        return ExitCode.FINE
    rows = [
        (printable(_path(file)), file.kind, size(file.nbytes), age(file.age_seconds), _state(file))
        for file in left_overs
    ]
    for line in columns([("NAME", "KIND", "SIZE", "AGE", "STATE"), *rows], right=[2, 3]):
        if rows:
            print(line)
    print(_sum(left_overs, options))
    if kept := versions_kept(options.url, storage):
        print(kept)
    return ExitCode.FINE


def _path(file: LeftOver) -> str:
    return f"{file.folder}/{file.name}".rstrip("/")


def _state(file: LeftOver) -> str:
    if file.was_removed:
        return "removed"
    return "left over" if file.is_old else "young: perhaps being saved"


def _sum(found: Sequence[LeftOver], options: Options) -> str:
    counted = [file for file in found if (file.was_removed if options.delete else file.is_old)]
    total = f"{count(len(counted), 'left-over')}{' removed' if options.delete else ''}"
    hint = "; --delete removes them" if counted and not options.delete else ""
    young, nbytes = sum(not file.is_old for file in found), sum(file.nbytes for file in counted)
    return f"{total}, {size(nbytes)}{hint}{_describe_kept(young, options)}"


def _describe_kept(young: int, options: Options) -> str:
    """Returns a text on the files that are too young to count, and on the age at which they do."""
    from ckpt.removing.gc import OLD_SECONDS

    if not young:
        return ""
    if options.older_than is not None:
        return f"; {count(young, 'younger file')}"
    return (
        f"; {count(young, 'young file')} that a save may still need: left over at the age of "
        f"{OLD_SECONDS / 3600:g} h, or of --older-than AGE (0s while no save runs here)"
    )
