"""The owner of a run's folder, and the program that it is. The saves of others are errors.

The owner is the start that began to save last. Rules:

1. A start takes its epoch at its first save: it creates `owner-EPOCH.json`, only if no file of this
   name exists, and then removes those of lower epochs. The highest epoch owns the folder. A start
   that only restores takes nothing.
2. The rank that commits lists the folder before each save begins and directly before the manifest
   is written, and before each removal, or each removal of several checkpoints together. A higher
   epoch there makes the save an error on all ranks. A listing of all files of a bucket serves for
   two seconds, but each manifest is preceded by a listing of its own.
3. Another start may take the folder between the last look and the commit. Its order is still the
   higher one, so that it never restores or keeps a step in place of a step of its own.
4. A start that has not saved takes no run from a later start. Each notes the highest epoch that it
   found when it began, and the owner's file tells that of the owner: the later start found the
   higher one. Only of two that found the same one the clock tells which began later.
5. The local folder of each host has such files too, with the epoch of the run.
6. The manifest of each checkpoint tells the program that saved it: its command line, source
   revision, versions and hosts (`provenance`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from ckpt.errors import CkptError, ExistsError, NotOwnerError
from ckpt.loading.newest import seconds_of
from ckpt.stores.driver import ObjectInfo
from ckpt.stores.store import Options, Store, open_store
from ckpt.transfer.facts import Beside, Known, Listing
from formats.errors import FormatError
from sharding.errors import ArgumentError, without_secrets

_FILE = re.compile(r"owner-(\d{1,18})\.json")
MOST_BYTES = 1 << 16
"""The most bytes of an owner file that are read."""
FRESH_SECONDS = 2.0
"""The age up to which a listing serves once more, for the removal just after a commit."""
PAGE_FILES = 1000
"""The files of one page of a listing. A folder with more is listed without its sub-folders."""
SHOWN_CHARS = 200
"""The most characters of another job's command in an error."""


def file_name(epoch: int) -> str:
    """Returns the name of the file of an epoch.

    >>> file_name(3)
    'owner-3.json'
    """
    return f"owner-{epoch}.json"


def epochs(names: Iterable[str]) -> list[int]:
    """Returns the epochs whose files are among these names.

    >>> epochs(["owner-3.json", "owner-03.json", "step-3/"])
    [3]
    """
    matches = (_FILE.fullmatch(name) for name in names if name.startswith("owner-"))
    return [int(m[1]) for m in matches if m is not None and file_name(int(m[1])) == m[0]]


class Ownership:
    """The claim of one start on the folder `url` of the run `run`, in one process."""

    def __init__(self, url: str, run: str, options: Options) -> None:
        self._url, self._run, self._options = url, without_secrets(run), options
        self.epoch = 0
        """The epoch of this start; 0 before its first save."""
        self._found: int | None = None
        """The highest epoch of the folder when this start began; None if it did not look."""
        self._started = f"{time.time():.6f}"
        """The time, as files tell it: a start whose claim failed half-way meets its own file."""
        self._is_short = False
        """Whether a listing of all files is known to have one page."""
        self._listed: tuple[float, Listing] | None = None
        """The last listing of all files, with its time."""

    def start(self) -> None:
        """Notes the highest epoch of the folder (rule 4). Raises StoreError."""
        with open_store(self._url, self._options) as store:
            self._found = max(epochs(store.names()), default=0)

    def take(self, least: int) -> int:
        """Makes this start the owner and returns its epoch, at least `least` and above all others.

        Raises NotOwnerError if a later start owns the folder, StoreError if the store fails.
        """
        with open_store(self._url, self._options) as store:
            while True:
                newest = max(epochs(store.names()), default=0)
                if self._is_older_than(store, newest):
                    self._check(store, [newest])
                epoch = max(least, 1 + newest)
                mine = self._note(epoch)
                try:
                    store.commit(file_name(epoch), mine, replace=False)
                except ExistsError:  # another start was faster; a listing may be out of date
                    least = epoch + 1
                    continue
                # A start that listed the folder before may have taken a higher epoch and removed
                # the lower ones. A server without conditions may have let both take this one.
                if max(epochs(store.names()), default=0) <= epoch and _has(store, epoch, mine):
                    break
                least = epoch + 1
            self._remove_older(store, epoch)
        self.epoch = epoch
        return epoch

    def claim(self, epoch: int) -> None:
        """Makes this start the owner with an epoch that it has taken elsewhere.

        Raises NotOwnerError if a later start owns the folder, ArgumentError if another run does.
        """
        with open_store(self._url, self._options) as store:
            taken = epochs(store.names())
            for other in taken:
                run = self._read_start(store, other).get("run")
                if run is not None and run != self._run:
                    raise ArgumentError(
                        f"{self._url} belongs to the run {run}; give each run a local folder of "
                        f"its own, or remove {file_name(other)} in it if that run is over"
                    )
            self.epoch = epoch
            self._check(store, taken)
            with suppress(ExistsError):
                store.commit(file_name(epoch), self._note(epoch), replace=False)
            self._remove_older(store, epoch)

    def look(self, names: Collection[str] | None = None, seconds: float = 0.0) -> Beside:
        """Returns the names in the folder, in one listing, or of one at most `seconds` old.

        `names` are those of its files, if another listing has just shown them. Raises NotOwnerError
        if a later start owns it.
        """
        listing = None if names is not None else self.listing(seconds)
        with open_store(self._url, self._options) as store:
            if listing is not None:
                parts = (path.partition("/") for path in listing)
                names = {f"{name}{slash}" for name, slash, _ in parts}
            elif names is None:
                names = store.entries()
            self._check(store, epochs(names))
        return Beside(names, listing)

    def listing(self, seconds: float) -> Listing | None:
        """Returns all files below the folder, as of at most `seconds` ago.

        Returns None if that is not known to take one request. Raises StoreError.
        """
        if self._listed is not None and time.monotonic() - self._listed[0] <= seconds:
            return self._listed[1]
        if self._is_short:
            with open_store(self._url, self._options) as store:
                self.note(store.below())
        return None if self._listed is None else self._listed[1]

    def note(self, listing: Listing | None) -> None:
        """Notes a listing of all files, of this moment."""
        self._is_short = listing is not None and len(listing) < PAGE_FILES
        self._listed = (time.monotonic(), listing or {}) if self._is_short else None

    def add(self, path: str, manifest: Known | None) -> None:
        """Adds the manifest of this start's last commit to the listing that came before it."""
        listed, self._listed = self._listed, None
        if listed is not None and manifest is not None and path not in listed[1]:
            seen = ObjectInfo(path, True, manifest.size, time.time(), manifest.tag)
            self._listed = listed[0], {**listed[1], path: seen}

    def _is_older_than(self, store: Store, epoch: int) -> bool:
        """Whether the start that took an epoch began after this one."""
        if self._found is None or epoch <= self._found:
            return False
        start = self._read_start(store, epoch)
        highest, started = start.get("found"), start.get("started")
        if type(highest) is not int or not isinstance(started, str):  # of an older release
            return False
        return (highest, seconds_of(started)) > (self._found, seconds_of(self._started))

    def _check(self, store: Store, there: Collection[int]) -> None:
        newest = max(there, default=0)
        if newest <= self.epoch:
            return
        start = self._read_start(store, newest)
        since = seconds_of(str(start.get("began")))
        age = f", which began to save {_format_age(time.time() - since)} ago" if since else ""
        command = str(start.get("command", ""))[:SHOWN_CHARS]
        raise NotOwnerError(
            f"{without_secrets(self._url)} belongs to another job now: host {start.get('host')}, "
            f"process {start.get('pid')}{age}{f' ({command})' if command else ''}. Nothing was "
            "saved or removed. End this job; to go on with it in place of the other, end the "
            "other and start this one again"
        )

    def _note(self, epoch: int) -> bytes:
        command = without_secrets(" ".join(sys.orig_argv))[:COMMAND_CHARS]
        record = {
            "epoch": epoch,
            "run": self._run,
            "host": host_name(),
            "pid": os.getpid(),
            "began": f"{time.time():.6f}",
            "found": self._found or 0,
            "started": self._started,
            "command": command,
            "token": secrets.token_hex(8),
        }
        return json.dumps(record).encode()

    def _read_start(self, store: Store, epoch: int) -> dict[str, object]:
        """Returns the content of a start's file; empty if it is gone or damaged."""
        try:
            document = json.loads(store.read_whole(file_name(epoch), MOST_BYTES))
        except (OSError, FormatError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def _remove_older(self, store: Store, epoch: int) -> None:
        with suppress(CkptError, OSError):  # a program that may not delete still owns the folder
            for older in epochs(store.names()):
                if older < epoch:
                    store.delete(file_name(older))


def _format_age(seconds: float) -> str:
    """Returns an age as text.

    >>> _format_age(90.0), _format_age(5400.0)
    ('90 s', '90 min')
    """
    return f"{max(0.0, seconds):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _has(store: Store, epoch: int, data: bytes) -> bool:
    try:
        return store.read_whole(file_name(epoch), MOST_BYTES) == data
    except FileNotFoundError:
        return False


COMMAND_CHARS = 1000
"""Longer command lines are cut: the manifest's first 4 KiB hold this text."""
SHOWN_HOSTS = 16
GIT_SECONDS = 5.0


def provenance(hosts: Sequence[str]) -> str:
    """Returns JSON for a manifest: command, git revision, Python, torch and the hosts of the ranks.

    `hosts` has one name for each rank. A directory without git has no revision.
    """
    names = list(dict.fromkeys(hosts))
    record = {
        "command": without_secrets(" ".join(sys.orig_argv))[:COMMAND_CHARS],
        "git": git_revision(),
        "python": platform.python_version(),
        "torch": getattr(sys.modules.get("torch"), "__version__", ""),
        "hosts": names[:SHOWN_HOSTS],
        "host_count": len(names),
    }
    return json.dumps({key: value for key, value in record.items() if value})


def host_name() -> str:
    return socket.gethostname()


def machine() -> str:
    """Returns a text that identifies this machine since its last start; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def git_revision(folder: str | None = None) -> str:
    """Returns the commit of a folder, with `+` if files differ from it; empty without git."""
    directory = folder or os.getcwd()
    head = _git(directory, "rev-parse", "HEAD")
    if not head:
        return ""
    return head + ("+" if _git(directory, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            # a look must not hold the lock of the user's index
            ["git", "--no-optional-locks", "-C", folder, *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
