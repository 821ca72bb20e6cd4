"""`ckpt completion`: a script by which a shell completes commands and options.

The shell runs the command itself, by way of argcomplete (decision 032). argcomplete, which knows
the parser, then answers in the place of the command.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from dataclasses import dataclass

from tools.exit_codes import ExitCode, Help

HELP = Help(
    summary="print a script that makes a shell complete commands and options",
    description="""\
Prints a script that makes a shell complete the commands and options of ckpt. The first line below
installs it for all later shells.""",
    examples=(
        (
            "echo 'eval \"$(ckpt completion bash)\"' >> ~/.bashrc",
            "for bash; for zsh, the same with zsh and ~/.zshrc",
        ),
        ("ckpt completion fish > ~/.config/fish/completions/ckpt.fish", "for fish"),
    ),
)
SHELLS = ("bash", "zsh", "fish")
ASKED = "_ARGCOMPLETE"
"""The environment variable that is set if a shell asks for completions."""


@dataclass(frozen=True, slots=True)
class Options:
    """The shell."""

    shell: str


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        metavar="SHELL",
        choices=SHELLS,
        help='bash or zsh: put `eval "$(ckpt completion bash)"` into ~/.bashrc, or the same with '
        "zsh into ~/.zshrc; fish: put `ckpt completion fish | source` into config.fish",
    )


def run(options: Options) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["ckpt"], shell=options.shell))
    return ExitCode.FINE


def is_asked() -> bool:
    """Whether a shell asks for completions."""
    return ASKED in os.environ


def answer(parser: ArgumentParser) -> None:
    """Answers a shell that asks for completions and ends the process; else returns at once."""
    if is_asked():
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)
