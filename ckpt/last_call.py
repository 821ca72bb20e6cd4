"""Caches the last result of a pure function that is often called again with the same objects."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def keeps_last(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function with a cache of its last result, for calls with the same arguments.

    Arguments are the same if they are the same objects, or equal integers. Arguments and result are
    kept until the next call: they may hold no tensors, and must not be changed.

    >>> shout = keeps_last(lambda words: [word.upper() for word in words])
    >>> words = ["a", "b"]
    >>> shout(words) is shout(words), shout(words) is shout(["a", "b"])
    (True, False)
    """
    last: list[tuple[tuple[object, ...], R]] = []

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        assert not options
        for given, result in last:
            if len(given) == len(args) and all(map(_is_same, given, args)):
                return result
        found = function(*args, **options)
        last[:] = [(args, found)]
        return found

    return call


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) is int and one == other)
