import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt
from tools.exit_codes import ExitCode
from tools.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints."""
    for step in (9, 10):
        ckpt.save(tmp_path / f"step-{step}", {"w": torch.full((9,), float(step))})
    return tmp_path


def test_the_path_stands_alone_on_a_line(run, capsys):
    assert main(["latest", str(run)]) == ExitCode.FINE
    assert capsys.readouterr() == (f"{run}/step-10\n", "")


def test_json_has_the_path_and_what_was_skipped(run, capsys):
    (run / "step-10" / "manifest.json").write_bytes(b"{")
    assert main(["latest", "--json", str(run)]) == ExitCode.FINE
    found = json.loads(capsys.readouterr().out)
    assert found["latest"] == f"{run}/step-9"
    assert [(one["url"], one["kind"]) for one in found["skipped"]] == [
        (f"{run}/step-10", "corrupt")
    ]


def test_what_is_skipped_is_told_on_stderr(run, capsys):
    (shard,) = (run / "step-10").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-25] ^= 1
    shard.write_bytes(data)
    assert main(["latest", str(run)]) == ExitCode.FINE
    assert capsys.readouterr().out == f"{run}/step-10\n"
    assert main(["latest", "--verify", str(run)]) == ExitCode.FINE
    out, err = capsys.readouterr()
    assert out == f"{run}/step-9\n"
    assert err.startswith(f"ckpt: skipped: {shard}: w: bytes ")


def test_the_exit_code_says_whether_there_is_none_or_none_that_is_sound(run, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert main(["latest", str(tmp_path / "empty")]) == ExitCode.NOT_A_CHECKPOINT
    for shard in run.glob("*/*.safetensors"):
        shard.unlink()
    assert main(["latest", str(run)]) == ExitCode.DAMAGED
    out, err = capsys.readouterr()
    assert out == ""
    assert "none of the 2 checkpoints in it is sound" in err


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [b"step\xe3\x80\x801", "fam\U0001f469\u200d\U0001f467".encode(), b"a\nb", b"\xff\xfe"]
)
def test_a_program_gets_the_path_byte_for_byte(tmp_path, name):
    ckpt.save(tmp_path / os.fsdecode(name), {"w": torch.ones(2)})
    command = [sys.executable, "-m", "ckpt", "latest", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (ExitCode.FINE, b"")
    assert ended.stdout == os.fsencode(tmp_path) + b"/" + name + b"\n"


def test_a_person_gets_text_that_a_terminal_takes_for_no_command(tmp_path):
    ckpt.save(tmp_path / "a\x1b[2J", {"w": torch.ones(2)})
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "ckpt", "latest", str(tmp_path)]
    subprocess.run(command, stdout=theirs, check=True)
    shown = os.read(ours, 4096)
    assert shown.strip() == os.fsencode(tmp_path) + rb"/a\x1b[2J"
    os.close(ours)
    os.close(theirs)
