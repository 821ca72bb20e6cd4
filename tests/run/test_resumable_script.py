"""The scripts in docs/runs.md: a new user's own with the lines with a plus, and that of SLURM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.thorough
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


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=2 "$@" & tasks[$i]=$!; done
echo "${tasks[@]}"
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "${status:-0}"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "again $2"; fi
"""
TRAIN = """
import time, ckpt, torch
import torch.distributed as dist

def train(step):
    state["w"] += 1
    if step < 4 and dist.get_rank() == 0:
        print(f"step {step}", flush=True)
    time.sleep(0.01)

if first_fails:
    raise SystemExit(3)
dist.init_process_group("gloo")
state = {"w": torch.zeros(4)}
"""


@pytest.mark.slow
def test_the_batch_script_saves_on_its_signal_is_queued_again_and_ends_with_its_last_step(
    tmp_path: Path,
) -> None:
    page = PAGE.read_text()
    [batch] = re.findall(r"```sh\n(#!/bin/bash.*?)```", page, re.DOTALL)
    [loop] = re.findall(r"```python\n(keep = ckpt.Keep\(last=3\)\n.*?)```", page, re.DOTALL)
    tools = tmp_path / "bin"
    tools.mkdir()
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", python)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    job_id = str(os.getpid())  # which gives the port
    (tmp_path / "job.sh").write_text(batch.replace("100000", "900"))
    loop = loop.replace("100_000", "900").replace("100_001", "901")
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": job_id}
    env |= {"PYTHONPATH": os.pathsep.join([str(PAGE.parents[1]), *sys.path])}

    def begun(fails: bool = False) -> subprocess.Popen[str]:
        text = TRAIN.replace("first_fails", str(fails)) + loop
        (tmp_path / "train.py").write_text(text)
        command = ["bash", "job.sh"]
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)

    job = begun()
    assert job.stdout is not None
    tasks, *steps = [job.stdout.readline().strip() for _ in range(4)]
    assert steps == ["step 1", "step 2", "step 3"]  # both ranks have made their Checkpointer
    for task in tasks.split():
        os.kill(int(task), signal.SIGUSR1)
    out, _ = job.communicate()
    assert (job.returncode, out.splitlines()[-1]) == (0, f"again {job_id}")
    [saved] = [one.step for one in ckpt.run_steps(tmp_path / "runs" / "gpt")]
    assert 1 < saved < 900
    job = begun()
    out, _ = job.communicate()
    assert (job.returncode, "again" in out, "step" in out) == (0, False, False)
    assert [one.step for one in ckpt.run_steps(tmp_path / "runs" / "gpt")] == [900, saved]
    job = begun(fails=True)
    out, _ = job.communicate()
    assert (job.returncode, "again" in out) == (3, False)
