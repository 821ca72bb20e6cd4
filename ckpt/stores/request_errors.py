"""The errors of requests to a store that have finally failed: of a disk, of an object store."""

from __future__ import annotations

import errno
import os
from errno import ENOENT

from ckpt.errors import AccessDeniedError, CkptError, ExistsError, StoreError
from ckpt.stores.retries import VARIABLE, ErrorClass
from formats.errors import CorruptError
from sharding.errors import without_secrets


class UnsupportedRequestError(StoreError):
    """The server does not support a request."""


class UploadGoneError(StoreError):
    """The parts of an upload are gone."""


class UnflushedError(StoreError):
    """The file is there under its name, which a loss of power may undo."""


_ADVICE = (
    ((errno.ENOSPC, errno.EDQUOT), "free some space or raise the quota, or choose another disk"),
    (
        (errno.EFBIG,),
        "the disk or `ulimit -f` allows no file of this size: raise the limit, or save elsewhere",
    ),
    ((errno.EROFS,), "mount the disk for writing, or choose another place"),
    (
        (errno.EACCES, errno.EPERM),
        "look at the owner and the permissions of this path and of the folders above it",
    ),
    (
        (errno.EMFILE,),
        "this process has as many open files as it may have: raise `ulimit -n`, or close some",
    ),
    (
        (errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
        "the machine or a limit (`ulimit -a`) has no more: raise it, or end other programs",
    ),
    ((errno.ENAMETOOLONG,), "choose a shorter path"),
    (
        (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY),
        "look at this path: it has a file, folder or link in place of another one",
    ),
    (
        (errno.ENOENT, errno.ESTALE),
        "another program has moved or removed it, or its folder: look at this path, and try again",
    ),
    ((errno.EBUSY, errno.ETXTBSY), "another program uses it: end that program, and try again"),
    (
        (errno.EIO, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG),
        "the disk fails: the system's log says more; choose another disk",
    ),
    (
        (errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.EREMCHG),
        "is the server of this disk up?",
    ),
)
"""The remedies of errors of the operating system."""


def disk_error(doing: str, place: str, error: OSError) -> StoreError:
    """Returns the error that says what failed, at which path, and what to do.

    `doing` is the call as a verb (`writing`). The error keeps the number of the system's error.
    """
    number = error.errno or 0
    said = error.strerror or str(error)
    remedy = next((advice for numbers, advice in _ADVICE if number in numbers), "try again")
    denied = number in (errno.EACCES, errno.EPERM)
    found = (AccessDeniedError if denied else StoreError)(
        f"{place}: {doing} it failed: {said}; {remedy}"
    )
    found.errno = number
    return found


class explained_on_disk:  # noqa: N801 - as `contextlib.suppress`: it is called like a function
    """Raises StoreError (`disk_error`) in place of an error of the operating system.

    With `or_missing` the error for a path that is not there passes through. A class takes a third
    of the time of a generator, and a save enters some forty of these.
    """

    __slots__ = ("_doing", "_or_missing", "_place")

    def __init__(self, doing: str, place: str, or_missing: bool = False) -> None:
        self._doing, self._place, self._or_missing = doing, place, or_missing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, CkptError):
            return
        if not (self._or_missing and isinstance(error, FileNotFoundError | NotADirectoryError)):
            raise disk_error(self._doing, self._place, error) from error


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
    said = f"{type(error).__name__}: {error}"
    match kind:
        case ErrorClass.MISSING:
            return FileNotFoundError(ENOENT, os.strerror(ENOENT), without_secrets(place))
        case ErrorClass.PAST_END:
            from ckpt.stores.driver import PastEndError  # a local disk needs no asyncio

            return PastEndError(None)
        case ErrorClass.EXISTS:
            return ExistsError(f"{place} exists already")
        case ErrorClass.UNSUPPORTED:
            return UnsupportedRequestError(
                f"{place}: {doing} it failed: the server does not support the request: {said}"
            )
        case ErrorClass.NO_BUCKET:
            return StoreError(f"{place}: there is no such bucket: create it or correct the URL")
        case ErrorClass.NO_UPLOAD:
            return UploadGoneError(
                f"{place}: {doing} it failed: its parts are gone ({said}): a rule of the bucket, "
                "`ckpt gc` or another program has aborted the upload; save again"
            )
        case ErrorClass.DENIED | ErrorClass.STALE | ErrorClass.SKEWED | ErrorClass.ARCHIVED:
            denied = AccessDeniedError(
                f"{place}: {doing} it was denied ({said}); {_REMEDIES[kind]}"
            )
            if kind in (ErrorClass.DENIED, ErrorClass.ARCHIVED):
                denied.errno = errno.EACCES  # as on a disk: this file alone may be out of reach
            return denied
        case _ if kind in _REMEDIES:
            return StoreError(f"{place}: {doing} it failed ({said}); {_REMEDIES[kind]}")
        case ErrorClass.PASSING if isinstance(error, CorruptError):
            return CorruptError(f"{place}: {doing} it failed each time: {said}")
        case ErrorClass.PASSING if seconds:
            return StoreError(
                f"{place}: {doing} it failed each time for {seconds:g} s ({VARIABLE}), at last "
                f"with {said}; check that the server is up, and its address"
            )
    return StoreError(f"{place}: {doing} it failed: {said}")
