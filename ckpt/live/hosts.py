"""The servers of one live state: one on each host of its publisher.

The *leader* of a host is its lowest rank: it starts the host's server, owns the name there, and
commits and drops versions. The server of rank 0's host is the *home*, which readers ask first. A
replica is a copy of another host's files, which the leader of this host makes.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any

from ckpt.errors import ArgumentError, NotACheckpointError, StoreError
from ckpt.live.control import runtime_folder
from ckpt.live.http_server import EVERY_ADDRESS
from ckpt.live.process import HostOptions, HostServer
from ckpt.live.protocol import Address
from ckpt.stores.addresses import LiveUrl
from sharding.agreement.ranks import Ranks, result_or_error

TOKEN_BYTES = 24


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a publisher, by one of its ranks."""

    name: str
    token: str = field(repr=False)
    host_of: Sequence[int]
    """The number of the host of each rank, by the rank's position."""
    addresses: Sequence[Address]
    """The server of each host."""
    rank: int
    server: HostServer | None
    """The connection to the server of this host; only on its leader."""

    @property
    def here(self) -> int:
        """The number of this rank's host."""
        return self.host_of[self.rank]

    @property
    def url(self) -> LiveUrl:
        """The address of the newest version."""
        host, port = self.addresses[0]
        return LiveUrl(host, port, self.name, None, self.token)

    def close(self) -> None:
        """Lets the names of this rank's server go: their versions end with their leases."""
        if self.server is not None:
            self.server.close()


Start = Callable[[str], HostServer]
"""Starts or finds the server of this host, with a token."""


def serve(ranks: Ranks, how: HostOptions) -> Hosts:
    """Returns the servers of a new live state, once they all listen. All ranks call this.

    Raises ExistsError if the name is served on a host, ArgumentError if ranks on several hosts
    give no address, RankError for another rank's error.
    """
    rows = gather(ranks, [*place_of_rank(), new_token()])
    networks = {row[1] for row in rows}

    def check() -> None:
        if len(networks) > 1 and how.address is None:
            raise ArgumentError(
                f"the ranks that publish {how.name} are on {len(networks)} hosts, and their "
                'servers would listen on the loopback: pass address="0.0.0.0", or the address of '
                "each host in the network of its readers"
            )

    ranks.run_on_all("choosing an address", check)
    places, token = [row[0] for row in rows], rows[0][2]
    return start_servers(ranks, how, places, token, partial(start_server, how))


def start_servers(
    ranks: Ranks, how: HostOptions, places: Sequence[str], token: str, start: Start
) -> Hosts:
    """Returns the servers that the leaders start; `places` has the host of each rank.

    All ranks call this. If a leader fails, the servers of the others end.
    """
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    host_of = tuple(numbers[place] for place in places)
    leads = host_of.index(host_of[ranks.rank]) == ranks.rank
    server: HostServer | None = None

    def begin() -> None:
        nonlocal server
        if leads:
            server = start(token)
            is_home = host_of[ranks.rank] == host_of[0]
            # Readers renew their leases at home. The others' files stay as long as these.
            server.own(how.keep_seconds if is_home else max(how.keep_seconds, how.lease_seconds))

    try:
        ranks.run_on_all("starting the servers", begin)
        rows = gather(ranks, None if server is None else list(server.address))
    except BaseException:
        if server is not None:
            with suppress(OSError):
                server.close()
        raise
    addresses = [(str(row[0]), int(row[1])) for row in rows if row is not None]
    return Hosts(how.name, token, host_of, addresses, ranks.rank, server)


def start_server(how: HostOptions, token: str) -> HostServer:
    """Returns a new server on this host. Raises ExistsError if the name is served here."""
    own = own_address() if how.address in EVERY_ADDRESS else None
    return HostServer.start(replace(how, token=token, advertise=own))


def gather(ranks: Ranks, mine: object) -> list[Any]:
    """Returns what each rank tells. All ranks call this."""
    record = json.dumps(mine).encode()

    def join(records: Sequence[bytes]) -> bytes:
        return b"[" + b",".join(records) + b"]"

    rows: list[Any] = json.loads(ranks.merge_records("meeting", record, join))
    return rows


def new_token() -> str:
    """Returns a new token for readers."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def place_of_rank() -> tuple[str, str]:
    """Returns texts that ranks of one host share, and that ranks share who meet at the loopback."""
    network = socket.gethostname()
    with suppress(OSError):
        network += f" {os.readlink('/proc/self/ns/net')}"
    return f"{network} {runtime_folder()}", network


def own_address() -> str:
    """Returns the address of this host for others: CKPT_HOST, or that of the way to rank 0."""
    host = os.environ.get("CKPT_HOST")
    if host:
        return host
    for far in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1", "2001:db8::1"):
        with suppress(OSError):
            for family, _, _, _, address in socket.getaddrinfo(far, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, socket.SOCK_DGRAM) as towards:
                    towards.connect(address)  # sends nothing, and only chooses an address
                    own = str(towards.getsockname()[0])
                if far and not own.startswith("127.") and own != "::1":
                    return own
    return socket.gethostname()


class Dropped(IntEnum):
    """The memory of a version that a server was asked to drop."""

    FREE = 0
    """Nobody has it."""
    HELD = 1
    """A reader of this host has it, and the server sends none of it."""
    UNKNOWN = 2
    """The server gave no answer: it may go on sending."""


def drop(hosts: Hosts, ask: Callable[[HostServer], bool]) -> Dropped:
    """Drops a version on this host by a call of its server; tells who still has the memory."""
    server = hosts.server
    if server is None:
        return Dropped.FREE
    leases, error = result_or_error(lambda: ask(server))
    if isinstance(error, NotACheckpointError):  # it never came here
        return Dropped.FREE
    if leases is None:
        return Dropped.UNKNOWN
    return Dropped.HELD if leases else Dropped.FREE


def check_room(hosts: Hosts, most: int | None, nbytes: int) -> None:
    """Raises StoreError if copies of so many bytes more would be over the bound of this host."""
    assert hosts.server is not None
    here = hosts.addresses[hosts.here]
    versions = hosts.server.versions().values()
    files = [file for version in versions for file in version.files.values()]
    taken = sum(file.size for file in files if here in file.at[1:])
    if most is not None and taken + nbytes > most:
        raise StoreError(
            f"{hosts.url.shown}: the files of other hosts have {nbytes:,} bytes; copies have "
            f"{taken:,} of the {most:,} bytes that they may have on this host"
        )
