"""The messages of live states as values: requests, answers, errors and limits.

Rules:

1. A server reads a message strictly: each field is known, present, and within its limits.
2. A server refuses by a `RefusedError`: a kind, a text, and values. It travels as
   `{"error": kind, "message": text, ...}`, by HTTP and by the Unix socket alike.
3. Only programs of the same user reach the Unix socket. Their messages are checked as strictly,
   because a wrong one would end in wrong bytes.

docs/decisions/035-live-states.md has the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, cast, get_args

from ckpt.errors import (
    AccessDeniedError,
    ExistsError,
    NotACheckpointError,
    ProtocolError,
    StoreError,
    StoreTimeoutError,
    VersionGoneError,
)
from ckpt.stores.addresses import FILE, MOST_VERSION, NAME
from formats.errors import FormatError
from formats.limits import decode_object
from sharding.errors import CkptError

HEADER_BYTES = 16 << 10
"""The longest head of an HTTP request."""
BODY_BYTES = 64 << 10
"""The longest body of an HTTP request."""
MESSAGE_BYTES = 64 << 10
"""The longest datagram of the Unix socket; a longer message travels in shared memory."""
LONG_MESSAGE_BYTES = 64 << 20
"""The longest message."""
MOST_DESCRIPTORS = 250
"""Descriptors with one message; Linux allows 253."""
REQUEST_SECONDS = 10.0
"""The time for a request to arrive, from its first byte; for the first one from the connection."""
IDLE_SECONDS = 120.0
"""The time without a request after which a connection is closed."""
STALL_SECONDS = 60.0
"""The time without progress after which the transfer of a body ends."""
WAIT_SECONDS = 60.0
"""The longest wait for a newer version in one request."""
LEASE_SECONDS = 30.0
"""The time from the last renewal of a lease to its end, unless the publisher chose another."""
MOST_LEASES = 100_000
MOST_SECONDS = 10.0 * 365 * 86_400
STATUS: Mapping[str, int] = {
    "protocol": 400,
    "token": 401,
    "unknown": 404,
    "method": 405,
    "timeout": 408,
    "exists": 409,
    "gone": 410,
    "length": 411,
    "large": 413,
    "range": 416,
    "header": 431,
    "internal": 500,
    "busy": 503,
    "memory": 507,
}
"""The kinds of refusals, with their HTTP status."""

Address: TypeAlias = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of an open descriptor. A file of a version consists of segments."""

    descriptor: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileAt:
    """The size of a file and the servers that have it."""

    size: int
    at: tuple[Address, ...]

    def json(self) -> dict[str, object]:
        """Returns the form in messages."""
        return {"size": self.size, "at": [list(address) for address in self.at]}


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """A version on one server."""

    files: dict[str, FileAt]
    """The committed files; before the commit, those that this server has."""
    complete: bool
    info: dict[str, object]
    """The values that the publisher gave with the commit."""

    def json(self) -> dict[str, object]:
        """Returns the form in messages."""
        return {"files": files_json(self.files), "complete": self.complete, "info": self.info}


class RefusedError(Exception):
    """A server's answer to a request that it does not serve."""

    def __init__(self, kind: str, message: str, **values: object) -> None:
        self.kind = kind
        self.message = message
        self.values = values
        super().__init__(message)

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.kind]

    def json(self) -> dict[str, object]:
        """Returns the form in messages."""
        return {"error": self.kind, "message": self.message, **self.values}


def error_of(
    kind: str,
    message: str,
    *,
    where: str = "",
    version: int | None = None,
    newest: int | None = None,
) -> CkptError:
    """Returns the error to raise for a refusal; `where` is the address without a token."""
    if kind == "gone" and version is not None:
        return VersionGoneError(where, version, newest)
    return _ERRORS.get(kind, ProtocolError)(f"{where}: {message}" if where else message)


_ERRORS: Mapping[str, Callable[[str], CkptError]] = {
    "token": AccessDeniedError,
    "unknown": NotACheckpointError,
    "gone": StoreError,
    "exists": ExistsError,
    "timeout": StoreTimeoutError,
    "busy": StoreError,
    "memory": StoreError,
    "internal": StoreError,
}


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks for the server's addresses."""


@dataclass(frozen=True, slots=True)
class Own:
    """This connection owns the name until it ends."""

    name: str
    keep_seconds: float


@dataclass(frozen=True, slots=True)
class Put:
    """A file of a version; the descriptors of its segments come with the message, by position."""

    name: str
    version: int
    file: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """A version is complete."""

    name: str
    version: int
    files: dict[str, FileAt]
    info: dict[str, object]


@dataclass(frozen=True, slots=True)
class Retire:
    """A version gets no new leases; the answer comes when its leases have ended."""

    name: str
    version: int
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Drop:
    """The server forgets the files of a version."""

    name: str
    version: int
    overdue: bool


@dataclass(frozen=True, slots=True)
class Reclaim(Retire):
    """As `Retire` and, once its leases have ended, `Drop`."""


@dataclass(frozen=True, slots=True)
class Get:
    """Asks for the descriptors of a file."""

    name: str
    version: int
    file: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Take:
    """Takes a lease, which ends with this connection; asks for descriptors of all files here."""

    name: str
    which: int | None
    """The version; None for the newest one."""
    address: Address
    """The server's address, as the reader knows it."""
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Versions:
    """Asks for all versions of a name."""

    name: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Ends a name."""

    name: str
    wait_seconds: float


Request: TypeAlias = (
    Hello | Own | Put | Commit | Retire | Drop | Reclaim | Get | Take | Versions | Remove
)
_REQUESTS: Mapping[str, type] = {kind.__name__.lower(): kind for kind in get_args(Request)}


def request_of(message: bytes) -> Request:
    """Returns the request in a message of the Unix socket. Raises RefusedError."""
    found = object_of(message, "a request")
    do = found.pop("do", None)
    kind = _REQUESTS.get(do) if isinstance(do, str) else None
    if kind is None:
        raise RefusedError("protocol", f"do={do!r:.80}: the requests are {', '.join(_REQUESTS)}")
    names = [field.name for field in fields(kind)]
    if set(found) != set(names):
        raise RefusedError("protocol", f"{do} has the fields {sorted(found)!r:.200}, not {names}")
    return cast(Request, kind(**{name: _CHECKS[name](name, found[name]) for name in names}))


def request_message(request: Request) -> bytes:
    """Returns the message of a request."""
    values = {field.name: _plain(getattr(request, field.name)) for field in fields(request)}
    return json_bytes({"do": type(request).__name__.lower(), **values})


def object_of(data: bytes, what: str) -> dict[str, Any]:
    """Returns the JSON object in a message. Raises RefusedError."""
    try:
        return decode_object(data, what)
    except FormatError as error:
        raise RefusedError("protocol", str(error)) from None


def json_bytes(value: Mapping[str, object]) -> bytes:
    """Returns a JSON object as a message."""
    return json.dumps(value, separators=(",", ":")).encode()


def files_json(files: Mapping[str, FileAt]) -> dict[str, object]:
    """Returns the files of a version in the form of messages."""
    return {name: file.json() for name, file in files.items()}


def files_of(what: str, value: object) -> dict[str, FileAt]:
    """Returns the files in a message. Raises RefusedError."""
    return {
        file_of(what, name): _file_at(what, file) for name, file in _object(what, value).items()
    }


def address_of(what: str, value: object) -> Address:
    """Returns the host and port in a message. Raises RefusedError."""
    if isinstance(value, list) and len(value) == 2:
        host, port = value
        if (
            isinstance(host, str)
            and 0 < len(host) <= 255
            and type(port) is int
            and 0 < port < 65536
        ):
            return host, port
    raise _wrong(what, value, "[host, port]")


def segments_of(what: str, value: object) -> tuple[Segment, ...]:
    """Returns the segments in a message, with positions of descriptors. Raises RefusedError."""
    if not isinstance(value, list) or len(value) > MOST_DESCRIPTORS:
        raise _wrong(what, value, f"a list of at most {MOST_DESCRIPTORS} segments")
    return tuple(_segment(what, segment) for segment in value)


def version_in(what: str, value: object) -> int:
    """Returns the version in a message. Raises RefusedError."""
    if type(value) is not int or not 0 <= value <= MOST_VERSION:
        raise _wrong(what, value, f"a whole number from 0 to {MOST_VERSION}")
    return value


def version_or_newest(what: str, value: object) -> int | None:
    """Returns the version in a message, or None for the newest one. Raises RefusedError."""
    return None if value is None else version_in(what, value)


def file_of(what: str, value: object) -> str:
    """Returns the name of a file in a message. Raises RefusedError."""
    if not isinstance(value, str) or not FILE.fullmatch(value):
        raise _wrong(what, value, f"a name that matches {FILE.pattern}")
    return value


def versions_of(value: object) -> dict[int, VersionInfo]:
    """Returns the versions in an answer. Raises RefusedError."""
    return {
        version_in("version", int(number)): VersionInfo(
            files_of("files", version["files"]), version["complete"], version["info"]
        )
        for number, version in _object("versions", value).items()
    }


def _file_at(what: str, value: object) -> FileAt:
    found = _object(what, value)
    size, at = found.get("size"), found.get("at")
    if set(found) != {"size", "at"} or type(size) is not int or not 0 <= size <= MOST_VERSION:
        raise _wrong(what, value, '{"size": bytes, "at": [[host, port], ...]}')
    if not isinstance(at, list):
        raise _wrong(what, at, "a list of [host, port]")
    return FileAt(size, tuple(address_of(what, address) for address in at))


def _segment(what: str, value: object) -> Segment:
    if not isinstance(value, list) or len(value) != 3:
        raise _wrong(what, value, "[position of the descriptor, offset, bytes]")
    if any(type(number) is not int or not 0 <= number <= MOST_VERSION for number in value):
        raise _wrong(what, value, "three whole numbers")
    return Segment(*value)


def _name(what: str, value: object) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise _wrong(what, value, f"a name that matches {NAME.pattern}")
    return value


def seconds_in(what: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 <= cast(float, value) <= MOST_SECONDS:
        raise _wrong(what, value, "a number of seconds")
    return float(cast(float, value))


def _flag(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(what, value, "true or false")
    return value


def text_in(what: str, value: object) -> str:
    """Returns the text in a message, which may be a secret. Raises RefusedError."""
    if not isinstance(value, str):
        raise RefusedError("protocol", f"{what} is not a text")
    return value


def _object(what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(what, value, "an object")
    return value


def _wrong(what: str, value: object, wanted: str) -> RefusedError:
    return RefusedError("protocol", f"{what}={value!r:.120}: {wanted} is wanted")


_CHECKS: Mapping[str, Callable[[str, object], object]] = {
    "name": _name,
    "version": version_in,
    "which": version_or_newest,
    "address": address_of,
    "file": file_of,
    "segments": segments_of,
    "files": files_of,
    "info": _object,
    "keep_seconds": seconds_in,
    "wait_seconds": seconds_in,
    "overdue": _flag,
    "token": text_in,
}


def _plain(value: object) -> object:
    """Returns the value of a request's field in the form of messages."""
    if isinstance(value, tuple) and all(isinstance(segment, Segment) for segment in value):
        return [[segment.descriptor, segment.offset, segment.nbytes] for segment in value]
    if isinstance(value, dict) and any(isinstance(segment, FileAt) for segment in value.values()):
        return files_json(value)
    return value
