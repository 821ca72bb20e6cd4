"""The processes that save or load together; their errors are this package's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt import errors
from sharding.agreement import ranks
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import HASH_BITS, attempt
from sharding.errors import NotAMemberError

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group

__all__ = ["HASH_BITS", "TIMEOUT_SECONDS", "Ranks", "attempt"]


class Ranks(ranks.Ranks):
    """As `sharding.agreement.ranks.Ranks`, with errors that a caller of `ckpt` knows."""

    rank_error = errors.RankError

    def __init__(
        self,
        group: Group = None,
        seconds: float | None = None,
        purpose: str = "calls",
    ) -> None:
        try:
            super().__init__(group, seconds, purpose)
        except NotAMemberError as error:
            raise errors.CkptError(str(error)) from error
