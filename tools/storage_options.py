"""`-o KEY=VALUE`: the options of the fsspec driver of a URL."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from typing import TypeAlias

Option: TypeAlias = tuple[str, object]
"""A name and a value."""
_PYTHON_S = {"True": "true", "False": "false", "None": "null"}


def add_storage_options(parser: ArgumentParser) -> None:
    """Declares `-o`, for every command whose arguments may be URLs."""
    parser.add_argument(
        "-o",
        "--storage-option",
        dest="storage_options",
        action="append",
        metavar="KEY=VALUE",
        type=storage_option,
        help="an option for the fsspec driver of a URL; VALUE is JSON or else text (example: "
        "-o anon=true); repeatable",
    )


def add_storage_options_of(parser: ArgumentParser, argument: str) -> None:
    """Declares options for the driver of one argument only: `--dst-storage-option` for DST."""
    parser.add_argument(
        f"--{argument.lower()}-storage-option",
        dest=f"{argument.lower()}_storage_options",
        action="append",
        metavar="KEY=VALUE",
        type=storage_option,
        help=f"an option for the driver of {argument} alone, which then gets no -o",
    )


def storage_option(text: str) -> Option:
    """Returns the name and the value in an argument, for argparse.

    >>> storage_option("anon=true"), storage_option("key=abc"), storage_option('key="12"')
    (('anon', True), ('key', 'abc'), ('key', '12'))
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentTypeError("a storage option is KEY=VALUE")  # the text may be a secret
    if value in _PYTHON_S:  # the text "False" would count as true
        raise ArgumentTypeError(f"{key}={value} is not JSON: say {key}={_PYTHON_S[value]}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def mapping(options: Iterable[Option] | None) -> dict[str, object] | None:
    """Returns the options as a dict for the library; None without options."""
    return None if options is None else dict(options)
