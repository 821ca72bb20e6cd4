"""The warning of a rank that waits unusually long for others; the rank waits on.

Rules:

1. Only the first operation of a call is watched. In later operations a missing rank is at work, for
   any length of time.
2. A rank says that it has called as it enters the call: it may be at work before the first
   operation too. Rank 0 names the missing ranks that have not said so. Another rank names rank 0.
3. The logger `ckpt` gets the warning; Python shows it on stderr by default. No call fails by a
   warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding.agreement.channel import Call

NOTICE_SECONDS = 10.0
"""The time after which a rank names the ranks that have not called."""
SHOWN = 8
"""The most ranks that a warning names."""
_log = logging.getLogger("ckpt")


class WaitWarning:
    """The time at which one wait of a rank becomes worth a warning."""

    def __init__(self, call: Call, rank: int) -> None:
        self._call, self._rank = call, rank
        self.began = monotonic()
        self._at = float("inf")
        if call.is_beginning:
            self._at = self.began + NOTICE_SECONDS

    def until(self, seconds: float) -> float:
        """Returns the given seconds, or the fewer ones until the warning is due."""
        return max(0.0, min(seconds, self._at - monotonic()))

    @property
    def is_due(self) -> bool:
        """Whether the warning is due."""
        return monotonic() >= self._at

    def hush(self) -> None:
        """Gives no warning for this wait."""
        self._at = float("inf")

    def say(self, missing: Sequence[int]) -> None:
        """Warns once, with the ranks that have not called, if there are any."""
        self.hush()
        if not missing:
            return
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
