"""Who writes what was staged: a process of our own, or this thread where no other can.

Both take a `WriteJob` and give a summary. The process is started with the first save that needs it,
and serves all later ones; it ends with this one (`ckpt.background.writer_process`).
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from ckpt.background.arena import Arena, set_progress
from ckpt.background.writer_process import IGNORED
from ckpt.errors import StoreError
from ckpt.transfer.write_job import WriteJob, job_message, read_answer, write_staged
from formats.native.shard import Progress, ShardSummary

POLL_SECONDS = 0.1
"""How often a caller who wants to see progress is told of it."""
_START = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from ckpt.background.writer_process import main; main()"
)
"""The trainer's own path finds the same packages; a module to run would put a folder before it."""


class WriterProcess:
    """The process, with the trainer's end of the connection to it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._connection, theirs = Pipe()
        # Above standard input, output and error, which are the process's own: one that is closed in
        # the trainer leaves its number to the next.
        descriptors = [
            fcntl.fcntl(found, fcntl.F_DUPFD_CLOEXEC, 3)
            for found in (theirs.fileno(), arena.descriptor)
        ]
        # The job may be signalled before the process can say that it ignores that.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, *map(str, descriptors), *sys.path],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
            for descriptor in descriptors:
                os.close(descriptor)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # A forked child, such as a data loader's, would keep the connection open.
        os.register_at_fork(after_in_child=self._connection.close)

    @property
    def is_running(self) -> bool:
        """Whether it can be given a job."""
        return not self._connection.closed and self.process.poll() is None

    def close(self) -> None:
        """Return when it has ended, which it does soon where it has no job."""
        self._connection.close()
        self.process.wait()

    def write(self, job: WriteJob, progress: Progress | None) -> ShardSummary:
        """What it wrote. Raises StoreError where it could not, or has ended.

        What `progress` raises goes through; the process has ended then, without its file.
        """
        where = f"{job.url}/{job.name}"
        try:
            answer = self._answer(job, progress)
        except (EOFError, OSError) as error:
            status = self.process.wait()
            raise StoreError(
                f"{where}: the process that writes it ended with status {status} before it was "
                "done; the system log says more if the system ended it, for lack of memory say"
            ) from error
        return read_answer(answer, where)

    def _answer(self, job: WriteJob, progress: Progress | None) -> bytes:
        """Its answer; a process whose answer nobody took would give it to the next job."""
        try:
            self._connection.send_bytes(job_message(job))
            _follow(self._connection, self._arena, progress)
            return self._connection.recv_bytes()
        except BaseException:
            self.close()
            raise


def _follow(connection: Connection, arena: Arena, progress: Progress | None) -> None:
    """Return when there is an answer; `progress` is told of what was written meanwhile."""
    told = 0
    while not connection.poll(None if progress is None else POLL_SECONDS):
        told = _tell(progress, told, arena.progress())
    _tell(progress, told, arena.progress())


def _tell(progress: Progress | None, told: int, done: int) -> int:
    if progress is not None and done > told:
        progress(done - told)
    return done


def write_here(
    job: WriteJob, data: memoryview, arena: Arena, progress: Progress | None
) -> ShardSummary:
    """The same by the calling thread."""
    told = 0

    def advance(done_bytes: int) -> None:
        nonlocal told
        set_progress(arena.head(), done_bytes)
        told = _tell(progress, told, done_bytes)

    return write_staged(job, data, advance)
