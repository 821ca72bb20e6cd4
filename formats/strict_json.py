"""JSON that no two readers understand differently: UTF-8, no key twice, no NaN, not too much."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import NoReturn

from formats.errors import FormatError, HostileError
from formats.limits import check

_MINUS_ZERO = re.compile(r"-0(?![0-9.eE])")


def decode_object(data: bytes | str, what: str, lone: bool = False) -> dict[str, object]:
    """The object that `data` holds; `what` says what is read, at the start of every message.

    `lone` allows escapes of half a surrogate pair, as Python has them in names of files.

    Raises:
        HostileError: an object has a key twice, or there are too many values, or they nest too
            deep to be read.
        FormatError: it is not JSON in UTF-8, or no object.

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
        raise FormatError(f"{what} is not JSON: {constant} is no JSON number")

    check("json_values", _most_values(data), what)
    try:
        text = data if isinstance(data, str) else data.decode()
        # A minus before zero is a float to some readers: few documents may have one.
        integer = _integer if _MINUS_ZERO.search(text) else None
        found: object = json.loads(
            text, object_pairs_hook=unique, parse_constant=refuse, parse_int=integer
        )
        if "\\u" in text and not lone:
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except FormatError:
        raise
    except RecursionError as error:
        raise HostileError(f"{what} nests too deep to be read") from error
    except ValueError as error:
        raise FormatError(f"{what} is not JSON in UTF-8: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} is JSON, but a {type(found).__name__}, not an object")
    return found


def _integer(digits: str) -> int:
    if digits == "-0":
        raise ValueError("-0 is no integer")
    return int(digits)


def _most_values(data: bytes | str) -> int:
    """At least as many as there are: each has a comma, a colon or a bracket before it."""
    if isinstance(data, bytes):
        return sum(map(data.count, (b",", b":", b"[", b"{")))
    return sum(map(data.count, ",:[{"))
