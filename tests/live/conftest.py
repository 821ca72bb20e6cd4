"""Host servers of a test, whose descriptors, processes and sockets are counted afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.hosts import (
    Hosts,
    check_no_more_descriptors,
    descriptors_of,
    is_running,
    until,
)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the sockets of this test."""
    folder = tmp_path / "runtime"
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def hosts(runtime: Path) -> Iterator[Hosts]:
    """Servers. After the test, none runs, no socket is there, and no descriptor is left open."""
    before = descriptors_of()
    found = Hosts()
    try:
        yield found
    finally:
        found.stack.close()
    until(lambda: not any(map(is_running, found.pids)))
    assert [path.name for path in runtime.glob("*") if path.name != "lock"] == []
    check_no_more_descriptors(before)
