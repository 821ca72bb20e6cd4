"""The fast tiers of a run: checkpoints on each host, and the last steps in memory of servers.

Rules of the folder on each host, on a disk or in memory:

1. All ranks save together. A rank's file lies in the folder of its host, and each host writes a
   manifest that names the files of all ranks. Plain tensors are stored on each host. A rank
   therefore reads files of its own host only (`ckpt.plan.save_plan`).
2. A local step is valid if every host has it, of the same save, and every rank is on the host of
   that save. A new host's folder is empty, so that no local step is valid.
3. A step that is saved to the folder of the run is not saved locally too. No local save begins
   while a save to the folder of the run is in flight: training does not wait for the slow store.
4. Each host keeps the newest steps, and removes others once all hosts have a newer one.
5. The names of a run's files begin with its mark. Other programs may save to the folder too, below
   other names: their files, finished or not, are never removed.

Rules of the memory of servers, which outlive the trainers:

6. A step is a version of a live state (`ckpt.live.publish`). The server of each host has the files
   of its own ranks, and copies of those of the `replicas` hosts behind it in a ring. Each host has
   the manifest, so every server that is left can be read from.
7. A step counts if the servers that are left have all of its files, and one of them has committed
   it. A commit comes after all copies. All ranks therefore see the same newest step.
8. A run that starts again takes over the servers that it finds on its hosts, by the address of the
   run. It keeps their versions until it has committed one of its own: then they are dropped.
9. After a save that failed, the next one starts servers in the place of those that have ended, and
   takes over the others as a run does that starts again.
10. The servers end when the run is closed, or when no trainer has come back in `keep_seconds`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, NotACheckpointError, UnreachableError
from ckpt.live.hosts import (
    Hosts,
    gather,
    new_token,
    own_address,
    place_of_rank,
    start_server,
    start_servers,
)
from ckpt.live.process import HostOptions, HostServer
from ckpt.live.protocol import LEASE_SECONDS, Address, FileAt, VersionInfo, versions_of
from ckpt.live.publish import LiveState
from ckpt.loading.newest import BEGAN, ORDER, list_committed, order_of, seconds_of
from ckpt.removing.gc import remove_marked
from ckpt.run.policy import Failures, Keep, LocalOptions, RunStep
from ckpt.run.steps import STEP
from ckpt.stores.addresses import LiveUrl
from ckpt.stores.store import join_url, one_spelling
from ckpt.transfer.facts import folder_name, step_of
from sharding.agreement.ranks import Ranks
from sharding.errors import ArgumentError, without_secrets

if TYPE_CHECKING:
    from ckpt.saving.background import SaveHandle
    from sharding.agreement.ranks import Group


HOSTS = "hosts"
"""The key of a local checkpoint's metadata for the URL of the run and the ranks on each host."""


@dataclass(frozen=True, slots=True)
class LocalTier:
    """One rank's view of the folder of its host."""

    options: LocalOptions
    run: str
    """The URL of the run."""
    hosts: Sequence[Sequence[int]]
    """The ranks on each host, by their rank in the default process group."""
    host: tuple[int, ...]
    """The ranks on this host."""

    @classmethod
    def of(
        cls, options: LocalOptions, run: str, places: Sequence[str], ranks: Sequence[int], rank: int
    ) -> LocalTier:
        """Returns the tier for `ranks[rank]`; `places` has the host and folder of each rank."""
        by_place: dict[str, list[int]] = {}
        for place, member in zip(places, ranks, strict=True):
            by_place.setdefault(place, []).append(member)
        return cls(options, run, [*by_place.values()], tuple(by_place[places[rank]]))

    def is_due(self, step: int) -> bool:
        """Returns whether a local checkpoint is due at this step."""
        return step % self.options.every_steps == 0

    def place(self, step: int) -> str:
        return join_url(self.options.folder, folder_name(step))

    @property
    def keep(self) -> Keep:
        """The policy for the steps that stay on each host."""
        return Keep(last=self.options.keep)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata about the hosts for manifests."""
        return {HOSTS: json.dumps({"run": without_secrets(self.run), "ranks": self.hosts})}

    def steps(self) -> list[tuple[str, str, int]]:
        """Returns this host's steps of this run and these hosts, each after its begin and order.

        Raises ArgumentError if the folder has steps of another run.
        """
        try:
            committed = list_committed(self.options.folder, None)
        except FileNotFoundError:
            return []
        mine, steps = self.metadata[HOSTS], []
        for checkpoint in committed:
            step = step_of(checkpoint.name)
            if step is None or not checkpoint.metadata:
                continue
            hosts = checkpoint.metadata.get(HOSTS, "")
            self._check_own(checkpoint.name, hosts)
            if hosts == mine:
                began, order = (checkpoint.metadata.get(key, "") for key in (BEGAN, ORDER))
                steps.append((began, order, step))
        return steps

    @property
    def mark(self) -> int:
        """The mark of this run in the names of its files, a number below 2**30."""
        run = without_secrets(self.run).encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(run, digest_size=4).digest(), "big") >> 2

    def remove_left_overs(self) -> None:
        """Removes the files of this run's saves that were killed, because they may take memory.

        The owner of the folder calls this before its first save. Files of other programs stay. A
        failure costs only space.
        """
        with suppress(CkptError, OSError):
            remove_marked(one_spelling(self.options.folder), f"{self.mark:08x}")

    def _check_own(self, name: str, server_job: str) -> None:
        """Raises ArgumentError for a step of another run."""
        try:
            run = json.loads(server_job)["run"]
        except (ValueError, TypeError, KeyError):
            run = None
        if run != without_secrets(self.run):
            whose = "no run's local folder" if run is None else f"the run {run}"
            raise ArgumentError(
                f"{join_url(self.options.folder, name)} belongs to {whose}; give each run a local "
                "folder of its own"
            )


__all__ = ["Memory"]

TOKEN = "token"
"""The key of a version's info for the token of its readers: only this user's processes see it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory tier of a `Checkpointer`: keeps the last two steps in server processes.

    Raises ArgumentError if a field has a wrong value.
    """

    replicas: int = 1
    """The other hosts that keep a copy of each host's part, as far as the run has so many."""
    every_steps: int | None = None
    """Save at each step that is a multiple of this, beside the steps that the run saves anyway."""
    keep_seconds: float = 3600.0
    """The servers end when no trainer of the run has come back for so long."""
    memory_bytes: int | None = None
    """The most memory of each host for copies of other hosts' parts; None is no bound beside that
    of two steps. A step that has no room is not saved to memory."""
    address: str | None = None
    """Where the servers listen; by default the loopback, and on several hosts the address by which
    each one reaches rank 0's."""

    def __post_init__(self) -> None:
        if type(self.replicas) is not int or not 0 <= self.replicas <= MOST_REPLICAS:
            raise ArgumentError(f"replicas={self.replicas!r}: give 0 to {MOST_REPLICAS}")
        every = self.every_steps
        if every is not None and (type(every) is not int or every < 1):
            raise ArgumentError(f"every_steps={every!r}: give a whole number of at least 1")
        most = self.memory_bytes
        if most is not None and (type(most) is not int or most < 0):
            raise ArgumentError(f"memory_bytes={most!r}: give a number of bytes, or None")
        keep = self.keep_seconds
        if not isinstance(keep, int | float) or not 0 <= keep <= MOST_KEEP_SECONDS:
            raise ArgumentError(f"keep_seconds={keep!r}: give 0 to {MOST_KEEP_SECONDS:g}")


MOST_REPLICAS = 16
MOST_KEEP_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Found:
    """A version that the servers can give whole."""

    version: int
    info: Mapping[str, object]
    files: Mapping[str, FileAt]
    """Each file with the servers that have it."""
    servers: Sequence[Address]
    """The servers that have committed it."""

    @property
    def step(self) -> RunStep:
        """The version as a step of the run."""
        step, began = int(str(self.info[STEP])), seconds_of(str(self.info[BEGAN]))
        order = order_of(str(self.info.get(ORDER, "")))
        return RunStep(step, folder_name(step), began, order=order)


Told = Sequence[tuple[Address, Mapping[int, VersionInfo]]]
"""Servers with their versions."""


def whole(servers: Told) -> list[Found]:
    """Returns the versions that these servers can give whole, newest first (rule 7)."""
    complete = []
    for number in sorted({number for _, versions in servers for number in versions}, reverse=True):
        having = [(at, versions[number]) for at, versions in servers if number in versions]
        committed = [(at, version) for at, version in having if version.complete]
        if not committed or not {STEP, BEGAN, TOKEN} <= committed[0][1].info.keys():
            continue
        _, first = committed[0]
        files = {
            name: FileAt(
                wanted.size,
                tuple(
                    at
                    for at, version in committed
                    if name in version.files and at in version.files[name].at
                ),
            )
            for name, wanted in first.files.items()
        }
        if all(file.at for file in files.values()):
            complete.append(Found(number, first.info, files, [at for at, _ in committed]))
    return complete


def name_of_run(url: str) -> str:
    """Returns the name of a run's live state.

    >>> name_of_run("/runs/a")
    'run-704e1951db552e57'
    """
    return f"run-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def open_live_state(
    options: Memory, url: str, ranks: Ranks, group: Group, timeout: float
) -> LiveState:
    """Returns the live state of the run at `url`, with its servers of before or new ones.

    All ranks call this.

    Raises:
        RankError: a server could not start.
    """
    rows = gather(ranks, place_of_rank())
    places, networks = [row[0] for row in rows], {row[1] for row in rows}
    address = options.address or (own_address() if len(networks) > 1 else None)
    how = HostOptions(name_of_run(url), address=address, keep_seconds=options.keep_seconds)
    leads = places.index(places[ranks.rank]) == ranks.rank
    mine = ranks.run_on_all("looking for servers", lambda: _there(how.name) if leads else None)
    known = gather(ranks, [mine.began, mine.token] if mine else [0.0, ""])
    _, token = max(known)

    def start(new: str) -> HostServer:
        if mine is not None and mine.token == new:
            return mine.server
        if mine is not None:  # of an earlier start of the run: others know of newer steps
            with mine.server:
                mine.server.remove()
        return start_server(how, new)

    hosts = start_servers(ranks, how, places, token or gather(ranks, new_token())[0], start)
    live = LiveState(hosts, None, group, LEASE_SECONDS, timeout)
    live.replicas, live.copies_bytes = options.replicas, options.memory_bytes
    return live


@dataclass(frozen=True, slots=True)
class _There:
    """The server of the run that is on this host already."""

    server: HostServer
    token: str
    began: float
    """The begin of its newest save, in seconds since 1970; 0 if it has none."""


def _there(name: str) -> _There | None:
    try:
        server = HostServer.attach(name)
    except UnreachableError:
        return None
    try:
        complete = [version.info for version in server.versions().values() if version.complete]
    except NotACheckpointError:  # it is ending
        complete = []
    newest = max(complete, key=lambda info: str(info.get(BEGAN)), default={})
    return _There(server, str(newest.get(TOKEN, "")), seconds_of(str(newest.get(BEGAN, ""))))


class MemoryTier:
    """One rank's view of the servers of a run."""

    def __init__(
        self, options: Memory, open_live: Callable[[], LiveState], failures: Failures, tells: bool
    ) -> None:
        """`open_live` calls `open_live_state` on all ranks; this rank `tells` failures or not."""
        self._options, self._open, self._live = options, open_live, open_live()
        self._failures, self._tells = failures, tells
        self._has_failed = False
        """Whether the last save has failed, as all ranks know."""
        self._handle: SaveHandle | None = None
        self._newest = self._step = 0
        """The numbers of the newest version, and of the last step that began."""

    def is_due(self, step: int) -> bool:
        """Returns whether a step is due here that no other tier saves."""
        every = self._options.every_steps
        return every is not None and step % every == 0

    def save(self, step: int, state: object, metadata: Mapping[str, str], waits: bool) -> bool:
        """Begins to save a step, once the last one is saved; returns False if it fails.

        All ranks call this. With `waits`, returns once the step is saved.
        """
        self.settle()
        self._newest, self._step = self._newest + 1, step
        failures = self._failures.count
        try:
            if self._has_failed:  # rule 9; servers that live have an owner at any time
                before, self._live = self._live, self._open()
                before.end()
                self._has_failed = False
            age = {key: metadata[key] for key in (STEP, BEGAN, ORDER)}
            info = {**age, TOKEN: self._live.hosts.token}
            self._handle = self._live.update_state(state, self._newest, metadata, info)
        except Exception as error:
            self._count_failure(error)
        if waits:
            self.settle()
        return self._failures.count == failures

    def settle(self) -> None:
        """Returns once no save is under way, and handles a failure of the last one."""
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                handle.wait()
            except Exception as error:
                self._count_failure(error)

    def _count_failure(self, error: Exception) -> None:
        self._has_failed = True
        place = f"step {self._step} in memory ({self._live.hosts.url.shown})"
        self._failures.add(error, place, "the next step", self._tells)

    def steps(self, ranks: Ranks) -> list[tuple[RunStep, str]]:
        """Returns the steps that can be restored, with their URLs for this rank, newest first.

        All ranks call this inside of a call. Servers learn which of them have the files.
        """
        server, hosts = self._live.hosts.server, self._live.hosts

        def list_versions() -> object:
            if server is None:
                return None
            versions = server.versions().items()
            return [list(server.address), {number: version.json() for number, version in versions}]

        rows = gather(ranks, ranks.run_on_all("listing the steps in memory", list_versions))
        servers: Told = [((r[0][0], r[0][1]), versions_of(r[1])) for r in rows if r is not None]
        self._newest = max((v for _, known in servers for v in known), default=self._newest)
        complete = whole(servers)

        def tell() -> None:
            for version in complete:
                if server is not None and server.address in version.servers:
                    server.commit(version.version, version.files, version.info)

        ranks.run_on_all("telling the servers of each other", tell)
        here = hosts.addresses[hosts.here]
        return [(version.step, _url(hosts, version, here)) for version in complete]

    def close(self, is_over: bool) -> None:
        """Ends the servers if the run is over; else they keep the last steps for its next start."""
        server = self._live.hosts.server
        if is_over and server is not None:
            with suppress(CkptError, OSError):
                server.remove()
        self._live.end()


def _url(hosts: Hosts, found: Found, here: Address) -> str:
    """Returns the URL of a version at the server of this host, or at another that has it."""
    host, port = here if here in found.servers else found.servers[0]
    return str(LiveUrl(host, port, hosts.name, found.version, hosts.token))
