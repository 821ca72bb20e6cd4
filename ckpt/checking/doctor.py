"""Tries at a place all that ckpt relies on there, and tells which promises hold.

Rules:

1. Everything that is written lies in one new folder, `ckpt-doctor-<16 hex digits>`. It is removed
   at the end, also after an error or an interrupt, with its uploads and old versions.
2. Each thing is tried by the methods of the store, with its retries and conditions: the result
   holds for ckpt, not for the server as such.
3. A missing permission is a finding. A server that cannot be reached, or takes no credentials, is
   an error.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple, TypeVar
from warnings import warn

from ckpt.checking.report import (
    KINDS,
    PERMISSIONS,
    SETTINGS,
    Examination,
    Finding,
    Outcome,
    promises_of,
)
from ckpt.display import count, size
from ckpt.errors import AccessDeniedError, ExistsError, LeftOverWarning, ReplacedError
from ckpt.stores.driver import StreamDriver
from ckpt.stores.local_store import NO_HARD_LINKS, RENAME_NOREPLACE, LocalStore, rename_with
from ckpt.stores.object_store import ObjectStore
from ckpt.stores.object_writes import NO_LIMIT
from ckpt.stores.retries import UnsupportedRequestError
from ckpt.stores.store import Options, Store, join_url, local_path, open_store
from formats.errors import FormatError
from sharding.errors import format_names, without_secrets

T = TypeVar("T")

PREFIX = "ckpt-doctor-"
AT_ONCE = 6
"""Commits that are sent in one moment."""
ROUNDS = 3
"""Files that are written, and looked for in a listing at once."""
FOLDERS = 3
"""Folders in which a file is looked for, to read from it."""
MOST_SKEW_SECONDS = 60.0
LEAST_DAYS = 2
"""A rule that aborts uploads sooner may abort one of a save, which has a day."""
ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
"""The classes of S3 whose objects must be restored before they are read."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_NOTES = {
    "overlay": "a container's own disk, whose files go with the container",
    "nfs": "Runs: On NFS and Lustre",
    "nfs4": "Runs: On NFS and Lustre",
    "lustre": "Runs: On NFS and Lustre",
    **dict.fromkeys(IN_MEMORY, "memory, whose files go with a restart"),
}


def examine(
    url: str | os.PathLike[str], *, read_only: bool = False, storage_options: Options = None
) -> Examination:
    """Returns all that was found at a folder, which need not exist.

    With `read_only` nothing is written. One process calls this.

    Raises:
        ArgumentError: as for a save to this place.
        StoreError: the place cannot be reached.
        LeftOverWarning: a warning, if files could not be removed.
    """
    text = os.fspath(url)
    protocol = "disk" if local_path(text) is not None else text.partition("://")[0]
    kind = KINDS.get(protocol, protocol)
    folder = ""
    left: list[str] = []
    with open_store(text, storage_options) as store:
        is_readable_only = not isinstance(store, LocalStore | ObjectStore) or "http" in kind
        if not (read_only or is_readable_only):
            folder = f"{PREFIX}{secrets.token_hex(8)}"
        doctor = _Doctor(store, kind, folder)
        with doctor.clean_up(left):
            doctor.examine()
    promises = promises_of(doctor.found)
    shown, found = without_secrets(text), tuple(doctor.found.values())
    return Examination(shown, kind, folder, found, promises, tuple(left))


_Result = tuple[Outcome, str]
_FIRST = b"the bytes of a file"
_FILES = (
    *("first", "condition", "at-once", "late-put", "late-delete", "large", "aborted"),
    *("many-1", "many-2", "clock", "flushed", "linked", "renamed-1", "renamed-2"),
)
"""The files that are written, beside those of `_list_after_put`."""


class _Try(NamedTuple):
    name: str
    permission: str
    run: Callable[[], _Result]
    writes: bool = True


class _Doctor:
    """The findings at one place."""

    def __init__(self, store: Store, kind: str, folder: str) -> None:
        self.found: dict[str, Finding] = {}
        self._store, self._kind, self._folder = store, kind, folder
        self._url = join_url(store.url, folder) if folder else store.url
        self._has_versions = self._has_written = False
        self._is_hidden: bool | None = None

    def examine(self) -> None:
        """Tries everything that a place of this kind has."""
        with open_store(self._url, self._store.options) as here:
            self._here = here
            for trial in self._tries():
                self._try(trial)

    @contextmanager
    def clean_up(self, left: list[str]) -> Iterator[None]:
        """Removes at the end of the block all that was written; `left` gets the names that stay."""
        to_make: list[Path] = []
        path = local_path(self._url)
        if self._folder and path is not None:
            place = Path(path).absolute()
            to_make = [folder for folder in (place, *place.parents) if not folder.exists()]
        try:
            yield
        finally:
            if self._has_written:
                left += self._clean()
                for folder in to_make:
                    with suppress(OSError):  # another program has put something in
                        folder.rmdir()
            if left:
                warn(
                    LeftOverWarning(
                        f"{without_secrets(self._url)}: {format_names(left)} could not be removed: "
                        "remove the folder"
                    ),
                    stacklevel=2,
                )

    def _clean(self) -> list[str]:
        """Removes all that was written, as far as it can; returns the names that stay."""
        names, stay = [f"file-{number}" for number in range(ROUNDS)] + [*_FILES], []
        with open_store(self._url, self._store.options) as store:
            with suppress(OSError):
                names = store.names()
            for name in names:
                try:
                    store.delete(name)
                except OSError:
                    stay.append(name)
            with suppress(OSError):
                for upload in store.list_unfinished():
                    store.abort(upload)
            if self._has_versions and isinstance(store, ObjectStore):
                driver: Any = store.driver
                with suppress(OSError):
                    store.request("removing the versions of", "", driver.delete_versions)
            with suppress(OSError):
                store.remove_if_empty()
                stay = store.names()
                stay += [attempt.name for attempt in store.list_unfinished()]
        return stay

    def _try(self, trial: _Try) -> None:
        permission = PERMISSIONS.get(self._kind, {}).get(trial.permission, "")
        if trial.writes and not self._can_write:
            self.found[trial.name] = Finding(
                trial.name, Outcome.NOT_TRIED, "needs a write", permission
            )
            return
        self._has_written |= trial.writes
        try:
            outcome, detail = trial.run()
        except AccessDeniedError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):  # the credentials are refused
                raise
            outcome, detail = Outcome.DENIED, f"needs {permission or 'a permission'}"
            detail += "" if permission else f": {error}"
        except UnsupportedRequestError:
            outcome, detail = Outcome.MISSING, "the server has no such request"
        except (OSError, FormatError) as error:
            if trial.name == "list":  # the place cannot be reached
                raise
            outcome, detail = Outcome.MISSING, str(error)
        self.found[trial.name] = Finding(trial.name, outcome, detail, permission)

    def _tries(self) -> Iterator[_Try]:
        store = self._store
        if isinstance(store, LocalStore):
            yield _Try("file system", "", lambda: _file_system(self._path()), writes=False)
            yield _Try("free space", "", lambda: _free_space(self._path()), writes=False)
        yield _Try("list", "list", self._list, writes=False)
        if isinstance(store, ObjectStore) and self._kind in PERMISSIONS:
            tells = (self._versioning, self._object_lock, self._lifecycle)
            for name, tell in zip(SETTINGS, tells, strict=True):
                yield _Try(name, name, partial(self._setting, name, tell), writes=False)
        yield _Try("put", "write", self._put)
        if isinstance(store, LocalStore):
            yield _Try("fsync", "", self._fsync)
            yield _Try("hard link", "", self._hard_link)
            yield _Try("rename without replacing", "", self._rename)
        yield _Try("range read", "read", self._range, writes=False)
        yield _Try("list after put", "list", self._list_after_put)
        yield _Try("conditional put", "write", self._conditional_put)
        yield _Try("commits at once", "write", self._at_once)
        yield _Try("overwrite", "write", self._overwrite)
        if isinstance(store, ObjectStore):
            yield _Try("conditional overwrite", "write", self._conditional_overwrite)
            yield _Try("conditional delete", "delete", self._conditional_delete)
        yield _Try("large file", "write", self._large_file)
        yield _Try("hidden until done", "list", self._hidden)
        yield _Try("atomic replace", "", lambda: self._claim("atomic_replace"), writes=False)
        yield _Try("durable", "", self._durable, writes=False)
        if isinstance(store, ObjectStore) and not isinstance(store.driver, StreamDriver):
            yield _Try("abort", "abort", self._abort)
            yield _Try("uploads", "uploads", self._uploads, writes=False)
        yield _Try("delete", "delete", self._delete)
        if isinstance(store, ObjectStore) and store.driver.deletes_at_once > 1:
            yield _Try("delete many", "delete", self._delete_many)
        yield _Try("clock", "read", self._clock)

    # The place as a store.

    @property
    def _can_write(self) -> bool:
        """Whether writes are tried, and none has failed."""
        put = self.found.get("put")
        return bool(self._folder) and (put is None or put.outcome is Outcome.OK)

    def _list(self) -> _Result:
        return Outcome.OK, count(len(self._store.entries()), "name")

    def _put(self) -> _Result:
        self._here.commit("first", _FIRST, replace=True)
        return Outcome.OK, ""

    def _range(self) -> _Result:
        if self._can_write:
            got = self._here.read("first", 1, len(_FIRST) - 1)
            return _either(got == _FIRST[1:], "", "other bytes than were written")
        for folder in ("", *self._store.folders()[:FOLDERS]):
            url = join_url(self._store.url, folder) if folder else self._store.url
            with open_store(url, self._store.options) as store:
                name = next((file for file, nbytes in store.sizes().items() if nbytes > 2), None)
                if name is not None:
                    data = store.read_start(name, 3).data
                    got = store.read(name, 1, 2)
                    return _either(got == data[1:], "", f"{name} has other bytes than at first")
        return Outcome.NOT_TRIED, "no file here to read from"

    def _list_after_put(self) -> _Result:
        for number in range(ROUNDS):
            name = f"file-{number}"
            self._here.commit(name, b"1", replace=True)
            if name not in self._here.names():
                return Outcome.MISSING, "a listing lacks a file that was just written"
        return Outcome.OK, f"{ROUNDS} of {ROUNDS} files at once"

    def _conditional_put(self) -> _Result:
        self._here.commit("condition", b"first", replace=False)
        with self._again() as other, suppress(ExistsError):
            other.commit("condition", b"second", replace=False)
            return Outcome.MISSING, "a second commit replaced the first"
        if not self._here.capabilities.put_if_absent:
            return Outcome.MISSING, "the condition has no effect: ckpt looks just before a commit"
        return Outcome.OK, "the second one is refused"

    def _at_once(self) -> _Result:
        start = Barrier(AT_ONCE)

        def commit(number: int) -> bool:
            with self._again() as other:
                start.wait()
                try:
                    other.commit("at-once", str(number).encode(), replace=False)
                except ExistsError:
                    return False
                return True

        with ThreadPoolExecutor(AT_ONCE) as pool:
            won = sum(pool.map(commit, range(AT_ONCE)))
        return (Outcome.OK if won == 1 else Outcome.MISSING), f"{won} of {AT_ONCE} succeeded"

    def _overwrite(self) -> _Result:
        self._here.commit("first", b"other", replace=True)
        with self._again() as other:
            got = other.read_whole("first", NO_LIMIT)
        return _either(got == b"other", "", "the old content is still there")

    def _conditional_overwrite(self) -> _Result:
        with self._replace_behind("late-put") as (late, other):
            try:
                late.commit("late-put", b"late", replace=True, check=lambda: None)
            except ReplacedError:
                kept = other.read_whole("late-put", NO_LIMIT) == b"newer"
                return _either(kept, "a late one is refused", "it was refused and carried out")
        return Outcome.MISSING, "a late one replaces a newer file"

    def _conditional_delete(self) -> _Result:
        with self._replace_behind("late-delete") as (late, _):
            try:
                late.delete("late-delete")
            except ReplacedError:
                return Outcome.OK, "a late one is refused"
        return Outcome.MISSING, "a late one deletes a newer file"

    @contextmanager
    def _replace_behind(self, name: str) -> Iterator[tuple[Store, Store]]:
        """Yields a store that has seen an older state of a file than another one has written."""
        with self._again() as late, self._again() as other:
            late.commit(name, b"older", replace=True)
            late.read_whole(name, NO_LIMIT)
            other.read_whole(name, NO_LIMIT)
            other.commit(name, b"newer", replace=True)
            yield late, other

    def _large_file(self) -> _Result:
        if not isinstance(self._here, ObjectStore) or isinstance(self._here.driver, StreamDriver):
            with self._here.create("large") as file:
                file.write([_FIRST])
                self._look_early()
            detail = "written as a stream"
        else:
            driver: Any = self._here.driver
            upload_id = self._request("large", driver.create_multipart)
            data = memoryview(_FIRST)
            part = self._request("large", lambda path: driver.upload_part(path, upload_id, 1, data))
            self._look_early()
            parts = [part]
            self._request("large", lambda path: driver.complete_multipart(path, upload_id, parts))
            detail = "in parts"
        got = self._here.read_whole("large", NO_LIMIT)
        return _either(got == _FIRST, detail, "it has other bytes than were written")

    def _look_early(self) -> None:
        with suppress(OSError):
            self._is_hidden = "large" not in self._here.names()

    def _hidden(self) -> _Result:
        if self._is_hidden is None:
            self._here.names()  # raises the error again
        return _either(bool(self._is_hidden), "", "an unfinished file is listed under its name")

    def _abort(self) -> _Result:
        driver: Any = self._here.driver  # type: ignore[attr-defined]

        def abort(path: str) -> None:
            upload_id = driver.create_multipart(path)
            driver.upload_part(path, upload_id, 1, memoryview(_FIRST))
            driver.abort_multipart(path, upload_id)

        self._request("aborted", abort)
        with suppress(AccessDeniedError):
            if any(upload.name == "aborted" for upload in self._here.list_unfinished()):
                return Outcome.MISSING, "the upload is still there"
        return Outcome.OK, ""

    def _uploads(self) -> _Result:
        return Outcome.OK, f"{len(self._store.list_unfinished())} incomplete"

    def _delete(self) -> _Result:
        with self._again() as other:
            other.delete("first")
        return _either(not self._here.exists("first"), "", "the file is still there")

    def _delete_many(self) -> _Result:
        for name in ("many-1", "many-2"):
            self._here.commit(name, b"1", replace=True)
        driver: Any = self._here.driver  # type: ignore[attr-defined]
        self._request("many-1", lambda path: driver.delete_all({path: "", f"{path[:-1]}2": ""}))
        left = {"many-1", "many-2"} & set(self._here.names())
        return _either(not left, f"up to {driver.deletes_at_once} in a request", "files stay")

    def _clock(self) -> _Result:
        began = time.time()
        self._here.commit("clock", b"1", replace=True)
        ended, modified = time.time(), self._here.modified("clock")
        # A store may count whole seconds.
        skew = modified - ended if modified > ended else min(0.0, modified + 1 - began)
        if abs(skew) < 1:
            return Outcome.OK, "no difference"
        side = "ahead of" if skew > 0 else "behind"
        is_near = abs(skew) <= MOST_SKEW_SECONDS
        return _either(is_near, *[f"the store is {abs(skew):.0f} s {side} this machine"] * 2)

    def _claim(self, name: str) -> _Result:
        if not isinstance(self._store, LocalStore | ObjectStore):
            return Outcome.NOT_TRIED, "reading only"
        known = bool(getattr(self._store.capabilities, name))
        if isinstance(self._store, LocalStore):
            return Outcome.OK, "by the operating system"
        source = "documented by the store's maker" if known else "the driver promises nothing"
        return (Outcome.OK if known else Outcome.UNKNOWN), source

    def _durable(self) -> _Result:
        if isinstance(self._store, LocalStore) and _mount(self._path())[1] in IN_MEMORY:
            return Outcome.MISSING, "this file system is memory"
        return self._claim("durable")

    # The place as a disk.

    def _path(self) -> Path:
        return Path(local_path(self._url) or "").absolute()

    def _fsync(self) -> _Result:
        descriptor = os.open(self._path() / "flushed", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, _FIRST)
            began = time.perf_counter()
            os.fsync(descriptor)
            middle = time.perf_counter()
        finally:
            os.close(descriptor)
        self._here.flush()
        took = (middle - began, time.perf_counter() - middle)
        return Outcome.OK, "{:.1f} ms for a file, {:.1f} for its folder".format(
            *(1000 * seconds for seconds in took)
        )

    def _hard_link(self) -> _Result:
        try:
            os.link(self._path() / "first", self._path() / "linked")
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            return Outcome.MISSING, f"{error.strerror}; a rename without replacing does as well"
        return Outcome.OK, ""

    def _rename(self) -> _Result:
        one, other = self._path() / "renamed-1", self._path() / "renamed-2"
        one.write_bytes(b"1")
        if not rename_with(RENAME_NOREPLACE, one, other):
            return Outcome.MISSING, "needed only where there are no hard links"
        one.write_bytes(b"2")
        refused = not rename_with(RENAME_NOREPLACE, one, other)
        return _either(refused, "", "it replaces a file all the same")

    # The rules of a bucket.

    def _setting(self, subject: str, tell: Callable[[Mapping[str, Any], str], _Result]) -> _Result:
        """Returns the result of `tell` for a setting of the bucket, and the key of the place."""
        store: Any = self._store
        if not hasattr(store.driver, "bucket_setting"):
            return Outcome.UNKNOWN, "this interface of the store does not tell"
        setting = store.request(
            f"reading the setting {subject} of the bucket of",
            "",
            lambda path: (store.driver.bucket_setting(path, subject), path.partition("/")[2]),
        )
        return tell(*setting)

    def _versioning(self, setting: Mapping[str, Any], key: str) -> _Result:
        status = setting.get("Status", "off")
        self._has_versions = status != "off"
        stay = ": removed files stay as versions until a rule removes them"
        return Outcome.OK, f"{status}{stay if self._has_versions else ''}"

    def _object_lock(self, setting: Mapping[str, Any], key: str) -> _Result:
        locked = "on: locked files stay when their checkpoint is removed"
        return Outcome.OK, locked if setting else "off"

    def _lifecycle(self, setting: Mapping[str, Any], key: str) -> _Result:
        rules = setting.get("Rules", ())
        harms = [harm for rule in rules for harm in harms_of(rule, key)]
        return _either(not harms, f"{count(len(rules), 'rule')}, none harmful", "; ".join(harms))

    # Helpers.

    def _again(self) -> Store:
        """Opens the folder as another process would, which has seen no file of it."""
        return open_store(self._url, self._store.options)

    def _request(self, name: str, action: Callable[[str], T]) -> T:
        store: Any = self._here
        found: T = store.request("trying requests for", name, action)
        return found


def _either(is_ok: bool, detail: str, otherwise: str) -> _Result:
    return (Outcome.OK, detail) if is_ok else (Outcome.MISSING, otherwise)


def harms_of(rule: Mapping[str, Any], key: str) -> Iterator[str]:
    """Yields the harm that a lifecycle rule of S3 does to checkpoints below a key.

    >>> rule = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "runs/"}}
    >>> list(harms_of({**rule, "Expiration": {"Days": 30}}, "runs/gpt"))
    ['old removes files after 30 days']
    >>> list(harms_of({**rule, "Expiration": {"Days": 30}}, "other"))
    []
    """
    chosen = rule.get("Filter", {})
    both = chosen.get("And", chosen)
    prefix = both.get("Prefix", rule.get("Prefix", ""))
    is_apart = not (f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/" if key else ""))
    # Files of checkpoints have no tags.
    if rule.get("Status") != "Enabled" or is_apart or both.get("Tag") or both.get("Tags"):
        return
    name = rule.get("ID", "a rule")
    expiry = rule.get("Expiration", {})
    for word, unit in (("Days", " days"), ("Date", "")):
        if word in expiry:
            yield f"{name} removes files after {expiry[word]}{unit}"
        for move in rule.get("Transitions", ()):
            if word in move and move.get("StorageClass") in ARCHIVES:
                yield f"{name} moves files to {move['StorageClass']} after {move[word]}{unit}"
    days = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation", LEAST_DAYS)
    if days < LEAST_DAYS:
        yield f"{name} aborts uploads after {days} day, which a save may still need"


def _file_system(path: Path) -> _Result:
    mount, kind, how = _mount(path)
    if not kind:
        return Outcome.UNKNOWN, "the operating system does not tell"
    note = _NOTES.get(kind, "")
    return Outcome.OK, f"{kind} at {mount} ({how}){f'; {note}' if note else ''}"


def _mount(path: Path) -> tuple[str, str, str]:
    """Returns the mount point of a path, its kind and its options; empty where none are told."""
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        return mount_of(os.path.realpath(path), lines)
    return "", "", ""


def mount_of(path: str, lines: Iterable[str]) -> tuple[str, str, str]:
    r"""Returns the mount point of a path, its kind and its options, from Linux's list of mounts.

    >>> lines = ["1 0 0:1 / / rw - overlay overlay rw", "2 1 0:2 / /a\\040b ro - nfs4 host:/ rw"]
    >>> mount_of("/a b/runs", lines), mount_of("/a", lines)[1]
    (('/a b', 'nfs4', 'ro'), 'overlay')
    """
    mount = ("", "", "")
    for line in lines:
        own, _, rest = line.partition(" - ")
        fields = own.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_above = f"{path}/".startswith(f"{point.rstrip('/')}/")
        if is_above and len(point) >= len(mount[0]):  # a later mount covers an earlier one
            mount = point, rest.split(" ")[0], fields[5]
    return mount


def _free_space(path: Path) -> _Result:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing)
    return Outcome.OK, f"{size(free.free)} of {size(free.total)}"
