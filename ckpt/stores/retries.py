"""When a request to a server is sent again, and for how long: one policy for all of them.

Rules:

1. A request is sent again after a failure that may pass (broken connections, time-outs, answers cut
   short, 429 and 5xx), until `RetryPolicy.deadline_seconds` after the first try began. Any other
   failure, as a missing permission or bucket, is an error at once.
2. Between tries lies a random part of a pause that doubles each time, up to `longest_seconds`:
   ranks that failed together do not come back together.
3. Requests are such that requests one twice does what requests it once does, or whoever sends it
   looks what the first one did.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from sharding.errors import ArgumentError
from sharding.url_secrets import without_secrets

T = TypeVar("T")

VARIABLE = "CKPT_STORE_DEADLINE"
DEFAULT_SECONDS = 300.0
TOLD_AFTER_SECONDS = 10.0
"""A request that has failed for so long is spoken of in the log, once."""

_log = logging.getLogger("ckpt.stores")


class ErrorClass(Enum):
    """What a failed request means, whatever the driver calls it."""

    MISSING = "missing"
    """There is no such file."""
    EXISTS = "exists"
    """The condition that it be absent does not hold."""
    DENIED = "denied"
    """No credentials, wrong ones, or no permission."""
    NO_BUCKET = "no bucket"
    UNSUPPORTED = "unsupported"
    """The server does not know what was asked for."""
    PAST_END = "past end"
    """The file ends before the range."""
    PASSING = "passing"
    """It may go well the next time."""
    LASTING = "lasting"
    """Anything else."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to try, and how long to wait between."""

    deadline_seconds: float = DEFAULT_SECONDS
    first_seconds: float = 0.2
    longest_seconds: float = 15.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    chance: Callable[[], float] = random.random
    """Between 0 and 1."""

    def run(
        self,
        action: Callable[[], T],
        class_of: Callable[[BaseException], ErrorClass],
        what: str,
        is_over: Callable[[], bool] = lambda: False,
    ) -> T:
        """What `action` returns, when it does; else the error of its last try.

        `what` is for the log. Nothing is tried again once `is_over`.
        """
        began, pause, told = self.clock(), self.first_seconds, False
        while True:
            try:
                return action()
            except Exception as error:
                if class_of(error) is not ErrorClass.PASSING or is_over():
                    raise
                waited = self.clock() - began
                if waited >= self.deadline_seconds:
                    raise
                if waited >= TOLD_AFTER_SECONDS and not told:
                    told = True
                    _log.warning(
                        "%s: %s: %s; tried again for up to %g s (%s)",
                        without_secrets(what),
                        type(error).__name__,
                        without_secrets(str(error))[:200],
                        self.deadline_seconds,
                        VARIABLE,
                    )
            self.sleep(min(self.chance() * pause, max(0.0, self.deadline_seconds - waited)))
            pause = min(2 * pause, self.longest_seconds)


def retry_policy() -> RetryPolicy:
    """The policy that the environment asks for: `CKPT_STORE_DEADLINE` is in seconds.

    Raises ArgumentError for text that is no number of seconds.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return RetryPolicy()
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentError(f"{VARIABLE} is {text!r}: it takes a number of seconds, like 300")
    return RetryPolicy(seconds)
