"""Server processes of the tests: started on a free port, and surely ended.

A server ends with its `with` block. It ends with the process that started it too, however that one
ends: the kernel kills it then (`PR_SET_PDEATHSIG`), so nothing is left of a test run that was
killed. Servers stay in the foreground for that; a daemon would slip away. They are killed, not
asked: what they hold lies in a temporary folder or in memory.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

HOST = "127.0.0.1"
START_SECONDS = 120
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


class NotInstalled(Exception):
    """A server's program is not on this machine; the message says how it gets there."""


class DidNotStart(Exception):
    """A server that is installed did not come up; the message has the end of its log."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to a file; killed in the end with all that it started."""
    parent = os.getpid()

    def die_with_parent() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when `ready` says so. Raises DidNotStart when the process ends or is too slow."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            ended = process.poll()
            why = f"did not answer in {START_SECONDS} s" if ended is None else f"ended: {ended}"
            raise DidNotStart(f"{process.args!r} {why}; {log} ends:\n{tail(log)}")
        time.sleep(0.02)


def answers(port: int, path: str = "/") -> bool:
    """True when an HTTP server there answers anything at all."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
