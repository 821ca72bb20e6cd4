"""The script in docs/runs.md: what a new user's own script becomes by the lines with a plus."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckpt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "runs.md"
IN_FOLDER = "import os, sys; os.chdir(sys.argv[1])\n"


def scripts() -> tuple[str, str]:
    """The script before and after the change."""
    [block] = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = block.splitlines()
    assert {line[:1] for line in lines} <= {" ", "+", "-", ""}
    added, removed = (sum(line[:1] == sign for line in lines) for sign in "+-")
    assert (added - removed, removed) == (6, 1)
    before, after = (
        "\n".join(line[1:] for line in lines if line[:1] != sign) + "\n" for sign in "+-"
    )
    return before, after


def test_a_script_of_thirty_lines_becomes_resumable_by_six(
    programs: Callable[..., Any], tmp_path: Path
) -> None:
    before, after = scripts()
    assert 25 <= len(before.splitlines()) <= 32
    undisturbed, told = programs(IN_FOLDER + before, tmp_path).communicate()
    assert told == ""
    losses = undisturbed.splitlines()
    assert len(losses) == 20

    killed = programs(IN_FOLDER + after, tmp_path)
    seen = [killed.stdout.readline().strip() for _ in range(7)]
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert seen == losses[:7]

    resumed, told = programs(IN_FOLDER + after, tmp_path).communicate()
    assert told == ""
    rest = resumed.splitlines()
    assert rest == losses[-len(rest) :]
    assert 13 <= len(rest) < 20  # the checkpoint of the last epoch may not have been committed
    steps = [one.step for one in ckpt.run_steps(tmp_path / "runs" / "sine")]
    assert steps[:3] == [20, 19, 18]
    assert len(steps) <= 4  # the script ends without close(), so nothing goes after its last save

    again, told = programs(IN_FOLDER + after, tmp_path).communicate()
    assert (again, told) == ("", "")
