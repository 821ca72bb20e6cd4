"""The process that writes staged memory to files: no torch, no part in training.

`ckpt.saving.writers` starts the process with one end of a connection and the arena. A thread
would take the interpreter's lock from the training loop for every chunk that it hashes and writes,
and would have no priority of its own.

Rules:

1. The process yields to the training: `CKPT_WRITER_NICE` is its niceness, `NICE` by default, and it
   is in the idle class of disk schedulers that have classes. It stays in the trainer's session,
   because Linux may weigh niceness within a session only.
2. The process ends when the trainer's end of the connection is closed in any way, and removes the
   file that it is writing. It ignores signals to the whole job: the trainer may want to finish.
3. The process does one job at a time, and gives one answer to each. Each job comes with its arena.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from queue import SimpleQueue

from ckpt.saving.arena import HEAD_BYTES, map_memory, set_progress
from ckpt.transfer.write_job import (
    FILLED,
    FREED,
    WriteJob,
    error_message,
    read_call,
    summary_message,
    write_staged,
)
from formats.native.shard import ShardSummary

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals to a whole job; `ckpt.saving.writers` starts this process with them blocked."""
NICE = 15
"""Takes 4 % of a core that the training needs; 10 takes 11 %, and 19 takes 2 %, a slow save."""
KNOWN_ARENAS = 2
"""The arenas that stay mapped: as many as a live state has."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of the system call, by machine."""
_IDLE_CLASS = 3 << 13  # <linux/ioprio.h>


Filled = SimpleQueue[int]
"""The trainer's answers to the messages of one job about its ring."""


class AbandonedError(Exception):
    """The trainer that wanted the file has ended."""


def main() -> None:
    """Does jobs until the connection ends, whose descriptor is in `argv`."""
    connection = Connection(int(sys.argv[1]))
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _yield_to_training()  # before any thread starts: each thread has a niceness of its own
    jobs: SimpleQueue[tuple[bytes, int, Filled] | None] = SimpleQueue()
    filled: Filled = SimpleQueue()
    is_abandoned = threading.Event()
    worker = threading.Thread(target=_work, args=(connection, jobs, is_abandoned))
    worker.start()
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv_bytes()
            if message.startswith(FILLED):
                filled.put(int(message[len(FILLED) :]))
                continue
            filled = SimpleQueue()  # of this job: a failed one leaves messages
            jobs.put((message, recv_handle(connection), filled))
    is_abandoned.set()
    filled.put(0)
    jobs.put(None)
    worker.join()


def _work(
    connection: Connection,
    jobs: SimpleQueue[tuple[bytes, int, Filled] | None],
    is_abandoned: threading.Event,
) -> None:
    known: dict[int, memoryview] = {}

    def do(message: bytes, arena: int, filled: Filled) -> ShardSummary:
        memory = _memory(arena, known)

        def advance(done_bytes: int) -> None:
            if is_abandoned.is_set():
                raise AbandonedError
            set_progress(memory, done_bytes)

        copied = 0

        def pass_on(freed: int, needed: int) -> None:
            nonlocal copied
            connection.send_bytes(b"%b%d" % (FREED, freed))
            while copied < needed:
                copied = filled.get()
                if is_abandoned.is_set():
                    raise AbandonedError

        function, job = read_call(message)
        if isinstance(job, WriteJob):
            return write_staged(job, memory[HEAD_BYTES:], advance, pass_on)
        return function(job, memory[HEAD_BYTES:], arena, advance)

    while (task := jobs.get()) is not None:
        try:
            answer = summary_message(do(*task))
        except AbandonedError:
            return
        except Exception as error:
            answer = error_message(error)
        finally:
            os.close(task[1])
        with suppress(OSError):
            connection.send_bytes(answer)


def _memory(arena: int, known: dict[int, memoryview]) -> memoryview:
    """Returns the mapping of an arena; `known` has the last ones by the numbers of their files."""
    about = os.fstat(arena)
    memory = known.pop(about.st_ino, None)
    if memory is None or len(memory) != about.st_size:
        memory = map_memory(arena)
    while len(known) >= KNOWN_ARENAS:
        del known[next(iter(known))]
    known[about.st_ino] = memory
    return memory


def _yield_to_training() -> None:
    wanted = os.environ.get("CKPT_WRITER_NICE", "")
    with suppress(OSError):
        os.nice(int(wanted) if wanted.isdecimal() else NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IDLE_CLASS)  # a hint: its result is ignored
