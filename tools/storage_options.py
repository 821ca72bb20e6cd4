"""`-o KEY=VALUE`: what the fsspec driver of a URL is told."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from typing import TypeAlias

Option: TypeAlias = tuple[str, object]
"""A name and a value."""
_PYTHON_S = {"True": "true", "False": "false", "None": "null"}


def add_storage_options(parser: ArgumentParser) -> None:
    """Declare `-o`, which every command has whose arguments may be URLs."""
    parser.add_argument(
        "-o",
        "--storage-option",
        dest="storage_options",
        action="append",
        metavar="KEY=VALUE",
        type=storage_option,
        help="tell the fsspec driver of a URL, as in storage_options=; VALUE is JSON or else text "
        "(example: -o anon=true); repeatable",
    )


def add_storage_options_of(parser: ArgumentParser, argument: str) -> None:
    """Declare what only the driver of one argument is told: `--dst-storage-option` of DST."""
    parser.add_argument(
        f"--{argument.lower()}-storage-option",
        dest=f"{argument.lower()}_storage_options",
        action="append",
        metavar="KEY=VALUE",
        type=storage_option,
        help=f"tell only the driver of {argument}, and that none of the others",
    )


def storage_option(text: str) -> Option:
    """The name and the value in an argument, for argparse.

    >>> storage_option("anon=true"), storage_option("key=abc"), storage_option('key="12"')
    (('anon', True), ('key', 'abc'), ('key', '12'))
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentTypeError("a storage option is KEY=VALUE")  # without it: it may be a secret
    if value in _PYTHON_S:  # as text, anon=False would be true
        raise ArgumentTypeError(f"{key}={value} is no JSON: say {key}={_PYTHON_S[value]}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def mapping(options: Iterable[Option] | None) -> dict[str, object] | None:
    """The options as the library takes them; None where there were none."""
    return None if options is None else dict(options)
