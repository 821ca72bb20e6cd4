"""`ckpt latest`: print the path of the newest sound checkpoint in a folder, for scripts."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field

from tools.exit_codes import ExitCode
from tools.storage_options import Option, add_storage_options, mapping
from tools.text import printable

SUMMARY = "print the path of the newest sound checkpoint in a folder"


@dataclass(frozen=True, slots=True)
class Options:
    """Where to look."""

    url: str
    verify: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "url", metavar="FOLDER", nargs="?", default=".", help="a path or URL; default: here"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every bit; otherwise the manifest, and that all files are there in their sizes",
    )
    add_storage_options(parser)


def run(options: Options) -> int:
    """Print it alone on a line; what was skipped, and why, goes to stderr."""
    from ckpt.newest import newest_sound

    found, skipped = newest_sound(options.url, options.verify, mapping(options.storage_options))
    for one in skipped:
        print(f"ckpt: skipped: {printable(one.message)}", file=sys.stderr)
    print(printable(found))
    return ExitCode.FINE
