"""Saving in the background: how long training stands still, and how much slower it is meanwhile.

python benchmarks/async_save.py --world-size 1 2 --store DIR

Four tables. The first is of workload A: the time until training may go on, over that of a copy of
the same bytes into memory that is warm: of a first save, of a first one after `ckpt.prepare` and of
a Checkpointer's first one after ten seconds of steps (in processes of their own, three times), and
of later ones. The second is of a model that trains, under FSDP2: the
steps while a save is in the background over those before it, in the same round, and all that the
save has cost the training until it was over, in seconds. The third is of the same training, with a
bound on host memory of all of a rank's part and of less: the peak is of the shared memory, and of
all other memory that the save adds to the trainer and that the writer process has. The fourth is of
weights in bfloat16 for `from_pretrained`, written with a checkpoint: as its second output, by a
conversion afterwards, and as most trainings do it, from a whole state dict on rank 0.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import floor
import measure
import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import train
import workload
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

import ckpt

TOKENS = 128
"""A rank's, in the model that trains."""
BLOCKS = 4
BEFORE = 4
"""Steps before each save, which the steps during it are compared with."""
TRAINED_GIB = 0.5
"""The most that the model that trains has as its state: its steps take seconds."""
MOST = 60
"""Steps that are timed during one save."""
SECONDS = 300
PREPARED_SECONDS = 10
FIRST, PREPARED, BY_RUN = "first", "prepared", "Checkpointer's first"
FIRSTS = 3
"""The processes that make a first save, one after the other."""

COPIED, OVERLAPPED = "ckpt, copied", "ckpt, overlapped"
PARTS = (1, 2, 4, 8)
"""The bounds on host memory: a rank's part by these numbers."""

Finish = Callable[[], object]
"""Returns when a save is over."""


class Rival:
    """torch DCP's async_save, on a process group of its own, by a thread or by a process."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def save(self, folder: str, state: Any, kind: AsyncCheckpointerType) -> Any:
        """The future of one save."""
        return torch_dcp.async_save(
            state, checkpoint_id=folder, process_group=self._group, async_checkpointer_type=kind
        )


# The first table: until training may go on.


def _stalls(store: str, gib: float, rounds: int, when: str = FIRST) -> measure.Samples:
    torch.ones(int(gib * 2**29))  # so that nobody pays for what the machine never handed out
    training, rival = workload.build(gib), Rival()
    state_dicts = training.state_dicts()
    locals_ = [tensor for tensor in training.locals() if tensor.numel()]
    warm = torch.ones(sum(tensor.nbytes for tensor in locals_), dtype=torch.uint8)
    ours, theirs = f"{store}/ours", f"{store}/dcp"
    running: list[Finish] = []

    def fresh() -> None:
        for finish in running:
            finish()
        running.clear()
        dist.barrier()
        if dist.get_rank() == 0:
            report.remove(ours)
            report.remove(theirs)

    def copied() -> None:
        target = warm.data_ptr()
        for source in locals_:
            ctypes.memmove(target, source.data_ptr(), source.nbytes)
            target += source.nbytes

    def saved(staging: Any) -> None:
        handle = ckpt.save(ours, training.state, blocking=False, staging=staging)
        running.append(lambda: handle.wait(SECONDS))

    def dcp(kind: AsyncCheckpointerType) -> None:
        running.append(rival.save(theirs, state_dicts, kind).result)

    contestants = {
        report.FLOOR: measure.Contestant(copied, fresh),
        COPIED: measure.Contestant(lambda: saved("copied"), fresh),
        OVERLAPPED: measure.Contestant(lambda: saved("overlapped"), fresh),
        "torch DCP, thread": measure.Contestant(lambda: dcp(AsyncCheckpointerType.THREAD), fresh),
        "torch DCP, process": measure.Contestant(lambda: dcp(AsyncCheckpointerType.PROCESS), fresh),
    }
    runs: list[ckpt.Checkpointer] = []
    if when == BY_RUN:
        run = ckpt.Checkpointer(f"{store}/run", every_steps=1000)
        run.save(1, training.state)  # not due
        contestants[COPIED] = measure.Contestant(lambda: run.save(2, training.state, force=True))
        runs.append(run)
    elif when == PREPARED:
        ckpt.prepare(training.state)
    if when != FIRST:
        time.sleep(PREPARED_SECONDS)  # as the first steps of a training would
        contestants = {name: contestants[name] for name in (report.FLOOR, COPIED)}
    elif not rounds:
        del contestants[OVERLAPPED]
    found = measure.interleaved(contestants, rounds + 1)
    fresh()
    for run in runs:
        run.close()
    return found


def _stall_rows(options: report.Options, world_size: int) -> list[list[str]]:
    def stalls(rounds: int, when: str = FIRST) -> measure.Samples:
        with options.folder() as store:
            ranks = measure.on_ranks(world_size, _stalls, store, options.gib, rounds, when)
        return measure.joined(ranks)

    rows = []
    for when in (FIRST, PREPARED, BY_RUN):
        firsts: measure.Samples = {}
        for _ in range(FIRSTS):
            for name, found in stalls(0, when).items():
                firsts.setdefault(name, []).extend(found)
        rows += report.rows(f"{world_size}, {when}", firsts, report.write_calls)
    later = {name: found[1:] for name, found in stalls(options.rounds).items()}
    return rows + report.rows(f"{world_size}, later", later, report.write_calls)


# The second table: while training goes on.


class Training:
    """Transformer blocks under FSDP2 with AdamW, and one step after another."""

    def __init__(self, gib: float) -> None:
        self._width = max(64, round((gib * 2**30 / (12 * BLOCKS * 12)) ** 0.5 / 64) * 64)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(train.Block(self._width) for _ in range(BLOCKS)))
        for unit in (*self.model, self.model):
            fully_shard(unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        loss = self.model(torch.randn(1, TOKENS, self._width)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True, slots=True)
class Cost:
    """One save during training, on one rank."""

    stall: float
    """Seconds that the call took."""
    slower: float
    """A step while the save is in the background, over one before it."""
    lost: float
    """Seconds by which the training is behind when the save is over."""
    steps: int
    """Steps until it was."""


def _costs(store: str, gib: float, rounds: int) -> dict[str, list[Cost]]:
    running, rival = Training(gib), Rival()
    ours, theirs = f"{store}/ours", f"{store}/dcp"

    def save_ours(staging: Any) -> tuple[Callable[[], bool], Finish]:
        state = {"model": running.model, "optimizer": running.optimizer}
        handle = ckpt.save(ours, state, blocking=False, staging=staging)
        return handle.done, lambda: handle.wait(SECONDS)

    def save_theirs(kind: AsyncCheckpointerType) -> tuple[Callable[[], bool], Finish]:
        model, optimizer = get_state_dict(running.model, running.optimizer)
        future = rival.save(theirs, {"model": model, "optimizer": optimizer}, kind)
        return future.done, future.result

    contestants = {
        COPIED: lambda: save_ours("copied"),
        OVERLAPPED: lambda: save_ours("overlapped"),
        "torch DCP, thread": lambda: save_theirs(AsyncCheckpointerType.THREAD),
        "torch DCP, process": lambda: save_theirs(AsyncCheckpointerType.PROCESS),
    }
    names = list(contestants)
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for number in range(rounds + 1):  # the first warms everything up
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            if dist.get_rank() == 0:
                report.remove(ours)
                report.remove(theirs)
                os.sync()
            dist.barrier()
            cost = _cost(running.step, contestants[name])
            if number:
                costs[name].append(cost)
    return costs


def _cost(step: Finish, save: Callable[[], tuple[Callable[[], bool], Finish]]) -> Cost:
    before = [_seconds(step) for _ in range(BEFORE)]
    usual = statistics.median(before)
    start = time.perf_counter()
    is_done, finish = save()
    stall = time.perf_counter() - start
    steps: list[float] = []
    while _goes_on(is_done) and len(steps) < MOST:
        steps.append(_seconds(step))
    finish()
    slower = sum(steps) / len(steps) / usual if steps else 1.0
    return Cost(stall, slower, stall + sum(steps) - usual * len(steps), len(steps))


def _goes_on(is_done: Callable[[], bool]) -> bool:
    """Whether the save is in flight on any rank: all make the same steps."""
    flag = torch.tensor([float(not is_done())])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _seconds(action: Finish) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _cost_rows(label: str, ranks: Sequence[dict[str, list[Cost]]]) -> list[list[str]]:
    rows = []
    for name in ranks[0]:
        slowest = [
            max(parts, key=lambda cost: cost.lost)
            for parts in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        rows.append(
            [
                label,
                name,
                report.spread([cost.stall for cost in slowest]),
                report.spread([cost.slower for cost in slowest]),
                report.spread([cost.lost for cost in slowest]),
                f"{statistics.median(cost.steps for cost in slowest):g}",
            ]
        )
    return rows


# The third table: less host memory than a rank's part.


@dataclass(frozen=True, slots=True)
class Bounded:
    """Saves within a bound on host memory, on one rank."""

    costs: list[Cost]
    bound_bytes: int
    peak_bytes: int


class Watch:
    """Looks at the memory of a trainer, its arena and its writer, two hundred times a second."""

    def __init__(self) -> None:
        self._shared = import_module("ckpt.saving.writers").arena_writer()
        self._writer = self._shared.writer().process.pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._before = _private()
        self.most = 0
        """The most bytes beyond those of the trainer before."""

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.005):
            arena = os.fstat(self._shared.arena.descriptor).st_blocks * 512
            added = _private() - self._before + arena + _private(self._writer)
            self.most = max(self.most, added)


def _bounded(store: str, gib: float, rounds: int, part: int) -> Bounded:
    running = Training(gib)
    running.step()
    state = {"model": running.model, "optimizer": running.optimizer}
    ours = f"{store}/ours"
    first = ckpt.save(ours, state, blocking=False, host_memory="64MiB", overwrite=True)
    nbytes = first.result(SECONDS).nbytes
    bound = nbytes if part == 1 else max(nbytes // part, 1 << 20)

    def save() -> tuple[Callable[[], bool], Finish]:
        handle = ckpt.save(ours, state, blocking=False, host_memory=bound, overwrite=True)
        return handle.done, lambda: handle.wait(SECONDS)

    for _ in range(5):  # then the arena has the size of these
        save()[1]()
    with Watch() as watch:  # without steps, whose own memory comes and goes
        save()[1]()
    costs = []
    for _ in range(rounds):
        dist.barrier()
        if dist.get_rank() == 0:
            report.remove(ours)
            os.sync()
        dist.barrier()
        costs.append(_cost(running.step, save))
    return Bounded(costs, bound, watch.most)


def _private(process: int | str = "self") -> int:
    """The bytes of memory that a process shares with no other and with no file."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) << 10


def _bounded_rows(label: str, store: str, gib: float, rounds: int, world_size: int) -> list[Any]:
    rows = []
    for part in PARTS:
        ranks = measure.on_ranks(world_size, _bounded, store, gib, rounds, part)
        slowest = [
            max(parts, key=lambda cost: cost.lost)
            for parts in zip(*(rank.costs for rank in ranks), strict=True)
        ]
        rows.append(
            [
                label,
                "1" if part == 1 else f"1/{part}",
                f"{max(rank.bound_bytes for rank in ranks) >> 20}",
                f"{max(rank.peak_bytes for rank in ranks) >> 20}",
                report.spread([cost.stall for cost in slowest]),
                report.spread([cost.lost for cost in slowest]),
                f"{statistics.median(cost.steps for cost in slowest):g}",
            ]
        )
    return rows


# The fourth table: weights beside a checkpoint.


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint and its weights, on one rank."""

    stall: float
    """Seconds until training may go on."""
    stall_cpu: float
    """Seconds of processor time until then."""
    cpu: float
    """The same until all exists, of the rank and its writer process."""
    seconds: float
    read: int
    """Bytes that the rank and its writer have read from files."""


def _weights(store: str, gib: float, rounds: int) -> dict[str, list[Weights]]:
    training = workload.build(gib)
    ckpt.prepare(training.state)
    time.sleep(PREPARED_SECONDS)
    place, hf = f"{store}/ours", f"{store}/hf"
    writer = import_module("ckpt.saving.writers").arena_writer().writer().process.pid

    def save(also: ckpt.HuggingFace | None = None) -> Finish:
        handle = ckpt.save(place, training.state, blocking=False, also=also)
        return lambda: handle.wait(SECONDS)

    def save_then_convert() -> Finish:
        finish = save()

        def rest() -> None:
            finish()
            ckpt.convert(place, hf, to="hf", dtype="bfloat16", group=None)

        return rest

    def save_and_gather() -> Finish:
        finish = save()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(training.model, options=options)
        if dist.get_rank() == 0:
            os.makedirs(hf)
            cast = {name: tensor.bfloat16() for name, tensor in whole.items()}
            floor.flushed(
                lambda: save_file(cast, f"{hf}/model.safetensors"), f"{hf}/model.safetensors"
            )
        dist.barrier()
        return finish

    contestants: dict[str, Callable[[], Finish]] = {
        "a checkpoint alone": save,
        "ckpt, also=HuggingFace": lambda: save(ckpt.HuggingFace(hf, dtype="bfloat16")),
        "ckpt, save, then convert": save_then_convert,
        "ckpt, save; whole state dict, save_file": save_and_gather,
    }
    found: dict[str, list[Weights]] = {name: [] for name in contestants}
    names = [*contestants]
    for number in range(rounds + 1):  # the first warms everything up
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            if dist.get_rank() == 0:
                report.remove(place)
                report.remove(hf)
                os.sync()
            dist.barrier()
            used, read, start = _used(writer), _read(writer), time.perf_counter()
            finish = contestants[name]()
            stall, stall_cpu = time.perf_counter() - start, _used()[0] - used[0]
            finish()
            seconds = time.perf_counter() - start
            cost = Weights(
                *(stall, stall_cpu, sum(_used(writer)) - sum(used), seconds, _read(writer) - read)
            )
            if number:
                found[name].append(cost)
    return found


def _used(*others: int) -> list[float]:
    """Seconds of processor time of this process, and of others."""
    found = [time.process_time()]
    for pid in others:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def _read(writer: int) -> int:
    """Bytes that system calls of this process and another have read."""
    texts = (Path(f"/proc/{pid}/io").read_text() for pid in ("self", writer))
    return sum(int(text.split()[1]) for text in texts)


def _weights_rows(label: str, ranks: Sequence[dict[str, list[Weights]]]) -> list[list[str]]:
    rows = []
    for name in ranks[0]:
        rounds = [*zip(*(rank[name] for rank in ranks), strict=True)]
        rows.append(
            [
                label,
                name,
                report.spread([max(one.stall for one in parts) for parts in rounds]),
                report.spread([max(one.stall_cpu for one in parts) for parts in rounds]),
                report.spread([sum(one.cpu for one in parts) for parts in rounds]),
                report.spread([max(one.seconds for one in parts) for parts in rounds]),
                f"{statistics.median(sum(one.read for one in parts) for parts in rounds) // 1e6:g}",
            ]
        )
    return rows


def tables(options: report.Options) -> list[report.Table]:
    """All tables, a block of rows for each world size."""
    stalls, costs, bounded, weights = [], [], [], []
    trained = min(options.gib, TRAINED_GIB)
    for world_size in options.world_sizes:
        label = str(world_size)
        stalls += _stall_rows(options, world_size)
        if world_size > (os.cpu_count() or 1):
            continue  # then it is the ranks that make one another wait
        with options.folder() as store:
            ranks = measure.on_ranks(world_size, _costs, store, trained, options.rounds)
            bounded += _bounded_rows(label, store, trained, options.rounds, world_size)
            found = measure.on_ranks(world_size, _weights, store, trained, options.rounds)
        costs += _cost_rows(label, ranks)
        weights += _weights_rows(label, found)
    return [
        report.Table(
            f"Until training goes on, {options.gib:g} GiB, {options.where}",
            report.columns("W", "write calls"),
            stalls,
        ),
        report.Table(
            f"Training during a save, {trained:g} GiB, {options.where}",
            ("W", "", "call, seconds", "step ÷ before", "lost, seconds", "steps"),
            costs,
        ),
        report.Table(
            f"Training during a save in less host memory, {trained:g} GiB, {options.where}",
            ("W", "bound ÷ part", "MiB", "peak MiB", "call, seconds", "lost, seconds", "steps"),
            bounded,
        ),
        report.Table(
            f"A checkpoint and weights in bfloat16, {trained:g} GiB, {options.where}",
            ("W", "", "call, seconds", "call, CPU", "CPU, all", "all, seconds", "MB read"),
            weights,
        ),
    ]


if __name__ == "__main__":
    report.main(__doc__, tables)
