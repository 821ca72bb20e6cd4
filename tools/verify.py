"""`ckpt verify`: whether a stored checkpoint is what was written."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict, dataclass, field

from ckpt.display import count, printable, size
from ckpt.report import Report
from tools.exit_codes import ExitCode
from tools.progress import file_bytes, progress
from tools.storage_options import Option, add_storage_options, mapping
from tools.text import json_text

SUMMARY = "check every checksum, file and size; without the model's code"
SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """What to verify."""

    url: str
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("url", metavar="CHECKPOINT", help="a path or URL")
    parser.add_argument("--json", dest="as_json", action="store_true", help="the report as JSON")
    add_storage_options(parser)


def run(options: Options) -> int:
    """Print the report; DIFFERENT where something is wrong."""
    from ckpt.verifying import verify

    told = mapping(options.storage_options)
    with progress("verify", lambda: file_bytes(options.url, told)) as advance:
        report = verify(options.url, advance, storage_options=told)
    if options.as_json:
        print(json_text({**asdict(report), "sound": report.sound}))
    else:
        _print(report)
    return ExitCode.FINE if report.sound else ExitCode.DIFFERENT


def _print(report: Report) -> None:
    for problem in report.problems[:SHOWN_PROBLEMS]:
        print(printable(problem.message))
    if len(report.problems) > SHOWN_PROBLEMS:
        print(f"... and {len(report.problems) - SHOWN_PROBLEMS} more; --json lists all")
    for note in report.notes:
        print(f"note: {printable(note)}")
    found = "sound" if report.sound else f"NOT SOUND, {count(len(report.problems), 'problem')}"
    print(f"{printable(report.url)}: {found}")
    hashed = f"; {size(report.bytes_checked)} compared" if report.bytes_checked else ""
    print(f"  {report.format}, {count(report.files, 'file')}; checked: {report.checked}{hashed}")
