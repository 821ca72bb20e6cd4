"""What befalls the requests of a store, and when: schedules for `fault_proxy`.

A schedule is asked once for each request, in the order in which they come. It decides by what it is
shown and by nothing else, so the same requests meet the same faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Fault(Enum):
    """What befalls a request."""

    DROP_REQUEST = "the connection ends when half of the request has reached the server"
    DROP_ANSWER = "the server has done what it was asked; the connection ends without an answer"
    CUT_ANSWER = "the connection ends in the middle of the answer"
    SHORT_ANSWER = "the answer has fewer bytes than it should, and says so"
    FLIP_ANSWER = "one bit of the answer is another"
    FLIP_REQUEST = "one bit of what is uploaded is another"
    DELAY = "the answer comes late, after `delay_seconds`"
    HANG = "no answer ever comes"
    TWICE = "the server gets the request twice, and the client hears of the second"
    LATE = "the connection ends without an answer, and the server gets the request much later"
    DENIED = "403"
    BROKEN = "500"
    UNAVAILABLE = "503"
    SLOW_DOWN = "503, by the name of SlowDown"


REFUSALS = {
    Fault.DENIED: (403, "Forbidden", "AccessDenied", "AuthorizationFailure"),
    Fault.BROKEN: (500, "Internal Server Error", "InternalError", "InternalError"),
    Fault.UNAVAILABLE: (503, "Service Unavailable", "ServiceUnavailable", "ServerBusy"),
    Fault.SLOW_DOWN: (503, "Slow Down", "SlowDown", "ServerBusy"),
}
"""Status, its words, S3's code and Azure's."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of a server that does not do what it is asked."""

    status: int
    code: str
    headers: tuple[tuple[str, str], ...] = ()


TRANSIENT = (
    *(Fault.DROP_REQUEST, Fault.DROP_ANSWER, Fault.CUT_ANSWER, Fault.DELAY),
    *(Fault.BROKEN, Fault.UNAVAILABLE, Fault.SLOW_DOWN),
)
"""What a second try may well mend."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request, as a schedule sees it."""

    number: int
    """From 0, in the order of coming."""
    method: str
    target: str
    """Path and query as they came, percent-encoded."""
    range: str
    """The `Range` header, or Azure's `x-ms-range`: `bytes=0-99`; empty where there is none."""
    length: int
    """Bytes of the body, as announced."""
    key: str = ""
    """The access key that signed it, on S3."""
    agent: str = ""
    """The header `User-Agent`."""

    @property
    def reads_data(self) -> bool:
        """True for a read of a part of an object."""
        return self.method == "GET" and bool(self.range)

    @property
    def writes_data(self) -> bool:
        """True for an upload of an object or of a part of one."""
        return self.method == "PUT" and self.length > 0


Schedule = Callable[[Request], "Fault | Refusal | None"]


def no_faults(request: Request) -> Fault | None:
    """A schedule under which all goes well: the proxy only counts."""
    return None


def seeded(
    seed: int,
    probability: float,
    faults: Sequence[Fault],
    concerns: Callable[[Request], bool] = lambda request: True,
) -> Schedule:
    """A fault for some of the requests, at random but the same for a seed and a number."""

    def schedule(request: Request) -> Fault | Refusal | None:
        chance = random.Random(f"{seed} {request.number}")
        if concerns(request) and chance.random() < probability:
            return chance.choice(faults)
        return None

    return schedule


def once(
    fault: Fault | Refusal, concerns: Callable[[Request], bool] = lambda request: True
) -> Schedule:
    """A fault for the first request that a condition concerns."""
    return times(1, fault, concerns)


def times(
    count: int, fault: Fault | Refusal, concerns: Callable[[Request], bool] = lambda request: True
) -> Schedule:
    """A fault for as many of the first requests that a condition concerns."""
    left = [count]

    def schedule(request: Request) -> Fault | Refusal | None:
        if left[0] and concerns(request):
            left[0] -= 1
            return fault
        return None

    return schedule


def nth(number: int, fault: Fault | Refusal, concerns: Callable[[Request], bool]) -> Schedule:
    """A fault for one of the requests that a condition concerns, counted from 0."""
    seen = [0]

    def schedule(request: Request) -> Fault | Refusal | None:
        if concerns(request):
            seen[0] += 1
            return fault if seen[0] == number + 1 else None
        return None

    return schedule


def dead_between(first: int, end: int) -> Schedule:
    """A server that is gone for the requests of these numbers."""
    return lambda request: Fault.DROP_REQUEST if first <= request.number < end else None
