"""The rendezvous of a group: rank 0 listens, the others connect to it.

Each rank asks the process group's store once, for rank 0's address. All messages use the
connections (`sharding.agreement.channel`): they do not depend on the kind of store, and delay no
other user of the store.

Rules:

1. Ranks of one machine meet at its loopback address. The others try these addresses in order: the
   one by which rank 0's machine reaches the store; the store's own, if the store is on rank 0's
   machine; the name of rank 0's machine. `CKPT_HOST`, set for rank 0, replaces these addresses.
2. A rank that connects begins with a secret that is in the store: the connections are as well
   protected as the store.
3. A new group may use the store of an earlier one. Rank 0 removes its place when all ranks have
   connected, or when it leaves the group. A message for late ranks is stored under the place's
   secret. A rank 0 that was killed leaves its place behind, and torchrun keeps the store across
   restarts: a rank therefore does not give up at a place that is older than its own process.
4. Rank 0 listens at the loopback address alone if torchrun's variables say that all ranks of the
   store are on its host, or if `CKPT_HOST` is such an address. Rank 0 cannot ask the others: they
   know its address from its first message. A store at `localhost` is no sign either: operators
   give rank 0 this name for itself, and the others its name in the network.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any

from sharding.agreement.channel import PROTOCOL, SECRET_CHARS, Failure, Link, WaitWarning, greeting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PLACE, LEFT = "ckpt/place", "ckpt/left"
"""Keys of the store: rank 0's address; with its secret, the last call that ended before all ranks
had connected."""
LOOPBACK = "127.0.0.1"
SLICE_SECONDS = 0.5
"""The longest single wait for the store, which ignores signals meanwhile."""
STORE_SECONDS = 5.0
"""The longest wait for the store if no result depends on it."""
REFUSED_SECONDS = 5.0
"""The time after which an address that refuses counts as that of an ended rank 0."""
CONNECT_SECONDS = 10.0
"""The longest try of one address."""
PAUSE_SECONDS = 0.05
"""The time between two tries."""
BACKLOG = 128
"""The connections that wait for rank 0; as many as there are ranks, if these are more."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The address at which rank 0 listens."""

    protocol: int
    """The number of rank 0's form of messages."""
    secret: str
    machine: str
    hosts: list[str]
    port: int
    is_at_store: bool
    """Whether the store is on rank 0's machine, which has the same addresses then."""
    at: float
    """The time when rank 0 published the place, in seconds by its machine's clock."""


class Rendezvous:
    """The store of one group, for one of its ranks. Each `purpose` has keys of its own."""

    def __init__(self, store: Store, purpose: str) -> None:
        self._given = store
        self._purpose = purpose
        self.secret = secrets.token_hex(SECRET_CHARS // 2)
        """The secret of a rank that connects: rank 0's on every rank that has connected."""

    @cached_property
    def _store(self) -> Store:
        """The store over a connection of our own, whose waits do not stop those of the training."""
        from torch._C._distributed_c10d import PrefixStore

        clone = getattr(self._given, "clone", None)
        return PrefixStore(self._purpose, self._given if clone is None else clone())

    def listen(self, world_size: int) -> socket.socket:
        """On rank 0: returns the listening socket; its address is in the store."""
        is_local = _is_one_host(self._given)
        host, _ = _address_of(self._given)
        hosts, is_at_store = ([LOOPBACK], False) if is_local else _own_hosts(host)
        server = _server(max(BACKLOG, world_size), is_local)
        server.setblocking(False)
        port = server.getsockname()[1]
        place = _Place(PROTOCOL, self.secret, _machine(), hosts, port, is_at_store, time.time())
        self._store.set(PLACE, json.dumps(asdict(place)))
        return server

    def connect(self, rank: int, seconds: float, waiting: WaitWarning) -> Link:
        """On the others: returns a connection to rank 0, with a first message to flush.

        A rank that is interrupted before this returns has sent nothing, and may connect again.
        Raises TimeoutError if rank 0 does not begin its call within so many seconds, and
        ConnectionError if rank 0 cannot be reached.
        """
        until = monotonic() + seconds
        refused: dict[str, float] = {}  # by a place's word: since when
        while True:
            place = self._place(until, waiting)
            if place is None:
                raise TimeoutError(f"it has not come within {seconds:g} s")
            found, why = self._reach(place, until)
            if found is not None:
                self.secret = place.secret
                return _greet(found, place.secret, rank)
            timeout = seconds if place.at < _began() else REFUSED_SECONDS
            if monotonic() > min(until, refused.setdefault(place.secret, monotonic()) + timeout):
                is_elsewhere = place.hosts == [LOOPBACK] and place.machine != _machine()
                local = (
                    "it listens at the loopback of its host alone, as its CKPT_HOST, or its equal "
                    "LOCAL_WORLD_SIZE and WORLD_SIZE, say that all ranks are there; "
                )
                raise ConnectionError(
                    f"it cannot be reached ({why}): {local if is_elsewhere else ''}it has ended, "
                    "or its address is to be given to it in CKPT_HOST; or else this is the address "
                    "of an earlier job that met at the same store"
                )
            time.sleep(PAUSE_SECONDS)

    def connect_again(self, rank: int, until: float) -> Link | None:
        """On the others: as `connect`, for a connection that rank 0 has closed unheard.

        Returns None if rank 0 has ended or left. Raises RuntimeError if the store is lost.
        """
        time.sleep(PAUSE_SECONDS)
        place = _place_of(self._store.get(PLACE)) if self._store.check([PLACE]) else None
        if place is None or place.secret != self.secret:
            return None
        found, _ = self._reach(place, until)
        return None if found is None else _greet(found, place.secret, rank)

    def leave_failure(self, call: int, failure: Failure) -> None:
        """On rank 0: tells each rank that connects from now on that this call is over."""
        with suppress(RuntimeError):  # the store is lost: the other ranks notice it themselves
            self._store.set(self._left, json.dumps([call, asdict(failure)]))

    def last_ended(self) -> tuple[int, Failure] | None:
        """On the others: returns the last call that ended before they connected, and why."""
        if not self._store.check([self._left]):
            return None
        call, failure = json.loads(self._store.get(self._left))
        return call, Failure(**failure)

    def withdraw(self) -> None:
        """On rank 0: removes the place from the store (rule 3)."""
        with suppress(RuntimeError):  # the store is lost, or cannot delete keys
            if hasattr(self._given, "clone"):  # the connection is our own
                self._store.set_timeout(timedelta(seconds=STORE_SECONDS))
            self._store.delete_key(PLACE)
        self.forget()

    @property
    def _left(self) -> str:
        return f"{LEFT}/{self.secret}"

    def forget(self) -> None:
        """Closes the connection to the store, which no connected rank needs."""
        self.__dict__.pop("_store", None)

    def _place(self, until: float, waiting: WaitWarning) -> _Place | None:
        try:
            while not self._is_there(max(0.001, min(SLICE_SECONDS, until - monotonic()))):
                if monotonic() > until:
                    return None
                if waiting.is_due:
                    waiting.say([0])
            return _place_of(self._store.get(PLACE))
        except RuntimeError as error:
            raise ConnectionError(
                f"the store of the process group cannot be reached: {error}"
            ) from error

    def _is_there(self, seconds: float) -> bool:
        with suppress(RuntimeError):  # each kind of store has its own class of time-out error
            self._store.wait([PLACE], timedelta(seconds=seconds))
            return True
        return bool(self._store.check([PLACE]))

    def _reach(self, place: _Place, until: float) -> tuple[socket.socket | None, str]:
        problems = []
        for host in self._hosts(place):
            try:
                seconds = max(0.1, min(CONNECT_SECONDS, until - monotonic()))
                link = socket.create_connection((host, place.port), seconds)
            except OSError as error:
                problems.append(f"{host} port {place.port}: {error}")
                continue
            if link.getsockname() != link.getpeername():  # a free port can connect to itself
                return link, ""
            link.close()
            problems.append(f"{host} port {place.port}: no process listens")
        return None, "; ".join(problems)

    def _hosts(self, place: _Place) -> Iterable[str]:
        """Returns the addresses to try, in order."""
        # The others too if the machine looks like this one: a copied virtual machine does.
        found = [LOOPBACK, *place.hosts] if place.machine == _machine() else place.hosts
        host, _ = _address_of(self._given)
        return dict.fromkeys([*found, host] if place.is_at_store and host else found)


def _place_of(stored: bytes) -> _Place:
    """Returns the place in the store. Raises ConnectionError if another version wrote it."""
    try:
        place = _Place(**json.loads(stored))
    except (ValueError, TypeError):
        place = None
    if place is None or place.protocol != PROTOCOL:
        raise ConnectionError(
            "rank 0 has another version of ckpt: install the same version for all ranks"
        )
    return place


def _greet(connected: socket.socket, secret: str, rank: int) -> Link:
    """Returns the link of a rank, with its greeting to flush."""
    link = Link(connected)
    link.add(greeting(secret, rank))
    return link


def _server(backlog: int, is_local: bool) -> socket.socket:
    """Returns a socket that listens at a port of the system's.

    It listens at the loopback address alone if `is_local`, else at all addresses of this machine.
    """
    if is_local:
        return socket.create_server((LOOPBACK, 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 exists and is switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
    return socket.create_server(("", 0), backlog=backlog)


def _addresses(host: str | None) -> list[tuple[Any, ...]]:
    """Returns the addresses of a host, in the order in which the system would try them."""
    with suppress(OSError):
        if host is not None:
            return list(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM))
    return []


def _own_hosts(store_host: str | None) -> tuple[list[str], bool]:
    """Returns this machine's addresses for others, and whether the store is on this machine."""
    host = os.environ.get("CKPT_HOST")
    if host:
        return [host], False
    for family, _, _, _, address in _addresses(store_host):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect(address)  # sends nothing, and only chooses an address of this machine
            own = towards.getsockname()[0]
            is_local = own.startswith("127.") or own == "::1"
            return [] if is_local else [own], is_local or own == address[0]
    return [socket.gethostname()], False


def _is_one_host(store: Store) -> bool:
    """Whether all ranks at the store are on this host (rule 4)."""
    named = os.environ.get("CKPT_HOST")
    if named:
        return named == "localhost" or named.startswith("127.")
    here, everywhere, host, port = map(
        os.environ.get, ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    # Another store may have ranks that this torchrun did not start.
    is_launchers = (host, port) == tuple(map(str, _address_of(store)))
    return is_launchers and here is not None and here == everywhere


def _address_of(store: Store) -> tuple[str | None, int | None]:
    """Returns the host and port of a TCPStore inside any wrappers; None for another store."""
    found: object = store
    while (inner := getattr(found, "underlying_store", None)) is not None:
        found = inner
    host, port = getattr(found, "host", None), getattr(found, "port", None)
    return (host, port) if isinstance(host, str) and isinstance(port, int) else (None, None)


def _began() -> float:
    """Returns the start of this process, in seconds by the machine's clock; 0 if it is unknown."""
    with suppress(OSError, AttributeError):  # the system has no /proc, or no such clock
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


@lru_cache(1)
def _machine() -> str:
    """Returns the identity of processes that reach each other by the loopback address."""
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()
