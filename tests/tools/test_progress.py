import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios


def stderr_at_a_terminal(*arguments: str) -> tuple[int, str]:
    """What the command writes to its stderr where that is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "ckpt", *arguments]
    # Our end of it stays open until all is read, and a few bars fit into its buffer.
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=False)
    os.set_blocking(ours, False)
    seen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    return ended.returncode, seen


def test_a_terminal_sees_a_bar(saved):
    code, seen = stderr_at_a_terminal("verify", str(saved))
    assert code == 0
    assert "verify" in seen
    assert "%" in seen


def test_every_long_command_has_one(saved, tmp_path):
    for command in (["diff", str(saved), str(saved)], ["convert", str(saved), str(tmp_path / "x")]):
        code, seen = stderr_at_a_terminal(*command)
        assert code == 0
        assert command[0] in seen


def test_a_pipe_sees_nothing(run, saved):
    assert run("verify", saved).err == ""
