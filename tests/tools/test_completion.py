"""What a shell is told when somebody presses Tab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {"ls", "inspect", "verify", "diff", "convert", "latest", "rm", "gc", "completion"}
CODE = "import sys; from ckpt.__main__ import main; sys.exit(main())"


def completions(line: str, folder: Path) -> set[str]:
    """The words that a shell is offered at the end of a line."""
    answer = folder / "answer"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\v",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run([sys.executable, "-c", CODE], env=environment, check=True, timeout=60)
    return {word.strip() for word in answer.read_text().split("\v")}


@pytest.mark.thorough
def test_commands_options_and_their_values_are_offered(tmp_path: Path) -> None:
    assert completions("ckpt ", tmp_path) >= COMMANDS
    assert completions("ckpt completion ", tmp_path) == {"bash", "zsh", "fish"}
    assert {"--keep", "--dry-run", "--missing-ok"} <= completions("ckpt rm --", tmp_path)
    assert completions("ckpt convert a b --to s", tmp_path) == {"safetensors"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_one_that_it_can_read(run, tmp_path: Path, shell: str) -> None:
    ended = run("completion", shell)
    assert ended.code == 0
    assert "ckpt" in ended.out
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here to read the script")
    (tmp_path / "script").write_text(ended.out)
    subprocess.run([program, "-n", str(tmp_path / "script")], check=True, timeout=60)


def test_another_shell_is_refused_by_name(run) -> None:
    ended = run("completion", "tcsh")
    assert ended.code == 2
    assert "bash" in ended.err
