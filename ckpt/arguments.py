"""The values of options, as literal types, and checks of arguments that several calls share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NoReturn

from ckpt.errors import ArgumentError, ArgumentTypeError, MisuseError

__all__ = [
    "CastingRule",
    "DtypeName",
    "FormatName",
    "KindName",
    "ReplicaReads",
    "UnchangedReads",
    "WhenBusy",
    "check_order",
    "check_word",
]

CastingRule = Literal["same_kind", "unsafe"]
"""The casts that a load may make, in numpy's words."""
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
"""The dtypes to which weights can be cast. float8_e8m0fnu has no sign, and torch has no casts to
packed floats."""
FormatName = Literal["ckpt", "safetensors", "hf", "torch", "dcp", "gguf", "npz"]
"""The formats to which a checkpoint is converted."""
KindName = Literal["full", "sharded", "local"]
"""The kinds of state dicts (`sharding.kind`)."""
ReplicaReads = Literal["auto", "read", "exchange"]
"""Whether each replica reads its elements, or the replicas read shares and exchange them."""
UnchangedReads = Literal["auto", "read", "skip"]
"""Whether a load reads chunks whose bytes the target has already."""
WhenBusy = Literal["wait", "refuse"]
"""Whether a save waits for the background save of its process, or raises BusyError."""


def check_word(name: str, value: object, words: Sequence[str]) -> None:
    """Raises ArgumentError, with all words, unless an option is one of them.

    >>> check_word("when_busy", "later", ("wait", "refuse"))
    Traceback (most recent call last):
    sharding.errors.ArgumentError: when_busy is 'later'; it can be 'wait' or 'refuse'
    """
    if value not in words:
        *others, last = map(repr, words)
        raise ArgumentError(f"{name} is {value!r:.80}; it can be {', '.join(others)} or {last}")


class Uncopied:
    """An object that a copy would not follow: `copy` and `pickle` of it raise MisuseError."""

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise MisuseError(
            f"a {kind} cannot be copied or pickled, because the copy would know nothing of what "
            f"goes on in it; pass the {kind} itself, or its URL and make another there"
        )


def check_order(call: str, url: object, state: object) -> None:
    """Raises ArgumentTypeError unless `url` is a path or URL; explains torch's order of arguments.

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
