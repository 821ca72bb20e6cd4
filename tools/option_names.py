"""Puts the options of a command in the place of Python's arguments in a message of the library.

The library's messages name its own arguments: `overwrite=True`, `select=`, `to='ckpt'`. The command
line has the same ones as options: the `dest` of an option is the name of the argument.
"""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser

_ARGUMENT = re.compile(
    r"(?<![^\s(])(?P<name>[a-z_]+)="
    r"(?P<value>True|'(?P<text>[^']*)'|\{'(?P<key>[^']+)': (?P<item>[^{}]+)\})?"
    r"(?=[\s,;:.)]|$)"
)


def with_options(message: str, parser: ArgumentParser) -> str:
    r"""Returns the message with options for arguments; an argument without an option stays.

    >>> parser = ArgumentParser()
    >>> _ = parser.add_argument("--overwrite", action="store_true")
    >>> _ = parser.add_argument("-t", "--to")
    >>> _ = parser.add_argument("--set", dest="parameters", action="append")
    >>> with_options("pass overwrite=True (or to='ckpt'), or strict=False", parser)
    'pass --overwrite (or --to ckpt), or strict=False'
    >>> with_options("give it by parameters={'heads': 4}; to= is the format", parser)
    'give it by --set heads=4; --to is the format'
    """
    flags = {
        action.dest: action.option_strings[-1]
        for action in parser._actions  # argparse has no public list
        if action.option_strings
    }

    def option(found: re.Match[str]) -> str:
        flag = flags.get(found["name"])
        if flag is None:
            return found[0]
        if found["key"] is not None:
            return f"{flag} {found['key']}={found['item']}"
        return flag if found["text"] is None else f"{flag} {shlex.quote(found['text'])}"

    return _ARGUMENT.sub(option, message)
