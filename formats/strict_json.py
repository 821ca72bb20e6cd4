"""Decodes JSON that all readers understand alike: UTF-8, unique keys, finite numbers, limits."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import NoReturn

from formats.errors import FormatError, HostileError
from formats.limits import check

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

    >>> decode_object('{"a": {"b": 1, "b": 2}}', "model.safetensors: the header")
    Traceback (most recent call last):
    formats.errors.HostileError: model.safetensors: the header has the key 'b' twice
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise HostileError(f"{what} has the key {twice!r:.80} twice")
        return found

    def refuse(constant: str) -> NoReturn:
        raise FormatError(f"{what} is not JSON: {constant} is not a JSON number")

    check("json_values", _most_values(data), what)
    try:
        text = data if isinstance(data, str) else data.decode()
        # Some readers take -0 for a float. Few documents have one.
        integer = _integer if _MINUS_ZERO.search(text) else None
        found: object = json.loads(
            text,
            object_pairs_hook=unique,
            parse_constant=float if nan else refuse,
            parse_float=_float,
            parse_int=integer,
        )
        if "\\u" in text and not lone:
            json.dumps(found, ensure_ascii=False).encode()  # raises for half a surrogate pair
    except FormatError:
        raise
    except RecursionError as error:
        raise HostileError(f"{what} nests too deep to be read") from error
    except ValueError as error:
        raise FormatError(f"{what} is not JSON in UTF-8: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} is JSON, but a {type(found).__name__}, not an object")
    return found


def _float(digits: str) -> float:
    found = float(digits)
    if math.isinf(found):  # other readers have another number
        raise ValueError(f"{digits:.40} is larger than every float")
    return found


def _integer(digits: str) -> int:
    if digits == "-0":
        raise ValueError("-0 is not an integer")
    return int(digits)


def _most_values(data: bytes | str) -> int:
    """Returns an upper bound of the values: a comma, colon or bracket stands before each."""
    if isinstance(data, bytes):
        return sum(map(data.count, (b",", b":", b"[", b"{")))
    return sum(map(data.count, ",:[{"))
