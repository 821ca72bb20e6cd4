"""The failures of requests to servers: their classes, the retries, and the errors of the last try.

Rules:

1. A request is sent again after a failure that may pass (broken connections, time-outs, short
   responses, 429 and 5xx), until `RetryPolicy.deadline_seconds` after the start of the first try.
   Any other failure, such as a missing permission or bucket, is an error at once.
2. The pause between tries is a random part of a time that doubles up to `longest_seconds`: ranks
   that fail together do not retry together. It is at least as long as the server asks for
   (`Retry-After`), but does not go beyond the deadline.
3. A repeated request has the effect of a single one, or its sender looks at the result of the
   first.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from errno import ENOENT
from typing import TYPE_CHECKING, TypeVar
from warnings import warn

from ckpt.errors import AccessDeniedError, ExistsError, StoreError, WireWarning
from formats.errors import CorruptError, GoneError, SizeError
from sharding.agreement.call_events import count_reread
from sharding.errors import ArgumentError, without_secrets

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

VARIABLE = "CKPT_STORE_DEADLINE"
DEFAULT_SECONDS = 300.0
TOLD_AFTER_SECONDS = 10.0
"""The log mentions a request once after failures for so long."""

_log = logging.getLogger("ckpt.stores")


class ErrorClass(Enum):
    """The meaning of a failed request, for all drivers."""

    MISSING = "missing"
    """The file does not exist."""
    EXISTS = "exists"
    """The file exists, against the condition of the request."""
    DENIED = "denied"
    """No credentials, or no permission."""
    STALE = "stale"
    """The server does not take the credentials: they have expired, were replaced or are wrong."""
    SKEWED = "skewed"
    """The clock of this machine is wrong."""
    ARCHIVED = "archived"
    """The file was moved to a class of storage that must be restored before it is read."""
    QUOTA = "quota"
    FULL = "full"
    OTHER_REGION = "other region"
    UNSUMMED = "unsummed"
    """The server wants a checksum with each file."""
    NO_BUCKET = "no bucket"
    NO_UPLOAD = "no upload"
    """The upload in parts was aborted or completed."""
    UNSUPPORTED = "unsupported"
    """The server does not support the request."""
    PAST_END = "past end"
    """The file ends before the range."""
    PASSING = "passing"
    """A retry may succeed."""
    LASTING = "lasting"
    """Any other failure."""


_OF_STATUS = {
    401: ErrorClass.STALE,
    403: ErrorClass.DENIED,
    408: ErrorClass.PASSING,
    416: ErrorClass.PAST_END,
    429: ErrorClass.PASSING,
}


def class_of_status(status: int, own: Mapping[int, ErrorClass] | None = None) -> ErrorClass:
    """Returns the class of an HTTP status; `own` has those that one kind of server means so."""
    other = ErrorClass.PASSING if status >= 500 else ErrorClass.LASTING
    return {**_OF_STATUS, **(own or {})}.get(status, other)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The deadline of a request and the pauses between its tries."""

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
        """Returns the result of `action`, or raises the error of its last try.

        `what` names the action in the log. There is no retry once `is_over`.
        """
        began, pause, was_told = self.clock(), self.first_seconds, False
        while True:
            try:
                return action()
            except Exception as error:
                if class_of(error) is not ErrorClass.PASSING or is_over():
                    raise
                waited = self.clock() - began
                if waited >= self.deadline_seconds:
                    raise
                if waited >= TOLD_AFTER_SECONDS and not was_told:
                    was_told = True
                    _log.warning(
                        "%s: %s: %s; tried again for up to %g s (%s)",
                        without_secrets(what),
                        type(error).__name__,
                        without_secrets(str(error))[:200],
                        self.deadline_seconds,
                        VARIABLE,
                    )
                asked = retry_after(error)
            rest = max(0.0, self.deadline_seconds - waited)
            self.sleep(min(max(self.chance() * pause, asked), rest))
            pause = min(2 * pause, self.longest_seconds)


def retry_after(error: BaseException) -> float:
    """Returns the seconds that a server asks to wait, by the header `Retry-After`; 0 without it.

    The clients of S3 keep headers in a dict of the error, those of Azure and aiohttp in attributes.
    """
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    value = headers.get("retry-after") or headers.get("Retry-After") if headers else None
    if not value:
        return 0.0
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


class OverNetwork:
    """A store whose bytes come over a network, which may change them.

    A reader whose checksum is wrong reads again (`formats.storage.read_again`).
    """

    url: str
    modified: Callable[[str], float]
    size: Callable[[str], int]
    _fetch: Callable[[str, int, Sequence[memoryview]], int | None]
    """Fills the views with bytes of a file, and returns its size if that is known.

    Raises FileNotFoundError, and PastEndError if the file ends before."""
    close: Callable[[], None]
    _has_warned = False

    def __str__(self) -> str:
        return without_secrets(self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def exists(self, name: str) -> bool:
        try:
            self.modified(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, offset: int, length: int) -> bytes:
        target = bytearray(length)
        self.read_into(name, offset, memoryview(target))
        return bytes(target)

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """Reads the last bytes of a file in one request. Raises SizeError unless it has `size`."""
        target = bytearray(length)
        try:
            file_bytes = self._fetch(name, size - length, [memoryview(target)])
        except PastEndError as error:
            file_bytes = error.size
        file_bytes = self.size(name) if file_bytes is None else file_bytes
        if file_bytes != size:
            raise SizeError(f"{self.url}/{name}", file_bytes, size)
        return bytes(target)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fills the buffers end to end with the bytes from `offset` on, in one request."""
        views = [target.cast("B") for target in targets if target.nbytes]
        if not views:
            return
        try:
            self._fetch(name, offset, views)
        except FileNotFoundError as error:
            raise GoneError(f"{self.url}/{name}") from error
        except PastEndError as error:
            end = offset + sum(view.nbytes for view in views)
            size = self.size(name) if error.size is None else error.size
            raise self.truncation_error(name, offset, end, size) from error

    def truncation_error(self, name: str, offset: int, end: int, size: int) -> CorruptError:
        """Returns the error for a file of `size` bytes of which bytes up to `end` are needed."""
        return CorruptError(
            f"{self.url}/{name}: bytes {offset}:{end} are needed, the file ends at {size}: it was "
            "truncated"
        )

    def count_reread(self, name: str, lo: int, hi: int) -> None:
        """Counts bytes that were wrong at first, and right when they were read again.

        The first ones of a store are a warning.
        """
        count_reread()
        place = without_secrets(f"{self.url}/{name}")
        message = (
            f"{place}: bytes {lo}:{hi} were changed on the way, and were right when read again"
        )
        _log.info("%s", message)
        if not self._has_warned:
            self._has_warned = True
            warn(
                WireWarning(
                    f"{message}: the checkpoint is sound, but the network, a proxy or this "
                    "machine's memory changes bytes; ckpt.events counts further ones as `rereads`"
                ),
                stacklevel=2,
            )


def retry_policy() -> RetryPolicy:
    """Returns the policy of the environment: `CKPT_STORE_DEADLINE` in seconds.

    Raises ArgumentError if the variable is not a number of seconds.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return RetryPolicy()
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentError(f"{VARIABLE} is {text!r}; give a number of seconds, such as 300")
    return RetryPolicy(seconds)


class UnsupportedRequestError(StoreError):
    """The server does not support a request."""


class UploadGoneError(StoreError):
    """The parts of an upload are gone."""


class UnflushedError(StoreError):
    """The file is there under its name, which a loss of power may undo."""


class PastEndError(CorruptError):
    """The file ends before the requested bytes."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        super().__init__(f"the file ends at {size}")


_SOURCES = "storage_options= or the driver's environment variables, files or role"
_REMEDIES = {
    ErrorClass.DENIED: (
        "check the credentials, in storage_options= or the driver's environment variables, and "
        "their permissions"
    ),
    ErrorClass.STALE: (
        "the server does not take these credentials, which have expired, were replaced or are "
        f"wrong, also after they were read again from their source; renew them in {_SOURCES}"
    ),
    ErrorClass.SKEWED: "set this machine's clock: it differs too much from the server's",
    ErrorClass.ARCHIVED: (
        "the file lies in an archive: restore it to a class of storage that can be read at once, "
        "and exclude the newest checkpoints from the rule of the bucket that archives"
    ),
    ErrorClass.QUOTA: (
        "delete something, such as old checkpoints (`ckpt rm --keep`), or raise the quota"
    ),
    ErrorClass.FULL: "the server has no space left: delete something, or choose another one",
    ErrorClass.OTHER_REGION: (
        "the bucket lies in another region: name it in storage_options="
        "{'client_kwargs': {'region_name': ...}} or AWS_DEFAULT_REGION"
    ),
    ErrorClass.UNSUMMED: (
        "a bucket with Object Lock wants a checksum with each file: pass storage_options="
        "{'config_kwargs': {'request_checksum_calculation': 'when_supported'}}"
    ),
}
"""The remedies of refused requests to a server."""


def explain(
    doing: str, place: str, error: Exception, kind: ErrorClass, seconds: float
) -> Exception:
    """Returns the error that says what failed, at which URL, and what to do.

    `doing` is the request as a verb (`reading`), `kind` the driver's class of the error, and
    `seconds` the deadline of the retries; 0 for a request that is sent once.
    """
    text = f"{type(error).__name__}: {error}"
    match kind:
        case ErrorClass.MISSING:
            return FileNotFoundError(ENOENT, os.strerror(ENOENT), without_secrets(place))
        case ErrorClass.PAST_END:
            return PastEndError(None)
        case ErrorClass.EXISTS:
            return ExistsError(f"{place} exists already")
        case ErrorClass.UNSUPPORTED:
            return UnsupportedRequestError(
                f"{place}: {doing} it failed: the server does not support the request: {text}"
            )
        case ErrorClass.NO_BUCKET:
            return StoreError(f"{place}: there is no such bucket: create it or correct the URL")
        case ErrorClass.NO_UPLOAD:
            return UploadGoneError(
                f"{place}: {doing} it failed: its parts are gone ({text}): a rule of the bucket, "
                "`ckpt gc` or another program has aborted the upload; save again"
            )
        case ErrorClass.DENIED | ErrorClass.STALE | ErrorClass.SKEWED | ErrorClass.ARCHIVED:
            denied = AccessDeniedError(
                f"{place}: {doing} it was denied ({text}); {_REMEDIES[kind]}"
            )
            if kind in (ErrorClass.DENIED, ErrorClass.ARCHIVED):
                denied.errno = errno.EACCES  # as on a disk: this file alone may be out of reach
            return denied
        case _ if kind in _REMEDIES:
            return StoreError(f"{place}: {doing} it failed ({text}); {_REMEDIES[kind]}")
        case ErrorClass.PASSING if isinstance(error, CorruptError):
            return CorruptError(f"{place}: {doing} it failed each time: {text}")
        case ErrorClass.PASSING if seconds:
            return StoreError(
                f"{place}: {doing} it failed each time for {seconds:g} s ({VARIABLE}), at last "
                f"with {text}; check that the server is up, and its address"
            )
    return StoreError(f"{place}: {doing} it failed: {text}")
