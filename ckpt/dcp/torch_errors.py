"""Errors that pass through torch.distributed.checkpoint, which pickles them between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckpt.errors import CkptError, RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
