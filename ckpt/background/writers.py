"""Writers of staged memory: the writer process, or the calling thread in its place.

Both take a `WriteJob` and return a summary. The first save that needs the process starts it, and it
serves all later saves; it ends with the trainer (`ckpt.background.writer_process`).
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from ckpt.background.arena import Arena, set_progress
from ckpt.background.writer_process import IGNORED
from ckpt.errors import StoreError
from ckpt.stores.request_errors import explained_on_disk
from ckpt.transfer.write_job import WriteJob, job_message, read_answer, write_staged
from formats.native.shard import Progress, ShardSummary

POLL_SECONDS = 0.1
"""The time between two calls of a caller's `progress`."""
_START = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from ckpt.background.writer_process import main; main()"
)
"""The process gets the trainer's `sys.path`; `-m` would put a folder before it."""


class WriterProcess:
    """The process, with the trainer's end of the connection to it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        with explained_on_disk("starting", "the process that writes background saves"):
            self._connection, self.process = _started(arena)
        # A forked child, such as a data loader's, would keep the connection open.
        os.register_at_fork(after_in_child=self._connection.close)

    @property
    def is_running(self) -> bool:
        """Whether the process can take a job."""
        return not self._connection.closed and self.process.poll() is None

    def close(self) -> None:
        """Ends the process, and returns once it has ended: soon if it has no job."""
        self._connection.close()
        self.process.wait()

    def write(self, job: WriteJob, progress: Progress | None) -> ShardSummary:
        """Returns the summary of the written file. Raises StoreError if the process fails or ends.

        An exception of `progress` passes through; the process has then ended without its file.
        """
        return self._do(job_message(job), None, progress, f"{job.url}/{job.name}")

    def seal(self, job: bytes, arena: Arena, where: str) -> ShardSummary:
        """As `write`, for a live state's part in `arena`, which goes to the server of this host.

        `job` is a message of `ckpt.live.sealing`; `where` is the file, for errors.
        """
        return self._do(job, arena, None, where)

    def _do(
        self, message: bytes, arena: Arena | None, progress: Progress | None, where: str
    ) -> ShardSummary:
        try:
            answer = self._answer(message, arena, progress)
        except (EOFError, OSError) as error:
            status = self.process.wait()
            raise StoreError(
                f"{where}: the process that writes it ended with status {status} before it was "
                "done; the system log says more if the system ended it, for lack of memory say"
            ) from error
        return read_answer(answer, where)

    def _answer(self, message: bytes, arena: Arena | None, progress: Progress | None) -> bytes:
        """Returns the answer. An error ends the process: its answer would be taken for the next."""
        try:
            self._connection.send_bytes(message)
            if arena is not None:
                send_handle(self._connection, arena.descriptor, self.process.pid)
            _follow(self._connection, self._arena, progress)
            return self._connection.recv_bytes()
        except BaseException:
            self.close()
            raise


def _started(arena: Arena) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Starts the process; returns the trainer's end of the connection to it. Raises OSError."""
    with ExitStack() as stack:
        ours, theirs = Pipe()
        stack.callback(theirs.close)
        # The descriptors are above those of standard input, output and error: if one of these is
        # closed in the trainer, the next file that is opened gets its number.
        descriptors = []
        for number in (theirs.fileno(), arena.descriptor):
            descriptors.append(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3))
            stack.callback(os.close, descriptors[-1])
        # A signal to the job may come before the process has said that it ignores signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, descriptors), *sys.path],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return ours, process


def _follow(connection: Connection, arena: Arena, progress: Progress | None) -> None:
    """Returns once there is an answer, and calls `progress` with the bytes written meanwhile."""
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
    """As `WriterProcess.write`, by the calling thread."""
    told = 0

    def advance(done_bytes: int) -> None:
        nonlocal told
        set_progress(arena.head(), done_bytes)
        told = _tell(progress, told, done_bytes)

    return write_staged(job, data, advance)
