"""Azure's blob storage, by Microsoft's own emulator.

An npm package: `make test-stores` puts it into `tests/stores/node_modules`, which git ignores.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.stores.child import HOST, NotInstalled, answers, free_ports, running, wait_until
from tests.stores.server import BUCKET, Server

PROGRAM = Path(__file__).parent / "node_modules" / ".bin" / "azurite-blob"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key that the emulator documents for everybody."""


def missing() -> str | None:
    """Why the server cannot be started here; None when it can."""
    if shutil.which("node") is None:
        return "Azurite needs node, which is not installed: apt-get install nodejs npm"
    if not PROGRAM.exists():
        return f"Azurite is not installed ({PROGRAM} is not there): make test-stores"
    return None


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    """The server with an empty container; data and log go to the folder."""
    reason = missing()
    if reason is not None:
        raise NotInstalled(reason)
    (port,) = free_ports(1)
    log = folder / "azurite.log"
    where = ("--blobHost", HOST, "--blobPort", str(port), "-l", str(folder / "data"))
    quiet = ("--silent", "--skipApiVersionCheck", "--disableTelemetry")
    node = shutil.which("node")
    assert node is not None
    with running((node, str(PROGRAM), *where, *quiet), log) as process:
        wait_until(lambda: answers(port), process, log)
        endpoint = f"http://{HOST}:{port}"
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={endpoint}/{ACCOUNT};"
        )
        server = Server(
            "azurite",
            "az",
            endpoint,
            {"connection_string": connection},
            {"AZURE_STORAGE_CONNECTION_STRING": connection},
        )
        _create_container(server)
        yield server


def _create_container(server: Server) -> None:
    from azure.storage.blob import BlobServiceClient

    with BlobServiceClient.from_connection_string(server.options["connection_string"]) as client:
        client.create_container(BUCKET)
