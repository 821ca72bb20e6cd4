"""The versions, files and leases of one host server: a state machine without I/O.

    open (files arrive) ── commit ──► complete ── retire ──► retiring ── drop ──► gone
                                         │ leases: taken, renewed, released, expired

Rules:

1. A version is visible from its commit to its retirement. Committed versions rise.
2. A retiring version gets no new lease. It counts as retired when its last lease has ended, and at
   its deadline in any case: a reader cannot hold a version for ever.
3. A lease ends `lease_seconds` after its last renewal. If a lease ends without a release, or a
   deadline passes over it, the version is *overdue*: its readers may still have bytes in flight.
   A lease that was taken for as long as its reader is connected ends `LOST_SECONDS` after the
   reader's last connection, unless it is renewed: the reader was killed.
4. A server has one name. It ends when nobody owns it any more and `keep_seconds` are over: all its
   versions retire, with a deadline of one lease. A removal ends it with the deadline that the
   caller gives.
5. The caller gives the time to each method, from a clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from ckpt.live.protocol import LEASE_SECONDS, MOST_LEASES, FileAt, RefusedError, VersionInfo

LOST_SECONDS = 2.0
"""The time in which a reader whose connections have broken connects again."""


class Phase(Enum):
    """The state of a version."""

    OPEN = auto()
    COMPLETE = auto()
    RETIRING = auto()


@dataclass(slots=True)
class Lease:
    """A reader's hold on a version."""

    version: int
    ends: float
    is_bound: bool
    """Whether it ends with the reader's connections."""


@dataclass(slots=True)
class _Version:
    phase: Phase = Phase.OPEN
    files: dict[str, int] = field(default_factory=dict)
    """The sizes of the files that are here."""
    places: Mapping[str, FileAt] = field(default_factory=dict)
    """All files of the version, as they were committed."""
    info: Mapping[str, object] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)
    is_overdue: bool = False
    deadline: float = 0.0
    """While retiring: the end of the wait for leases."""


class Table:
    """The state of one server. Each method checks its arguments first, and changes all or nothing.

    A method raises RefusedError where the state does not allow the event.
    """

    def __init__(self, name: str, lease_seconds: float = LEASE_SECONDS) -> None:
        self.name, self.lease_seconds = name, lease_seconds
        self.leases: dict[str, Lease] = {}
        self.is_served = False
        """Whether the name has begun, with its first owner, and not ended."""
        self._owners, self._keep_seconds = 0, 0.0
        self._kept_until: float | None = None
        """The end of the time without an owner; None while there is an owner."""
        self._ends: float | None = None
        """The end of the last leases, once the name ends; None before."""
        self._versions: dict[int, _Version] = {}
        self._newest = -1
        """The newest version that was ever committed."""
        self._last_dropped = -1
        """The newest version that was committed and dropped."""

    @property
    def is_ending(self) -> bool:
        """Whether the name is ending, or has ended."""
        return self._ends is not None

    def own(self, keep_seconds: float) -> None:
        """Adds an owner of the name, which begins with its first owner."""
        if self.is_ending:
            raise RefusedError(
                "busy", f"{self.name} is ending; try again when its last leases have ended"
            )
        self.is_served = True
        self._owners += 1
        self._keep_seconds = keep_seconds
        self._kept_until = None

    def disown(self, now: float) -> None:
        """Removes an owner of the name, whose connection has ended."""
        self._owners -= 1
        if self._owners == 0:
            self._kept_until = now + self._keep_seconds

    def put(self, version: int, file: str, nbytes: int) -> None:
        """Adds a file to a version that is not yet committed."""
        self._check()
        row = self._versions.get(version)
        if row is not None and file in row.files:
            raise RefusedError("exists", f"{self.name}/{version}/{file} is here already")
        self._check_rises(version)
        self._versions.setdefault(version, _Version()).files[file] = nbytes

    def commit(self, version: int, files: Mapping[str, FileAt], info: Mapping[str, object]) -> None:
        """Makes a version visible; one that is visible gets these places and this info."""
        self._check()
        there = self._versions.get(version)
        if there is None or there.phase is not Phase.COMPLETE:
            self._check_rises(version)
        if there is not None and there.phase is Phase.RETIRING:
            raise RefusedError(
                "unknown", f"{self.name}/{version} was given up before it was complete"
            )
        if not files:
            raise RefusedError(
                "protocol", f"{self.name}/{version}: a version has at least one file"
            )
        row = self._versions.setdefault(version, _Version())
        row.phase, row.places, row.info = Phase.COMPLETE, dict(files), dict(info)
        self._newest = max(version, self._newest)

    def visible(self) -> list[int]:
        """Returns the visible versions, the newest last."""
        self._check()
        return self._visible

    def lease(self, version: int | None, key: str, now: float, is_bound: bool = False) -> int:
        """Takes a lease on a version, or on the newest one; returns the version."""
        visible = self.visible()
        if version is None:
            if not visible:
                text = f"{self.name} has no version yet: wait for one with ckpt.follow"
                raise RefusedError("unknown", text)
            version = visible[-1]
        self.places(version)  # raises unless it is visible
        if len(self.leases) >= MOST_LEASES:
            raise RefusedError("busy", f"{self.name} has {MOST_LEASES:,} leases, and no more")
        self.leases[key] = Lease(version, now + self.lease_seconds, is_bound)
        self._versions[version].leases.add(key)
        return version

    def renew(self, key: str, now: float) -> int:
        """Renews a lease; returns its version. Refused if the lease has ended."""
        lease = self.leases.get(key)
        if lease is None:
            text = f"{self.name} has no such lease: it has ended, or never began"
            raise RefusedError("unknown", text)
        lease.ends = now + self.lease_seconds
        return lease.version

    def release(self, key: str) -> None:
        """Ends a lease whose reader has all bytes that it wants."""
        if key in self.leases:
            self._end(key)

    def lose(self, key: str, now: float) -> None:
        """Takes notice that the reader with a lease has no connection any more (rule 3)."""
        lease = self.leases.get(key)
        if lease is not None and lease.is_bound:
            lease.ends = min(lease.ends, now + LOST_SECONDS)

    def retire(self, version: int, wait_seconds: float, now: float) -> None:
        """Gives no new leases on a version; existing ones may go on for `wait_seconds`."""
        row = self._version(version)
        deadline = now + wait_seconds
        if row.phase is Phase.RETIRING:
            deadline = min(deadline, row.deadline)
        row.phase, row.deadline = Phase.RETIRING, deadline

    def is_retired(self, version: int) -> bool | None:
        """Returns whether a retired version is overdue (rule 3); None while its leases last."""
        row = self._version(version)
        return None if row.leases else row.is_overdue

    def drop(self, version: int) -> None:
        """Forgets a version."""
        self._check()
        row = self._version(version)
        for key in list(row.leases):
            self._end(key)
        del self._versions[version]
        if row.phase is not Phase.OPEN:  # the number of a failed version is free again
            self._last_dropped = max(self._last_dropped, version)

    def find(self, version: int, file: str) -> int:
        """Returns the size of a file that is here."""
        self._check(is_ending_fine=True)
        row = self._versions.get(version)
        size = None if row is None else row.files.get(file)
        is_retired = row is not None and row.phase is Phase.RETIRING and not row.leases
        if row is None or size is None or is_retired:
            raise self._missing(version, row, file)
        return size

    def is_committed(self, version: int) -> bool:
        """Whether leases on a version are given here."""
        return self._version(version).phase is not Phase.OPEN

    def places(self, version: int) -> Mapping[str, FileAt]:
        """Returns the files of a visible version."""
        self._check()
        row = self._versions.get(version)
        if row is None or row.phase is not Phase.COMPLETE:
            raise self._missing(version, row)
        return row.places

    def versions(self) -> dict[int, VersionInfo]:
        """Returns all versions but those that retire."""
        self._check()
        return {
            number: VersionInfo(
                dict(row.places) or {key: FileAt(size, ()) for key, size in row.files.items()},
                row.phase is Phase.COMPLETE,
                dict(row.info),
            )
            for number, row in sorted(self._versions.items())
            if row.phase is not Phase.RETIRING
        }

    def remove(self, wait_seconds: float, now: float) -> None:
        """Ends the name: it is unknown from now on, and gone when its last leases have ended."""
        self._check()
        self._ends = now + wait_seconds
        for number in self._versions:
            self.retire(number, wait_seconds, now)

    def tick(self, now: float) -> list[int]:
        """Lets time pass: ends leases, versions' waits and the name.

        Returns the versions whose files are to be closed.
        """
        for key, lease in list(self.leases.items()):
            version = self._versions[lease.version]
            is_late = version.phase is Phase.RETIRING and version.deadline <= now
            if lease.ends <= now or is_late:
                version.is_overdue = True
                self._end(key)
        if self._kept_until is not None and not self.is_ending and self._kept_until <= now:
            self.remove(self.lease_seconds, now)
        if not self.is_served or not self.is_ending or self.leases:
            return []
        self.is_served, forgotten = False, [*self._versions]
        self._versions.clear()
        return forgotten

    def next_at(self) -> float | None:
        """Returns the time of the next change that comes by itself; None if there is none."""
        times = [lease.ends for lease in self.leases.values()]
        rows = [row for row in self._versions.values() if row.phase is Phase.RETIRING]
        times += [row.deadline for row in rows if row.leases]
        ends = self._ends if self.is_ending else self._kept_until
        if self.is_served and ends is not None:
            times.append(ends)
        return min(times, default=None)

    def _check(self, is_ending_fine: bool = False) -> None:
        if not self.is_served or (self.is_ending and not is_ending_fine):
            raise unknown_name(self.name)

    @property
    def _visible(self) -> list[int]:
        found = self._versions.items()
        return sorted(number for number, row in found if row.phase is Phase.COMPLETE)

    def _end(self, key: str) -> None:
        lease = self.leases.pop(key)
        self._versions[lease.version].leases.discard(key)

    def _version(self, version: int) -> _Version:
        self._check(is_ending_fine=True)
        if version not in self._versions:
            raise self._missing(version, None)
        return self._versions[version]

    def _check_rises(self, version: int) -> None:
        last = max(self._newest, self._last_dropped)
        if version <= last:
            raise RefusedError("exists", f"{self.name}/{version} is not newer than version {last}")

    def _missing(self, version: int, row: _Version | None, file: str = "") -> RefusedError:
        newest = self._visible[-1] if self._visible else None
        is_past = row.phase is Phase.RETIRING if row is not None else version <= self._last_dropped
        if is_past:
            now = "none is newer" if newest is None else f"{newest} is the newest"
            text = f"version {version} of {self.name} was replaced ({now}): load again"
            return RefusedError("gone", text, version=version, newest=newest)
        where = f"{self.name}/{version}/{file}" if file else f"{self.name}/{version}"
        return RefusedError("unknown", f"{where} is not here", newest=newest)


def unknown_name(name: str) -> RefusedError:
    """Returns the refusal of a request for a name that is not served."""
    return RefusedError("unknown", f"no live state {name} is here: it has ended, or never began")
