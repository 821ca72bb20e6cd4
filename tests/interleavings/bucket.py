"""A bucket in memory, as a driver of the product's own object store. Each request is a call.

Its `conditions` are those of a server: it honours `If-None-Match`, or refuses it, or ignores it in
silence. A listing has pages of `PAGE` names and is no snapshot over pages. One of these
happens to a write, as the policy chooses:

- "answered": it is carried out, and the client hears of it;
- "unheard": it is carried out, and the answer is lost, so that the client sends it again;
- "dropped": it is lost on the way, and the client sends it again;
- "late": the client gives up, and it is carried out later, or twice: a request in the network is
  an actor of its own.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from hashlib import md5
from itertools import count
from typing import Any

from ckpt.errors import ExistsError
from ckpt.stores.driver import ObjectInfo, PartLimits, Start, StoreCapabilities, Unfinished
from ckpt.stores.retries import ErrorClass, PastEndError
from tests.interleavings.scheduler import Call, Scheduler, current

SCHEME = "interleaved"
PAGE = 2
_numbers = count()
"""Numbers of buckets: an address may come again after a bucket is collected."""


class Conditions(Enum):
    """How a server treats the condition that a file does not exist."""

    HONOURED = "honoured"
    REFUSED = "refused"
    IGNORED = "ignored"


class Unheard(TimeoutError):
    """No answer has come."""


@dataclass(frozen=True)
class Stored:
    """An object."""

    data: bytes
    modified: float


def _tag(data: bytes) -> str:
    """The ETag of an object: as on S3, equal bytes have equal tags."""
    return md5(data, usedforsecurity=False).hexdigest()


class Bucket:
    """The objects of a bucket by path, and the requests of one run."""

    capabilities = StoreCapabilities(
        put_if_absent=None, atomic_replace=True, hides_unfinished=True, durable=True
    )
    part_limits = PartLimits(1 << 20, 10_000)
    deletes_at_once = 1000
    holds_answers = False

    def __init__(
        self,
        scheduler: Callable[[], Scheduler | None],
        changed: Callable[[str, str], None],
        clock: Callable[[], float],
        process: Callable[[], str],
        conditions: Conditions = Conditions.HONOURED,
    ) -> None:
        self.objects: dict[str, Stored] = {}
        self.is_late = False
        """Whether the network may carry out a request late."""
        self._scheduler, self._changed, self._clock = scheduler, changed, clock
        self._process = process
        self._conditions = conditions
        self._late = 0
        self._number = next(_numbers)

    def files(self) -> dict[str, bytes]:
        """The contents of the objects by path."""
        return {path: one.data for path, one in self.objects.items()}

    def server(self) -> str:
        """Each process learns for itself whether the server honours conditions."""
        return f"server {self._number} of {self._process()}"

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        prefix, reached = f"{folder.rstrip('/')}/", ""
        found: dict[str, ObjectInfo] = {}
        while True:
            self._before("LIST more of" if reached else "LIST", folder, {prefix})
            names = sorted(
                {
                    path[len(prefix) :].partition("/")[0] + "/" * ("/" in path[len(prefix) :])
                    for path in self.objects
                    if path.startswith(prefix)
                }
            )
            page = [name for name in names if name > reached][:PAGE]
            for name in page:
                one = self.objects.get(prefix + name)
                found[name] = (
                    ObjectInfo(name, True, len(one.data), one.modified)
                    if one is not None
                    else ObjectInfo(name.rstrip("/"), False, 0, 0.0)
                )
            if len(page) < PAGE:
                return list(found.values())
            reached = page[-1]

    def list_below(self, folder: str) -> list[ObjectInfo]:
        prefix, reached = f"{folder.rstrip('/')}/", ""
        found: dict[str, ObjectInfo] = {}
        while True:
            self._before("LIST more below" if reached else "LIST below", folder, {prefix})
            names = sorted(path for path in self.objects if path.startswith(prefix))
            page = [name for name in names if name > reached][: 2 * PAGE]
            for path in page:
                one, name = self.objects[path], path[len(prefix) :]
                found[name] = ObjectInfo(name, True, len(one.data), one.modified, _tag(one.data))
            if len(page) < 2 * PAGE:
                return list(found.values())
            reached = page[-1]

    def head(self, path: str) -> ObjectInfo:
        one = self._read("HEAD", path)
        return ObjectInfo(path.rpartition("/")[2], True, len(one.data), one.modified)

    def get_start(self, path: str, length: int) -> Start:
        data = self._read("GET", path).data
        return Start(data[:length], len(data), _tag(data))

    def get(self, path: str, limit: int) -> tuple[bytes | int, str]:
        data = self._read("GET", path).data
        return (len(data) if len(data) > limit else data), _tag(data)

    def get_range(self, path: str, offset: int, targets: Sequence[memoryview]) -> int | None:
        data = memoryview(self._read("GET", path).data)
        if len(data) < offset + sum(len(target) for target in targets):
            raise PastEndError(len(data))
        for target in targets:
            target[:] = data[offset : offset + len(target)]
            offset += len(target)
        return len(data)

    def put(self, path: str, data: memoryview, tag: str = "") -> str:
        self._write("PUT", path, bytes(data), self._condition(path, tag))
        return _tag(bytes(data))

    def put_if_absent(self, path: str, data: memoryview) -> str:
        self._write("PUT", path, bytes(data), self._condition(path, None))
        return _tag(bytes(data))

    def delete(self, path: str, tag: str = "") -> None:
        self._write("DELETE", path, None, self._condition(path, tag))

    def delete_all(self, paths: Mapping[str, str]) -> None:
        """A request for many objects deletes one after the other."""
        for path, tag in paths.items():
            self.delete(path, tag)

    def _condition(self, path: str, tag: str | None) -> str | None:
        """The tag that the object must have, None of no object, as far as the server cares."""
        if tag != "" and self._conditions is Conditions.REFUSED:
            self._before("PUT", f"{path} if {tag or 'absent'}")
            raise OSError(errno.ENOSYS, "not implemented")
        return tag if self._conditions is Conditions.HONOURED else ""

    def list_multipart(self, folder: str) -> list[Unfinished]:
        """Small files are no uploads in parts."""
        return []

    def abort_multipart(self, path: str, upload_id: str) -> None:
        raise NotImplementedError

    def create_multipart(self, path: str) -> str:
        raise NotImplementedError

    def upload_part(self, path: str, upload_id: str, number: int, data: memoryview) -> Any:
        raise NotImplementedError

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[Any]) -> None:
        raise NotImplementedError

    def multipart_bytes(self, path: str, upload_id: str) -> int:
        return 0

    def delete_folder(self, folder: str) -> None:
        """A folder is no object."""

    @property
    def session(self) -> object:
        return None

    def renew(self, session: object) -> None:
        """No credentials are stale."""

    def error_class(self, error: BaseException) -> ErrorClass:
        if isinstance(error, Unheard):
            return ErrorClass.PASSING
        if isinstance(error, PastEndError):
            return ErrorClass.PAST_END
        if isinstance(error, FileExistsError | ExistsError):
            return ErrorClass.EXISTS
        if isinstance(error, FileNotFoundError):
            return ErrorClass.MISSING
        is_unsupported = isinstance(error, OSError) and error.errno == errno.ENOSYS
        return ErrorClass.UNSUPPORTED if is_unsupported else ErrorClass.LASTING

    def _read(self, name: str, path: str) -> Stored:
        self._before(name, path, {path})
        try:
            return self.objects[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _write(self, name: str, path: str, data: bytes | None, tag: str | None) -> None:
        condition = " if absent" if tag is None else f" if {tag[:4]}" if tag else ""
        scheduler, shown = self._scheduler(), f"{path}{condition}"
        above = {f"{path[:at]}/" for at, letter in enumerate(path) if letter == "/"}

        def carry_out() -> None:
            if scheduler is not None and current() is not None:
                scheduler.before(Call(name, shown, frozenset(), frozenset({path, *above})))
            found = self.objects.get(path)
            if tag is None and found is not None:
                raise FileExistsError(path)
            if tag and found is None:
                raise FileNotFoundError(path)
            if tag and found is not None and _tag(found.data) != tag:
                raise FileExistsError(path)
            if data is not None:
                self.objects[path] = Stored(data, self._clock())
                self._changed("makes", path)
            elif self.objects.pop(path, None) is not None:
                self._changed("removes", path)

        outcome = "answered"
        if scheduler is not None and current() is not None:
            more = ("late",) if self.is_late else ()
            outcome = scheduler.choose("answered", "unheard", "dropped", *more)
        if scheduler is not None and outcome == "late":
            self._late += 1
            # A kill of the process does not end its requests in the network.
            sender = copy(current().process)  # type: ignore[union-attr]
            scheduler.add(f"late {name} {self._late}", carry_out, sender).is_request = True
            raise Unheard
        if outcome != "dropped":
            carry_out()
        if outcome != "answered":
            raise Unheard

    def _before(self, name: str, place: str, reads: set[str] | None = None) -> None:
        scheduler = self._scheduler()
        if scheduler is not None and current() is not None:
            scheduler.before(Call(name, place, frozenset(reads or ())))
