"""A training beside a live state: a step while others read, and a resume from memory."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path

import measure
import report
import torch
import torch.distributed as dist
from live_job import COLUMNS, TENSORS, Job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt


def beside_training(nbytes: int, rounds: int, store: str) -> list[list[str]]:
    """The rows of a step beside readers, and of a resume."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=store) as folder:
        rows = []
        for has_own_core in (False, True):
            given = nbytes, rounds, f"{folder}/flag", has_own_core
            found = measure.on_ranks(2, steps_beside_readers, *given)[0]
            where = ", the step has its own core" if has_own_core else ""
            for at, does in ((1, "loads"), (2, "copies")):
                pairs = [(one[0], one[at]) for one in found]
                what = f"a step, another job {does} all the time{where}"
                rows.append([what, *_ratio(pairs, "alone")])
        report.say("steps are done")
        with suppress(BrokenProcessPool):
            measure.on_ranks(2, train_and_die, nbytes, f"{folder}/run")
        report.say("trainers are killed")
        resumed = measure.on_ranks(2, resume, nbytes, f"{folder}/run", rounds)
        slowest = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in zip(*resumed, strict=True)]
        back = [(disk, near) for near, disk in slowest]
        rows.append(["a resume from memory after kill -9", *_ratio(back, "from disk, cold cache")])
    return rows


def steps_beside_readers(
    nbytes: int, rounds: int, flag: str, has_own_core: bool
) -> list[tuple[float, float, float]]:
    """On the trainer: the seconds of a step alone, beside loads, and beside plain copies.

    The other rank loads the state all the time, or copies as many bytes of its own memory: what the
    memory of the machine makes of any reader. If the trainer has its own core, the reader and the
    server share the others.
    """
    job = Job(nbytes, 1, 1)
    copies = [one.clone() for one in job.locals]
    cores = sorted(os.sched_getaffinity(0))
    if has_own_core:
        os.sched_setaffinity(0, cores[1:])  # which the server that `open` starts inherits
    job.open()
    if has_own_core and job.is_trainer:
        os.sched_setaffinity(0, cores[:1])
    size, found = 512, []
    left, right = torch.rand(size, size), torch.rand(size, size)

    def steps() -> float:
        times = []
        for _ in range(60):
            started = time.perf_counter()
            for _ in range(4):
                torch.mm(left, right)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def copy() -> None:
        for one, other in zip(job.locals, copies, strict=True):
            other.copy_(one)

    for _ in range(rounds):
        times = []
        for beside in (None, job.load, copy):
            dist.barrier()
            if job.rank == 0:
                if beside is not None:
                    time.sleep(0.2)
                times.append(steps())
                Path(flag).touch()
            elif beside is not None:
                while not os.path.exists(flag):
                    beside()
            dist.barrier()
            with suppress(FileNotFoundError):
                os.unlink(flag)
        if job.rank == 0:
            found.append((times[0], times[1], times[2]))
    job.close()
    return found


class _StopError(Exception):
    """Ends a run as a crash does: its memory stays."""


def _run_state(nbytes: int) -> dict[str, object]:
    rows = max(4, nbytes // 4 // COLUMNS // TENSORS // 4 * 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        f"w{at}": distribute_tensor(torch.full((rows, COLUMNS), float(at)), mesh, [Shard(0)])
        for at in range(TENSORS)
    }


def train_and_die(nbytes: int, folder: str) -> None:
    """Saves a step to the disk and to memory; then every rank is killed."""
    run = ckpt.Checkpointer(folder, every_steps=1, memory=ckpt.Memory(), signals=())
    run.save(1, _run_state(nbytes))
    run.wait_until_finished()
    dist.barrier()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def resume(nbytes: int, folder: str, rounds: int) -> list[tuple[float, float]]:
    """The seconds of a restore from memory, and from the disk with a cold cache."""
    state, found = _run_state(nbytes), []

    def restored(memory: ckpt.Memory | None, url: str) -> float:
        for one in state.values():
            assert isinstance(one, DTensor)
            one.to_local().fill_(-1.0)
        dist.barrier()
        started = time.perf_counter()
        with suppress(_StopError), ckpt.Checkpointer(url, memory=memory, signals=()) as run:
            assert run.restore(state) == 1
            dist.barrier()
            seconds = time.perf_counter() - started
            raise _StopError
        for at, one in enumerate(state.values()):
            assert isinstance(one, DTensor)
            assert bool((one.to_local() == float(at)).all())
        return seconds

    for memory in (None, ckpt.Memory()):  # the first of each imports modules
        restored(memory, folder)
    for _ in range(rounds):
        near = restored(ckpt.Memory(), folder)
        os.sync()
        for file in Path(folder, "step-1").iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        found.append((near, restored(None, folder)))
    with ckpt.Checkpointer(folder, memory=ckpt.Memory(), signals=()) as run:
        run.restore(state)
    return found


def _ratio(pairs: Sequence[tuple[float, float]], other: str) -> list[str]:
    """The second of each pair, the first, and their ratio."""
    return [
        report.spread([second for _, second in pairs]),
        f"{other}: {report.spread([first for first, _ in pairs])}",
        report.spread([second / first for first, second in pairs]),
    ]
