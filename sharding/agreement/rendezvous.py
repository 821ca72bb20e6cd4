"""The rendezvous of a group: rank 0 listens, the others connect to it.

Each rank asks the process group's store once, for rank 0's address. All messages use the
connections (`sharding.agreement.links`): they do not depend on the kind of store, and delay no
other user of the store.

Rules:

1. Ranks of one machine meet at its loopback address. The others try these addresses in order: the
   one by which rank 0's machine reaches the store; the store's own, if the store is on rank 0's
   machine; the name of rank 0's machine. `CKPT_HOST`, set for rank 0, replaces these addresses.
2. A rank that connects must know a word that is in the store: the connections are as well
   protected as the store.
3. A new group may use the store of an earlier one. Rank 0 removes its place when all ranks have
   connected, or when it leaves the group. A message for late ranks is stored under the place's
   word. A rank 0 that was killed leaves its place behind, and torchrun keeps the store across
   restarts: a rank therefore does not give up at a place that is older than its own process.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any

from sharding.agreement.links import Failure, Kind, Link, Message
from sharding.agreement.wait_warning import WaitWarning

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PLACE, LEFT = "ckpt/place", "ckpt/left"
"""Keys of the store: rank 0's address; with its word, the last call that ended before all ranks
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


@dataclass(frozen=True, slots=True)
class _Place:
    """The address at which rank 0 listens."""

    word: str
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
        self.word = secrets.token_hex(16)
        """The word that a rank must know to connect: rank 0's on every rank that has connected."""

    @cached_property
    def _store(self) -> Store:
        """The store over a connection of our own, whose waits do not stop those of the training."""
        from torch._C._distributed_c10d import PrefixStore

        clone = getattr(self._given, "clone", None)
        return PrefixStore(self._purpose, self._given if clone is None else clone())

    def listen(self, world_size: int) -> socket.socket:
        """On rank 0: returns the listening socket; its address is in the store."""
        server = _server(max(128, world_size))
        server.setblocking(False)
        hosts, is_at_store = _own_hosts(_host_of(self._given))
        port = server.getsockname()[1]
        place = _Place(self.word, _machine(), hosts, port, is_at_store, time.time())
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
            found, why = self._reached(place, until)
            if found is not None:
                self.word = place.word
                link = Link(found)
                link.add(Message(Kind.HELLO, 0, rank, place.word).packed())
                return link
            patience = seconds if place.at < _began() else REFUSED_SECONDS
            if monotonic() > min(until, refused.setdefault(place.word, monotonic()) + patience):
                raise ConnectionError(
                    f"it cannot be reached ({why}): it has ended, or its address is to be given "
                    "to it in CKPT_HOST; or else this is the address of an earlier job that met at "
                    "the same store"
                )
            time.sleep(0.05)

    def leave_word(self, call: int, failure: Failure) -> None:
        """On rank 0: tells each rank that connects from now on that this call is over."""
        with suppress(RuntimeError):  # the store is lost: the other ranks notice it themselves
            self._store.set(self._left, json.dumps([call, asdict(failure)]))

    def left(self) -> tuple[int, Failure] | None:
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
        return f"{LEFT}/{self.word}"

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
            return _Place(**json.loads(self._store.get(PLACE)))
        except RuntimeError as error:
            raise ConnectionError(
                f"the store of the process group cannot be reached: {error}"
            ) from error

    def _is_there(self, seconds: float) -> bool:
        with suppress(RuntimeError):  # each kind of store has its own class of time-out error
            self._store.wait([PLACE], timedelta(seconds=seconds))
            return True
        return bool(self._store.check([PLACE]))

    def _reached(self, place: _Place, until: float) -> tuple[socket.socket | None, str]:
        said = []
        for host in self._hosts(place):
            try:
                seconds = max(0.1, min(CONNECT_SECONDS, until - monotonic()))
                found = socket.create_connection((host, place.port), seconds)
            except OSError as error:
                said.append(f"{host} port {place.port}: {error}")
                continue
            if found.getsockname() != found.getpeername():  # a free port can connect to itself
                return found, ""
            found.close()
            said.append(f"{host} port {place.port}: no process listens")
        return None, "; ".join(said)

    def _hosts(self, place: _Place) -> Iterator[str]:
        """Yields the addresses to try, in order."""
        if place.machine == _machine():
            yield LOOPBACK
        yield from place.hosts  # also if the machine looks like this one: a copied virtual one does
        host = _host_of(self._given)
        if place.is_at_store and host is not None:
            yield host


def _server(backlog: int) -> socket.socket:
    """Returns a socket that listens at all addresses of this machine, at a port of the system's."""
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
    given = os.environ.get("CKPT_HOST")
    if given:
        return [given], False
    for family, _, _, _, address in _addresses(store_host):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect(address)  # sends nothing, and only chooses an address of this machine
            own = towards.getsockname()[0]
            is_local = own.startswith("127.") or own == "::1"
            return [] if is_local else [own], is_local or own == address[0]
    return [socket.gethostname()], False


def _host_of(store: Store) -> str | None:
    """Returns the host of a TCPStore inside any wrappers; None for another store."""
    found: object = store
    while (inner := getattr(found, "underlying_store", None)) is not None:
        found = inner
    host = getattr(found, "host", None)
    return host if isinstance(host, str) else None


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
