"""`ckpt doctor`: tries at a place all that ckpt relies on, and tells which promises hold there."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ckpt.display import printable
from tools.exit_codes import ExitCode, Help
from tools.options import Option, add_storage_options, mapping
from tools.text import columns, json_text

if TYPE_CHECKING:
    from ckpt.checking.report import Examination

HELP = Help(
    summary="try what a disk or object store can do, and tell what ckpt may promise there",
    description="""\
Tries at a folder, which need not exist, all that ckpt relies on: writes, conditions, listings,
uploads, deletes, the clock, the rules of a bucket, the calls of a disk. It names permissions that
lack, and tells which promises hold. All that it writes lies in one new folder, ckpt-doctor-*, and
is removed.""",
    examples=(
        ("ckpt doctor s3://bucket/runs", "before the first run there"),
        ("ckpt doctor /mnt/shared/runs --read-only", "writes nothing"),
    ),
    codes=(ExitCode.DIFFERENT, ExitCode.STORE),
)


@dataclass(frozen=True, slots=True)
class Options:
    """The place, and whether to write there."""

    url: str
    read_only: bool
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "url",
        metavar="FOLDER",
        help="the folder of runs, as a path or URL",
    )
    parser.add_argument(
        "--read-only", action="store_true", help="write nothing, and try only what needs no write"
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="the result as JSON")
    add_storage_options(parser)


def run(options: Options) -> int:
    """Prints the result; DIFFERENT if a promise does not hold."""
    from ckpt.checking.doctor import examine

    examined = examine(
        options.url, read_only=options.read_only, storage_options=mapping(options.storage_options)
    )
    if options.as_json:
        print(json_text({**asdict(examined), "complete": examined.is_complete}))
    else:
        print("\n".join(_lines(examined)))
    return ExitCode.FINE if examined.is_complete else ExitCode.DIFFERENT


def _lines(found: Examination) -> Iterator[str]:
    yield f"{printable(found.url)} ({found.kind})"
    yield ""
    rows = [
        (finding.name, finding.outcome.value, printable(finding.detail))
        for finding in found.findings
    ]
    yield from columns([("TRIED", "FOUND", ""), *rows])
    yield ""
    promises = [
        (promise.outcome.value, f"{promise.name}{_why(promise.because)}", promise.where)
        for promise in found.promises
    ]
    yield from columns([("HOLDS", "PROMISE", "IN"), *promises])
    if found.left_over:
        yield ""
        yield f"left in {found.folder}: {printable(', '.join(found.left_over))}"


def _why(because: tuple[str, ...]) -> str:
    return f" [{', '.join(because)}]" if because else ""
