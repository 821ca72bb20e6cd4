"""Publishes a state: the versions of it are read like checkpoints, while the training goes on.

A version is a background save whose shard files lie in memory (`ckpt.live.process.seal`). Rules:

1. A live state has two arenas, and at most two versions. The update after them retires the older
   version: it waits until the readers have given back their leases, then all hosts drop it.
2. Memory is not written again while a reader may read it. If a reader still has it, its pages go
   back to the system, and the update takes new memory.
3. A version is visible from the commit at its home. A publisher that fails or is killed before the
   commit leaves the last version as it is.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from ckpt.arguments import Uncopied
from ckpt.errors import ClosedError
from ckpt.live.hosts import Dropped, Hosts, check_room, drop, serve
from ckpt.live.process import HostOptions
from ckpt.live.protocol import LEASE_SECONDS, FileAt, Segment
from ckpt.live.shared_files import in_memory
from ckpt.opening.in_flight import SaveQueue, mark_errors_seen
from ckpt.saving.agreement import (
    SaveAttempt,
    SaveOptions,
    StoredDtypes,
    agree_on_attempt,
    manifest_of,
)
from ckpt.saving.arena import Arena
from ckpt.saving.background import SaveHandle, begin
from ckpt.saving.staging import COPIED
from ckpt.saving.writers import ArenaWriter, Fill, new_arena
from ckpt.stores.addresses import MOST_VERSION, NAME
from ckpt.stores.store import Options
from ckpt.transfer.write_job import Ring, call_message, pack_summary, unpack_summary
from formats.native.manifest import MANIFEST, dump
from formats.native.shard import ShardSummary
from sharding.agreement.call_events import pause_collection
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import HASH_BITS, Ranks, result_or_error
from sharding.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from ckpt.live.chain import Chain
    from sharding.agreement.ranks import Group

__all__ = ["LiveState", "publish"]

FULL_EVERY = 16


def publish(
    state: object,
    name: str = "policy",
    *,
    group: Group = None,
    address: str | None = None,
    lease_seconds: float = LEASE_SECONDS,
    dtype: StoredDtypes = None,
    through: str | os.PathLike[str] | None = None,
    full_every: int = FULL_EVERY,
    storage_options: Options = None,
    timeout: float = TIMEOUT_SECONDS,
) -> LiveState:
    """Returns, on every rank, once the first version of `state` can be read at the result's `url`.

    All ranks of `group` call this, with any state that `ckpt.save` takes. `ckpt.load(url, model)`
    and every other call that reads checkpoints read it in other jobs, on any number of ranks. Each
    host gets one server process. A rank keeps up to two copies of its part in memory.

    Args:
        name: the name in the URL: letters, digits, `.`, `_` and `-`. A name is
            unique on a host.
        address: where the servers listen: the loopback by default, "0.0.0.0" for all networks of
            the host, or one of its addresses. Ranks on several hosts need it.
        lease_seconds: a reader that says nothing for so long loses its version. An update waits
            for readers at most so long.
        dtype: as for `ckpt.save`: the dtype of the versions, best that of the readers, which then
            get the differences between versions. The casts take memory during the copy.
        through: a folder or bucket to which each version goes too, for jobs that cannot reach this
            one: they give `ckpt.follow` this URL. An update ends once its version is there.
        full_every: each of so many versions is whole there, and the others are deltas.
        storage_options: those of `through`, as for `ckpt.save`.
        timeout: the most seconds that a rank waits for another.

    Raises:
        ArgumentError: an option does not have such a value, or, as an ArgumentTypeError, type.
        ExistsError: this host has a live state of this name; the error names the process. Or
            another job publishes `through` this folder.
        StoreError: the folder or bucket `through` which it goes failed.
        StateError: a value cannot be stored; the error names its key path.
        RankError: another rank failed; the error names the rank and its error.

    >>> import ckpt, torch
    >>> state = {"w": torch.ones(2), "step": 1}
    >>> with ckpt.publish(state, "docs-publish") as live:
    ...     state["w"] += 1
    ...     live.update().wait()
    ...     live.version, ckpt.load(live.url, {"w": torch.zeros(2), "step": 0})
    (2, {'w': tensor([2., 2.]), 'step': 1})
    """
    ranks = Ranks(group, timeout)

    def check() -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ArgumentError(f"name is {name!r:.80}; use only letters, digits, '.', '_' and '-'")
        if address is not None and not (isinstance(address, str) and address):
            raise ArgumentTypeError(
                f"address is {address!r:.80}; give None, or an address such as '0.0.0.0'"
            )
        if isinstance(lease_seconds, bool) or not isinstance(lease_seconds, int | float):
            raise ArgumentTypeError(f"lease_seconds is {lease_seconds!r:.80}; give a number")
        if not 0.1 <= lease_seconds <= MOST_LEASE_SECONDS:
            raise ArgumentError(
                f"lease_seconds is {lease_seconds!r}; it can be 0.1 to {MOST_LEASE_SECONDS}"
            )
        if type(full_every) is not int or full_every < 1:
            raise ArgumentError(f"full_every is {full_every!r}; give a whole number from 1 on")

    def look() -> tuple[Chain | None, int]:
        if through is None:
            return None, 0
        from ckpt.live.chain import Chain  # zstandard is for those who need it

        if not isinstance(through, str | os.PathLike):
            raise ArgumentTypeError(f"through is {through!r:.80}; give a path or URL, or None")
        found = Chain(os.fspath(through), full_every, storage_options)
        return found, found.newest() if ranks.rank == 0 else 0

    def hashes(found: object) -> dict[str, int]:
        place = None if through is None else [os.fspath(through), full_every]
        return {"through": xxh3_64_intdigest(repr(place).encode()) >> (64 - HASH_BITS)}

    with ranks.call("ckpt.publish"):
        ranks.run_on_all("checking arguments", check)
        (chain, before), agreed = ranks.run_and_compare("looking for versions", look, hashes)
        if not agreed.same["through"]:
            raise ArgumentError(
                "the ranks gave different through= or full_every=: give all the same"
            )
        hosts = serve(ranks, HostOptions(name, address=address, lease_seconds=lease_seconds))
    live = LiveState(hosts, state, group, lease_seconds, timeout, dtype)
    live.chain, live._tried = chain, before
    try:
        live.update().wait()
    except BaseException:
        live.end()
        raise
    return live


MOST_LEASE_SECONDS = 3600.0


@dataclass(slots=True)
class _Slot:
    """An arena, and the version whose bytes it has."""

    arena: Arena = field(default_factory=lambda: new_arena(is_sealed=True))
    version: int | None = None
    held: Dropped = Dropped.FREE
    """The users of the memory once its version is retired."""


class LiveState(Uncopied):
    """A published state. Use it in a `with` statement, or close it; all ranks call all methods."""

    def __init__(
        self,
        hosts: Hosts,
        state: object,
        group: Group,
        lease_seconds: float,
        timeout: float,
        dtype: StoredDtypes = None,
    ) -> None:
        """`ckpt.publish` makes live states."""
        self.hosts = hosts
        self.version = 0
        """The newest version that this rank has seen complete; 0 before the first."""
        self.chain: Chain | None = None
        """The versions in a folder or bucket."""
        self.replicas: int | None = None
        """The hosts beside its own that keep each file; with None only the home commits."""
        self.copies_bytes: int | None = None
        """The most bytes of these copies, on each host; None is no bound."""
        self._state, self._group, self._dtype = state, group, dtype
        self._lease_seconds, self._timeout = lease_seconds, timeout
        self._slots = (_Slot(), _Slot())
        """Equal versions on all ranks."""
        self._committed: int | None = None
        """The newest version if rank 0 has committed it and no update has begun since."""
        self._tried = 0
        """The newest version that this rank has begun to store."""
        self._arena_writer = ArenaWriter(self._slots[0].arena)
        self._queue = SaveQueue()
        self._is_closed = False

    @property
    def url(self) -> str:
        """The URL of the newest version, with the token that readers need."""
        return str(self.hosts.url)

    def __repr__(self) -> str:
        return f"<LiveState {self.hosts.url.shown}: version {self.version}>"

    def __enter__(self) -> LiveState:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.end()

    def update(self, version: int | None = None) -> SaveHandle:
        """Returns a handle as soon as the state is copied; its `wait` returns once it can be read.

        The state of this call becomes version `version`, by default the next one. All ranks call
        this, with the same version. If an update fails, readers keep the last version.

        Raises:
            ArgumentError: `version` is not above the newest version; an ArgumentTypeError if it is
                no int.
            ClosedError: the live state is closed.
            BackgroundError: an earlier update failed, and no caller has seen its error.
            StateError: a value cannot be stored; the error names its key path. Or the ranks gave
                different versions.
            RankError: another rank failed; the error names the rank and its error.
        """
        return self.update_state(self._state, version, {}, {})

    def update_state(
        self,
        state: object,
        version: int | None,
        metadata: Mapping[str, str],
        info: Mapping[str, object],
    ) -> SaveHandle:
        """As `update`, of any state, with metadata for its manifest and info for the servers."""
        started = time.perf_counter()
        ranks = Ranks(self._group, self._timeout)
        later = Ranks(self._group, self._timeout, f"versions of {self.hosts.name}")
        with mark_errors_seen() as begun, ranks.call("LiveState.update", later):
            self._queue.wait()
            with pause_collection(), ExitStack() as stack:

                def choice() -> bytes:
                    ranks.doing("choosing a version")
                    return self._choice(version)

                def check() -> None:
                    self._check(version)
                    self._queue.check_free("wait", stack, ranks.is_single_process)

                options = SaveOptions(
                    overwrite=False, compress=False, metadata=dict(metadata), dtype=self._dtype
                )
                arguments = {"version": version}
                attempt, leaves = agree_on_attempt(ranks, state, options, check, arguments, choice)
                number, slot = self._chosen(ranks, attempt.note)
                shown = self.hosts.url.at(number).shown
                handle = SaveHandle(shown, attempt.plan.nbytes, started)
                target = _Version(handle, attempt, self._queue, self, number, slot, info)
                later.connect()
                begun.append(handle)
                ranks.doing("copying the state")
                begin(target, state, leaves, later, COPIED)
                return handle

    def close(self) -> None:
        """Ends the live state once its last update is over; readers keep their leases.

        The servers end when no lease is left. Raises BackgroundError if the last update failed, and
        no caller has seen its error. May be called twice.
        """
        if not self._is_closed:
            self.end()
            self._queue.raise_untold()

    def end(self) -> None:
        """As `close`, without an error of the last update."""
        self._is_closed = True
        self._queue.wait()
        self.hosts.close()
        self._arena_writer.close()
        for slot in self._slots:
            slot.arena.close()

    def _choice(self, version: int | None) -> bytes:
        """Returns rank 0's choice of the version and of the slot for it, for `_chosen`.

        On a single host the slot's version is retired and dropped, on several it is retired. If the
        update fails after this, the other version stays.
        """
        self._check(version)
        is_one_host = len(self.hosts.addresses) == 1
        newest, self._committed = self._committed, None
        if newest is None or not (is_one_host and all(slot.version for slot in self._slots)):
            newest = self._newest_at_home()
        self.version = max(self.version, newest)
        number = max(newest, self._tried) + 1 if version is None else version
        if not self.version < number <= MOST_VERSION:
            raise ArgumentError(
                f"{self.hosts.url.shown}: version {number} is not above {self.version}, the "
                f"newest, and at most {MOST_VERSION}"
            )
        index = 1 if self._slots[0].version == newest else 0
        slot, is_overdue = self._slots[index], False
        if slot.version is not None and is_one_host:
            old, seconds = slot.version, self._lease_seconds
            dropped = drop(self.hosts, lambda server: server.reclaim(old, seconds))
            if dropped == Dropped.UNKNOWN:
                self._newest_at_home()  # raises if the server has ended
            slot.held, slot.version = max(slot.held, dropped), None
        elif slot.version is not None:
            is_overdue = self._retire(slot.version)
        return json.dumps([number, index, slot.held, is_overdue]).encode()

    def _chosen(self, ranks: Ranks, choice: bytes) -> tuple[int, int]:
        """Returns the version and the slot that rank 0 has chosen; the slot is free of its version.

        All ranks call this. A server that fails here fails the update later, too.
        """
        number, index, dropped, is_overdue = json.loads(choice)
        slot = self._slots[index]
        if len(self.hosts.addresses) > 1:
            dropped = Dropped.FREE
            if slot.version is not None:
                dropped = self._drop_on_all(ranks, slot.version, is_overdue)
        slot.held, slot.version = max(slot.held, Dropped(dropped)), None
        return number, index

    def _newest_at_home(self) -> int:
        """Returns the newest version of rank 0's server, 0 without one. Raises if it has ended."""
        assert self.hosts.server is not None
        known = self.hosts.server.versions()
        return max((number for number, found in known.items() if found.complete), default=0)

    def _retire(self, version: int) -> bool:
        """Returns whether a retired version is overdue, as `HostServer.retire` tells."""
        assert self.hosts.server is not None
        server, seconds = self.hosts.server, self._lease_seconds
        overdue, error = result_or_error(lambda: server.retire(version, seconds))
        return bool(overdue) or error is not None

    def _drop_on_all(self, ranks: Ranks, version: int, overdue: bool) -> Dropped:
        """Drops a version on each host; tells who still has its memory on this one."""
        dropped = drop(self.hosts, lambda server: server.drop(version, overdue))
        everyone = ranks.merge_records("dropping a version", bytes([dropped]), b"".join)
        at_hosts = zip(everyone, self.hosts.host_of, strict=True)
        return Dropped(max(how for how, at in at_hosts if at == self.hosts.here))

    def _check(self, version: int | None) -> None:
        if self._is_closed:
            raise ClosedError(f"{self.hosts.url.shown} is closed; publish the state again")
        if version is not None and type(version) is not int:
            raise ArgumentTypeError(
                f"{self.hosts.url.shown}: version is {version!r:.80}; give a whole number, as "
                "int() makes it"
            )

    def drop_others(self) -> None:
        """Drops the versions on this host that an earlier publisher has left.

        A memory tier calls this once it has committed a version of its own.
        """
        server, mine = self.hosts.server, {slot.version for slot in self._slots}
        assert server is not None
        for number in server.versions().keys() - mine:
            server.drop(number)

    def _place(self, index: int, version: int) -> ArenaWriter:
        """Returns the arena writer with the arena for a version."""
        slot = self._slots[index]
        slot.version = version
        self._tried = max(self._tried, version)
        dropped, slot.held = slot.held, Dropped.FREE
        if dropped:
            if dropped == Dropped.HELD:
                slot.arena.discard()
            else:  # the server would send zeros; the memory ends with its last user
                slot.arena.close()
            slot.arena = new_arena(is_sealed=True)
        self._arena_writer.use(slot.arena)
        return self._arena_writer


@dataclass(frozen=True, slots=True)
class _Version:
    """The target of one update."""

    handle: SaveHandle
    attempt: SaveAttempt
    queue: SaveQueue
    live: LiveState
    number: int
    slot: int
    info: Mapping[str, object]

    def arena_writer(self) -> ArenaWriter:
        """Returns the live state's arena writer, with the arena of this version."""
        return self.live._place(self.slot, self.number)

    def write(
        self, data: memoryview, place: ArenaWriter, ring: Ring | None, fill: Fill
    ) -> ShardSummary:
        """Seals this rank's part, and gives it to the server of this host."""
        file, plan = self.attempt.file_name, self.attempt.plan
        fields = {"name": self.live.hosts.name, "version": self.number, "file": file, "plan": plan}
        job = call_message("ckpt.live.process:seal", fields)
        return place.writer().call(job, place.arena, f"{self.handle.url}/{file}")

    def end(
        self,
        ranks: Ranks,
        written: ShardSummary | None,
        error: Exception | None,
        data: memoryview,
    ) -> None:
        """Commits the version, once all files are where they belong."""
        records = ranks.gather("writing", pack_summary(written), error)
        hosts = self.live.hosts
        is_copied = self.live.replicas is not None
        made = _Made("", {}, {})
        if ranks.rank == 0:
            manifest = dump(manifest_of(self.attempt, _summaries(records))).decode()
            made = _Made(manifest, self._sizes(records), dict(self.info))
        if is_copied:
            made = _Made(*json.loads(ranks.broadcast(json.dumps(made).encode())))
        commits = hosts.server is not None and (is_copied or ranks.rank == 0)
        if is_copied:
            ranks.run_on_all(
                "copying to other hosts", lambda: self._copy(made) if commits else None
            )
        ranks.run_on_all("committing", lambda: self._commit(made) if commits else None)
        self.live.version = self.number
        if self.live.chain is not None:
            part = None if written is None else (self.attempt.file_name, written)
            version = self.number, str(hosts.url.at(self.number)), made.manifest
            writer = self.live._arena_writer
            self.live.chain.append(ranks, version, part, self.attempt.plan, writer)

    def _sizes(self, records: list[bytes]) -> dict[str, tuple[int, int]]:
        """Returns each file's size and the number of its host."""
        return {
            self.attempt.file_of(rank): (summary.size, self.live.hosts.host_of[rank])
            for rank, summary in _summaries(records).items()
        }

    def _holders(self, host: int) -> list[int]:
        """Returns the hosts with the files of a host, its own first."""
        count = len(self.live.hosts.addresses)
        return [(host + step) % count for step in range(min(count, 1 + (self.live.replicas or 0)))]

    def _copy(self, made: _Made) -> None:
        """Copies the files of other hosts to the server of this one, where it is a replica."""
        hosts, place = self.live.hosts, self.live._arena_writer
        files = [
            (file, size, hosts.addresses[host])
            for file, (size, host) in made.sizes.items()
            if host != hosts.here and hosts.here in self._holders(host)
        ]
        if files:
            check_room(hosts, self.live.copies_bytes, sum(size for _, size, _ in files))
            fields = {"name": hosts.name, "token": hosts.token, "version": self.number}
            job = call_message("ckpt.live.process:copy_files", {**fields, "files": files})
            place.writer().call(job, place.arena, self.handle.url)

    def _commit(self, made: _Made) -> None:
        server, hosts = self.live.hosts.server, self.live.hosts
        assert server is not None
        manifest = made.manifest.encode()
        descriptor = in_memory(manifest)
        try:
            server.put(self.number, MANIFEST, [Segment(descriptor, 0, len(manifest))])
        finally:
            os.close(descriptor)
        files = {
            file: FileAt(size, tuple(hosts.addresses[at] for at in self._holders(host)))
            for file, (size, host) in made.sizes.items()
        }
        files[MANIFEST] = FileAt(len(manifest), (hosts.addresses[hosts.here],))
        server.commit(self.number, files, made.info)
        self.live._committed = self.number
        if self.live.replicas is not None:
            self.live.drop_others()


class _Made(NamedTuple):
    """The content of a version, as rank 0 commits it."""

    manifest: str
    sizes: dict[str, tuple[int, int]]
    """The size of each file, and the number of its host."""
    info: dict[str, object]


def _summaries(records: list[bytes]) -> dict[int, ShardSummary]:
    return {rank: unpack_summary(record) for rank, record in enumerate(records) if record}
