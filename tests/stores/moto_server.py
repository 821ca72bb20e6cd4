"""An S3 server in one Python process: moto, quick to start and everywhere to be had.

It honours conditions, ranges and multipart uploads but checks no signatures, keeps objects in
memory, and reads the whole object for every range of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.stores.child import HOST, NotInstalled, answers, free_ports, running, wait_until
from tests.stores.server import Server, s3_server


def missing() -> str | None:
    """Why the server cannot be started here; None when it can."""
    absent = [name for name in ("moto", "flask", "flask_cors") if find_spec(name) is None]
    if not absent:
        return None
    return f"moto's server is not installed ({', '.join(absent)}): pip install -e '.[test]'"


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    """The server with an empty bucket; its log goes to the folder."""
    reason = missing()
    if reason is not None:
        raise NotInstalled(reason)
    (port,) = free_ports(1)
    log = folder / "moto.log"
    # Its log has a line for every request: nobody reads it, and long tests make it huge.
    quiet = "import logging, moto.server; logging.disable(); moto.server.main()"
    command = (sys.executable, "-W", "ignore", "-c", quiet, "-H", HOST, "-p", str(port))
    with running(command, log) as process:
        wait_until(lambda: answers(port, "/moto-api/"), process, log)
        yield s3_server("moto", port, "test-key", "test-secret")
