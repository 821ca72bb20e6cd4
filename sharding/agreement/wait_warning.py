"""Ranks that have been waited for unusually long: the one that waits says so, and waits on.

Rules:

1. Only the first operation of a call is watched: a rank that is missing there has not called. Later
   on the others work, however long that takes.
2. Rank 0 knows who is missing and names them, and tells those that wait for it that it does. Who
   has not heard from rank 0 either names rank 0.
3. It is a warning of the logger `ckpt`, which Python shows on stderr unless a program says
   otherwise. Nothing fails by it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding.agreement.channel import Call

NOTICE_SECONDS = 10.0
"""How long rank 0 waits before it names who has not called."""
GRACE_SECONDS = 2.0
"""How much longer the others wait for its word that it does."""
SHOWN = 8
"""How many ranks a warning names."""
_log = logging.getLogger("ckpt")


class WaitWarning:
    """When one wait of a rank is worth a word."""

    def __init__(self, call: Call, rank: int) -> None:
        self._call, self._rank = call, rank
        self.began = monotonic()
        self._at = float("inf")
        if call.is_beginning:
            self._at = self.began + NOTICE_SECONDS + (GRACE_SECONDS if rank else 0.0)

    def until(self, seconds: float) -> float:
        """So many seconds, or fewer until there is something to say."""
        return max(0.0, min(seconds, self._at - monotonic()))

    @property
    def is_due(self) -> bool:
        """Whether there is something to say, once."""
        return monotonic() >= self._at

    def hush(self) -> None:
        """There is nothing to say any more."""
        self._at = float("inf")

    def say(self, missing: Sequence[int]) -> None:
        """Name the ranks that have not called."""
        self.hush()
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        who = f"rank {missing[0]}, which has" if len(missing) == 1 else ""
        who = who or f"the ranks {list(missing[:SHOWN])}{more}, which have"
        _log.warning(
            "%s: rank %d has waited %.0f s for %s not called it. Every rank of the process group "
            'must call it; a rank that saves or loads by itself passes group="self". All fail '
            "after %g s.",
            self._call.name,
            self._rank,
            monotonic() - self.began,
            who,
            self._call.seconds,
        )
