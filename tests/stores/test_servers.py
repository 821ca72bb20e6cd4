"""The servers of the tests: that they come, and that nothing of them stays."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores import moto_server
from tests.stores.child import DidNotStart, running, wait_until
from tests.stores.fixtures import STARTERS
from tests.stores.server import Server, s3_client

STARTS_AND_WAITS = """
import sys
from pathlib import Path
from tests.stores.child import running
with running(["sleep", "600"], Path(sys.argv[1])) as process:
    print(process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("name", STARTERS)
def test_a_server_answers(servers: Callable[[str], Server], name: str) -> None:
    assert servers(name).url("run") == f"{servers(name).protocol}://checkpoints/run"


def test_a_server_outlives_no_process_that_started_it(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTS_AND_WAITS, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    with starter.stdin, starter.stdout:
        child = os.pidfd_open(int(starter.stdout.readline()))
        try:
            starter.send_signal(signal.SIGKILL)
            starter.wait()
            ended = select.poll()
            ended.register(child, select.POLLIN)
            assert ended.poll(30_000)
        finally:
            os.close(child)


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        running(["sh", "-c", "echo the reason; exit 3"], log) as process,
        pytest.raises(DidNotStart, match=r"(?s)ended: 3.*the reason"),
    ):
        wait_until(lambda: False, process, log)


@pytest.mark.thorough
def test_a_new_server_has_an_empty_bucket(tmp_path: Path) -> None:
    with moto_server.started(tmp_path) as server:
        listing = s3_client(server).list_objects_v2(Bucket=server.bucket)
        assert listing["KeyCount"] == 0
