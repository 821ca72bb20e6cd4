"""`ckpt latest`: print the path of the newest complete checkpoint in a folder, for scripts.

A script gets the bytes of the path, a terminal printable text.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from dataclasses import asdict, dataclass, field

from ckpt.display import printable
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_storage_options, mapping
from tools.text import json_text, tell

HELP = Help(
    summary="print the path of the newest checkpoint with an intact manifest and all its files",
    description="""\
Prints the path of the newest checkpoint of ckpt's own format that has an intact manifest and
all its files. Newer ones that are not sound are named on stderr.""",
    examples=(
        ('ckpt verify "$(ckpt latest runs/gpt)"', "checks the newest checkpoint"),
        ("ckpt latest runs/gpt --verify", "the newest one whose checksums are all right"),
    ),
    codes=OF_A_READER,
)


@dataclass(frozen=True, slots=True)
class Options:
    """The folder, and the depth of the check."""

    url: str
    verify: bool
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="FOLDER", nargs="?", default=".", help="a path or URL; default: here"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every checksum too; without it, no tensor is read: the manifest has to be "
        "intact, and its files to be there in their sizes",
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="the path and what is skipped, as JSON"
    )
    add_storage_options(parser)


def run(options: Options) -> int:
    """Prints the path alone on a line; skipped checkpoints and the reasons go to stderr."""
    from ckpt.loading.newest import newest_sound

    newest, skipped = newest_sound(options.url, options.verify, mapping(options.storage_options))
    if options.as_json:
        rows = [asdict(step) for step in skipped]
        print(json_text({"url": options.url, "latest": newest, "skipped": rows}))
        return ExitCode.FINE
    for step in skipped:
        tell(f"ckpt: skipped: {printable(step.message)}")
    _print_path(newest)
    return ExitCode.FINE


def _print_path(path: str) -> None:
    """Prints the path on a line: to a program byte for byte, to a terminal as text."""
    raw = getattr(sys.stdout, "buffer", None)
    if raw is None or sys.stdout.isatty():
        print(printable(path))
        return
    sys.stdout.flush()
    raw.write(os.fsencode(path) + b"\n")
