"""`ckpt verify`: checks that stored checkpoints are as they were written."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from dataclasses import asdict, dataclass, field

from ckpt.checking.report import Report
from ckpt.display import count, printable, size
from ckpt.errors import CkptError, NotACheckpointError
from tools.exit_codes import OF_A_READER, ExitCode, Help, code_of
from tools.options import Option, add_quiet, add_storage_options, mapping, with_options
from tools.text import colour, file_bytes, json_text, place, progress, tell

HELP = Help(
    summary="check every checksum, file and size; without the model's code",
    description="""\
Reads checkpoints of any format and checks every checksum, file and size. The code of the model is
not needed. Names each damaged tensor with its file and its bytes.""",
    examples=(
        ("ckpt verify runs/gpt/step-100", "whether a checkpoint is sound"),
        ("ckpt verify -q runs/gpt/*/", "the problems of all checkpoints of a run"),
    ),
    codes=(ExitCode.DIFFERENT, *OF_A_READER),
)
SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """The checkpoints to verify."""

    urls: list[str]
    verbose: bool
    quiet: bool
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "urls", metavar="CHECKPOINT", nargs="+", help="paths or URLs; RUN/*/ are those of a run"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print all problems, not only the first ones"
    )
    add_quiet(parser, "print only the problems")
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="the report as JSON; of several checkpoints, a list of them under `reports`",
    )
    add_storage_options(parser)


def run(options: Options) -> int:
    """Prints each report as soon as it is known; DIFFERENT if a checkpoint is not sound.

    An error at one checkpoint is printed, and the others are still verified. The command then ends
    with the exit code of the first such error.
    """
    parser = ArgumentParser()
    add_arguments(parser)
    reports: list[dict[str, object]] = []
    failed: Exception | None = None
    is_sound = True
    for argument in options.urls:
        url = (
            argument if argument.endswith("://") else argument.rstrip("/") or argument
        )  # a shell's RUN/*/
        try:
            report = _verify(url, options)
        except (CkptError, OSError) as error:
            if len(options.urls) == 1:
                raise
            failed = failed or error
            tell(f"ckpt: {place(with_options(str(error), parser))}")
            reports.append({"url": url, "sound": False, "error": str(error)})
            continue
        is_sound = is_sound and report.sound
        reports.append({**asdict(report), "sound": report.sound})
        if not options.as_json:
            _print(report, options)
    if options.as_json:
        print(json_text({"reports": reports} if len(reports) > 1 else reports[0]))
    if failed is not None:
        return code_of(failed)
    return ExitCode.FINE if is_sound else ExitCode.DIFFERENT


def _verify(url: str, options: Options) -> Report:
    from ckpt.checking.verify import verify

    storage = mapping(options.storage_options)
    with progress("verify", lambda: file_bytes(url, storage), options.quiet) as advance:
        try:
            return verify(url, advance, storage_options=storage)
        except NotACheckpointError as error:
            if not _is_local_run(url):
                raise
            every = shlex.quote(url) + "/*/"
            raise NotACheckpointError(f"{error}; `ckpt verify {every}` verifies all") from error


def _is_local_run(url: str) -> bool:
    """Whether checkpoints of ckpt's own format lie in a folder on a disk."""
    from ckpt.opening.sources import checkpoints_below
    from ckpt.stores.store import local_path, open_store

    if local_path(url) is None:  # no shell expands the star
        return False
    with open_store(url) as store:
        below = checkpoints_below(store, store.entries(), only_native=True)
        return below is not None and below.is_in(url)


def _print(report: Report, options: Options) -> None:
    shown = report.problems[: None if options.verbose else SHOWN_PROBLEMS]
    for problem in shown:
        print(colour(printable(problem.message), "damaged"))
    if len(report.problems) > len(shown):
        print(f"... and {len(report.problems) - len(shown)} more; -v prints all")
    if options.quiet:
        return
    for note in report.notes:
        print(f"note: {printable(note)}")
    found = colour("sound", "sound")
    if not report.sound:
        found = colour(f"NOT SOUND, {count(len(report.problems), 'problem')}", "damaged")
    found += ", but it has no tensors" if report.tensors == 0 and report.sound else ""
    print(f"{place(report.url)}: {found}")
    hashed = f"; {size(report.bytes_checked)} compared" if report.bytes_checked else ""
    print(f"  {report.format}, {count(report.files, 'file')}; checked: {report.checked}{hashed}")
