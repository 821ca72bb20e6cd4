"""A live state from a trainer's ranks to another job's, beside the ways without it.

    python benchmarks/live.py --size-mb 1000

Trainers and readers are ranks of one gloo group, so that all ways take turns on the same ranks; no
way but the gather uses that. The floors move the bytes that the readers need: by one copy of warm
memory, and by `sendfile` to `recv_into` over as many loopback connections as a load has threads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

import measure
import report
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from ckpt.transfer.read import workers_for

TENSORS, COLUMNS = 48, 1020
TMPFS = "/dev/shm"
CASES = ((2, 2), (2, 3), (4, 1))
"""Trainers and readers. Three readers have every other tensor cut along its columns."""
RUNTIME = "CKPT_RUNTIME_DIR"
COPY, SENDFILE, RIVAL = "copy of warm memory", "sendfile → recv_into", "gather, broadcast, load"
LOAD_HERE, LOAD_TCP = "ckpt.load, same host", "ckpt.load, loopback TCP"
UNVERIFIED = "the same, verify=False"
ALL, UPDATE, COPY_PART = "update, then ckpt.load", "update returns", "copy of a trainer's part"
TO_TMPFS, DCP = "ckpt.save to tmpfs, ckpt.load", "DCP to tmpfs, DCP load"
REQUEST = struct.Struct("<QQ")
"""First byte and number of bytes."""


class _Job:
    """One rank of the trainers and readers."""

    def __init__(self, nbytes: int, trainers: int, readers: int) -> None:
        rows = max(12, nbytes // 4 // COLUMNS // TENSORS // 12 * 12)
        self.rank, self.trainers, self.readers = dist.get_rank(), trainers, readers
        self.is_trainer = self.rank < trainers
        members = [list(range(trainers)), list(range(trainers, trainers + readers))]
        groups = [dist.new_group(one) for one in members]
        self.group = groups[0] if self.is_trainer else groups[1]
        self.fan = dist.new_group([0, *members[1]])
        self.shapes = {f"w{at:02}": (rows, COLUMNS) for at in range(TENSORS)}
        self.nbytes = 4 * rows * COLUMNS * TENSORS
        mesh = DeviceMesh.from_group(self.group, "cpu")
        self.state: dict[str, Any] = {}
        for at, (name, shape) in enumerate(self.shapes.items()):
            dim = at % 2 if not self.is_trainer and readers == 3 else 0
            local = self._part(shape, dim)
            self.state[name] = DTensor.from_local(
                local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=(shape[1], 1)
            )
            if self.is_trainer:
                local.fill_(float(at))
        self.locals = [one.to_local() for one in self.state.values()]
        self.copies = [one.clone() for one in self.locals]
        self.handle: Any = None
        self.live: Any = None
        self.url = ""
        self.memory = self.listener = None
        self.where = [None]

    def _part(self, shape: tuple[int, int], dim: int) -> torch.Tensor:
        first = 0 if self.is_trainer else self.trainers
        count = self.trainers if self.is_trainer else self.readers
        sizes = list(shape)
        chunks = torch.empty(shape[dim]).chunk(count)
        sizes[dim] = len(chunks[self.rank - first])
        return torch.zeros(sizes)

    def open(self) -> None:
        """Publishes the state, and listens for the floor's connections."""
        if self.is_trainer:
            self.live = ckpt.publish(self.state, "bench", group=self.group)
            self.url = self.live.url
        if self.rank == 0:
            self.memory = os.memfd_create("floor")
            with open(self.memory, "wb", closefd=False) as file:
                for at in range(TENSORS):
                    file.write(torch.full((self.nbytes // TENSORS // 4,), float(at)).numpy())
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        found = [self.url, self.listener and self.listener.getsockname()]
        dist.broadcast_object_list(found, src=0)
        self.url, self.where = found

    def close(self) -> None:
        if self.live is not None:
            self.live.close()

    def before(self) -> None:
        """Ends the last update, and gives the readers other bytes than they are to read."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        if not self.is_trainer:
            for one in self.locals:
                one.fill_(-1.0)

    def check(self) -> None:
        """Raises unless each reader has the trainers' bytes."""
        if not self.is_trainer:
            for at, one in enumerate(self.locals):
                assert bool((one == float(at)).all()), at

    # The ways.

    def copy(self) -> None:
        if not self.is_trainer:
            for one, copy in zip(self.locals, self.copies, strict=True):
                copy.copy_(one)

    def copy_part(self) -> None:
        if self.is_trainer:
            for one, copy in zip(self.locals, self.copies, strict=True):
                copy.copy_(one)

    def update(self) -> None:
        if self.is_trainer:
            self.handle = self.live.update()

    def update_and_load(self) -> None:
        if self.is_trainer:
            self.live.update().wait()
        dist.barrier()
        self.load()

    def load(self, verify: bool = True) -> None:
        if not self.is_trainer:
            ckpt.load(self.url, self.state, verify=verify, group=self.group)

    def load_over_tcp(self) -> None:
        """A reader that finds no socket of the server is on another host."""
        before = os.environ.get(RUNTIME)
        os.environ[RUNTIME] = f"{tempfile.gettempdir()}/ckpt-elsewhere-{os.getpid()}"
        try:
            self.load()
        finally:
            os.environ.pop(RUNTIME)
            if before is not None:
                os.environ[RUNTIME] = before

    def sendfile(self) -> None:
        """Rank 0 serves each connection from a thread; each reader has as many as a load."""
        each = workers_for(self.readers)
        if self.rank == 0:
            threads = []
            for _ in range(each * self.readers):
                threads.append(threading.Thread(target=self._send, args=self.listener.accept()))
                threads[-1].start()
            for thread in threads:
                thread.join()
        elif not self.is_trainer:
            shares = [self.locals[at::each] for at in range(each)]
            threads = [threading.Thread(target=self._receive, args=(one,)) for one in shares]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _send(self, connection: socket.socket, _: object) -> None:
        with connection:
            while request := connection.recv(REQUEST.size, socket.MSG_WAITALL):
                at, left = REQUEST.unpack(request)
                while left:
                    sent = os.sendfile(connection.fileno(), self.memory, at, left)
                    at, left = at + sent, left - sent

    def _receive(self, tensors: Sequence[torch.Tensor]) -> None:
        with socket.create_connection(self.where) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for tensor in tensors:
                left = memoryview(tensor.reshape(-1).numpy()).cast("B")
                connection.sendall(REQUEST.pack(0, len(left)))
                while left:
                    left = left[connection.recv_into(left) :]

    def gather(self) -> None:
        """The way without a library: the whole model on rank 0 and on each reader."""
        whole: dict[str, torch.Tensor] = {}
        if self.is_trainer:
            for name, one in self.state.items():
                full = one.full_tensor()
                if self.rank == 0:
                    whole[name] = full
            if self.rank:
                return
        for name, shape in self.shapes.items():
            if self.rank:
                whole[name] = torch.empty(shape)
            dist.broadcast(whole[name], src=0, group=self.fan)
        if self.rank:
            for name, one in self.state.items():
                dim = one.placements[0].dim
                part = whole[name].chunk(self.readers, dim)[self.rank - self.trainers]
                one.to_local().copy_(part)

    def through_tmpfs(self, folder: str) -> None:
        if self.is_trainer:
            ckpt.save(f"{folder}/ours", self.state, group=self.group, overwrite=True)
        dist.barrier()
        if not self.is_trainer:
            ckpt.load(f"{folder}/ours", self.state, group=self.group)

    def through_dcp(self, folder: str) -> None:
        if self.is_trainer:
            dcp.save(self.state, checkpoint_id=f"{folder}/dcp", process_group=self.group)
        dist.barrier()
        if not self.is_trainer:
            dcp.load(self.state, checkpoint_id=f"{folder}/dcp", process_group=self.group)


def hand_over(
    nbytes: int, trainers: int, readers: int, rounds: int, folder: str
) -> measure.Samples:
    """On each rank: the samples of all ways."""
    job = _Job(nbytes, trainers, readers)
    job.open()

    def way(run: Callable[[], object], checked: bool = True) -> measure.Contestant:
        return measure.Contestant(run, job.before, job.check if checked else lambda: None)

    ways = {
        COPY: way(job.copy, False),
        LOAD_HERE: way(job.load),
        UNVERIFIED: way(lambda: job.load(verify=False)),
        LOAD_TCP: way(job.load_over_tcp),
        SENDFILE: way(job.sendfile, False),
        COPY_PART: way(job.copy_part, False),
        UPDATE: way(job.update, False),
        ALL: way(job.update_and_load),
        RIVAL: way(job.gather),
        TO_TMPFS: way(lambda: job.through_tmpfs(folder)),
        DCP: way(lambda: job.through_dcp(folder)),
    }
    for one in (job.update_and_load, job.load_over_tcp, job.update_and_load):  # all memory is warm
        job.before()
        one()
    samples = measure.interleaved(ways, rounds)
    job.before()
    job.close()
    return samples


FLOORS = {LOAD_HERE: COPY, UNVERIFIED: COPY, LOAD_TCP: SENDFILE, UPDATE: COPY_PART}
"""The way to compare with; all others are compared with the gather."""


def hand_over_rows(label: str, samples: measure.Samples) -> list[list[str]]:
    """A row for each way."""
    rows = []
    for name, found in samples.items():
        other = FLOORS.get(name, RIVAL if name in (ALL, TO_TMPFS, DCP) else "")
        ratio = ""
        if other:
            pairs = zip(found, samples[other], strict=True)
            ratio = f"{report.spread([a.seconds / b.seconds for a, b in pairs])} of “{other}”"
        extra = f"{max(one.extra_bytes for one in found) / 2**20:.0f}"
        cpu = report.spread([one.cpu_seconds for one in found])
        rows.append([label, name, report.spread([one.seconds for one in found]), ratio, cpu, extra])
    return rows


def steps_beside_readers(
    nbytes: int, rounds: int, flag: str, has_own_core: bool
) -> list[tuple[float, float, float]]:
    """On the trainer: the seconds of a step alone, beside loads, and beside plain copies.

    The other rank loads the state all the time, or copies as many bytes of its own memory: what the
    memory of the machine makes of any reader. If the trainer has its own core, the reader and the
    server share the others.
    """
    job = _Job(nbytes, 1, 1)
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

    for _ in range(rounds):
        times = []
        for beside in (None, job.load, job.copy):
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


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=1000, help="the whole state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", default=tempfile.gettempdir(), help="a folder on a disk")
    parser.add_argument("--table", choices=("hand-over", "training"), help="one of the two tables")
    given = parser.parse_args()
    nbytes, rounds = given.size_mb * 10**6, given.rounds
    os.environ.setdefault(RUNTIME, tempfile.mkdtemp(prefix="ckpt-bench-run-"))
    print(report.machine(), end="\n\n", flush=True)
    size = f"{given.size_mb} MB, {rounds} rounds"
    if given.table != "training":
        columns = ("ranks", "way", "seconds", "ratio", "CPU seconds", "extra MiB a rank")
        rows = hand_overs(nbytes, rounds)
        print(report.Table(f"From trainers to readers, {size}", columns, rows), flush=True)
    if given.table != "hand-over":
        columns = ("", "seconds", "other", "ratio")
        rows = beside_training(nbytes, rounds, given.store)
        print(report.Table(f"Beside the training, {size}", columns, rows))


def hand_overs(nbytes: int, rounds: int) -> list[list[str]]:
    """The rows of all cases."""
    rows = []
    for trainers, readers in CASES:
        folder = tempfile.mkdtemp(prefix="ckpt-bench-", dir=TMPFS)
        try:
            world = trainers + readers
            samples = measure.on_ranks(world, hand_over, nbytes, trainers, readers, rounds, folder)
        finally:
            shutil.rmtree(folder)
        rows += hand_over_rows(f"{trainers} → {readers}", measure.joined(samples))
        _say(f"{trainers} → {readers} is done")
    return rows


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
        _say("steps are done")
        with suppress(BrokenProcessPool):
            measure.on_ranks(2, train_and_die, nbytes, f"{folder}/run")
        _say("trainers are killed")
        resumed = measure.on_ranks(2, resume, nbytes, f"{folder}/run", rounds)
        slowest = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in zip(*resumed, strict=True)]
        back = [(disk, near) for near, disk in slowest]
        rows.append(["a resume from memory after kill -9", *_ratio(back, "from disk, cold cache")])
    return rows


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _ratio(pairs: Sequence[tuple[float, float]], other: str) -> list[str]:
    """The second of each pair, the first, and their ratio."""
    return [
        report.spread([second for _, second in pairs]),
        f"{other}: {report.spread([first for first, _ in pairs])}",
        report.spread([second / first for first, second in pairs]),
    ]


if __name__ == "__main__":
    main()
