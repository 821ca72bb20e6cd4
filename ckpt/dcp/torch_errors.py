"""Errors that pass through torch.distributed.checkpoint, which pickles them between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckpt.errors import CkptError, RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
T = TypeVar("T")


def sendable(error: CkptError) -> CkptError:
    """Returns the error, or one of its nearest base class whose only argument is the text.

    torch unpickles an exception from its text: an exception with more arguments would be lost.
    """
    for kind in type(error).__mro__:
        if kind is type(error) and kind.__init__ is CkptError.__init__:
            return error
        if issubclass(kind, CkptError) and kind.__init__ is CkptError.__init__:
            return kind(str(error))
    return error


def sendable_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function with errors that torch can send to other ranks."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CkptError as error:
            told = sendable(error)
            if told is error:
                raise
            raise told from error

    return call


def translated(error: CheckpointException, group: ProcessGroup | None, no_dist: bool) -> CkptError:
    """Returns this rank's own error, or a RankError with the text of another rank's error."""
    is_alone = no_dist or not dist.is_initialized()
    rank = 0 if is_alone else dist.get_rank(group)
    failed = error.failures
    own = failed[rank][0] if rank in failed else None
    if isinstance(own, CkptError):
        return own
    first = min(failed)
    cause = failed[first][0]
    return RankError(str(error.args[0]), first, type(cause).__name__, str(cause))


@contextmanager
def translated_errors(group: ProcessGroup | None, no_dist: bool) -> Iterator[None]:
    """Raises errors of this package in the place of torch's CheckpointException in the block."""
    try:
        yield
    except CheckpointException as error:
        raise translated(error, group, no_dist) from error
