"""Options that several commands share.

`--map`, `--rename` and others change names and shapes before a command works. `--include` and
`--exclude` choose the names that it uses. `-o KEY=VALUE` has the options of the fsspec driver of a
URL. The library's messages name its own arguments: `overwrite=True`, `select=`, `to='ckpt'`. The
command line has the same ones as options, and puts them in the place of the arguments: the `dest`
of an option is the name of the argument.
"""

from __future__ import annotations

import json
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from formats.limits import RANKS
from sharding.errors import ArgumentError

if TYPE_CHECKING:
    from ckpt.mapping.changes import MappingName

Pair = tuple[str, str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MappingOption:
    """A mapping as it was given: a name or a file, and whether its inverse is meant."""

    name: str
    is_inverse: bool


def add_name_changes(parser: ArgumentParser, whose: str) -> None:
    """Declares the options; `whose` are the names that they change."""
    add = parser.add_argument
    for flag, is_inverse, help_text in (
        ("--map", False, "change names and shapes by a mapping: llama-hf-megatron, auto, a file"),
        ("--inverse-map", True, "the same from the right of the mapping to its left"),
    ):
        add(
            flag,
            dest="mappings",
            action="append",
            type=partial(MappingOption, is_inverse=is_inverse),
            metavar="NAME|FILE",
            help=f"{help_text}; repeatable, in turn",
        )
    add(
        "--set",
        dest="parameters",
        action="append",
        type=_parameter,
        metavar="NAME=N",
        help="a size that a mapping needs (example: heads=32); by default from the config.json",
    )
    add(
        "--config",
        metavar="FOLDER|FILE",
        help="the folder of the model with its config.json, or this file: for sizes, and for the "
        f"small files of a Hugging Face folder that is written; without it the folder of {whose}",
    )
    add(
        "--rename",
        action="append",
        type=_rename,
        metavar="OLD=NEW",
        help="a name or a dotted prefix, a pattern with *, or /a regular expression/ with groups "
        "as \\1 in NEW; repeatable, a name is renamed once; after --map",
    )


def mappings_of(options: Sequence[MappingOption] | None) -> list[MappingName]:
    """Returns the mappings that were given, as the library takes them."""
    from ckpt.mapping.changes import read_mapping

    return [
        read_mapping(option.name).inverse() if option.is_inverse else option.name
        for option in options or ()
    ]


def by_first(pairs: Sequence[tuple[str, T]] | None, flag: str) -> dict[str, T]:
    """Returns the pairs of a repeatable option as a dict. Raises ArgumentError for equal names."""
    first: dict[str, T] = {}
    for name, value in pairs or ():
        if name in first:
            raise ArgumentError(f"{flag} has {name!r} twice; give it once")
        first[name] = value
    return first


def _parameter(text: str) -> tuple[str, int]:
    """Returns a size by its name, for argparse."""
    name, _, value = text.partition("=")
    if not name or not (value.isascii() and value.isdecimal()):
        raise ArgumentTypeError(f"{text!r} is not of the form NAME=N; give it as in heads=32")
    return name, int(value)


def _rename(text: str) -> Pair:
    r"""Returns an old and a new name, for argparse.

    >>> _rename("old=new"), _rename("/a=(.)/=b")
    (('old', 'new'), ('/a=(.)/', 'b'))
    """
    end = text.find("/=", 1) + 1 if text.startswith("/") else text.find("=")
    if end <= 0 and not text.startswith("="):
        raise ArgumentTypeError(f"{text!r} is not of the form OLD=NEW; give it as in net=model")
    return text[:end], text[end + 1 :]


def add_name_patterns(parser: ArgumentParser) -> None:
    """Declares both; their values are `include` and `exclude` of the library."""
    for flag, help_text in (("--include", "only these names"), ("--exclude", "not these names")):
        parser.add_argument(
            flag,
            action="append",
            metavar="PATTERN",
            help=f"{help_text}; has * and ?, or is /a regular expression/; has to match a name; "
            "repeatable",
        )


Option: TypeAlias = tuple[str, object]
"""A name and a value."""
_PYTHON_S = {"True": "true", "False": "false", "None": "null"}


def add_quiet(parser: ArgumentParser, effect: str = "print nothing but errors") -> None:
    """Declares `-q`, of a command whose exit code tells the outcome."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help=f"{effect}, and show no progress"
    )


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
        # The text may be a secret.
        raise ArgumentTypeError("give KEY=VALUE, as in endpoint_url=https://host")
    if value in _PYTHON_S:  # the text "False" would count as true
        raise ArgumentTypeError(f"{key}={value} is not JSON: say {key}={_PYTHON_S[value]}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def mapping(options: Iterable[Option] | None) -> dict[str, object] | None:
    """Returns the options as a dict for the library; None without options."""
    return None if options is None else dict(options)


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


def ranks_in(text: str) -> int:
    """A number of ranks, for argparse."""
    if text.isascii() and text.isdecimal() and 1 <= int(text[:12]) <= RANKS:
        return int(text)
    raise ArgumentTypeError(
        f"{text!r} is no number of ranks; give a whole number from 1 to {RANKS:,}"
    )
