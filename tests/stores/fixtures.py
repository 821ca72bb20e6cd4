"""Servers for tests: each is started once, by the first test that wants it.

A server that cannot be started is a skip whose reason stands in pytest's summary. Where
`CKPT_STORES_REQUIRED` is set, as `make test-stores` does, it is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.stores import azurite, gcs_emulator, moto_server, radosgw
from tests.stores.child import DidNotStart, NotInstalled
from tests.stores.server import Server

REQUIRED = "CKPT_STORES_REQUIRED"
STARTERS: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {
    "moto": moto_server.started,
    "radosgw": radosgw.started,
    "azurite": azurite.started,
    "gcs": gcs_emulator.started,
}


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """A function from a name in `STARTERS` to the server, which runs until the session ends."""
    with ExitStack() as stack:
        running: dict[str, Server] = {}
        absent: dict[str, str] = {}

        def server(name: str) -> Server:
            if name not in running and name not in absent:
                try:
                    folder = tmp_path_factory.mktemp(name)
                    running[name] = stack.enter_context(STARTERS[name](folder))
                except (NotInstalled, DidNotStart) as error:
                    absent[name] = f"NO {name.upper()} SERVER, so not tested: {error}"
            if name in absent:
                (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(absent[name])
            return running[name]

        yield server


@pytest.fixture(scope="session")
def moto(servers: Callable[[str], Server]) -> Server:
    """S3 by moto: always there, checks no signatures."""
    return servers("moto")


@pytest.fixture(scope="session")
def radosgw_server(servers: Callable[[str], Server]) -> Server:
    """S3 by Ceph's gateway: the real thing, where it is installed."""
    return servers("radosgw")


@pytest.fixture(scope="session")
def azurite_server(servers: Callable[[str], Server]) -> Server:
    """Azure's blob storage by its emulator, where it is installed."""
    return servers("azurite")


@pytest.fixture(scope="session")
def gcs_server(servers: Callable[[str], Server]) -> Server:
    """Google's storage by an emulator that is good for a look only."""
    return servers("gcs")
