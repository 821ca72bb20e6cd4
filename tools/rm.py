"""`ckpt rm`: delete checkpoints, each whole, and none that another borrows from."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass

from tools.exit_codes import ExitCode
from tools.text import printable

SUMMARY = "delete checkpoints of ckpt's own format, unless others borrow from them"


@dataclass(frozen=True, slots=True)
class Options:
    """What to delete."""

    urls: list[str]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("urls", metavar="CHECKPOINT", nargs="+", help="paths or URLs, in order")


def run(options: Options) -> int:
    """Delete one after another; the first that cannot be deleted ends it."""
    from ckpt.deleting import delete

    for url in options.urls:
        delete(url)
        print(f"deleted {printable(url)}")
    return ExitCode.FINE
