"""The answers of a server of live states as values, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ckpt.errors import ProtocolError
from ckpt.live.protocol import FileAt, RefusedError, error_of, files_of, version_in
from ckpt.stores.http_client import Answer, json_of
from formats.errors import FormatError
from formats.strict_json import decode_object
from sharding.errors import CkptError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """A lease on a version."""

    version: int
    key: str
    seconds: float
    """The time after which the lease ends unless it is renewed."""
    files: Mapping[str, FileAt]
    server: str
    """The ID of the server that answers."""


@dataclass(frozen=True, slots=True)
class NewsAnswer:
    """The versions of a live state."""

    newest: int | None
    versions: tuple[int, ...]
    server: str
    """The ID of the server that answers."""


def lease_in(found: Mapping[str, object], where: str) -> LeaseAnswer:
    """Returns the lease in the object of an answer. Raises ProtocolError."""

    def checked() -> LeaseAnswer:
        return LeaseAnswer(
            version_in("version", found["version"]),
            _text(found["lease"]),
            _seconds(found["seconds"]),
            files_of("files", found["files"]),
            _text(found["server"]),
        )

    return _read(checked, where)


def news_in(answer: Answer, where: str) -> NewsAnswer:
    """Returns the versions in an answer. Raises ProtocolError."""
    found = json_of(answer, where)

    def checked() -> NewsAnswer:
        newest, versions = found["newest"], found["versions"]
        if not isinstance(versions, list):
            raise RefusedError("protocol", f"versions={versions!r:.80} is no list")
        return NewsAnswer(
            None if newest is None else version_in("newest", newest),
            tuple(version_in("versions", one) for one in versions),
            _text(found["server"]),
        )

    return _read(checked, where)


def refused(answer: Answer, where: str, version: int | None) -> CkptError:
    """Returns the error for an answer whose status is one."""
    try:
        found = decode_object(answer.body, where)
    except FormatError:
        found = {}
    kind, newest = str(found.get("error", "")), found.get("newest")
    message = str(found.get("message", "")) or f"the server answers with status {answer.status}"
    return error_of(
        kind,
        message,
        where=where,
        version=version,
        newest=newest if isinstance(newest, int) else None,
    )


def _read(checked: Callable[[], T], where: str) -> T:
    try:
        return checked()
    except KeyError as error:
        raise ProtocolError(f"{where}: the answer has no {error}") from None
    except RefusedError as error:
        raise ProtocolError(f"{where}: {error}") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise RefusedError("protocol", f"{value!r:.80} is no text")
    return value


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 < float(str(value)) < 1e9:
        raise RefusedError("protocol", f"{value!r:.80} is no number of seconds")
    return float(str(value))
