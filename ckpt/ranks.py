"""The processes that save or load together; their errors are this package's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt import errors
from sharding import ranks
from sharding.errors import NotAMemberError
from sharding.ranks import HASH_BITS, attempt

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["HASH_BITS", "Ranks", "attempt"]


class Ranks(ranks.Ranks):
    """As `sharding.ranks.Ranks`, with errors that a caller of `ckpt` knows."""

    rank_error = errors.RankError

    def __init__(self, group: ProcessGroup | None = None) -> None:
        try:
            super().__init__(group)
        except NotAMemberError as error:
            raise errors.CkptError(str(error)) from error
