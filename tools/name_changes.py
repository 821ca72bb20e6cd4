"""`--map`, `--rename` and others: changes of names and shapes before a command works."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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
    for flag, is_inverse, said in (
        ("--map", False, "change names and shapes by a mapping that ships or by a file"),
        ("--inverse-map", True, "the same from the right of the mapping to its left"),
    ):
        add(
            flag,
            dest="mappings",
            action="append",
            type=_mapping_type(is_inverse),
            metavar="NAME|FILE",
            help=f"{said}; repeatable, in turn (docs/converting.md)",
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

    found: list[MappingName] = []
    for option in options or ():
        mapping = read_mapping(option.name)
        found.append(mapping.inverse() if option.is_inverse else mapping)
    return found


def by_first(pairs: Sequence[tuple[str, T]] | None, flag: str) -> dict[str, T]:
    """Returns the pairs of a repeatable option as a dict. Raises ArgumentError for equal names."""
    found: dict[str, T] = {}
    for name, value in pairs or ():
        if name in found:
            raise ArgumentError(f"{flag} has {name!r} twice; give it once")
        found[name] = value
    return found


def _mapping_type(is_inverse: bool) -> Callable[[str], MappingOption]:
    return lambda name: MappingOption(name, is_inverse)


def _parameter(text: str) -> tuple[str, int]:
    """Returns a size by its name, for argparse."""
    name, _, value = text.partition("=")
    if not name or not (value.isascii() and value.isdecimal()):
        raise ArgumentTypeError(f"{text!r} is no NAME=N, as in heads=32")
    return name, int(value)


def _rename(text: str) -> Pair:
    r"""Returns an old and a new name, for argparse.

    >>> _rename("old=new"), _rename("/a=(.)/=b")
    (('old', 'new'), ('/a=(.)/', 'b'))
    """
    end = text.find("/=", 1) + 1 if text.startswith("/") else text.find("=")
    if end <= 0 and not text.startswith("="):
        raise ArgumentTypeError(f"{text!r} is no OLD=NEW")
    return text[:end], text[end + 1 :]
