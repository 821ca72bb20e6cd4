"""Writers of staged memory: the writer process, or the calling thread in its place.

Both take a `WriteJob` and return a summary. The first save that needs the process starts it, and it
serves all later saves; it ends with the trainer (`ckpt.saving.writer_process`).

The arena and the writer process that background saves share.

All saves to stores share one arena writer. Each live state has its own, and two arenas in turn.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

import torch

from ckpt.errors import CkptError, StoreError
from ckpt.saving.agreement import SaveAttempt
from ckpt.saving.arena import Arena, set_progress
from ckpt.saving.staging import page_lock, release
from ckpt.saving.writer_process import IGNORED
from ckpt.stores.local_files import explained_on_disk
from ckpt.stores.store import Options, place_elsewhere
from ckpt.transfer.write_job import (
    FILLED,
    FREED,
    WriteJob,
    call_message,
    read_answer,
    read_call,
    write_staged,
)
from formats.native.shard import Progress, ShardSummary
from sharding.errors import without_secrets

Fill = Callable[[int], int]
"""Copies waiting bytes into a ring; the argument is the number of bytes that have passed it.

Returns the number of bytes copied so far: all, or more than three quarters of the ring later."""
POLL_SECONDS = 0.1
"""The time between two calls of a caller's `progress`."""
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; from ckpt.saving.writer_process import main; main()"
)
"""The process gets the trainer's `sys.path`; `-m` would put a folder before it."""


class WriterProcess:
    """The process, with the trainer's end of the connection to it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        with explained_on_disk("starting", "the process that writes background saves"):
            self._connection, self.process = _start_process()
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

    def write(
        self, job: WriteJob, progress: Progress | None, fill: Fill | None = None
    ) -> ShardSummary:
        """Returns the summary of the written file. Raises StoreError if the process fails or ends.

        This thread calls `fill` for a job with a ring. An exception of it and of `progress` passes
        through; the process has then ended without its file.
        """
        message = call_message("ckpt.transfer.write_job:write_staged", job)
        return self._do(message, self._arena, f"{job.url}/{job.name}", progress, fill)

    def call(self, job: bytes, arena: Arena, where: str) -> ShardSummary:
        """As `write`, for a job of another room (`call_message`), with the bytes in `arena`.

        `where` is the place that the job writes to, for errors.
        """
        return self._do(job, arena, where)

    def _do(
        self,
        message: bytes,
        arena: Arena,
        where: str,
        progress: Progress | None = None,
        fill: Fill | None = None,
    ) -> ShardSummary:
        try:
            answer = self._answer(message, arena, progress, fill)
        except (EOFError, OSError) as error:
            if isinstance(error, CkptError):  # of `fill`
                raise
            status = self.process.wait()
            raise StoreError(
                f"{where}: the process that writes it ended with status {status} before it was "
                "done; the system log says more if the system ended it (out of memory?)"
            ) from error
        return read_answer(answer, where)

    def _answer(
        self, message: bytes, arena: Arena, progress: Progress | None, fill: Fill | None
    ) -> bytes:
        """Returns the answer. An error ends the process: its answer would be taken for the next."""
        try:
            self._connection.send_bytes(message)
            send_handle(self._connection, arena.descriptor, self.process.pid)
            freed = reported = 0
            while True:
                if fill is not None:
                    self._connection.send_bytes(b"%b%d" % (FILLED, fill(freed)))
                while not self._connection.poll(None if progress is None else POLL_SECONDS):
                    reported = _tell(progress, reported, self._arena.progress())
                reported = _tell(progress, reported, self._arena.progress())
                answer = self._connection.recv_bytes()
                if not answer.startswith(FREED):
                    return answer
                freed = int(answer[len(FREED) :])
        except BaseException:
            self.close()
            raise


def _start_process() -> tuple[Connection, subprocess.Popen[bytes]]:
    """Starts the process; returns the trainer's end of the connection to it. Raises OSError."""
    with ExitStack() as stack:
        ours, theirs = Pipe()
        stack.callback(theirs.close)
        # The descriptor is above those of standard input, output and error: if one of these is
        # closed in the trainer, the next file that is opened gets its number.
        descriptor = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
        stack.callback(os.close, descriptor)
        # A signal to the job may come before the process has said that it ignores signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(descriptor), *sys.path],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return ours, process


def _tell(progress: Progress | None, reported: int, done: int) -> int:
    if progress is not None and done > reported:
        progress(done - reported)
    return done


def write_here(
    job: WriteJob,
    data: memoryview,
    arena: Arena,
    progress: Progress | None,
    fill: Fill | None = None,
) -> ShardSummary:
    """As `WriterProcess.write`, by the calling thread."""
    told = 0

    def advance(done_bytes: int) -> None:
        nonlocal told
        set_progress(arena.head(), done_bytes)
        told = _tell(progress, told, done_bytes)

    def pass_on(freed: int, needed: int) -> None:
        if fill is not None:
            fill(freed)

    return write_staged(job, data, advance, pass_on)


class ArenaWriter:
    """The arena, and the process that writes from it."""

    def __init__(self, arena: Arena | None = None) -> None:
        self.arena = arena or new_arena()
        self._writer: WriterProcess | None = None
        self._preparing: threading.Thread | None = None
        atexit.register(self.close)

    def writer(self) -> WriterProcess:
        """Returns the writer process, started anew if there is none."""
        if self._writer is not None and not self._writer.is_running:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = WriterProcess(self.arena)
        return self._writer

    def reserve(self, nbytes: int) -> memoryview:
        """Returns the arena's memory for so many bytes, once preparations have ended."""
        self.wait_prepared()
        return self.arena.reserve(nbytes)

    def prepare(self, nbytes: int, workers: int, device: torch.device | None) -> None:
        """Lets another thread reserve and touch so many bytes, and start a writer.

        `workers` threads touch the bytes, which are page-locked for a `device`. Called while no
        save uses the arena.
        """
        self.wait_prepared()

        def work() -> None:
            with suppress(OSError, RuntimeError):  # the save tries again, and tells of the error
                data = self.arena.reserve(nbytes)
                self.arena.touch(workers)
                self.writer()
                if device is not None:
                    page_lock(data, device)

        thread = threading.Thread(target=work, name="ckpt-prepare", daemon=True)
        with suppress(RuntimeError):  # no thread can be started: the interpreter may be ending
            thread.start()
            self._preparing = thread

    def wait_prepared(self) -> None:
        """Returns once preparations have ended."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def use(self, arena: Arena) -> None:
        """Stages the next saves in another arena."""
        self.wait_prepared()
        self.arena = arena

    def close(self) -> None:
        """Ends the writer, and waits for its end."""
        self.wait_prepared()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def new_arena(is_sealed: bool = False) -> Arena:
    """Returns an arena that copies from devices can use; `is_sealed` as for `Arena`."""
    return Arena(before_remapping=release, is_sealed=is_sealed)


_arena_writer: ArenaWriter | None = None


def arena_writer() -> ArenaWriter:
    """Returns the arena writer of this process; a forked child makes its own."""
    global _arena_writer
    if _arena_writer is None:
        _arena_writer = ArenaWriter()
        os.register_at_fork(after_in_child=_leave_it_to_the_parent)
    return _arena_writer


def _leave_it_to_the_parent() -> None:
    global _arena_writer
    if _arena_writer is not None:
        atexit.unregister(_arena_writer.close)
    _arena_writer = None


@dataclass(frozen=True, slots=True)
class CommittedSave:
    """A save that is committed, with this rank's bytes still in memory."""

    url: str
    options: Mapping[str, Any] = field(repr=False)
    attempt: SaveAttempt
    data: memoryview | Callable[[int, memoryview], None]
    """The bytes, or a function that fills memory with those from a place on."""
    arena_writer: ArenaWriter | None = None
    """The arena that has the bytes, and its writer."""

    def call(self, function: str, job: object, place: str, options: Options) -> ShardSummary:
        """Returns the result of a function that writes to a place with the bytes (`call_message`).

        The writer process calls it if it reaches the places, and has the bytes; else this thread.
        """
        message, writer = call_message(function, job), None
        places = ((self.url, self.options), (place, options or {}))
        if self.arena_writer is not None and all(place_elsewhere(*each) for each in places):
            with suppress(StoreError):
                writer = self.arena_writer.writer()
        if writer is not None and self.arena_writer is not None:
            return writer.call(message, self.arena_writer.arena, without_secrets(place))
        called, job = read_call(message)
        return called(job, self.data, -1, lambda nbytes: None)
