"""Planning for many ranks, played by one process without a process group.

    python benchmarks/scale.py
    python benchmarks/scale.py --short

A plan is made of layouts, which are symbolic: what a rank computes to save or to load can be
computed here for any rank of any number. Every figure is what one rank does, alone, in CPU seconds;
nothing is kept from one rank to the next. What depends on all ranks is measured in full: the
manifest, with a file for each, and torch DCP's global plan, which its rank 0 makes of all ranks'
plans. So is the agreement: rank 0 is real, and another process plays the others, with a connection
for each, at once. 64 real ranks save and load last. The table of requests is arithmetic.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing
import os
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import big_models
import dcp_plans
import report
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.plan.read_plan import BoxCopies, ReadRequest, requests_for
from ckpt.plan.save_plan import WriteItem, choose_layouts, plan_save
from ckpt.state.flatten import FlatState, Leaf
from ckpt.state.merged_state import state_hashes, summary
from ckpt.state.state_spec import StateSpec, merge_specs
from ckpt.stores.driver import PartLimits
from ckpt.stores.object_writes import PartSizes
from formats.catalog import Catalog, TensorRef
from formats.errors import SizeError, TooLargeError
from formats.native import reader
from formats.native.manifest import MANIFEST, Manifest, ShardFile, StoredTensor, dump, load
from formats.native.shard import ALIGN, CHUNK_BYTES, RECORD, TABLE
from formats.safetensors.file import build
from formats.storage import LOCAL_READ_BYTES
from sharding.agreement.call_events import pause_collection
from sharding.agreement.channel import Kind, Link, Message
from sharding.agreement.coordinator import Coordinator
from sharding.layout import Mesh

T = TypeVar("T")

WORLDS = (8, 64, 256, 1024, 4096, 16384)
SHORT_WORLDS = (8, 256)
SAMPLED = 5
"""Ranks whose plans are timed: the first, the last and some between."""
COUNTED = 64
"""Ranks whose bytes are counted, evenly spread."""
DCP_WORLDS = (8, 64, 256)
REPEATS = 3
"""How often a rank plans; the least time counts."""


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """What an action returns, and its CPU seconds, with empty caches; the least of `REPEATS`."""
    gc.collect()
    caches = [found for found in gc.get_objects() if type(found) is functools._lru_cache_wrapper]
    best = float("inf")
    for _ in range(REPEATS):
        for cache in caches:  # the ranks played here are processes of their own
            cache.cache_clear()
        start = time.process_time()
        result = action()
        best = min(best, time.process_time() - start)
    return result, best


def _spaced(world_size: int, count: int) -> list[int]:
    return sorted({round(at * (world_size - 1) / (count - 1)) for at in range(count)})


def flat(described: StateSpec) -> FlatState:
    """The state on one rank, its tensors without memory."""
    empty = torch.empty(0, device="meta")
    leaves = {
        name: Leaf(name, tensor.dtype, empty, tensor.layout, empty)
        for name, tensor in described.tensors.items()
    }
    return FlatState(leaves, {}, described.tree)


@dataclass(frozen=True, slots=True)
class Saved:
    """What one rank's planning of a save gives."""

    tensors: Mapping[str, StoredTensor]
    parts: Sequence[WriteItem]
    header: bytes
    table_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that the rank writes."""
        return sum(part.nbytes for part in self.parts)

    def file(self, rank: int) -> ShardFile:
        """The rank's entry in the manifest; the chunk table is of zeros."""
        hasher = xxhash.xxh3_128(self.header)
        hasher.update(bytes(self.table_bytes))
        size = len(self.header) + self.nbytes + self.table_bytes
        digest = hasher.hexdigest()
        return ShardFile(_name(rank), rank, size, len(self.header), self.table_bytes, digest)


def _name(rank: int) -> str:
    return f"{0:016x}-{rank:05d}.safetensors"


def planned_save(described: StateSpec, rank: int) -> Saved:
    """Everything that a rank computes between its description and the first byte it writes."""
    state_hashes(described)
    tensors = choose_layouts(described.tensors)
    return _own(described.tensors, tensors, rank)


def _own(held: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor], rank: int) -> Saved:
    parts = plan_save(held, tensors, rank).items
    entries = [(p.name, p.dtype.carrier, p.dtype.carrier_shape(p.shape), p.nbytes) for p in parts]
    table_bytes = sum(-(-p.nbytes // CHUNK_BYTES) for p in parts) * RECORD.size
    entries.append((TABLE, "U8", (table_bytes,), table_bytes))
    metadata = {"format": "pt", "ckpt.chunk_bytes": str(CHUNK_BYTES), "ckpt.codec": "raw"}
    return Saved(tensors, parts, build(entries, metadata, align=ALIGN), table_bytes)


def manifest_of(described: StateSpec, tensors: Mapping[str, StoredTensor], ranks: int) -> Manifest:
    """The manifest of a save by so many ranks; the digests of their files are made up."""
    files = [ShardFile(_name(r), r, 10**9, 10**5, 10**5, f"{r:032x}") for r in range(ranks)]
    return Manifest(tensors, {}, described.tree, files, {"ckpt": "0", "world_size": str(ranks)})


class Memory:
    """The folder of a checkpoint that was never written: headers made up as they are asked for."""

    url = "memory"
    read_bytes = LOCAL_READ_BYTES

    def __init__(self, described: StateSpec, world_size: int, needed: Sequence[int]) -> None:
        tensors = choose_layouts(described.tensors)
        self._files = {rank: _own(described.tensors, tensors, rank) for rank in needed}
        manifest = manifest_of(described, tensors, world_size)
        files = [
            self._files[f.rank].file(f.rank) if f.rank in self._files else f for f in manifest.files
        ]
        self._manifest = dump(Manifest(tensors, {}, described.tree, files, manifest.writer))
        self._sizes = {file.name: file.size for file in files}

    def names(self) -> list[str]:
        """The manifest and a file for each rank."""
        return [MANIFEST, *self._sizes]

    def entries(self, folder: str = "") -> list[str]:
        """The same: there are no folders."""
        return [] if folder else self.names()

    def size(self, name: str) -> int:
        """Bytes in a file."""
        return len(self._manifest) if name == MANIFEST else self._sizes[name]

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Some of the manifest; or of a file that is needed its header, or its chunk table."""
        if name == MANIFEST:
            return self._manifest[offset : offset + length]
        header = self._files[int(name[17:22])].header
        return header[:length] if offset == 0 else bytes(length)

    def read_whole(self, name: str, limit: int) -> bytes:
        """The manifest."""
        if self.size(name) > limit:
            raise TooLargeError(f"{self.url}/{name}", self.size(name), limit)
        return self.read(name, 0, self.size(name))

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """The end of a file: of a shard file, its chunk table."""
        if self.size(name) != size:
            raise SizeError(f"{self.url}/{name}", self.size(name), size)
        return self.read(name, size - length, length)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """The same bytes as `read`, end to end in these buffers."""
        for target in targets:
            target[:] = self.read(name, offset, len(target))
            offset += len(target)


def plan_load(catalog: Catalog, wanted: StateSpec, rank: int) -> list[ReadRequest]:
    """What a rank reads of a checkpoint, and where: every element that it holds."""
    found: list[ReadRequest] = []
    copies = BoxCopies()
    with pause_collection():  # as a load does
        for name, tensor in wanted.tensors.items():
            pieces = copies.pieces(tensor.layout, rank)
            found += requests_for(catalog.tensors[name], pieces, 0, copies)
    return found


def needed(have: StateSpec, wanted: StateSpec, rank: int) -> list[int]:
    """The ranks whose files a rank of another world opens."""
    stored = choose_layouts(have.tensors)
    return sorted(
        {
            holder
            for name, tensor in wanted.tensors.items()
            for piece in tensor.layout.pieces(rank)
            for holder in stored[name].layout.holders(piece.box)
        }
    )


def _seconds(values: Mapping[int, float]) -> str:
    """Least and median, and the slowest with its rank."""
    slowest = max(values, key=lambda rank: values[rank])
    least, middle = min(values.values()), statistics.median(values.values())
    return f"{least:.3f} / {middle:.3f} / {values[slowest]:.3f} (rank {slowest})"


def saving_row(label: Sequence[str], of_rank: Callable[[int], StateSpec], ranks: int) -> list[str]:
    """One model under one way of spreading it, saved by so many ranks."""
    seconds, saved = {}, {}
    for rank in _spaced(ranks, SAMPLED):
        described = of_rank(rank)
        saved[rank], seconds[rank] = timed(lambda d=described, r=rank: planned_save(d, r))
    first = of_rank(0)
    tensors = choose_layouts(first.tensors)
    nbytes = [plan_save(first.tensors, tensors, r).nbytes for r in _spaced(ranks, COUNTED)]
    total = sum(t.dtype.nbytes(t.shape) for t in tensors.values())
    manifest, dumping = timed(lambda: dump(manifest_of(first, tensors, ranks)))
    _, opening = timed(lambda: load(manifest))
    parts = [len(one.parts) for one in saved.values()]
    return [
        *label,
        f"{ranks:,}",
        _seconds(seconds),
        f"{statistics.median(parts):,.0f}",
        f"{max(nbytes) / 1e6:,.0f}",
        f"{max(nbytes) / (total / ranks):.3f}",
        f"{len(manifest) / 1e6:.2f}",
        f"{dumping:.3f}",
        f"{opening:.3f}",
    ]


def saving_table(models: Sequence[big_models.Model], worlds: Sequence[int]) -> report.Table:
    """Rows P1 and P2 for large models."""
    rows = []
    for model in models:
        for name, spread in big_models.SPREADS.items():
            for ranks in worlds:
                whole = big_models.whole(model, spread, ranks)
                rows.append(saving_row((model.name, name), lambda rank, w=whole: w, ranks))
    columns = ("", "", "W", "plan of a rank: least / median / slowest", "parts", "MB, busiest rank")
    more = ("÷ (total/W)", "manifest MB", "written in", "opened in")
    return report.Table("Planning a save, CPU seconds", (*columns, *more), rows)


def resharding_row(
    label: Sequence[str], have: StateSpec, wanted: StateSpec, ranks: int, to: int
) -> list[str]:
    """A load by other ranks, as the first and the last of them plan it, once."""
    seconds, requests, files = {}, [], []
    for rank in _spaced(to, 2):
        store = Memory(have, ranks, needed(have, wanted, rank))
        start = time.process_time()
        found = plan_load(reader.read(store), wanted, rank)
        seconds[rank] = time.process_time() - start
        requests.append(len(found))
        files.append(len({request.extent.file for request in found}))
    return [
        *label,
        f"{ranks:,} → {to:,}",
        _seconds(seconds),
        f"{max(requests):,}",
        f"{max(files):,}",
    ]


def resharding_table(models: Sequence[big_models.Model], worlds: Sequence[int]) -> report.Table:
    """Row P3 for large models, opening the manifest included."""
    rows = []
    pairs = [(ranks, to) for ranks in worlds for to in (ranks // 2, ranks, 2 * ranks)]
    for model in models:
        for name, spread in big_models.SPREADS.items():
            for ranks, to in pairs:
                have = big_models.whole(model, spread, ranks)
                wanted = big_models.whole(model, spread, to)
                rows.append(resharding_row((model.name, name), have, wanted, ranks, to))
    columns = ("", "", "W", "plan of a rank: least / median / slowest", "requests", "files")
    return report.Table(
        "Planning a load, CPU seconds, manifest and headers included", columns, rows
    )


def merging_table(model: big_models.Model, worlds: Sequence[int]) -> report.Table:
    """Pipeline stages: what describing apart costs. Every different description is broadcast."""
    rows = []
    for ranks in worlds:
        for count in sorted({min(8, ranks), min(64, ranks), min(ranks, model.layers)}):
            parts = big_models.stages(model, ranks, count)
            texts, world = [summary(part) for part in parts], Mesh.grid(("world",), (ranks,))
            width = ranks // len(parts)

            def merge(texts: list[bytes] = texts, width: int = width, world: Mesh = world) -> int:
                found = []
                for stage, text in enumerate(texts):
                    manifest = load(text, "a summary", stored=False)
                    described = StateSpec(manifest.tensors, manifest.aliases, manifest.tree)
                    found.append((range(stage * width, (stage + 1) * width), described))
                return len(choose_layouts(merge_specs(found, world).tensors))

            tensors, seconds = timed(merge)
            received = f"{sum(map(len, texts)) / 1e6:.2f}"
            rows.append([f"{ranks:,}", str(count), f"{tensors:,}", f"{seconds:.3f}", received])
    columns = ("W", "stages", "tensors", "CPU seconds, each rank", "MB received, each rank")
    title = f"Merging the descriptions of pipeline stages, {model.name}"
    return report.Table(title, columns, rows)


def weights(ranks: int) -> dict[str, StoredTensor]:
    """1,000 matrices over so many ranks."""
    full = big_models.whole(big_models.thousand(), big_models.fsdp, ranks)
    return {name: one for name, one in full.tensors.items() if name.startswith("master.")}


def rival_rows(ranks: int) -> list[list[str]]:
    """1,000 tensors over so many ranks, by ours and by torch DCP's planner."""
    tensors = weights(ranks)
    described = StateSpec(tensors, {}, {name: TensorRef(name) for name in tensors})
    targets = [weights(to) for to in (max(1, ranks // 32), ranks, 2 * ranks)]
    planning = max(
        timed(functools.partial(planned_save, described, rank))[1]
        for rank in _spaced(ranks, SAMPLED)
    )
    manifest = dump(manifest_of(described, choose_layouts(tensors), ranks))
    _, opening = timed(lambda: load(manifest))
    loading = []
    for target in targets:
        wanted = StateSpec(target, {}, described.tree)
        store = Memory(described, ranks, needed(described, wanted, 0))
        seconds = []
        for _ in range(REPEATS):
            catalog = reader.read(store)  # anew, so that headers are opened anew
            start = time.process_time()
            plan_load(catalog, wanted, 0)
            seconds.append(time.process_time() - start)
        loading.append(min(seconds))

    def row(name: str, figures: Sequence[float], nbytes: int) -> list[str]:
        first, *others = (f"{seconds:.3f}" for seconds in figures)
        return [f"{ranks:,}", name, first, f"{nbytes / 1e6:.2f}", *others]

    rows = [row("ckpt", (planning, opening, *loading), len(manifest))]
    if ranks in DCP_WORLDS:
        theirs = dcp_plans.measured(tensors, ranks, targets)
        figures = theirs.planning, theirs.opening, *theirs.loading
        rows.append(row("torch DCP", figures, theirs.nbytes))
    return rows


def rival_table(worlds: Sequence[int]) -> report.Table:
    """Rows P1 to P3, beside torch DCP's planner."""
    rows = [row for ranks in worlds for row in rival_rows(ranks)]
    columns = ("W", "", "save: slowest rank", "metadata MB", "opened in")
    loads = ("load at W/32", "at W", "at 2 W")
    return report.Table("Planning, 1,000 tensors over W ranks, CPU seconds", columns + loads, rows)


# The agreement: one operation of all ranks.

OPERATIONS = 5
"""The least time of so many counts."""
OF_A_RANK = bytes(128)
"""The record of a rank, as long as that of the file it has written."""
SECONDS = 600.0


def _message(number: int) -> Message:
    return Message(Kind.HERE, 1, number, "ckpt.save", "writing", SECONDS, None, OF_A_RANK)


def _play(port: int, ranks: int, connection: Connection) -> None:
    """Plays all ranks but rank 0."""
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(1, ranks)]
    connection.send("connected")
    for number in range(1, OPERATIONS + 1):
        connection.recv()
        packed = _message(number).pack()
        for one in sockets:
            one.sendall(packed)
        connection.send("sent")
        for one in sockets:
            one.recv(1 << 16)
    connection.recv()


def agreement_row(ranks: int) -> list[str]:
    """The processor time of rank 0 and of the others, in an operation that all ranks wait for."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    cpu = seconds = float("inf")
    with socket.create_server(("127.0.0.1", 0), backlog=ranks) as listener:
        port = listener.getsockname()[1]
        others = multiprocessing.get_context("fork").Process(
            target=_play, args=(port, ranks, theirs)
        )
        others.start()
        rank_0: Any = Coordinator(None, ranks)  # type: ignore[arg-type]
        for rank in range(1, ranks):
            link = rank_0._links[rank] = Link(listener.accept()[0])
            rank_0._selector.register(link, 1, rank)
        ours.recv()
        with rank_0.call("ckpt.save", SECONDS) as call:
            for _ in range(OPERATIONS):
                ours.send("go")
                ours.recv()
                start = time.process_time(), time.perf_counter()
                answer = rank_0.meet(call, "writing", OF_A_RANK, None, lambda records: records[-1])
                cpu = min(cpu, time.process_time() - start[0])
                seconds = min(seconds, time.perf_counter() - start[1])
                if answer != OF_A_RANK:
                    raise RuntimeError(f"the answer is {answer}")
        ours.send("end")
        others.join()
        rank_0.forget()
    nbytes = (ranks - 1) * len(_message(1).pack())
    return [
        f"{ranks:,}",
        f"{cpu * 1e3:.1f}",
        f"{cpu / ranks * 1e6:.1f}",
        f"{seconds * 1e3:.1f}",
        f"{nbytes / 1e6:.2f}",
        f"{ranks - 1:,}",
    ]


def agreement_table(worlds: Sequence[int]) -> report.Table:
    """One operation; a save has three, a load two."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = [agreement_row(ranks) for ranks in worlds if ranks + 100 < hard]
    columns = ("W", "CPU ms, rank 0", "µs a rank", "ms, at rank 0", "MB received", "descriptors")
    return report.Table("One agreement of all ranks", columns, rows)


# Requests to an object store.

HOSTS, RANKS_A_HOST = 1024, 8
PREFIX_REQUESTS = 3_500
"""PUT, COPY, POST and DELETE requests a second and prefix, by Amazon's documentation of S3."""
HOST_BYTES = 12.5e9
"""The bytes a second of a host's network: 100 Gbit."""
S3 = PartLimits(least_bytes=5 << 20, most=10_000)
BUDGETS = (64 << 20, 512 << 20, 1 << 30)
"""The memory budgets of a rank's writer."""


def request_table(models: Sequence[big_models.Model]) -> report.Table:
    """A save by many hosts: requests and bytes, and the seconds that each of them takes alone."""
    ranks, rows = HOSTS * RANKS_A_HOST, []
    for model in models:
        stored = big_models.whole(model, big_models.fsdp, ranks).tensors.values()
        total = sum(tensor.dtype.nbytes(tensor.shape) for tensor in stored)
        for budget in BUDGETS:
            nbytes = total // ranks
            part = PartSizes.within(budget, S3).part_bytes
            requests = 1 if nbytes < part else -(-nbytes // part) + 2
            rows.append(
                [
                    model.name,
                    f"{nbytes / 1e6:,.0f}",
                    f"{budget >> 20}",
                    f"{part >> 20}",
                    f"{requests}",
                    f"{requests * ranks:,}",
                    f"{requests * ranks / PREFIX_REQUESTS:.0f}",
                    f"{nbytes * RANKS_A_HOST / HOST_BYTES:.1f}",
                    f"{-(-ranks // 1000)}",
                ]
            )
    columns = ("", "MB a rank", "budget MiB", "part MiB", "requests a rank", "all requests")
    more = ("s, requests of one prefix", "s, bytes of a host", "pages of a listing")
    return report.Table(f"A save to S3 by {HOSTS:,} hosts", (*columns, *more), rows)


# Real ranks.

REAL_RANKS = 64


def _on_real_rank(rank: int, ranks: int, folder: str) -> dict[str, float]:
    """CPU seconds of the second save, a load and a background save; descriptors."""
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def state(value: float) -> dict[str, DTensor]:
        part = torch.full((4, 256), value)
        return {f"layers.{i}": DTensor.from_local(part + i, mesh, [Shard(0)]) for i in range(50)}

    saved, target, found = state(rank), state(-1), {}
    before = len(os.listdir("/proc/self/fd"))
    ckpt.save(f"{folder}/first", saved)
    ckpt.load(f"{folder}/first", state(-1))
    actions: dict[str, Callable[[], object]] = {
        "save": lambda: ckpt.save(f"{folder}/a", saved),
        "load": lambda: ckpt.load(f"{folder}/a", target),
        "save, blocking=False": lambda: ckpt.save(f"{folder}/b", saved, blocking=False).wait(),
    }
    for name, action in actions.items():
        dist.barrier()
        start = time.process_time()
        action()
        found[name] = time.process_time() - start
    if not all(torch.equal(target[n].to_local(), saved[n].to_local()) for n in saved):
        raise RuntimeError("what was loaded is not what was saved")
    found["descriptors"] = len(os.listdir("/proc/self/fd")) - before
    dist.barrier()
    return found


def _fork_ranks(ranks: int, folder: str) -> list[dict[str, float]]:
    """What each of so many forked processes finds: none imports torch anew."""
    processes = []
    for rank in range(ranks):
        if process := os.fork():
            processes.append(process)
            continue
        try:
            found = _on_real_rank(rank, ranks, folder)
            Path(folder, f"{rank}.json").write_text(json.dumps(found))
            os._exit(0)
        finally:
            os._exit(1)
    statuses = [os.waitpid(process, 0)[1] for process in processes]
    if any(statuses):
        raise RuntimeError("a rank has failed")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def real_table(ranks: int = REAL_RANKS) -> report.Table:
    """50 tensors over real ranks of one machine, which save and load them."""
    folder = tempfile.mkdtemp()
    try:
        found = _fork_ranks(ranks, folder)
        if ckpt.verify(f"{folder}/b").problems:
            raise RuntimeError("the background save is damaged")
    finally:
        shutil.rmtree(folder)
    rows = [
        [
            name,
            f"{found[0][name] * 1e3:.1f}",
            f"{statistics.median(rank[name] for rank in found[1:]) * 1e3:.1f}",
            f"{sum(rank[name] for rank in found):.2f}",
        ]
        for name in found[0]
        if name != "descriptors"
    ]
    first, *others = (int(rank["descriptors"]) for rank in found)
    title = f"{ranks} real ranks; new descriptors: {first} on rank 0, {max(others)} elsewhere"
    return report.Table(title, ("", "CPU ms, rank 0", "median of the others", "all, s"), rows)


def tables(short: bool = False) -> Iterator[report.Table]:
    """All of them; the short form has two worlds and one model."""
    worlds = SHORT_WORLDS if short else WORLDS
    models = [big_models.dense_70b()]
    if not short:
        models.append(big_models.experts_400b())
    yield rival_table(worlds)
    yield saving_table(models, worlds)
    yield resharding_table(models, (256,) if short else (64, 256, 1024))
    yield merging_table(models[0], worlds)
    yield agreement_table(worlds)
    yield request_table(models)
    if not short:
        yield real_table()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="two worlds, one model")
    given = parser.parse_args()
    print(report.origin(), end="\n\n")
    for table in tables(given.short):
        print(table, flush=True)


if __name__ == "__main__":
    main()
