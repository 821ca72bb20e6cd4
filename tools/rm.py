"""`ckpt rm`: delete checkpoints, each whole, and none that another borrows from."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass, field

from ckpt.display import printable
from tools.exit_codes import ExitCode
from tools.storage_options import Option, add_storage_options, mapping

SUMMARY = "delete checkpoints of ckpt's own format, unless others borrow from them"


@dataclass(frozen=True, slots=True)
class Options:
    """What to delete."""

    urls: list[str]
    missing_ok: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("urls", metavar="CHECKPOINT", nargs="+", help="paths or URLs, in order")
    parser.add_argument(
        "--missing-ok", action="store_true", help="go on where there is no checkpoint"
    )
    add_storage_options(parser)


def run(options: Options) -> int:
    """Delete one after another; the first that cannot be deleted ends the command."""
    from ckpt.deleting import was_deleted

    for url in options.urls:
        found = was_deleted(url, options.missing_ok, mapping(options.storage_options))
        print(f"deleted {printable(url)}" if found else f"not there {printable(url)}")
    return ExitCode.FINE
