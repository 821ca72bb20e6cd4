"""`ckpt rm`: delete checkpoints, each whole, and none that another borrows from."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass, field

from tools.exit_codes import ExitCode
from tools.storage_options import Option, add_storage_options, mapping
from tools.text import printable

SUMMARY = "delete checkpoints of ckpt's own format, unless others borrow from them"


@dataclass(frozen=True, slots=True)
class Options:
    """What to delete."""

    urls: list[str]
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("urls", metavar="CHECKPOINT", nargs="+", help="paths or URLs, in order")
    add_storage_options(parser)


def run(options: Options) -> int:
    """Delete one after another; the first that cannot be deleted ends it."""
    from ckpt.deleting import delete

    for url in options.urls:
        delete(url, storage_options=mapping(options.storage_options))
        print(f"deleted {printable(url)}")
    return ExitCode.FINE
