"""A look at `gs://`: an emulator of Google's JSON interface that is too loose to be believed.

It ignores `ifGenerationMatch`, so it says nothing about commits; what passes here is that the
driver is found and bytes go there and back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.stores.child import HOST, NotInstalled, answers, free_ports, running, wait_until
from tests.stores.server import BUCKET, Server

# Read when gcsfs is imported. Without it gcsfs asks, by another protocol than the emulator speaks,
# whether the bucket has real folders, and asks for ever.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


def missing() -> str | None:
    """Why the server cannot be started here; None when it can."""
    if find_spec("gcp_storage_emulator") is None:
        return "gcp-storage-emulator is not installed: make test-stores"
    return None


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    """The server with an empty bucket; its log goes to the folder."""
    reason = missing()
    if reason is not None:
        raise NotInstalled(reason)
    (port,) = free_ports(1)
    log = folder / "gcs.log"
    program = Path(sys.executable).with_name("gcp-storage-emulator")
    where = (f"--host={HOST}", f"--port={port}", "--in-memory", f"--default-bucket={BUCKET}")
    with running((str(program), "start", *where), log) as process:
        wait_until(lambda: answers(port), process, log)
        endpoint = f"http://{HOST}:{port}"
        yield Server(
            "gcs",
            "gs",
            endpoint,
            {"endpoint_url": endpoint, "token": "anon", "project": "test"},
            {"STORAGE_EMULATOR_HOST": endpoint},
        )
