"""Limits for the numbers that a checkpoint announces, and for the JSON in it.

A file of unknown origin may announce any number. A reader compares each number that sizes memory or
work with a limit first. Rules:

1. `Limits` has limits that an honest, huge checkpoint may exceed one day. `limits` or the
   environment raises them. No honest checkpoint exceeds the constants below: they are fixed.
2. A checkpoint keeps the limits with which it was opened, in all threads.
3. A number above a limit is a HostileError with the limit's name, the number and the remedy.
4. Dict keys with equal hashes are refused: an attacker has chosen them, since n of them take n²
   comparisons. Python randomizes the hashes of text and bytes, and those of numbers and tuples are
   predictable.
5. JSON is decoded here alone (`decode_object`), as all readers understand it alike: UTF-8, unique
   keys, finite numbers, within the limits.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import lru_cache
from typing import NoReturn

from formats.errors import FormatError, HostileError
from sharding.errors import ArgumentError

__all__ = ["limits"]

VARIABLE = "CKPT_LIMITS"
"""The environment variable that raises limits: `header_bytes=200MB,json_values=100000000`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that may be raised. The size of a file is a further limit for all parts of it."""

    header_bytes: int = 100_000_000
    """The JSON header of a safetensors file or native shard, as in the safetensors library."""
    manifest_bytes: int = 1 << 30
    """A native `manifest.json`."""
    index_bytes: int = 100_000_000
    """The index of a Hugging Face folder; enough for a million tensors."""
    table_bytes: int = 1 << 30
    """The chunk table of a native shard with its borrowed runs; enough for 3 TB of tensors."""
    chunk_bytes: int = 64 << 20
    """One decoded chunk, in scratch memory of a thread; ours have at most 1 MiB."""
    json_values: int = 64_000_000
    """Values in one JSON document, counted by its punctuation; each takes at most 120 bytes."""
    pickle_bytes: int = 1 << 30
    """One pickle. The `.metadata` of DCP grows with tensors × ranks: 52 MB for 256 ranks."""
    pickle_steps: int = 200_000_000
    """Steps of one pickle; each takes at most 100 bytes. A `.metadata` has a step in 2.3 bytes."""
    zip_directory_bytes: int = 128 << 20
    """The directory of a zip: 1.5 million records, each of which takes 700 bytes."""
    name_chars: int = 4096
    """The name of a tensor: the keys of its key path, joined."""
    expansion: int = 1 << 16
    """Bytes of all tensors for each byte of the files. Compressed zeros reach 15,000, a compressed
    checkpoint that borrows all its chunks 52,000."""


DIMENSIONS = 64
"""The largest number of dimensions of a torch tensor."""
HEADER_DIMENSIONS = 1_000
"""Dimensions in a safetensors header of another library: to multiply more would take hours."""
ELEMENTS = 2**63
"""Shapes with so many elements or more are refused: torch counts in signed 64-bit integers."""
DEPTH = 200
"""The depth of a state's nest."""
KEY_DEPTH = 8
"""The depth of a tuple that is a key of a dict: its hash takes space on the C stack."""
KEY_PARTS = 1_000
"""Parts of such a tuple at all depths: a pickle can repeat one part a million times."""
ALIKE_KEYS = 256
"""Keys of one dict with one hash: the time for a dict grows with the square of their number."""
INTEGER_BYTES = 1024
"""Bytes of an integer in a pickle. The state of a random generator has 312."""
FREE_VALUES = 1 << 18
"""Values that a pickle may describe beyond one for each byte: it can refer to a part repeatedly."""
NAME_CHARS_A_BYTE = 64
"""Characters in all names of tensors and values, for each byte that describes them, plus"""
FREE_NAME_CHARS = 1 << 23
"""so many: names repeat the keys above them."""
LIST_HOLES = 1_000_000
"""Missing indices in all lists of a DCP checkpoint together."""
TANGLED = 512
"""Boxes of a tensor that no straight cut separates."""
CUTS = 16
"""Rounds of straight cuts that separate a tensor's boxes; sharding makes one or two a dimension."""
AXES = 16
"""Axes of a mesh."""
RANKS = 1 << 24
"""Ranks of a mesh."""
SPLITS = 1 << 16
"""Chunks into which a layout cuts its dimensions before it cuts them over ranks."""
ALL_SPLITS = 1 << 22
"""The sum of these for all different layouts of tensors with more than `FEW_SPLITS`."""
FEW_SPLITS = 64
"""A layout with at most so many chunks does not count for `ALL_SPLITS`."""
SIZE = 1 << 62
"""The largest dimension, rank, offset or byte count in a manifest."""
BASES = 32
"""Bases of one checkpoint."""

_NAMES = tuple(each.name for each in fields(Limits))
_raised: ContextVar[Limits | None] = ContextVar("ckpt_limits", default=None)


def current() -> Limits:
    """Returns the limits in force. Raises ArgumentError if the variable cannot be parsed."""
    raised = _raised.get()
    return _parse(os.environ.get(VARIABLE, "")) if raised is None else raised


@contextmanager
def limits(**raised: int) -> Iterator[Limits]:
    """Sets limits for checkpoints that are opened inside the block.

    A checkpoint that is opened in the block keeps them. For a file whose origin you trust, pass a
    larger number than the one in the error; smaller limits are allowed too. The environment
    variable `CKPT_LIMITS` does the same for another program and the command line.

    Raises:
        ArgumentError: no limit has this name, or a number is not a positive integer.

    >>> import ckpt
    >>> with ckpt.limits(header_bytes=200_000_000) as now:
    ...     now.header_bytes
    200000000
    """
    for name, number in raised.items():
        _check_known(name, "ckpt.limits")
        if type(number) is not int or number < 1:
            raise ArgumentError(f"ckpt.limits: {name}={number!r} is not a whole number from 1 up")
    with apply_limits(replace(current(), **raised)) as now:
        yield now


@contextmanager
def apply_limits(chosen: Limits) -> Iterator[Limits]:
    """Puts these limits in force in this thread, inside the block."""
    token = _raised.set(chosen)
    try:
        yield chosen
    finally:
        _raised.reset(token)


def check(name: str, found: int, where: str) -> None:
    """Raises HostileError, which begins with `where`, if a number is above the limit of a name."""
    if found > getattr(current(), name):
        raise limit_error(name, found, where)


def limit_error(name: str, found: int, where: str) -> HostileError:
    """Returns the error for a number above the limit of a name."""
    return HostileError(
        f"{where}: {name} would be {found}, the limit is {getattr(current(), name)}; if you trust "
        f"the file's origin, raise the limit with ckpt.limits({name}=...), or "
        f"{VARIABLE}={name}=... in the environment"
    )


@lru_cache(maxsize=8)
def _parse(text: str) -> Limits:
    """Returns the limits in the environment variable.

    >>> _parse("header_bytes=200MB, pickle_steps=5").pickle_steps
    5
    """
    sizes: dict[str, int] = {}
    for setting in filter(None, map(str.strip, text.split(","))):
        name, _, value = setting.partition("=")
        _check_known(name.strip(), VARIABLE)
        try:
            sizes[name.strip()] = parse_size(value)
        except ValueError as error:
            raise ArgumentError(f"{VARIABLE}: {setting!r}: {error}") from None
    return Limits(**sizes)


def _check_known(name: str, where: str) -> None:
    if name not in _NAMES:
        raise ArgumentError(f"{where}: there is no limit {name!r}; there are {', '.join(_NAMES)}")


class Names:
    """Limits the length of names in a checkpoint: of each tensor's name, and of all together."""

    def __init__(self, where: str, described_bytes: int) -> None:
        """`described_bytes` is the length of the bytes with the names; `grow` adds to it."""
        self._where = where
        self._longest = current().name_chars
        self._left = FREE_NAME_CHARS + NAME_CHARS_A_BYTE * described_bytes

    def grow(self, described_bytes: int) -> None:
        """Adds bytes that describe the checkpoint."""
        self._left += NAME_CHARS_A_BYTE * described_bytes

    def tensor(self, chars: int) -> None:
        """Counts the name of a tensor. Raises HostileError if it, or all together, is too long."""
        self._left -= chars
        if chars > self._longest or self._left < 0:
            if chars > self._longest:
                raise limit_error("name_chars", chars, f"{self._where}: the name of a tensor")
            self.values(0)

    def values(self, chars: int, count: int = 1) -> None:
        """Counts names of values, of so many characters each. Raises HostileError if too many."""
        self._left -= chars * count
        if self._left < 0:
            raise HostileError(
                f"{self._where}: all its names, which repeat the keys above them, are over "
                f"{NAME_CHARS_A_BYTE} times as long as the bytes that describe them"
            )


_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?) ?(?P<unit>[kKMGT](?:i?B)?|B)?")
_DECIMAL = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"k": 2**10, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as `5GB`, `40kB` or `1M` (decimal), `2GiB` or `4096`.

    Raises:
        ArgumentError: the text is not a size, or is zero.

    >>> parse_size("5GB"), parse_size("1.5KiB"), parse_size("40kB"), parse_size("1M")
    (5000000000, 1536, 40000, 1000000)
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(Decimal(match["number"]) * _bytes_of(match["unit"] or "B")) if match else 0
    if size < 1:
        raise ArgumentError(
            f"{text!r} is no size; write a number of bytes, 500MB or 5GB (decimal), or 2GiB "
            "(binary)"
        )
    return size


def _bytes_of(unit: str) -> int:
    return 1 if unit == "B" else (_BINARY if "i" in unit else _DECIMAL)[unit[0]]


_APART = sys.hash_info.modulus
"""No three integers between minus this number and this number have the same hash."""


class KeysApart:
    """Checks that no dict or set that is being made has many keys with one hash."""

    def __init__(self, where: str = "") -> None:
        """`where` begins the message, unless the caller adds it."""
        self._where = f"{where}: " if where else ""
        self._alike: dict[int, int] = {}

    def check(self, key: object, owner: object) -> None:
        """Raises HostileError if `owner` has too many keys with the hash of `key`."""
        kind = type(key)
        if kind is str or (kind is int and -_APART < key < _APART):  # type: ignore[operator]
            return
        slot = hash(key) ^ id(owner)
        count = self._alike[slot] = self._alike.get(slot, 0) + 1
        if count > ALIKE_KEYS:
            raise HostileError(
                f"{self._where}over {ALIKE_KEYS} keys of one dict have the same hash, which does "
                "not happen by chance"
            )


_MINUS_ZERO = re.compile(r"-0(?![0-9.eE])")


def decode_object(
    data: bytes | str, what: str, lone: bool = False, nan: bool = False
) -> dict[str, object]:
    """Returns the JSON object in `data`. `what` names the document at the start of each message.

    `lone` allows escapes of half a surrogate pair, which Python uses in names of files; `nan`
    allows NaN and Infinity, which Python's json writes.

    Raises:
        HostileError: a key occurs twice, there are too many values, or they nest too deep.
        FormatError: `data` is not JSON in UTF-8, or not an object.

    >>> decode_object('{"b": 1, "b": 2}', "m: the header")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    HostileError: m: the header has the key 'b' twice
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise HostileError(f"{what} has the key {twice!r:.80} twice")
        return entries

    def refuse(constant: str) -> NoReturn:
        raise FormatError(f"{what} is not JSON: {constant} is not a JSON number")

    check("json_values", _most_values(data), what)
    try:
        text = data if isinstance(data, str) else data.decode()
        # Some readers take -0 for a float. Few documents have one.
        integer = _integer if _MINUS_ZERO.search(text) else None
        document: object = json.loads(
            text,
            object_pairs_hook=unique,
            parse_constant=float if nan else refuse,
            parse_float=_float,
            parse_int=integer,
        )
        if "\\u" in text and not lone:
            json.dumps(document, ensure_ascii=False).encode()  # raises for half a surrogate pair
    except FormatError:
        raise
    except RecursionError as error:
        raise HostileError(f"{what} nests too deep to be read") from error
    except ValueError as error:
        raise FormatError(f"{what} is not JSON in UTF-8: {error}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{what} is JSON, but a {type(document).__name__}, not an object")
    return document


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):  # other readers have another number
        raise ValueError(f"{digits:.40} is larger than every float")
    return number


def _integer(digits: str) -> int:
    if digits == "-0":
        raise ValueError("-0 is not an integer")
    return int(digits)


def _most_values(data: bytes | str) -> int:
    """Returns an upper bound of the values: a comma, colon or bracket stands before each."""
    if isinstance(data, bytes):
        return sum(map(data.count, (b",", b":", b"[", b"{")))
    return sum(map(data.count, ",:[{"))
