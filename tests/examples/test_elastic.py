"""A run under torchrun's elastic agents whose workers and hosts are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_elastic_run_goes_on_by_itself_when_workers_and_hosts_are_killed() -> None:
    command = [sys.executable, str(EXAMPLES / "elastic_kills.py"), "--kills", "4", "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on [2, 3] ranks" in done.stdout
