import fcntl
import io
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
from threading import Event, Thread

import pytest

from tools import text
from tools.exit_codes import ExitCode


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


@pytest.mark.thorough
def test_every_long_command_has_one(saved, tmp_path):
    for command in (["diff", str(saved), str(saved)], ["convert", str(saved), str(tmp_path / "x")]):
        code, seen = stderr_at_a_terminal(*command)
        assert code == 0
        assert command[0] in seen


def test_a_pipe_sees_nothing(run, saved):
    assert run("verify", saved).err == ""


class Terminal(io.StringIO):
    """A terminal that tells when something is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.was_written = Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.was_written.set()
        return super().write(text)


def test_a_terminal_sees_that_a_command_waits_for_a_server(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(text, "NOTE_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", terminal)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"live://127.0.0.1:{silent.getsockname()[1]}/policy"

        def end() -> None:
            assert terminal.was_written.wait(60)
            silent.shutdown(socket.SHUT_RDWR)  # resets the connection of the reader
            silent.close()

        ending = Thread(target=end)
        ending.start()
        assert run("ls", f"{place}?token=secret").code == ExitCode.STORE
        ending.join()
    assert terminal.getvalue().startswith(f"ckpt: waiting for {place}")
    assert "secret" not in terminal.getvalue()


@pytest.mark.parametrize("url", ["s3://bucket/run", "run", "file:///run"])
def test_only_a_server_that_has_not_answered_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(text, "_note", None)
    with text.note_of_a_wait([None, 3, ["run", url]]):
        note = text._note
        assert (note is not None and note.is_alive()) == (url == "s3://bucket/run")
        text.has_answered()
    assert note is None or note.finished.is_set()
