"""`gs://` by an emulator of Google's JSON interface.

`GCS_TESTBENCH` names the program `storage-testbench` of github.com/googleapis/storage-testbench, by
which Google tests its own clients, in an environment of its own. It honours conditions. Else it is
the emulator of PyPI, which ignores `ifGenerationMatch` and so says nothing about commits: there the
driver is found, and bytes go there and back.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

from tests.stores.child import HOST, NotInstalled, answers, free_ports, running, wait_until
from tests.stores.server import BUCKET, Server

# Read when gcsfs is imported. Without it gcsfs asks, by another protocol than the emulator speaks,
# whether the bucket has real folders, and asks for ever.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


TESTBENCH = os.environ.get("GCS_TESTBENCH")


def missing() -> str | None:
    """Why the server cannot be started here; None when it can."""
    if TESTBENCH is None and find_spec("gcp_storage_emulator") is None:
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
    command = (str(program), "start", *where)
    if TESTBENCH is not None:
        command = (TESTBENCH, f"--port={port}")
    with running(command, log) as process:
        wait_until(lambda: answers(port), process, log)
        endpoint = f"http://{HOST}:{port}"
        if TESTBENCH is not None:
            body = json.dumps({"name": BUCKET}).encode()
            url, kind = (
                f"{endpoint}/storage/v1/b?project=test",
                {"Content-Type": "application/json"},
            )
            urlopen(Request(url, body, kind)).close()
        yield Server(
            "gcs",
            "gs",
            endpoint,
            {"endpoint_url": endpoint, "token": "anon", "project": "a-project"},
            {"STORAGE_EMULATOR_HOST": endpoint},
        )
