"""Where the ranks of a group find each other: rank 0 listens, the others connect to it.

The store at which the process group itself has met is asked once, for rank 0's address. Everything
else goes by the connections (`sharding.agreement.links`), so that it neither depends on the kind of
store nor holds up those who use it.

Rules:

1. Ranks of one machine meet at its loopback address. Others take the address by which rank 0's
   machine reaches the store, or that of the store itself where it is on rank 0's machine, or else
   what the machine's name stands for. `CKPT_HOST`, set for rank 0, is taken in their place.
2. Who connects must know a word that is in the store: as much protection as the store has itself.
3. A group may be made where an earlier one has met: a place is gone when all have connected, or
   when rank 0 has left the group, and what is left for those who come late goes by the place's
   word. A rank 0 that was killed has left its place there, and torchrun keeps the store when it
   starts a job again: a place older than the process that finds it is no reason to give up.
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
"""Keys: rank 0's address; with its word, the last call that ended before all had connected."""
LOOPBACK = "127.0.0.1"
SLICE_SECONDS = 0.5
"""How long the store is waited for at once: it does not heed signals meanwhile."""
STORE_SECONDS = 5.0
"""How long it is waited for where nothing depends on it."""
REFUSED_SECONDS = 5.0
"""How long an address may refuse before rank 0 counts as ended: it may be an earlier one's."""
CONNECT_SECONDS = 10.0
"""How long one address is tried."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where rank 0 listens."""

    word: str
    machine: str
    hosts: list[str]
    port: int
    is_at_store: bool
    """The store is on its machine: whoever has reached the one reaches the other."""
    at: float
    """When it was given, in seconds by its machine's clock."""


class Rendezvous:
    """The store of one group, used by one of its ranks. `purpose` tells several meetings apart."""

    def __init__(self, store: Store, purpose: str) -> None:
        self._given = store
        self._purpose = purpose
        self.word = secrets.token_hex(16)
        """What those who connect have to know; theirs once they have."""

    @cached_property
    def _store(self) -> Store:
        """By a connection of our own: to wait does not stop the training's."""
        from torch._C._distributed_c10d import PrefixStore

        clone = getattr(self._given, "clone", None)
        return PrefixStore(self._purpose, self._given if clone is None else clone())

    def listen(self, world_size: int) -> socket.socket:
        """On rank 0: where the others connect to, once they have looked into the store."""
        server = _server(max(128, world_size))
        server.setblocking(False)
        hosts, is_at_store = _own_hosts(_host_of(self._given))
        port = server.getsockname()[1]
        place = _Place(self.word, _machine(), hosts, port, is_at_store, time.time())
        self._store.set(PLACE, json.dumps(asdict(place)))
        return server

    def connect(self, rank: int, seconds: float, waiting: WaitWarning) -> Link:
        """On the others: a connection to rank 0, which has begun its call, to be flushed.

        Who is interrupted before it has that in hand has said nothing, and may connect again.
        Raises TimeoutError where it has not within so many seconds, ConnectionError where it cannot
        be reached.
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
        """On rank 0: whoever connects from now on finds that this call is over."""
        with suppress(RuntimeError):  # the store is lost: they will see for themselves
            self._store.set(self._left, json.dumps([call, asdict(failure)]))

    def left(self) -> tuple[int, Failure] | None:
        """On the others: the last call that was over before they connected."""
        if not self._store.check([self._left]):
            return None
        call, failure = json.loads(self._store.get(self._left))
        return call, Failure(**failure)

    def withdraw(self) -> None:
        """On rank 0: nobody is to find this place any more (rule 3)."""
        with suppress(RuntimeError):  # the store is lost, or keeps what it has
            if hasattr(self._given, "clone"):  # the connection is our own
                self._store.set_timeout(timedelta(seconds=STORE_SECONDS))
            self._store.delete_key(PLACE)
        self.forget()

    @property
    def _left(self) -> str:
        return f"{LEFT}/{self.word}"

    def forget(self) -> None:
        """Give up the connection to the store: it is not needed once all are connected."""
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
        with suppress(RuntimeError):  # its kind differs from store to store
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
            said.append(f"{host} port {place.port}: nobody listens")
        return None, "; ".join(said)

    def _hosts(self, place: _Place) -> Iterator[str]:
        """The addresses to try, in order."""
        if place.machine == _machine():
            yield LOOPBACK
        yield from place.hosts  # also of what looks like this machine: copies of a virtual one do
        host = _host_of(self._given)
        if place.is_at_store and host is not None:
            yield host


def _server(backlog: int) -> socket.socket:
    """Listens at all addresses of this machine, at a port that the system chooses."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # there is IPv6, and it is switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
    return socket.create_server(("", 0), backlog=backlog)


def _addresses(host: str | None) -> list[tuple[Any, ...]]:
    """Of a host, in the order in which the system would try them."""
    with suppress(OSError):
        if host is not None:
            return list(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM))
    return []


def _own_hosts(store_host: str | None) -> tuple[list[str], bool]:
    """Addresses of this machine for others, and whether the store is on it."""
    given = os.environ.get("CKPT_HOST")
    if given:
        return [given], False
    for family, _, _, _, address in _addresses(store_host):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect(address)  # sends nothing: it only chooses an address of our own
            own = towards.getsockname()[0]
            is_local = own.startswith("127.") or own == "::1"
            return [] if is_local else [own], is_local or own == address[0]
    return [socket.gethostname()], False


def _host_of(store: Store) -> str | None:
    """The host of a TCPStore, whatever it is wrapped in; None for another store."""
    found: object = store
    while (inner := getattr(found, "underlying_store", None)) is not None:
        found = inner
    host = getattr(found, "host", None)
    return host if isinstance(host, str) else None


def _began() -> float:
    """When this process did, in seconds by the machine's clock; 0 where the system does not say."""
    with suppress(OSError, AttributeError):  # there is no /proc, or no such clock
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


@lru_cache(1)
def _machine() -> str:
    """What two processes have in common that reach each other by the loopback address."""
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()
