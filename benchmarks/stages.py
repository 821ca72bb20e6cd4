"""Where the time of a save and of a load goes: exclusive seconds of every stage, beside the floor.

    python benchmarks/stages.py --store DIR --world-size 2

Functions that stand for a stage are timed where they are called; what a stage calls of another one
is that one's time. Rank 0's median over the rounds is shown; "everything else" is what no stage
accounts for, and less than nothing where two threads work at once.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import floor
import report
import torch.distributed as dist
import workload
from measure import on_ranks

import ckpt

Where = Mapping[str, tuple[str, ...]]
"""A stage's name -> the functions it consists of, as `module:name` or `module:Class.name`."""

TOGETHER = ("agree", "gather", "broadcast", "common", "merge_records")
RANKS = tuple(f"sharding.agreement.ranks:Ranks.{name}" for name in TOGETHER)
SAVE: Where = {
    "describing the state": ("ckpt.saving.agreement:flatten",),
    "hashing its structure": ("ckpt.state.merged_state:state_hashes",),
    "sampling its replicas": ("ckpt.transfer.replica_hashes:ReplicaHashes.weigh",),
    "waiting for and telling other ranks": RANKS,
    "planning who writes what": ("ckpt.saving.save:choose_layouts", "ckpt.saving.save:plan_save"),
    "the file's header": ("formats.native.shard_writer:build",),
    "hashing the data": ("formats.native.shard_writer:records_of",),
    "writing": ("ckpt.stores.local_store:LocalFileWriter.write",),
    "flushing files and folders": ("os:fsync",),
    "the manifest": ("ckpt.saving.agreement:write_manifest",),
}
LOAD: Where = {
    "opening manifest and headers": (
        "formats.native.reader:read",
        "formats.native.reader:open_shard",
        "formats.native.shard:first_chunks",
    ),
    "matching names": ("ckpt.loading.agreement:match", "ckpt.loading.agreement:Saved"),
    "waiting for and telling other ranks": RANKS,
    "planning requests": (
        "ckpt.loading.agreement:plan_load",
        "ckpt.transfer.read:byte_ranges_of",
    ),
    "reading": ("ckpt.stores.local_store:LocalStore.read_into",),
    "verifying": ("formats.native.shard:ChunkTable.wrong",),
    "placing what was not read in place": ("ckpt.transfer.read:_place",),
}


class Stages:
    """Exclusive seconds by stage, while the functions are replaced by timed ones.

    Of every thread, which is why the pieces may come to more than the whole where several work.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._thread = threading.local()

    @contextmanager
    def watching(self, where: Where) -> Iterator[None]:
        """Time these functions within the block."""
        undo: list[tuple[Any, str, Any]] = []
        try:
            for stage, functions in where.items():
                for function in functions:
                    owner, name = _found(function)
                    undo.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, self._timed(stage, getattr(owner, name)))
            yield
        finally:
            for owner, name, original in reversed(undo):
                setattr(owner, name, original)

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            inner = self._thread.__dict__.setdefault("inner", [0.0])
            inner.append(0.0)
            start = time.perf_counter()
            try:
                result = function(*arguments, **options)
                return list(result) if isinstance(result, Iterator) else result
            finally:
                seconds = time.perf_counter() - start
                self.seconds[stage] += seconds - inner.pop()
                inner[-1] += seconds

        return timed


def _found(function: str) -> tuple[Any, str]:
    """The object that has a function, and the name it has there."""
    module, _, path = function.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name


def _measured(action: Callable[[], object], where: Where, before: Callable[[], object]) -> Any:
    """Seconds in all and by stage, of one run on this rank."""
    before()
    dist.barrier()
    stages = Stages()
    with stages.watching(where):
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
    dist.barrier()
    return seconds, dict(stages.seconds)


def _on_rank(store: str, gib: float, rounds: int) -> list[dict[str, list[Any]]]:
    training = workload.build(gib)
    buffers = training.buffers()
    raw, ours = f"{store}/raw-{dist.get_rank()}", f"{store}/ours"

    def fresh() -> None:
        report.remove(raw)
        if dist.get_rank() == 0:
            report.remove(ours)

    saves: dict[str, list[Any]] = {"floor": [], "ckpt": []}
    loads: dict[str, list[Any]] = {"floor": [], "ckpt": []}
    for _ in range(rounds):
        saves["floor"].append(_measured(lambda: floor.write(raw, buffers), {}, fresh))
        loads["floor"].append(_measured(lambda: floor.read(raw, buffers), {}, dist.barrier))
        saves["ckpt"].append(_measured(lambda: ckpt.save(ours, training.state), SAVE, fresh))
        loads["ckpt"].append(_measured(lambda: ckpt.load(ours, training.state), LOAD, dist.barrier))
    return [saves, loads]


def tables(options: report.Options) -> list[report.Table]:
    """Two tables, a save's and a load's stages, with a column for each world size."""
    found = []
    for world_size in options.world_sizes:
        with options.folder() as store:
            ranks = on_ranks(world_size, _on_rank, store, options.gib, options.rounds)
            found.append(ranks[0])
    titles = (("save", SAVE, "raw write"), ("load", LOAD, "raw read"))
    return [
        report.Table(
            f"Milliseconds of a {what}, {options.gib:g} GiB, {options.where}",
            ("", *(f"W = {world_size}" for world_size in options.world_sizes)),
            _rows([runs[which] for runs in found], where, least),
        )
        for which, (what, where, least) in enumerate(titles)
    ]


def _rows(runs: list[dict[str, list[Any]]], where: Where, least: str) -> list[list[str]]:
    def row(name: str, of: Callable[[float, Mapping[str, float]], float]) -> list[str]:
        cells = [statistics.median(of(*one) for one in run["ckpt"]) * 1000 for run in runs]
        return [name, *(f"{cell:.1f}" for cell in cells)]

    floors = [statistics.median(one[0] for one in run["floor"]) * 1000 for run in runs]
    return [
        [f"floor: {least}", *(f"{value:.1f}" for value in floors)],
        row("ckpt, all of it", lambda seconds, _: seconds),
        *(row(stage, lambda _, by, stage=stage: by.get(stage, 0.0)) for stage in where),
        row("everything else", lambda seconds, by: seconds - sum(by.values())),
    ]


if __name__ == "__main__":
    report.main(__doc__, tables)
