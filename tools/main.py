"""The `ckpt` command: parses arguments, runs a command, turns errors into a line and an exit code.

Rules:

1. Results go to stdout, errors and progress to stderr. `--json` prints one JSON object.
2. An error is one line, `ckpt: <what happened, where, what to do>`; with CKPT_TRACEBACK set the
   traceback comes before it. If stderr cannot be written, the exit code is the same.
3. Commands import the modules that they need when they run, so that `ckpt --help`, inspect, ls and
   verify start at once: torch alone takes a second.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Generic, NoReturn, TypeVar

from ckpt.display import printable
from ckpt.installation import __version__
from sharding.errors import without_secrets
from tools import (
    completion,
    convert,
    cp,
    diff,
    doctor,
    gc,
    inspect,
    latest,
    ls,
    merge,
    pin,
    plan,
    rm,
    serve,
    top,
    verify,
)
from tools import id as identity
from tools.exit_codes import ExitCode, Help, code_of, epilog
from tools.options import with_options
from tools.text import note_of_a_wait, tell

OptionsT = TypeVar("OptionsT")

DESCRIPTION = """\
Looks into, checks, compares, converts and deletes checkpoints: ckpt's own, safetensors files,
Hugging Face folders, files of torch.save, folders of torch.distributed.checkpoint and of trainers,
GGUF and numpy files, on disk or at any URL that fsspec has a driver for."""
EXAMPLES = (
    ("ckpt ls runs/gpt", "the checkpoints of a run"),
    ("ckpt convert runs/gpt/step-100 model.safetensors --model-only", "its weights, as one file"),
)
GUESSES = {
    "list": "ls",
    "du": "ls",
    "show": "inspect",
    "info": "inspect",
    "tree": "inspect",
    "check": "verify",
    "fsck": "verify",
    "digest": "id",
    "sha256": "id",
    "compare": "diff",
    "export": "convert",
    "import": "convert",
    "copy": "cp",
    "average": "merge",
    "mean": "merge",
    "watch": "top",
    "newest": "latest",
    "delete": "rm",
    "remove": "rm",
    "clean": "gc",
    "probe": "doctor",
    "prune": "gc",
}
"""Commands that people try by other names."""


class _Parser(argparse.ArgumentParser):
    """argparse with errors in the form of all our errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"ckpt: {printable(message)}; see `{self.prog} --help`\n")


class _CommandParser(_Parser):
    """The parser of one command. Options may stand between its other arguments, and after them.

    argparse alone takes `CHECKPOINT [NAME ...]` as complete at the first option after CHECKPOINT.
    """

    _is_intermixed = False

    def parse_known_args(  # type: ignore[override]  # the overloads differ in the namespace alone
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the arguments of the command; here, unknown ones end it with this parser's error.

        The parser of all commands, which calls this method, would name its own help instead.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if self._is_intermixed or not unknown or completion.is_asked():
            return parsed, unknown
        self._is_intermixed = True  # argparse calls this method again: for the options, then for
        try:  # the other arguments
            parsed, unknown = self.parse_known_intermixed_args(args, None)
        finally:
            self._is_intermixed = False
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            meant = next((_meant(word.partition("=")[0], flags) for word in unknown), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return parsed, []


def _meant(word: str, known: Collection[str]) -> str:
    """Returns the question for the nearest of the known words; empty if none is near.

    >>> _meant("--overwirte", ["--overwrite", "--to"]), _meant("x", ["--to"])
    ('; did you mean --overwrite?', '')
    """
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class _Command(Generic[OptionsT]):
    """One command: the functions that declare its arguments and run it."""

    name: str
    help: Help
    options: Callable[..., OptionsT]
    """A frozen dataclass; its fields are the names of the arguments."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[OptionsT], int]

    def __call__(self, arguments: argparse.Namespace) -> int:
        names = [field.name for field in fields(self.options)]  # type: ignore[arg-type]
        return self.run(self.options(**{name: getattr(arguments, name) for name in names}))


_COMMANDS = (
    _Command("ls", ls.HELP, ls.Options, ls.add_arguments, ls.run),
    _Command("inspect", inspect.HELP, inspect.Options, inspect.add_arguments, inspect.run),
    _Command("verify", verify.HELP, verify.Options, verify.add_arguments, verify.run),
    _Command("diff", diff.HELP, diff.Options, diff.add_arguments, diff.run),
    _Command("id", identity.HELP, identity.Options, identity.add_arguments, identity.run),
    _Command("convert", convert.HELP, convert.Options, convert.add_arguments, convert.run),
    _Command("merge", merge.HELP, merge.Options, merge.add_arguments, merge.run),
    _Command("plan", plan.HELP, plan.Options, plan.add_arguments, plan.run),
    _Command("top", top.HELP, top.Options, top.add_arguments, top.run),
    _Command("serve", serve.HELP, serve.Options, serve.add_arguments, serve.run),
    _Command("latest", latest.HELP, latest.Options, latest.add_arguments, latest.run),
    _Command("rm", rm.HELP, rm.Options, rm.add_arguments, rm.run),
    _Command("cp", cp.HELP, cp.Options, cp.add_arguments, cp.run),
    _Command("pin", pin.HELP, pin.Options, pin.add_arguments, pin.run),
    _Command("gc", gc.HELP, gc.Options, gc.add_arguments, gc.run),
    _Command("doctor", doctor.HELP, doctor.Options, doctor.add_arguments, doctor.run),
    _Command(
        "completion", completion.HELP, completion.Options, completion.add_arguments, completion.run
    ),
)

HELPS = {command.name: command.help for command in _COMMANDS}
"""The texts of each command."""


def main(argv: Sequence[str]) -> int:
    """Runs the command that the arguments name; returns its exit code, never raises."""
    try:
        code = _run(argv)
        if sys.stdout is not None:  # None after `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        code = ExitCode.BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        code = _report(error)
    _let_go()
    return code


def _run(argv: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may be in any script
    found = parser()
    completion.answer(found)
    try:
        _check_command(found, argv)
        arguments = found.parse_args(argv)
    except SystemExit as end:  # from argparse: --help, --version, wrong arguments
        return end.code if isinstance(end.code, int) else ExitCode.FINE
    try:
        with note_of_a_wait(vars(arguments).values()):
            return int(arguments.command(arguments))
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, arguments.parser)


def _check_command(used: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Ends the process with an error unless the first argument is an option or a command."""
    if argv and not argv[0].startswith("-") and argv[0] not in HELPS:
        guess = GUESSES.get(argv[0])
        meant = _meant(argv[0], HELPS) if guess is None else f"; did you mean {guess}?"
        used.error(f"there is no command {argv[0]!r}{meant}")


def _let_go() -> None:
    """Flushes both streams, so that Python's last flush cannot fail and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    below = epilog(EXAMPLES, ExitCode)
    parser = _Parser(prog="ckpt", description=DESCRIPTION, epilog=below, formatter_class=raw)
    parser.add_argument("-V", "--version", action="version", version=f"ckpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_CommandParser)
    for command in _COMMANDS:
        subparser = commands.add_parser(
            command.name,
            help=command.help.summary,
            description=command.help.description,
            epilog=command.help.epilog,
            formatter_class=raw,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command, parser=subparser)
    return parser


def _report(error: BaseException, used: argparse.ArgumentParser | None = None) -> int:
    """Prints an error and returns its exit code. `used` is the parser of the command that ran."""
    if os.environ.get("CKPT_TRACEBACK"):
        tell("".join(traceback.format_exception(error)).rstrip("\n"))
    code = code_of(error)
    message = " ".join(line.strip() for line in str(error).splitlines())
    if code == ExitCode.INTERRUPTED:
        message = "interrupted"
    elif code == ExitCode.INTERNAL:
        message = f"a bug: {type(error).__name__}: {message}; set CKPT_TRACEBACK=1 to see where"
    elif isinstance(error, OSError) and error.strerror and error.filename:
        message = f"{error.filename}: {error.strerror}"
    elif used is not None:
        message = with_options(message, used)
    tell(f"ckpt: {printable(without_secrets(message))}")
    return code
