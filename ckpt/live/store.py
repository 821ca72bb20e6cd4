"""The store of a live state: one version in the memory of other processes, read like a folder.

Rules:

1. The first read takes a lease from the home server, on the version of the URL or on the newest.
   All reads of the store are of this version. `close` gives the lease back. A home on this host
   gives the lease over its Unix socket, with the descriptors of its files.
2. A lease ends if the store reads nothing for a while. The next read then takes another one on the
   same version. Once the version is retired, reads raise VersionGoneError with the newest version.
3. Files of a server on this host that has the same token are read from its memory
   (`ckpt.live.shared_files`), others by ranges over HTTP, from the first server that answers.
4. Without a version in the URL, the versions are the folders of the store.

The answers of a server of live states as values, checked.
"""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from errno import ENOENT
from itertools import groupby
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from ckpt.errors import (
    NotACheckpointError,
    ProtocolError,
    StoreError,
    StoreTimeoutError,
    UnreachableError,
    VersionGoneError,
)
from ckpt.live.process import HostServer
from ckpt.live.protocol import (
    Address,
    FileAt,
    RefusedError,
    error_of,
    files_of,
    seconds_in,
    text_in,
    version_in,
)
from ckpt.live.shared_files import SharedFile
from ckpt.live.swarm import TRACKER_SECONDS, share_of
from ckpt.stores.addresses import parse, version_of
from ckpt.stores.http_client import (
    Answer,
    HttpClient,
    HttpOptions,
    Place,
    json_of,
    past_end,
    path_of,
)
from ckpt.stores.served_store import ReadOnlyStore
from formats.errors import FormatError, GoneError
from formats.limits import decode_object
from formats.storage import LOCAL_READ_BYTES, REMOTE_READ_BYTES
from sharding.errors import CkptError

if TYPE_CHECKING:
    from ckpt.plan.read_plan import ByteRange
    from ckpt.transfer.live_deltas import Area, Delta

RENEWALS = 3
"""A lease is renewed once this part of it is over."""
RELEASE_SECONDS = 2.0
"""The longest wait of `close` for the server."""


@dataclass(slots=True)
class _Lease:
    """A lease on one version."""

    version: int
    key: str
    seconds: float
    """The time after which it ends unless it is renewed."""
    files: Mapping[str, FileAt]
    renewed: float = 0.0
    is_by_socket: bool = False
    """Whether the lease ends with the connection to the server on this host."""
    shared: dict[str, SharedFile | None] = field(default_factory=dict)
    """The files that were looked for on this host; None for those of other hosts."""

    @property
    def is_due(self) -> bool:
        """Whether it is time for a renewal."""
        return monotonic() - self.renewed > self.seconds / RENEWALS


class LiveStore(ReadOnlyStore):
    """A version of a live state, or the newest one. Safe to use from several threads."""

    delta_range_bytes = 1 << 20
    """Bytes that are changed and verified while they are in the processor's cache."""
    refusal = (
        "this is a live state, which is only read; ckpt.publish makes one, and LiveState.update "
        "replaces it"
    )

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        address = parse(url)
        self._told = HttpOptions.of(options, address.token)
        self.options: Mapping[str, Any] = self._told.as_storage_options()
        self._live = replace(address, token=None)
        self.url = self._live.shown
        """The address without the token; with the version once the store has its lease."""
        self._home: Address = (address.host, address.port)
        self._clients: dict[Address, HttpClient] = {}
        self._local: HostServer | None = None
        """The server of this state on this host."""
        self._beside: dict[int, LiveStore] = {}
        self._lease: _Lease | None = None
        self._share = share_of(url)
        self._lock = threading.RLock()

    @property
    def read_bytes(self) -> int:
        """The best size of a read: that of a disk if all files are on this host."""
        return LOCAL_READ_BYTES if self.memory_name else REMOTE_READ_BYTES

    @property
    def memory_name(self) -> str:
        """The name of the memory of the server on this host, if it has all files; else empty."""
        lease, local = self._take_lease(), self._local
        is_here = all(self._shared_file(lease, name) is not None for name in lease.files)
        return f"{local.server}/{lease.version}" if is_here and local is not None else ""

    @property
    def version(self) -> int:
        """The version that the store reads."""
        return self._take_lease().version

    def entries(self, folder: str = "") -> list[str]:
        """Returns the files of the version; those of another version if `folder` is its number."""
        if folder:
            beside = self._other(f"{folder}/")
            return [] if beside is None else beside[0].entries(beside[1])
        return super().entries()

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the files, by name."""
        return {name: file.size for name, file in sorted(self._take_lease().files.items())}

    def folders(self) -> list[str]:
        """Returns the versions, sorted by text; none for the URL of one version."""
        if self._live.version is not None:
            return []
        return sorted(map(str, self.news()))

    def news(self, after: int = -1, wait_seconds: float = 0.0) -> list[int]:
        """Returns the versions, once one is newer than `after`, or else after `wait_seconds`."""
        query = f"?after={after}&wait={wait_seconds:g}" if wait_seconds else ""
        path = path_of(self._live.name) + query
        answer = self._client(self._home).ask("GET", path, wait_seconds=wait_seconds)
        with _checked(self.url):
            versions = json_of(self._sound(answer), self.url)["versions"]
            if not isinstance(versions, list):
                raise RefusedError("protocol", f"versions={versions!r:.80} is no list")
            return [version_in("versions", version) for version in versions]

    def size(self, name: str) -> int:
        """Returns the size of a file."""
        return self._file_at(name).size

    def modified(self, name: str) -> float:
        """Returns 0: the server tells no times."""
        self._file_at(name)
        return 0.0

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fills the buffers end to end with the bytes from `offset` on.

        Raises VersionGoneError once the version was replaced and its memory has other uses.
        """
        other = self._other(name)
        if other is not None:
            other[0].read_into(other[1], offset, *targets)
            return
        views = [target.cast("B") for target in targets if target.nbytes]
        lease = self._renew_if_due()
        if name not in lease.files:
            raise GoneError(f"{self.url}/{name}")
        if not views:
            return
        shared = self._shared_file(lease, name)
        if shared is None:
            if self._share is None or not self._share.read_into(self, name, offset, views):
                self.fetch(name, offset, views)
        elif shared.read_into(offset, views) < sum(map(len, views)):
            self._renew(lease)  # raises if the memory was taken away
            end = offset + sum(map(len, views))
            raise self.truncation_error(name, offset, end, shared.size)

    def delta(self, name: str, areas: Sequence[Area], is_of_swarm: bool = False) -> Delta | None:
        """Returns the delta of areas of a file of another host since the version before it.

        None if no server has both versions, or if this process shares what it reads: `is_of_swarm`
        is for its pieces. Raises FormatError for an answer that is no delta.
        """
        if self._share is not None and not is_of_swarm:
            return None
        from ckpt.transfer.live_deltas import Delta  # numpy is for those who need it

        body = {"delta": [area.as_json() for area in areas]}
        lease = self._renew_if_due()
        if name not in lease.files or self._shared_file(lease, name) is not None:
            return None
        path = path_of(self._live.name, str(lease.version), name)
        for address in lease.files[name].at:
            with suppress(UnreachableError):
                answer = self._client(address).ask("POST", path, body)
                if answer.status == http.client.GONE:
                    raise refusal_error(answer, self.url, lease.version)
                is_given = answer.status == http.client.OK
                return Delta(answer.body, areas) if is_given else None
        return None

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """Is told of ranges that are going to be read; a swarm takes them in any order."""
        for name, some in groupby(ranges, attrgetter("file")):
            if self._share is not None and self._shared_file(self._renew_if_due(), name) is None:
                spans = [(one.lo, one.hi, one.request.itemsize) for one in some]
                self._share.expect(self, name, spans)

    def ask_pieces(self, name: str, told: list[object]) -> list[list[Any]]:
        """Returns the pieces of a file to take next: number, source and checksum."""
        lease = self._renew_if_due()
        path = path_of(self._live.name, str(lease.version), name)
        client = self._client(lease.files[name].at[0])
        answer = client.ask("POST", path, {"pieces": [lease.key, *told]}, TRACKER_SECONDS)
        return cast(
            "list[list[Any]]", json_of(self._sound(answer, lease.version), self.url)["pieces"]
        )

    def in_place(
        self, name: str, offset: int, length: int
    ) -> AbstractContextManager[memoryview] | None:
        """Returns bytes where they lie, as `formats.storage.in_place` does."""
        other = self._other(name)
        if other is not None:
            return other[0].in_place(other[1], offset, length)
        lease = self._renew_if_due()
        shared = self._shared_file(lease, name) if name in lease.files else None
        view = None if shared is None else shared.view(offset, length)
        if shared is None or view is None:
            return None
        return self._lend(lease, shared, name, offset, view)

    @contextmanager
    def _lend(
        self, lease: _Lease, shared: SharedFile, name: str, offset: int, view: memoryview
    ) -> Iterator[memoryview]:
        try:
            yield view
        finally:
            if not shared.is_intact(offset):  # and not damaged, if the block says so
                self._renew(lease)  # raises, because the memory was taken away
                raise self.truncation_error(name, offset, offset + len(view), shared.size)

    def close(self) -> None:
        """Gives the lease back, and closes connections and descriptors."""
        with self._lock:
            lease, self._lease = self._lease, None
            beside, self._beside = self._beside, {}
            local, self._local = self._local, None
        for store in beside.values():
            store.close()
        for http_client in self._clients.values():
            http_client.close()
        if local is not None:
            local.close()
        if lease is not None:  # last: bytes in flight are the server's memory
            lease.shared.clear()
        if lease is not None and not lease.is_by_socket:
            client = HttpClient(Place(*self._home), replace(self._told, seconds=RELEASE_SECONDS))
            with suppress(StoreError):  # it ends by itself
                client.ask("DELETE", self._lease_path(lease))
            client.close()

    def _take_lease(self) -> _Lease:
        """Returns the lease; takes it if there is none (rule 1)."""
        with self._lock:
            if self._lease is None:
                self._lease = self._take(self._live.version)
                self.url = self._live.at(self._lease.version).shown
            return self._lease

    def _renew_if_due(self) -> _Lease:
        lease = self._take_lease()
        if lease.is_due:
            with self._lock:
                if lease.is_due:
                    self._renew(lease)
        return lease

    def _renew(self, lease: _Lease) -> None:
        """Renews a lease, or takes another one on the same version (rule 2)."""
        answer = self._client(self._home).ask("POST", self._lease_path(lease))
        if answer.status == http.client.NOT_FOUND:
            again = self._take(lease.version)
            lease.key, lease.is_by_socket = again.key, again.is_by_socket
        else:
            self._sound(answer, lease.version)
        lease.renewed = monotonic()

    def _take(self, version: int | None) -> _Lease:
        """Takes a lease on a version, or on the newest one (rule 1)."""
        began = monotonic()
        with suppress(OSError):  # none on this host, or no folder for sockets
            self._local = self._local or HostServer(self._live.name, self._told.seconds)
        lease = self._lease_here(version) or self._lease_by_http(version)
        lease.renewed = began
        return lease

    def _lease_here(self, version: int | None) -> _Lease | None:
        """Takes a lease from the home server over its socket; None if it is not on this host."""
        local = self._local
        if local is None:
            return None
        try:
            found, here = local.take(version, self._home, self._told.token or "")
            shared = {name: SharedFile(parts, local) for name, parts in here.items()}
            lease = _lease_in(found, self.url)
            lease.is_by_socket, lease.shared = True, {**shared}
            return lease
        except StoreTimeoutError:
            raise
        except CkptError:
            return None  # the answer by HTTP says the same, with the address

    def _lease_by_http(self, version: int | None) -> _Lease:
        path = path_of(self._live.name, "leases") + "?while=connected"
        answer = self._client(self._home).ask("POST", path, {"version": version})
        try:
            return _lease_in(json_of(self._sound(answer, version), self.url), self.url)
        except NotACheckpointError:
            if version is not None and self._lease is not None:
                raise VersionGoneError(self.url, version, None) from None  # its publisher has ended
            raise

    def _lease_path(self, lease: _Lease) -> str:
        return path_of(self._live.name, "leases", lease.key)

    def _file_at(self, name: str) -> FileAt:
        other = self._other(name)
        if other is not None:
            return other[0]._file_at(other[1])
        found = self._take_lease().files.get(name)
        if found is None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), f"{self.url}/{name}")
        return found

    def _other(self, name: str) -> tuple[LiveStore, str] | None:
        """Returns the store of the version in a name, `12/manifest.json`, and the file's name."""
        folder, slash, file = name.partition("/")
        if not slash:
            return None
        version = version_of(folder)
        if version is None or self._live.version is not None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), f"{self.url}/{name}")
        with self._lock:
            if version not in self._beside:
                url = str(self._live.at(version))
                self._beside[version] = LiveStore(url, self.options)
            return self._beside[version], file

    def _client(self, address: Address) -> HttpClient:
        with self._lock:
            if address not in self._clients:
                self._clients[address] = HttpClient(Place(*address), self._told)
            return self._clients[address]

    def _shared_file(self, lease: _Lease, name: str) -> SharedFile | None:
        """Returns a file of this host by its descriptors; None for a file of other hosts."""
        if name in lease.shared:
            return lease.shared[name]
        with self._lock:
            if name not in lease.shared:
                lease.shared[name] = self._find_here(lease, name)
            return lease.shared[name]

    def _find_here(self, lease: _Lease, name: str) -> SharedFile | None:
        """Returns a file of the server on this host, if that has this state's token and file."""
        local, token = self._local, self._told.token or ""
        if local is None:
            return None
        try:
            return SharedFile(local.get(lease.version, name, token), local)
        except CkptError:  # it has another state, or not this file, or not any more
            return None

    def fetch(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """Reads a range by HTTP, from the first server that answers (rule 3)."""
        lease = self._renew_if_due()
        path = path_of(self._live.name, str(lease.version), name)
        headers, lost = {"Ckpt-Lease": lease.key}, None
        for address in lease.files[name].at:
            try:
                found = self._client(address).read_range(path, offset, views, headers)
            except UnreachableError as error:
                lost = error
                continue
            if not isinstance(found, int):
                raise self._unread(lease, name, offset, views, found)
            return
        raise lost or NotACheckpointError(f"{self.url}/{name}: no server has this file")

    def _unread(
        self, lease: _Lease, name: str, offset: int, views: Sequence[memoryview], answer: Answer
    ) -> Exception:
        """Returns the error for an answer without the bytes."""
        size = past_end(answer)
        if size is not None:
            return self.truncation_error(name, offset, offset + sum(map(len, views)), size)
        return refusal_error(answer, self.url, lease.version)

    def _sound(self, answer: Answer, version: int | None = None) -> Answer:
        """Returns the answer, unless its status is an error."""
        if answer.status < http.client.MULTIPLE_CHOICES:
            return answer
        raise refusal_error(answer, self._live.shown, version)


def _lease_in(found: Mapping[str, object], where: str) -> _Lease:
    """Returns the lease in the object of an answer. Raises ProtocolError."""
    with _checked(where):
        return _Lease(
            version_in("version", found["version"]),
            text_in("lease", found["lease"]),
            seconds_in("seconds", found["seconds"]),
            files_of("files", found["files"]),
        )


def refusal_error(answer: Answer, where: str, version: int | None) -> CkptError:
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


@contextmanager
def _checked(where: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise ProtocolError(f"{where}: the answer has no {error}") from None
    except RefusedError as error:
        raise ProtocolError(f"{where}: {error}") from None
