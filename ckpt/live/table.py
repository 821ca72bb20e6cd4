"""The names, versions, files and leases of one host server: a state machine without I/O.

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
4. A name ends when nobody owns it any more and `keep_seconds` are over: all its versions retire,
   with a deadline of one lease. A removal ends it with the deadline that the caller gives.
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

    name: str
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


@dataclass(slots=True)
class _Name:
    owners: int = 0
    keep_seconds: float = 0.0
    kept_until: float | None = None
    """The end of the time without an owner; None while there is an owner."""
    ends: float | None = None
    """The end of the last leases, once the name ends; None before."""
    versions: dict[int, _Version] = field(default_factory=dict)
    newest: int | None = None
    """The newest version that was ever committed."""
    last_dropped: int = -1
    """The newest version that was committed and dropped."""

    @property
    def visible(self) -> list[int]:
        return sorted(
            number for number, row in self.versions.items() if row.phase is Phase.COMPLETE
        )


class Table:
    """The state of one server. Each method checks its arguments first, and changes all or nothing.

    A method raises RefusedError where the state does not allow the event.
    """

    def __init__(self, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        self._names: dict[str, _Name] = {}
        self.leases: dict[str, Lease] = {}

    @property
    def names(self) -> list[str]:
        """The names that are served."""
        return list(self._names)

    @property
    def is_ending(self) -> bool:
        """Whether every name is ending."""
        return all(known.ends is not None for known in self._names.values())

    def own(self, name: str, keep_seconds: float) -> None:
        """Adds an owner of a name; the name begins with its first owner."""
        found = self._names.setdefault(name, _Name())
        if found.ends is not None:
            raise RefusedError(
                "busy", f"{name} is ending; try again when its last leases have ended"
            )
        found.owners += 1
        found.keep_seconds = keep_seconds
        found.kept_until = None

    def disown(self, name: str, now: float) -> None:
        """Removes an owner of a name, whose connection has ended."""
        found = self._names.get(name)
        if found is None:
            return
        found.owners -= 1
        if found.owners == 0:
            found.kept_until = now + found.keep_seconds

    def put(self, name: str, version: int, file: str, nbytes: int) -> None:
        """Adds a file to a version that is not yet committed."""
        found = self._name(name)
        row = found.versions.get(version)
        if row is not None and file in row.files:
            raise RefusedError("exists", f"{name}/{version}/{file} is here already")
        self._check_rises(name, found, version)
        found.versions.setdefault(version, _Version()).files[file] = nbytes

    def commit(
        self, name: str, version: int, files: Mapping[str, FileAt], info: Mapping[str, object]
    ) -> None:
        """Makes a version visible; one that is visible gets these places and this info."""
        found = self._name(name)
        there = found.versions.get(version)
        if there is None or there.phase is not Phase.COMPLETE:
            self._check_rises(name, found, version)
        if there is not None and there.phase is Phase.RETIRING:
            raise RefusedError("unknown", f"{name}/{version} was given up before it was complete")
        if not files:
            raise RefusedError("protocol", f"{name}/{version}: a version has at least one file")
        row = found.versions.setdefault(version, _Version())
        row.phase, row.places, row.info = Phase.COMPLETE, dict(files), dict(info)
        found.newest = max(version, -1 if found.newest is None else found.newest)

    def visible(self, name: str) -> list[int]:
        """Returns the visible versions, the newest last."""
        return self._name(name).visible

    def lease(
        self, name: str, version: int | None, key: str, now: float, is_bound: bool = False
    ) -> int:
        """Takes a lease on a version, or on the newest one; returns the version."""
        found = self._name(name)
        if version is None:
            if not found.visible:
                text = f"{name} has no version yet: wait for one with ckpt.follow"
                raise RefusedError("unknown", text)
            version = found.visible[-1]
        row = found.versions.get(version)
        if row is None or row.phase is not Phase.COMPLETE:
            raise self._missing(found, name, version, row)
        if len(self.leases) >= MOST_LEASES:
            raise RefusedError("busy", f"{name} has {MOST_LEASES:,} leases, and no more")
        self.leases[key] = Lease(name, version, now + self.lease_seconds, is_bound)
        row.leases.add(key)
        return version

    def renew(self, name: str, key: str, now: float) -> int:
        """Renews a lease; returns its version. Refused if the lease has ended."""
        lease = self.leases.get(key)
        if lease is None or lease.name != name:
            raise RefusedError("unknown", f"{name} has no such lease: it has ended, or never began")
        lease.ends = now + self.lease_seconds
        return lease.version

    def release(self, name: str, key: str) -> None:
        """Ends a lease whose reader has all bytes that it wants."""
        lease = self.leases.get(key)
        if lease is not None and lease.name == name:
            self._end(key)

    def lose(self, name: str, key: str, now: float) -> None:
        """Takes notice that the reader with a lease has no connection any more (rule 3)."""
        lease = self.leases.get(key)
        if lease is not None and lease.name == name and lease.is_bound:
            lease.ends = min(lease.ends, now + LOST_SECONDS)

    def retire(self, name: str, version: int, wait_seconds: float, now: float) -> None:
        """Gives no new leases on a version; existing ones may go on for `wait_seconds`."""
        row = self._version(name, version)
        deadline = now + wait_seconds
        if row.phase is Phase.RETIRING:
            deadline = min(deadline, row.deadline)
        row.phase, row.deadline = Phase.RETIRING, deadline

    def is_retired(self, name: str, version: int) -> bool | None:
        """Returns whether a retired version is overdue (rule 3); None while its leases last."""
        row = self._version(name, version)
        return None if row.leases else row.is_overdue

    def drop(self, name: str, version: int) -> None:
        """Forgets a version."""
        found = self._name(name)
        row = self._version(name, version)
        for key in list(row.leases):
            self._end(key)
        del found.versions[version]
        if row.phase is not Phase.OPEN:  # the number of a failed version is free again
            found.last_dropped = max(found.last_dropped, version)

    def find(self, name: str, version: int, file: str) -> int:
        """Returns the size of a file that is here."""
        found = self._name(name, is_ending_fine=True)
        row = found.versions.get(version)
        size = None if row is None else row.files.get(file)
        is_retired = row is not None and row.phase is Phase.RETIRING and not row.leases
        if row is None or size is None or is_retired:
            raise self._missing(found, name, version, row, file)
        return size

    def is_committed(self, name: str, version: int) -> bool:
        """Whether leases on a version are given here."""
        return self._version(name, version).phase is not Phase.OPEN

    def places(self, name: str, version: int) -> Mapping[str, FileAt]:
        """Returns the files of a visible version."""
        found = self._name(name)
        row = found.versions.get(version)
        if row is None or row.phase is not Phase.COMPLETE:
            raise self._missing(found, name, version, row)
        return row.places

    def versions(self, name: str) -> dict[int, VersionInfo]:
        """Returns all versions but those that retire."""
        return {
            number: VersionInfo(
                dict(row.places) or {key: FileAt(size, ()) for key, size in row.files.items()},
                row.phase is Phase.COMPLETE,
                dict(row.info),
            )
            for number, row in sorted(self._name(name).versions.items())
            if row.phase is not Phase.RETIRING
        }

    def remove(self, name: str, wait_seconds: float, now: float) -> None:
        """Ends a name: it is unknown from now on, and gone when its last leases have ended."""
        found = self._name(name)
        found.ends = now + wait_seconds
        for number in found.versions:
            self.retire(name, number, wait_seconds, now)

    def tick(self, now: float) -> list[tuple[str, int]]:
        """Lets time pass: ends leases, versions' waits and names.

        Returns the names and versions whose files are to be closed.
        """
        for key, lease in list(self.leases.items()):
            version = self._names[lease.name].versions[lease.version]
            is_late = version.phase is Phase.RETIRING and version.deadline <= now
            if lease.ends <= now or is_late:
                version.is_overdue = True
                self._end(key)
        forgotten: list[tuple[str, int]] = []
        for name, found in list(self._names.items()):
            if found.kept_until is not None and found.ends is None and found.kept_until <= now:
                self.remove(name, self.lease_seconds, now)
            if found.ends is not None and not any(row.leases for row in found.versions.values()):
                forgotten += [(name, number) for number in found.versions]
                del self._names[name]
        return forgotten

    def next_at(self) -> float | None:
        """Returns the time of the next change that comes by itself; None if there is none."""
        times = [lease.ends for lease in self.leases.values()]
        for found in self._names.values():
            rows = [row for row in found.versions.values() if row.phase is Phase.RETIRING]
            times += [row.deadline for row in rows if row.leases]
            if found.ends is not None:
                times.append(found.ends)
            elif found.kept_until is not None:
                times.append(found.kept_until)
        return min(times, default=None)

    def _end(self, key: str) -> None:
        lease = self.leases.pop(key)
        self._names[lease.name].versions[lease.version].leases.discard(key)

    def _name(self, name: str, is_ending_fine: bool = False) -> _Name:
        found = self._names.get(name)
        if found is None or (found.ends is not None and not is_ending_fine):
            raise RefusedError(
                "unknown", f"no live state {name} is here: it has ended, or never began"
            )
        return found

    def _version(self, name: str, version: int) -> _Version:
        found = self._name(name, is_ending_fine=True)
        if version not in found.versions:
            raise self._missing(found, name, version, None)
        return found.versions[version]

    def _check_rises(self, name: str, found: _Name, version: int) -> None:
        last = max(-1 if found.newest is None else found.newest, found.last_dropped)
        if version <= last:
            raise RefusedError("exists", f"{name}/{version} is not newer than version {last}")

    def _missing(
        self, found: _Name, name: str, version: int, row: _Version | None, file: str = ""
    ) -> RefusedError:
        newest = found.visible[-1] if found.visible else None
        is_past = row.phase is Phase.RETIRING if row is not None else version <= found.last_dropped
        if is_past:
            now = "none is newer" if newest is None else f"{newest} is the newest"
            text = f"version {version} of {name} was replaced ({now}): load again"
            return RefusedError("gone", text, version=version, newest=newest)
        where = f"{name}/{version}/{file}" if file else f"{name}/{version}"
        return RefusedError("unknown", f"{where} is not here", newest=newest)
