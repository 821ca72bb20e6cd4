"""The values of options and of the environment, and checks of arguments that several calls share.

The memory budget of loads and conversions is one number for a process: the environment variable
`CKPT_MEMORY_BUDGET`, or 64 MiB. It covers read buffers, tensors on their way to another dtype or
device, and messages between ranks, beside the tensors that are filled. A checksummed chunk, and a
row of a tensor that is cast, are never divided.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NoReturn

from ckpt.errors import ArgumentError, ArgumentTypeError, MisuseError
from formats.limits import parse_size

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
    ckpt.ArgumentError: when_busy is 'later'; it can be 'wait' or 'refuse'
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
    ckpt.ArgumentTypeError: ckpt.save takes the place first, torch.save the state: call \
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


VARIABLE = "CKPT_MEMORY_BUDGET"
DEFAULT_BYTES = 64 << 20
LEAST_BYTES = 8 << 20
"""A smaller budget would make reads so small that a load is slow."""
MOST_BYTES = 1 << 60


def memory_budget() -> int:
    """Returns the budget of the environment in bytes.

    Raises:
        ArgumentError: the variable's text is not a size, or is too small.
    """
    text = os.environ.get(VARIABLE, "").strip()
    return parse_bytes(text) if text else DEFAULT_BYTES


def parse_bytes(text: str) -> int:
    """Returns the bytes of a size as text. Raises as `memory_budget` does.

    >>> parse_bytes("64MiB"), parse_bytes("100000000")
    (67108864, 100000000)
    """
    try:
        nbytes = parse_size(text)
    except ArgumentError:
        nbytes = 0
    if not LEAST_BYTES <= nbytes <= MOST_BYTES:
        raise ArgumentError(
            f"{VARIABLE} is {text!r}; give a number of bytes, such as 64MiB, 1GB or 100000000, and "
            f"at least {LEAST_BYTES >> 20}MiB"
        )
    return nbytes


LEAST_BOUND_BYTES = 1 << 20


def bound_bytes(host_memory: str | int | None) -> int | None:
    """Returns the bytes of the argument `host_memory`. Raises ArgumentError if they are too few.

    >>> bound_bytes("8GB"), bound_bytes(1 << 30), bound_bytes(None)
    (8000000000, 1073741824, None)
    """
    if host_memory is None:
        return None
    if isinstance(host_memory, bool) or not isinstance(host_memory, int | str):
        raise ArgumentTypeError(f"host_memory is {host_memory!r:.80}; give bytes or a text as 8GB")
    nbytes = parse_size(host_memory) if isinstance(host_memory, str) else host_memory
    if nbytes < LEAST_BOUND_BYTES:
        raise ArgumentError(f"host_memory is {host_memory!r}; give at least 1MiB, or None")
    return nbytes


MAX_WORKERS = 4


def workers_for(ranks_here: int) -> int:
    """Returns the number of threads of this rank if `ranks_here` ranks share the machine."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "") or ranks_here)
    return min(MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) // max(1, ranks_here)))
