"""How large a checkpoint may say that it is before a reader refuses it.

A file that nobody vouches for may announce any number. Each number that sizes memory or work is
held against a limit first. Rules:

1. `Limits` has what an honest, huge checkpoint may exceed one day; `limits` or the environment
   raise it. The constants below have what none exceeds: they stay.
2. Those in force where a checkpoint is opened hold for it from then on, whichever thread reads.
3. What exceeds one is a HostileError with the limit's name, the number found and how to raise it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from formats.errors import HostileError
from formats.sizes import parse_size
from sharding.errors import ArgumentError

__all__ = ["limits"]

VARIABLE = "CKPT_LIMITS"
"""The environment variable that raises limits: `header_bytes=200MB,json_values=100000000`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be raised. Everything read is also at most as long as the file that has it."""

    header_bytes: int = 100_000_000
    """The JSON header of a safetensors file or native shard: what that library reads."""
    manifest_bytes: int = 1 << 30
    """A native `manifest.json`."""
    index_bytes: int = 100_000_000
    """The index of a Hugging Face folder; one of a million tensors is no longer."""
    table_bytes: int = 1 << 30
    """The chunk table of a native shard with its records of what is borrowed: 3 TB of tensors."""
    chunk_bytes: int = 64 << 20
    """One chunk once it is decoded, in scratch memory of a thread; ours have 1 MiB at most."""
    json_values: int = 64_000_000
    """Values in one JSON document, counted by its punctuation; each takes at most 120 bytes."""
    pickle_bytes: int = 1 << 30
    """One pickle. The `.metadata` of DCP grows with tensors × ranks: 52 MB at 256."""
    pickle_steps: int = 200_000_000
    """Steps of one pickle; each takes at most 100 bytes. A `.metadata` has one in 2.3 bytes."""
    zip_directory_bytes: int = 128 << 20
    """The directory of a zip: 1.5 million records, each of which takes 700 bytes."""
    name_chars: int = 4096
    """The name of a tensor: the keys on the way to it, joined."""
    expansion: int = 1 << 16
    """Bytes of all tensors for each byte of the files: zeros, compressed, reach 15,000, and a
    compressed checkpoint that borrows all its chunks 52,000."""


DIMENSIONS = 64
"""The most dimensions torch gives a tensor."""
HEADER_DIMENSIONS = 1_000
"""The same for a safetensors header, which other libraries write: multiplying more takes hours."""
ELEMENTS = 2**63
"""Shapes with this many elements or more are refused; torch counts in signed 64-bit integers."""
DEPTH = 200
"""How deep a state may nest."""
KEY_DEPTH = 8
"""How deep a tuple that is a key of a dict may: hashing it takes the C stack."""
KEY_PARTS = 1_000
"""Parts of such a tuple, however deep: one part may stand in it a million times."""
ALIKE_KEYS = 256
"""Keys of one dict with one hash: a dict of many such takes a time that grows with their square."""
INTEGER_BYTES = 1024
"""Longer integers of a pickle are refused; the state of a random generator has 312."""
FREE_VALUES = 1 << 18
"""Values a pickle may describe beyond one for each of its bytes, by naming a part of it again."""
NAME_CHARS_A_BYTE = 64
"""Characters in all names, of tensors and values, for each byte of what describes them, and"""
FREE_NAME_CHARS = 1 << 23
"""so many more: names repeat the keys above them."""
LIST_HOLES = 1_000_000
"""Indices that all lists of a DCP checkpoint together may leave out."""
TANGLED = 512
"""Boxes of a tensor that no straight cut takes apart."""
CUTS = 16
"""Rounds of straight cuts that a tensor's boxes may need; sharding makes one or two a dimension."""
AXES = 16
"""Axes of a mesh."""
RANKS = 1 << 24
"""Ranks of a mesh."""
SPLITS = 1 << 16
"""Chunks into which a layout cuts its dimensions before it cuts them over ranks."""
ALL_SPLITS = 1 << 22
"""The same of all layouts of tensors that are not alike, where there are more than `FEW_SPLITS`."""
FEW_SPLITS = 64
"""Chunks of one tensor that are not counted there."""
SIZE = 1 << 62
"""The largest dimension, rank, offset or byte count in a manifest."""
BASES = 32
"""Checkpoints that one may borrow from."""

_NAMES = tuple(each.name for each in fields(Limits))
_raised: ContextVar[Limits | None] = ContextVar("ckpt_limits", default=None)


def current() -> Limits:
    """The limits in force here. Raises ArgumentError where the variable makes no sense."""
    raised = _raised.get()
    return _parsed(os.environ.get(VARIABLE, "")) if raised is None else raised


@contextmanager
def limits(**raised: int) -> Iterator[Limits]:
    """Within the block, checkpoints that are opened may exceed the limits of these names so far.

    A checkpoint that is opened in it keeps them. Give numbers larger than those that an error
    named, for a file whose origin you trust; smaller ones are allowed too. In another program, and
    for the command line, the environment variable `CKPT_LIMITS` does the same.

    Raises:
        ArgumentError: there is no limit of that name, or a number is no positive integer.

    >>> with limits(header_bytes=200_000_000) as now:
    ...     now.header_bytes, now == current()
    (200000000, True)
    """
    for name, number in raised.items():
        _check_known(name, "ckpt.limits")
        if type(number) is not int or number < 1:
            raise ArgumentError(f"ckpt.limits: {name}={number!r} is no whole number from 1 up")
    with applied(replace(current(), **raised)) as now:
        yield now


@contextmanager
def applied(chosen: Limits) -> Iterator[Limits]:
    """Within the block, in this thread, just these limits are in force."""
    token = _raised.set(chosen)
    try:
        yield chosen
    finally:
        _raised.reset(token)


def check(name: str, found: int, where: str) -> None:
    """Raise HostileError, beginning with `where`, if the number is over the limit of this name."""
    if found > getattr(current(), name):
        raise exceeded(name, found, where)


def exceeded(name: str, found: int, where: str) -> HostileError:
    """The error for a number over the limit of this name."""
    return HostileError(
        f"{where}: {name} would be {found}, the limit is {getattr(current(), name)}; if you trust "
        f"its origin, raise it with ckpt.limits({name}=...), or {VARIABLE}={name}=... in the "
        "environment"
    )


@lru_cache(maxsize=8)
def _parsed(text: str) -> Limits:
    """The limits of the environment variable.

    >>> _parsed("header_bytes=200MB, pickle_steps=5").pickle_steps
    5
    """
    found: dict[str, int] = {}
    for setting in filter(None, map(str.strip, text.split(","))):
        name, _, value = setting.partition("=")
        _check_known(name.strip(), VARIABLE)
        try:
            found[name.strip()] = parse_size(value)
        except ValueError as error:
            raise ArgumentError(f"{VARIABLE}: {setting!r}: {error}") from None
    return Limits(**found)


def _check_known(name: str, where: str) -> None:
    if name not in _NAMES:
        raise ArgumentError(f"{where}: there is no limit {name!r}; there are {', '.join(_NAMES)}")


class Names:
    """The names of what is in a checkpoint: no tensor's too long, and not too much in all."""

    def __init__(self, where: str, described_bytes: int) -> None:
        """`described_bytes` is the length of what describes them; `grow` adds to it."""
        self._where = where
        self._longest = current().name_chars
        self._left = FREE_NAME_CHARS + NAME_CHARS_A_BYTE * described_bytes

    def grow(self, described_bytes: int) -> None:
        """So many bytes more describe the checkpoint."""
        self._left += NAME_CHARS_A_BYTE * described_bytes

    def tensor(self, chars: int) -> None:
        """The name of one more tensor. Raises HostileError where it is too long, or all are."""
        self._left -= chars
        if chars > self._longest or self._left < 0:
            if chars > self._longest:
                raise exceeded("name_chars", chars, f"{self._where}: the name of a tensor")
            self.values(0)

    def values(self, chars: int, count: int = 1) -> None:
        """Names of values, so many characters each. Raises HostileError where all are too long."""
        self._left -= chars * count
        if self._left < 0:
            raise HostileError(
                f"{self._where}: the names in it, which repeat the keys above them, are over "
                f"{NAME_CHARS_A_BYTE} times as long as what describes them"
            )
