"""A process that has imported everything and is forked for each rank of each trial.

Started with the address of a socket. A job is a `Job`; its answer is one `Ended` for each rank,
given when every process of the job is gone, writers and all.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Client
from typing import Any

SUBREAPER = 36  # <linux/prctl.h>
LIMIT_SECONDS = 90.0
"""After which a job is ended, and counts as one that hangs."""


@dataclass(frozen=True)
class Job:
    """One command, by as many ranks as it takes."""

    name: str
    """Of a function in tests/faults/commands.py."""
    arguments: dict[str, Any]
    world_size: int
    folder: str
    """What is watched."""
    scratch: str
    """An empty folder for the job's own files."""
    kill: Any = None
    group_seconds: float = 20.0
    watched: bool = True
    together: bool = True
    """Whether the ranks are a process group; else each is a job of its own."""
    faults: tuple[int, float, bool] | None = None
    """A seed and a probability for `faulty_store`, and whether stores may lie as well."""


@dataclass(frozen=True)
class Ended:
    """How one rank's process ended."""

    status: int
    """Its exit status, negative for a signal; 0 also where the command raised."""
    error: str
    """The class of what it raised, or nothing."""
    message: str
    seconds: float
    faults: int = 0
    """How many its stores have met."""
    result: Any = None
    """What the command returned."""
    lied: bool = False
    """Whether a store has written something else than it was told to, and not said so."""


def main() -> None:
    """Serve jobs until the connection ends."""
    from tests.faults import commands, faulty_store, steps

    faulty_store.import_all()
    with suppress(ImportError):  # what the first request would import
        import_module("s3fs")
        import_module("aiobotocore.session")
    gc.collect()
    gc.freeze()  # a rank collects only its own garbage
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    with Client(sys.argv[1], family="AF_UNIX") as connection:
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            connection.send(_done(job, commands, steps))


def _done(job: Job, commands: Any, steps: Any) -> list[Ended]:
    processes: list[int] = []
    for rank in range(job.world_size):
        leader = processes[0] if processes else 0
        process = os.fork()
        if process == 0:
            os.setpgid(0, leader)
            _be_rank(job, rank, commands, steps)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(process, leader or process)
        processes.append(process)
    statuses: dict[int, int] = {}
    limit = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if process:
            statuses[process] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > limit:
            for one in {*processes, *_children()}:
                os.kill(one, signal.SIGKILL)
        else:
            time.sleep(0.002)
    return [
        _ended(f"{job.scratch}/outcome{rank}", statuses[process])
        for rank, process in enumerate(processes)
    ]


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def _ended(outcome: str, status: int) -> Ended:
    try:
        with open(outcome) as file:
            return Ended(status, **json.load(file))
    except FileNotFoundError:
        return Ended(status, "", "", 0.0)


def _be_rank(job: Job, rank: int, commands: Any, steps: Any) -> None:
    import torch.distributed as dist

    from ckpt.saving import writers
    from tests.faults.faulty_store import HONEST, Fault, Faults, failing, seeded

    try:
        os.environ["RANK"] = str(rank)
        log = os.open(f"{job.scratch}/stderr{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
        watching = steps.Watching(
            f"rank{rank}", job.folder, f"{job.scratch}/steps", job.kill, os.getpgrp()
        )
        if job.world_size > 1 and job.together:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{job.scratch}/meeting",
                rank=rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=job.group_seconds),
            )
            dist.barrier()
        if job.watched:
            os.environ[steps.VARIABLE] = steps.for_writer(watching)
            hook = "from tests.faults.steps import watch_writer; watch_writer(); "
            head, tail = writers._START.split("; ", 2)[:2], writers._START.split("; ", 2)[2]
            writers._START = "; ".join(head) + "; " + hook + tail
            steps.watch(watching)
        started = time.monotonic()
        found: dict[str, Any] = {"error": "", "message": ""}
        seed, probability, lies = job.faults or (0, 0.0, False)
        kinds = [*HONEST, Fault.FLIP, Fault.CUT] if lies else HONEST
        schedule = seeded(seed + rank, probability, kinds)
        with ExitStack() as stack:
            faults = stack.enter_context(failing(schedule)) if job.faults else Faults(schedule)
            try:
                found["result"] = getattr(commands, job.name)(**job.arguments)
            except BaseException as error:
                traceback.print_exc()
                found |= {"error": type(error).__name__, "message": str(error)}
        found |= {"faults": len(faults.met), "lied": faults.lied}
        with open(f"{job.scratch}/outcome{rank}", "w") as file:
            json.dump({**found, "seconds": time.monotonic() - started}, file)
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    os._exit(0)
