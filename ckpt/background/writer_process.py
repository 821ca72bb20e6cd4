"""The process that writes staged memory to files: no torch, no part in training.

`ckpt.background.writers` starts it with one end of a connection and the arena. It is a process and
not a thread, because a thread that hashes and writes takes the interpreter's lock again for every
chunk, each time from the training loop, and because only a process has a priority of its own.

Rules:

1. It yields to the training: `CKPT_WRITER_NICE` is its niceness, `NICE` by default, and where the
   disk's scheduler knows classes it is in the idle one. It stays in the trainer's session, because
   Linux may weigh niceness within a session only.
2. It ends when the trainer's end of the connection is closed, however that came about, and removes
   the file it was writing. Signals to the whole job do not end it: the trainer may want to finish.
3. One job at a time; each has one answer.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
from contextlib import suppress
from mmap import mmap
from multiprocessing.connection import Connection
from queue import SimpleQueue

from ckpt.background.arena import HEAD_BYTES, mapped, set_progress
from ckpt.transfer.write_job import error_message, read_job, summary_message, write_staged

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Of a whole job; `ckpt.background.writers` starts this process with them blocked."""
NICE = 15
"""Takes 4 % of a core that the training wants; 10 takes 11 %, and 19 2 %, which takes long."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Numbers of the system call, by machine."""
_IDLE_CLASS = 3 << 13  # <linux/ioprio.h>


class AbandonedError(Exception):
    """Whoever wanted the file is gone."""


def main() -> None:
    """Write until the connection ends; `argv` has its descriptor and the arena's."""
    connection, arena = Connection(int(sys.argv[1])), int(sys.argv[2])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _yield_to_training()  # before there are threads: each has a niceness of its own
    jobs: SimpleQueue[bytes | None] = SimpleQueue()
    is_abandoned = threading.Event()
    worker = threading.Thread(target=_work, args=(connection, arena, jobs, is_abandoned))
    worker.start()
    with suppress(EOFError, OSError):
        while True:
            jobs.put(connection.recv_bytes())
    is_abandoned.set()
    jobs.put(None)
    worker.join()


def _work(
    connection: Connection,
    arena: int,
    jobs: SimpleQueue[bytes | None],
    is_abandoned: threading.Event,
) -> None:
    memory: mmap | None = None

    def advance(done_bytes: int) -> None:
        if is_abandoned.is_set():
            raise AbandonedError
        assert memory is not None
        set_progress(memory, done_bytes)

    while (message := jobs.get()) is not None:
        try:
            if memory is None or len(memory) != os.fstat(arena).st_size:
                memory = mapped(arena)
            summary = write_staged(read_job(message), memoryview(memory)[HEAD_BYTES:], advance)
            answer = summary_message(summary)
        except AbandonedError:
            return
        except Exception as error:
            answer = error_message(error)
        with suppress(OSError):
            connection.send_bytes(answer)


def _yield_to_training() -> None:
    wanted = os.environ.get("CKPT_WRITER_NICE", "")
    with suppress(OSError):
        os.nice(int(wanted) if wanted.isdecimal() else NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IDLE_CLASS)  # a hint: what it returns is ignored
