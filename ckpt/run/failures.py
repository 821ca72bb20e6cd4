"""Saves of a run that have failed: counted and told, or raised."""

from __future__ import annotations

from typing import Literal
from warnings import warn

from ckpt.errors import ArgumentError, CkptError, NotOwnerError, RankError, SaveFailedWarning
from sharding.agreement.participant import ENDED, LATE

OnFailure = Literal["continue", "raise"]
HOPELESS = (
    *("StateError", "ExistsError", "InUseError", "ArgumentError", "ArgumentTypeError"),
    *("NotOwnerError", "ValueError", "TypeError", ENDED, LATE),
)
"""Errors that are raised, because the next step would fail in the same way."""


class Failures:
    """The failed saves of a run, on one rank."""

    def __init__(self, on_failure: OnFailure) -> None:
        if on_failure not in ("continue", "raise"):
            raise ArgumentError(f'on_failure={on_failure!r}: it can be "continue" or "raise"')
        self._on_failure = on_failure
        self.count = 0

    def add(self, error: Exception, place: str, again: str, tells: bool) -> None:
        """Counts a failure, and warns of it if this rank `tells`; or raises the error.

        `again` names the step that saves again.
        """
        kind = error.error if isinstance(error, RankError) else type(error).__name__
        may_pass = isinstance(error, CkptError | OSError) and kind not in HOPELESS
        if kind == NotOwnerError.__name__ and isinstance(error, RankError):
            raise NotOwnerError(str(error)) from error
        if self._on_failure == "raise" or not may_pass:
            raise error
        self.count += 1
        if tells:
            warn(
                f"{place} was not saved: {kind}: {error}; {again} saves again "
                f"(failure {self.count} of this run)",
                SaveFailedWarning,
                stacklevel=5,
            )
