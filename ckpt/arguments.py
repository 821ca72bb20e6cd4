"""The words that the verbs take as options, and the checks of arguments that they share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from ckpt.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "CastingRule",
    "DtypeName",
    "FormatName",
    "KindName",
    "ReplicaReads",
    "WhenBusy",
    "check_order",
    "check_word",
]

CastingRule = Literal["same_kind", "unsafe"]
"""Which casts a load may make; numpy's words."""
DtypeName = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]
"""Types that weights are cast to. Not float8_e8m0fnu, which has no sign, nor packed floats, to
which torch casts nothing."""
FormatName = Literal["ckpt", "safetensors", "hf", "torch", "dcp"]
"""Formats that a checkpoint is converted to."""
KindName = Literal["full", "sharded", "local"]
"""Kinds of state dicts (`sharding.kind`)."""
ReplicaReads = Literal["auto", "read", "exchange"]
"""How ranks that want the same elements get them."""
WhenBusy = Literal["wait", "refuse"]
"""How a save treats another one of its process that is in the background."""


def check_word(name: str, value: object, words: Sequence[str]) -> None:
    """Raise ArgumentError, which lists the words, unless an option is one of them.

    >>> check_word("when_busy", "later", ("wait", "refuse"))
    Traceback (most recent call last):
    sharding.errors.ArgumentError: when_busy is 'later'; it can be 'wait' or 'refuse'
    """
    if value not in words:
        *others, last = map(repr, words)
        raise ArgumentError(f"{name} is {value!r:.80}; it can be {', '.join(others)} or {last}")


def check_order(call: str, url: object, state: object) -> None:
    """Raise ArgumentTypeError where the place of a checkpoint is none; tell torch's order.

    >>> check_order("ckpt.save", {"step": 1}, "runs/step-1")
    Traceback (most recent call last):
    sharding.errors.ArgumentTypeError: ckpt.save takes the place first, torch.save the state: call \
ckpt.save('runs/step-1', state), not ckpt.save(state, 'runs/step-1')
    """
    places = (str, os.PathLike)
    if isinstance(url, places):
        return
    if isinstance(state, places):
        place = os.fspath(state)
        raise ArgumentTypeError(
            f"{call} takes the place first, {call.replace('ckpt', 'torch')} the state: call "
            f"{call}({place!r}, state), not {call}(state, {place!r})"
        )
    raise ArgumentTypeError(
        f"{call} takes a path or URL and a state: {call}(url, state); the first argument is a "
        f"{type(url).__name__}"
    )
