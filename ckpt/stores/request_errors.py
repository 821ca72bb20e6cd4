"""The errors of requests to an object store that have finally failed."""

from __future__ import annotations

import os
from errno import ENOENT

from ckpt.errors import ExistsError, StoreError
from ckpt.stores.driver import PastEndError
from ckpt.stores.retries import VARIABLE, ErrorClass
from formats.errors import CorruptError
from sharding.url_secrets import without_secrets


class UnsupportedRequestError(StoreError):
    """The server does not support a request."""


def explained(
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
            return PastEndError(None)
        case ErrorClass.EXISTS:
            return ExistsError(f"{place} exists already")
        case ErrorClass.UNSUPPORTED:
            return UnsupportedRequestError(
                f"{place}: {doing} it failed: the server does not support the request: {said}"
            )
        case ErrorClass.NO_BUCKET:
            return StoreError(f"{place}: there is no such bucket: create it or correct the URL")
        case ErrorClass.DENIED:
            return StoreError(
                f"{place}: {doing} it was denied ({said}); check the credentials, in "
                "storage_options= or the driver's environment variables, and their permissions"
            )
        case ErrorClass.PASSING if isinstance(error, CorruptError):
            return CorruptError(f"{place}: {doing} it failed each time: {said}")
        case ErrorClass.PASSING if seconds:
            return StoreError(
                f"{place}: {doing} it failed each time for {seconds:g} s ({VARIABLE}), at last "
                f"with {said}; is the server up, and its address right?"
            )
    return StoreError(f"{place}: {doing} it failed: {said}")
