"""The root of all errors, and those about tensors, layouts, arguments and ranks.

Rules:

1. `CkptError` is the root of every error that `ckpt`, `formats` and `sharding` raise on purpose.
   The base that Python has for the case stays a base: `ValueError`, `OSError`, `TimeoutError`.
2. A class has one stable `kind`, the word a program may compare: the name of the class without
   `Error`, in snake case. A class that a caller handles as its base has the base's.
3. No text of an error shows a secret of a URL: a password before its host, the signature of a
   presigned URL, or the token of a live state. Each text passes through `without_secrets`.
4. Errors and warnings survive pickle and copy, whatever arguments their `__init__` takes: pools of
   processes and torch's collectives send them (`Picklable`).

Pure Python: no torch. `docs/decisions/028-one-error-root.md` says why the root is here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CkptError",
    "DestroyedGroupError",
    "HoleError",
    "LocalShapeError",
    "MisuseError",
    "NotAMemberError",
    "OptimizerMismatchError",
    "PartialError",
    "RankError",
    "ShardingError",
    "TorchAssertionError",
    "TransferError",
    "UnknownPlacementError",
    "WorldMismatchError",
]

SHOWN_NAMES = 20
"""The most names in a message; the exception has all of them."""


def format_names(names: Sequence[object], most: int = SHOWN_NAMES) -> str:
    """Returns the first few names as text, and how many more there are.

    >>> format_names(["w", "b"]), format_names(["w", "b", "c"], 1)
    ('w, b', 'w and 2 more')
    """
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


class Picklable:
    """An exception that pickle and copy rebuild from `args` and attributes, without `__init__`.

    Python's own way calls `__init__` with `args`, and the failure of that call breaks a pool.
    """

    def __reduce__(self) -> tuple[object, ...]:
        kind, args, *attributes = tuple(super().__reduce__())
        return _rebuilt, (kind, args), *attributes


def _rebuilt(kind: type[Any], args: tuple[object, ...]) -> object:
    """Returns an exception as Python's own base of `kind` makes it from `args`."""
    error: Any = kind.__new__(kind, *args)
    super(Picklable, error).__init__(*args)
    return error


class CkptError(Picklable, Exception):
    """The root of all errors that `ckpt`, `formats` and `sharding` raise on purpose."""

    kind = "ckpt"
    names: tuple[str, ...] = ()
    """All names of a list of which the message shows the first ones."""
    shown_on: int | None = None
    """A lower rank that raises an equal error, and shows where: this rank's traceback is short."""

    def __init__(self, *args: object, names: Iterable[str] = ()) -> None:
        super().__init__(*(without_secrets(arg) if isinstance(arg, str) else arg for arg in args))
        if names:
            self.names = tuple(names)

    def __str__(self) -> str:
        if self.shown_on is None or "\n" not in self.reason:
            return self.reason
        return f"{self.reason}\n  Rank {self.shown_on} has the same error, and its traceback."

    @property
    def reason(self) -> str:
        """The whole message, without a part that concerns this rank alone."""
        return super().__str__()


class ArgumentError(CkptError, ValueError):
    """An argument, or a variable of the environment, has a value that is not accepted."""

    kind = "argument"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument, or an object in it, has a type that is not accepted."""


class MisuseError(CkptError, RuntimeError):
    """A call at the wrong moment, such as a save on a read-only run."""

    kind = "misuse"


class TorchAssertionError(MisuseError, AssertionError):
    """A misuse for which torch's own function raises AssertionError."""


class ShardingError(CkptError, ValueError):
    """This package cannot describe a tensor, a module or a layout."""

    kind = "sharding"


class HoleError(ShardingError):
    """No rank holds a wanted box. The message names the box."""

    kind = "hole"


class PartialError(ShardingError):
    """Ranks hold summands of a tensor, not parts of it: redistribute it, then describe it."""

    kind = "partial"


class UnknownPlacementError(ShardingError):
    """A tensor is divided in a way that no placement of `sharding.layout` describes."""

    kind = "unknown_placement"


class LocalShapeError(ShardingError):
    """A rank's local tensor differs from the part that the tensor's placements give the rank."""

    kind = "local_shape"


class WorldMismatchError(LocalShapeError):
    """Another rank, or another number of ranks, made a local state dict."""

    kind = "world_mismatch"


class OptimizerMismatchError(ShardingError):
    """An optimizer's state does not fit the optimizer: another module, or other groups."""

    kind = "optimizer_mismatch"


class NotAMemberError(ShardingError):
    """A process calls a function of a process group of which it is not a member."""

    kind = "not_a_member"


class DestroyedGroupError(ShardingError):
    """A needed process group has been destroyed: shard again in a new one."""

    kind = "destroyed_group"


class TransferError(CkptError, RuntimeError):
    """Elements did not arrive from another rank, or could not be sent to it; names the rank."""

    kind = "transfer"


ENDED, LATE = "ProcessEnded", "TimeoutError"
"""The names of the errors of ranks that cannot send their own, in a `RankError`."""


class RankError(CkptError):
    """Another rank failed; every rank raises. `rank`, `error` and `message` describe its error."""

    kind = "rank"
    touched: tuple[str, ...] = ()
    """In a load: the tensors of this rank's target that were filled before."""

    def __init__(self, stage: str, rank: int, error: str, message: str) -> None:
        self.rank = rank
        self.error = error
        self.message = without_secrets(message)
        super().__init__(f"{stage} failed on rank {rank} with {error}: {message}")

    def __str__(self) -> str:
        mixed = f". On this rank: {describe_mixed(self.touched)}" if self.touched else ""
        return self.reason + mixed


def describe_mixed(touched: Sequence[str]) -> str:
    """Returns a sentence that names the tensors that a failed load has touched."""
    return f"The target may hold a mix of old and new bytes in: {format_names(touched)}"


def describe_error(error: BaseException) -> str:
    """Returns the reason of an exception and, in parentheses, the notes that were added to it.

    Other ranks are told so much, and so is a user whose load went on with another checkpoint.
    """
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{error.reason if isinstance(error, CkptError) else error}{notes}"


HIDDEN = "***"
_USER = re.compile(
    r"(?<=://)[^/\s'\"@:]*:[^/\s'\"]*@|(?<=http://)[^/\s'\"]+@|(?<=https://)[^/\s'\"]+@"
)
_QUERY = re.compile(r"((?:https?|live)://[^\s?'\"]{0,1024}\?)[^\s'\"]+?(?=[:,.;)]?(?:[\s'\"]|$))")

_TOKEN = re.compile(r"([?&]token=)[^\s&'\"]+?(?=[:,.;)]?(?:[\s&'\"]|$))")
"""The token of a URL whose path has a space, which ends a URL for `_QUERY`."""


def without_secrets(text: str) -> str:
    """Returns the text without the passwords and signatures of its URLs; in linear time.

    >>> without_secrets("ftp://me:secret@host/run: no checkpoint here")
    'ftp://***@host/run: no checkpoint here'
    >>> without_secrets("https://host/a.safetensors?X-Amz-Signature=1f: the file was truncated")
    'https://host/a.safetensors?***: the file was truncated'
    >>> without_secrets("live://10.0.0.7:4000/policy/12?token=abc: no such version")
    'live://10.0.0.7:4000/policy/12?***: no such version'
    >>> without_secrets("http://host/step 9?token=abc: no such checkpoint")
    'http://host/step 9?token=***: no such checkpoint'
    >>> without_secrets("s3://bucket/a?b=c and abfs://container@account.dfs.core.windows.net/run")
    's3://bucket/a?b=c and abfs://container@account.dfs.core.windows.net/run'
    """
    if "://" not in text:
        return text
    hidden = _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))
    return _TOKEN.sub(rf"\1{HIDDEN}", hidden)


def cause_without_secrets(error: BaseException) -> BaseException | None:
    """Returns the error as a cause to raise from; None if its traceback would show a secret."""
    at: BaseException | None = error
    for _ in range(16):
        if at is None:
            return error
        text = str(at)
        if without_secrets(text) != text:
            return None
        at = at.__cause__ or at.__context__
    return None
