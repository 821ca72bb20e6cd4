"""The store of a folder in a bucket, or behind any other fsspec driver.

Rules:

1. All requests go through `_try`. It sends a request again while a retry may help
   (`ckpt.stores.retries`), once with credentials that are read anew if the server does not take
   them, and turns a final failure into an error with the URL, the request and the remedy.
2. A server may have carried out a request whose response was lost. After a request that must not be
   repeated, the store looks at the result (`_finish`, and `ckpt.stores.object_writes`).
3. Folders are prefixes. The store creates and removes none where they are not objects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ckpt.arguments import memory_budget
from ckpt.errors import ExistsError, ReplacedError, StoreError
from ckpt.stores.driver import (
    CopyingDriver,
    MultipartDriver,
    ObjectInfo,
    Start,
    StreamDriver,
    Unfinished,
    repeating,
)
from ckpt.stores.object_writes import (
    NO_LIMIT,
    ConditionalWrites,
    PartSizes,
    Upload,
    UploadRequests,
    open_writer,
)
from ckpt.stores.retries import (
    ErrorClass,
    OverNetwork,
    PastEndError,
    RetryPolicy,
    UnsupportedRequestError,
    UploadGoneError,
    explain,
    retry_policy,
)
from formats.detect import is_shard
from formats.errors import TooLargeError
from formats.storage import (
    BESIDE,
    COPIED_READ_BYTES,
    LOCAL_READ_BYTES,
    REMOTE_READ_BYTES,
    FileWriter,
    Pool,
    Reader,
)
from sharding.errors import cause_without_secrets

T = TypeVar("T")

_log = logging.getLogger("ckpt.stores")

DELETES = 8
"""Requests to delete files that are under way at the same time."""
TRIAL_SECONDS = 5.0
"""The deadline of the first copy on the server."""
CANCEL_SECONDS = 10.0
"""The deadline of an abort after a failure or an interrupt, which waits for it."""


class ObjectStore(ConditionalWrites, OverNetwork):
    """The store of any folder that is not on a local disk."""

    refusal = ""

    def __init__(
        self,
        url: str,
        root: str,
        driver: MultipartDriver | StreamDriver,
        options: Mapping[str, Any],
        policy: RetryPolicy | None = None,
    ) -> None:
        self.url = url
        self.read_bytes = REMOTE_READ_BYTES
        if driver.holds_answers:
            self.read_bytes = min(
                COPIED_READ_BYTES, max(LOCAL_READ_BYTES + 1, memory_budget() // 8)
            )
        self.options = options
        self._root = root
        self._tags: dict[str, str | None] = {}
        """The tags of files as this store has last read or written them; None of absent ones."""
        self._driver = driver
        self._policy = retry_policy() if policy is None else policy

    @property
    def driver(self) -> MultipartDriver | StreamDriver:
        """The driver, whose single requests `request` sends."""
        return self._driver

    def request(self, doing: str, name: str, action: Callable[[str], T]) -> T:
        """Returns the result of `action` for the driver's path of a file, with retries (rule 1)."""
        path = self._path(name) if name else self._root
        return self._try(doing, name, lambda: action(path))

    def names(self) -> list[str]:
        """Returns the files directly in the folder, sorted; none if the folder does not exist."""
        return [found.name for found in self._listing() if found.is_file]

    def entries(self, folder: str = "") -> list[str]:
        found = self._listing(folder)
        return sorted(entry.name if entry.is_file else f"{entry.name}/" for entry in found)

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the files directly in the folder, in one listing if it has them."""
        sizes = {}
        for entry in self._listing():
            if entry.is_file:
                with suppress(FileNotFoundError):  # deleted since the listing
                    known = entry.nbytes
                    sizes[entry.name] = (
                        self._status(entry.name).nbytes or 0 if known is None else known
                    )
        return sizes

    def folders(self) -> list[str]:
        return [found.name for found in self._listing() if not found.is_file]

    def below(self) -> dict[str, ObjectInfo] | None:
        """Returns all files in the folder and below it by their paths, in one listing; or None."""
        try:
            found = self._try("listing", "", lambda: self._driver.list_below(self._root))
        except FileNotFoundError:
            return {}
        return None if found is None else {entry.name: entry for entry in found}

    def size(self, name: str) -> int:
        found = self._status(name).nbytes
        if found is None:
            raise StoreError(f"{self.url}/{name}: the server does not tell the size of the file")
        return found

    def tag(self, name: str) -> str:
        return self._tags.get(name) or ""

    def modified(self, name: str) -> float:
        """Returns the time of a file's last write, in seconds since 1970 by the server's clock."""
        return self._status(name).modified

    def arrivals(self) -> dict[str, float]:
        """Returns the times of the last writes, by name. A copy in a bucket is a new object."""
        return {found.name: found.modified for found in self._listing() if found.is_file}

    def read_whole(self, name: str, limit: int) -> bytes:
        path = self._path(name)
        try:
            content, tag = self._try("reading", name, lambda: self._driver.get(path, limit))
        except FileNotFoundError:
            self._tags[name] = None
            raise
        self._tags[name] = tag
        if isinstance(content, int):
            raise TooLargeError(f"{self.url}/{name}", content, limit)
        return content

    def server_path(self, name: str) -> tuple[object, str]:
        """Returns the session, and the path that it has for a file."""
        return self._driver.session, self._path(name)

    def read_start(self, name: str, length: int) -> Start:
        """Reads the first bytes of a file in one request; fewer if it is shorter."""
        path = self._path(name)
        return self._try("reading", name, lambda: self._driver.get_start(path, length))

    @contextmanager
    def create(
        self, name: str, rewritable: bool = False, replace: bool = True
    ) -> Iterator[FileWriter]:
        """Returns a writer of a new file, in parts or, if the driver has no parts, as a stream.

        Without `replace`, a file of one request has the condition that it does not exist. For a
        larger file the store looks at the start and just before the end, and raises ExistsError.
        """
        driver = self._driver
        if not replace:
            self._check_absent(name)
        if not isinstance(driver, StreamDriver):
            with self._uploading(driver, name, rewritable, replace) as upload:
                yield upload
        else:
            with self._streaming(driver, name, rewritable) as stream:
                yield stream
                if not replace and driver.capabilities.hides_unfinished:
                    self._check_absent(name)

    def commit(
        self, name: str, data: bytes, replace: bool, check: Callable[[], object] | None = None
    ) -> None:
        """Writes a small file in one request; unless `replace`, on the condition of its absence."""
        view = memoryview(data)
        if replace:
            self._replace(name, view, check)
        else:
            try:
                self._put_new(name, view, check)
            except ExistsError:
                # A server on the way may have sent the request twice: then the bytes are equal.
                if not self._try("reading", name, lambda: self._has(name, view)):
                    raise

    def list_unfinished(self) -> list[Unfinished]:
        """Returns incomplete uploads in parts. A process may still be writing one."""
        return self._try(
            "listing uploads below", "", lambda: self._driver.list_multipart(self._root)
        )

    def unfinished_bytes(self, unfinished: Unfinished) -> int:
        """Returns the bytes that an incomplete upload takes; 0 if the server does not tell."""
        path = self._path(unfinished.name)
        with suppress(OSError):  # without the permission to list parts, too
            return self._try(
                "listing parts of",
                unfinished.name,
                lambda: self._driver.multipart_bytes(path, unfinished.upload_id),
            )
        return 0

    def old_versions(self) -> tuple[int, int]:
        """Returns the number and the bytes of versions below the folder that are not current.

        Returns zeros where the server has no versions, or does not tell this user.
        """
        driver: Any = self._driver
        look: Callable[[str], tuple[int, int]] | None = getattr(driver, "old_versions", None)
        if look is None:
            return 0, 0
        with suppress(OSError):
            found: tuple[int, int] = self._try("listing versions", "", lambda: look(self._root))
            return found
        return 0, 0

    def abort(self, unfinished: Unfinished) -> None:
        """Aborts an incomplete upload, if it exists."""
        self._abort(unfinished.name, unfinished.upload_id, self._policy)

    def delete(self, name: str) -> bool:
        """Removes a file, if it exists and this store has seen no other state of it.

        Returns False for one that was not there at the first try, as far as the server tells. A
        later try finds no file if the answer to the first was lost.
        """
        path, tries = self._path(name), 0

        def delete(tag: str) -> None:
            nonlocal tries
            tries += 1
            self._driver.delete(path, tag)

        try:
            while True:
                tag = self._tag(name) or ""
                try:
                    self._try("deleting", name, partial(delete, tag))
                    return True
                except (ExistsError, UnsupportedRequestError) as error:
                    if not tag:
                        raise
                    if isinstance(error, ExistsError):
                        self.read_whole(name, NO_LIMIT)
                if self._tag(name) != tag:
                    raise ReplacedError(
                        f"{self.url}/{name}: it was replaced by another one meanwhile, which stays"
                    )
                self._learn_tags(tag)
        except FileNotFoundError:
            return tries > 1
        finally:
            self._tags.pop(name, None)

    def delete_all(self, names: Sequence[str], tags: Mapping[str, str] | None = None) -> None:
        """Removes files, if they exist: many in a request, or several requests at once.

        `tags` has the tags of those that are removed only in this state. Raises the error of the
        first one that stays.
        """
        self._tags.update(tags or {})
        step = self._driver.deletes_at_once
        groups = [names[at : at + step] for at in range(0, len(names), step)]
        with Pool(DELETES, "ckpt-delete") as pool:
            failed = [name for group in pool.map(self._delete_group, groups) for name in group]
        for error in failed:
            raise error

    def _delete_group(self, names: Sequence[str]) -> list[OSError]:
        paths = {self._path(name): self._tag(name) or "" for name in names}
        if len(names) > 1:
            with suppress(OSError):  # some servers lack the request; a single one tells the cause
                self._try("deleting", names[0], lambda: self._driver.delete_all(paths))
                return []
        failed = []
        for name in names:
            try:
                self.delete(name)
            except OSError as error:
                failed.append(error)
        return failed

    def remove_if_empty(self) -> None:
        """Removes the folder if it is empty, on servers with folders."""
        self._driver.delete_folder(self._root)

    def flush(self) -> None:
        """Does nothing: a file that the server has acknowledged is durable."""

    def close(self) -> None:
        """Does nothing: drivers pool their own connections."""

    def _fetch(self, name: str, offset: int, views: Sequence[memoryview]) -> int | None:
        path = self._path(name)
        return self._try("reading", name, lambda: self._driver.get_range(path, offset, views))

    def _listing(self, folder: str = "") -> list[ObjectInfo]:
        root = self._path(folder) if folder else self._root
        try:
            found = self._try("listing", folder, lambda: self._driver.list_folder(root))
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda entry: entry.name)

    def _status(self, name: str) -> ObjectInfo:
        path = self._path(name)
        return self._try("looking for", name, lambda: self._driver.head(path))

    @contextmanager
    def _uploading(
        self, driver: MultipartDriver, name: str, rewritable: bool, replace_file: bool
    ) -> Iterator[FileWriter]:
        path, stopped = self._path(name), threading.Event()
        policy = self._policy
        if policy.sleep is time.sleep:
            policy = replace(policy, sleep=stopped.wait)

        def send(doing: str, action: Callable[[], T]) -> T:
            return self._try(doing, name, action, policy, stopped.is_set)

        def send_whole(data: memoryview) -> None:
            if replace_file:
                send("writing", lambda: driver.put(path, data))
            else:
                self._put_new(name, data)

        def create() -> str:
            tries = 0

            def begin() -> str:
                nonlocal tries
                tries += 1
                return driver.create_multipart(path)

            upload_id = send("beginning to upload", begin)
            if tries > 1 and is_shard(name):  # no other program writes a file of this name
                with suppress(OSError):  # otherwise `ckpt gc` finds the one whose answer was lost
                    for other in self.list_unfinished():
                        if other.name == name and other.upload_id != upload_id:
                            self.abort(other)
            return upload_id

        def complete(upload_id: str, tags: Sequence[Any], total: int) -> None:
            if not replace_file:
                self._check_absent(name)
            self._finish(driver, name, upload_id, tags, total)

        def path_of(reader: Reader, file: str) -> str | None:
            place = getattr(reader, "server_path", None)
            found: tuple[object, str] | None = None if place is None else place(file)
            return None if found is None or found[0] is not driver.session else found[1]

        can_copy = False

        def copy_part(upload_id: str, number: int, source: str, lo: int, hi: int) -> Any:
            nonlocal can_copy
            assert isinstance(driver, CopyingDriver)
            request = partial(driver.copy_part, path, upload_id, number, source, lo, hi)
            # A server that cannot copy may say so as one that is busy: the bytes are then read.
            most = policy.deadline_seconds if can_copy else TRIAL_SECONDS
            patience = replace(policy, deadline_seconds=min(most, policy.deadline_seconds))
            tag = self._try(f"copying part {number} of", name, request, patience, stopped.is_set)
            can_copy = True
            return tag

        requests = UploadRequests(
            path_of=path_of,
            copy_part=copy_part if isinstance(driver, CopyingDriver) else None,
            put=send_whole,
            create_multipart=create,
            upload_part=lambda upload_id, number, data: send(
                f"uploading part {number} of",
                lambda: driver.upload_part(path, upload_id, number, data),
            ),
            complete_multipart=complete,
            abort_multipart=lambda upload_id: self._abort(
                name, upload_id, replace(self._policy, deadline_seconds=CANCEL_SECONDS)
            ),
        )
        upload = Upload(
            requests, PartSizes.within(memory_budget(), driver.part_limits), rewritable, stopped
        )
        try:
            yield upload
            upload.finish()
        except BaseException:
            with suppress(OSError):  # `ckpt gc` finds an upload that could not be aborted
                upload.cancel()
            raise

    def _streaming(
        self, driver: StreamDriver, name: str, rewritable: bool
    ) -> AbstractContextManager[FileWriter]:
        once = replace(self._policy, deadline_seconds=0.0)

        def send(action: Callable[[], T]) -> T:
            return self._try("writing", name, action, once)

        return open_writer(driver, self._path(name), rewritable, send)

    def _finish(
        self, driver: MultipartDriver, name: str, upload_id: str, tags: Sequence[Any], total: int
    ) -> None:
        """Makes a file of its parts, even if the response of a try was lost (rule 2)."""
        path, tries = self._path(name), 0

        def finish() -> None:
            nonlocal tries
            tries += 1
            driver.complete_multipart(path, upload_id, tags)

        try:
            self._try("completing", name, finish)
        except (FileNotFoundError, UploadGoneError):
            with suppress(FileNotFoundError):
                if tries > 1 and self.size(name) == total:
                    return
            raise

    def _abort(self, name: str, upload_id: str, policy: RetryPolicy) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError, UploadGoneError):
            self._try(
                "aborting", name, lambda: self._driver.abort_multipart(path, upload_id), policy
            )

    def _try(
        self,
        doing: str,
        name: str,
        action: Callable[[], T],
        policy: RetryPolicy | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> T:
        policy = self._policy if policy is None else policy
        place = f"{self.url}/{name}" if name else self.url
        driver, is_renewed, tries = self._driver, False, 0

        def request() -> T:
            nonlocal is_renewed, tries
            session, tries = driver.session, tries + 1
            with repeating() if tries > 1 else nullcontext():
                try:
                    return action()
                except Exception as error:
                    if is_renewed or driver.error_class(error) is not ErrorClass.STALE:
                        raise
                    is_renewed = True
            driver.renew(session)
            with repeating():
                return action()

        try:
            return policy.run(request, driver.error_class, f"{place}: {doing}", is_over)
        except PastEndError:
            raise
        except Exception as error:
            kind, seconds = driver.error_class(error), policy.deadline_seconds
            raise explain(doing, place, error, kind, seconds) from cause_without_secrets(error)

    def _path(self, name: str) -> str:
        root = self._root.rstrip("/")
        while name.startswith(BESIDE):  # an object store takes dots as letters
            root, name = root.rpartition("/")[0], name.removeprefix(BESIDE)
            if root.endswith(":/"):  # another web server would take the place of a folder
                place = f"{self.url}/{BESIDE}{name}"
                raise explain("reading", place, FileNotFoundError(), ErrorClass.MISSING, 0.0)
        return f"{root}/{name}"
