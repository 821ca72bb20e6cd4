"""How everything here is measured: contestants take turns on the same ranks, in rounds.

Rules:

1. The machine is not quiet and not ours alone. So all contestants run in every round, in an order
   that rotates, and what counts is a contestant's ratio to the floor of the same round.
2. Time runs from a barrier until the slowest rank is done. CPU seconds are the sum over the ranks,
   user and system, all threads, and the processes that `process` ran.
3. Extra memory is how far a rank's resident memory rose above what it was before: the state and
   the interpreter are not in it. The operating system keeps this peak (`VmHWM`). Of a process that
   `process` ran all counts, with its interpreter.
4. Reads are warm: the page cache cannot be dropped without root. Before anything that writes, what
   others left unwritten is flushed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TypeVar

T = TypeVar("T")

GROUP_SECONDS = 300
"""How long a rank waits for the others."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one contestant, on one rank or joined over all."""

    seconds: float
    cpu_seconds: float
    extra_bytes: int
    """Resident memory above that before the run: the largest of any rank."""
    write_calls: int
    """System calls that wrote, to files or pipes."""
    read_bytes: int
    """Bytes that system calls read. What is mapped into memory is not counted."""
    written_bytes: int
    """Bytes that system calls wrote: to files, and to other ranks."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to do the job."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    """Puts everything back, on every rank, outside the measured time."""
    check: Callable[[], object] = lambda: None
    """Raises when the job was not done right; after the first round, outside the measured time."""


Samples = dict[str, list[Sample]]
"""By contestant, one sample per round."""


def on_ranks(world_size: int, function: Callable[..., T], *arguments: object) -> list[T]:
    """What the function returns on each rank of a new gloo process group, one thread a rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["PYTHONWARNINGS"] = "ignore"
    with (
        TemporaryDirectory(prefix="ckpt-bench-") as folder,
        ProcessPoolExecutor(world_size, get_context("spawn")) as pool,
    ):
        running = [
            pool.submit(_as_rank, f"{folder}/store", rank, world_size, function, arguments)
            for rank in range(world_size)
        ]
        return [future.result() for future in running]


def _as_rank(
    store: str, rank: int, world_size: int, function: Callable[..., T], arguments: Sequence[object]
) -> T:
    import torch
    import torch.distributed as dist
    import torch.distributed.fsdp  # before there is a group: docs/sharding.md, How a process ends
    from torch.distributed.device_mesh import DeviceMesh

    from sharding.torch_versions import release_with_groups

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    try:
        return function(*arguments)
    finally:
        for mesh in [one for one in gc.get_objects() if type(one) is DeviceMesh]:
            release_with_groups(mesh)  # those of torch's own contestants too
        dist.destroy_process_group()
        gc.collect()  # modules of torch's FSDP2 keep the group, and are in cycles


def interleaved(contestants: Mapping[str, Contestant], rounds: int) -> Samples:
    """Samples of this rank (rule 1). To be called by all ranks with the same names."""
    import torch.distributed as dist

    names = list(contestants)
    samples: Samples = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            contestant = contestants[name]
            contestant.before()
            if dist.get_rank() == 0:
                os.sync()
            dist.barrier()
            samples[name].append(sampled(contestant.run, dist.barrier))
            dist.barrier()
            if number == 0:
                contestant.check()
    return samples


def sampled(action: Callable[[], object], meet: Callable[[], object] = lambda: None) -> Sample:
    """Run the action once, on this rank; `meet` lets the ranks begin together (rule 2)."""
    gc.collect()
    _give_memory_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    meet()  # the preparation takes the ranks different times
    resident, io, cpu = _status("VmRSS"), _io(), time.process_time()
    _ended.clear()
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu + sum(one.ru_utime + one.ru_stime for one in _ended)
    after = _io()
    return Sample(
        seconds,
        cpu,
        max(_status("VmHWM") - resident, *(one.ru_maxrss << 10 for one in _ended), 0),
        after["syscw"] - io["syscw"],
        after["rchar"] - io["rchar"],
        after["wchar"] - io["wchar"],
    )


_ended: list[resource.struct_rusage] = []
"""The resources that the processes of this action took."""


def process(command: Sequence[str]) -> None:
    """Run a command to its end, and count its resources; its output is shown if it fails."""
    with TemporaryFile() as output:
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        _ended.append(used)
        if started.returncode:
            output.seek(0)
            raise RuntimeError(f"{command} failed:\n{output.read().decode(errors='replace')}")


def joined(ranks: Iterable[Samples]) -> Samples:
    """The samples of all ranks as those of one job (rule 2)."""
    everyone = list(ranks)
    return {
        name: [_joined_round(parts) for parts in zip(*(s[name] for s in everyone), strict=True)]
        for name in everyone[0]
    }


def _joined_round(parts: Sequence[Sample]) -> Sample:
    return Sample(
        max(part.seconds for part in parts),
        sum(part.cpu_seconds for part in parts),
        max(part.extra_bytes for part in parts),
        sum(part.write_calls for part in parts),
        sum(part.read_bytes for part in parts),
        sum(part.written_bytes for part in parts),
    )


def _give_memory_back() -> None:
    """Ask malloc to return what it keeps, or the next peak would hide in it."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _status(key: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {key}: the benchmarks need Linux")


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}
