"""Planning for many ranks, played by one process without a process group.

    python benchmarks/scale.py
    python benchmarks/scale.py --short

A plan is made of layouts, which are symbolic: what a rank computes to save or to load can be
computed here for any rank of any number. Every figure is what one rank does, alone, in CPU seconds;
nothing is kept from one rank to the next. What depends on all ranks is measured in full: the
manifest, with a file for each, and torch DCP's global plan, which its rank 0 makes of all ranks'
plans.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import big_models
import dcp_plans
import report
import torch
import xxhash

from ckpt.plan.read_plan import BoxCopies, ReadRequest, requests_for
from ckpt.plan.save_plan import WriteItem, choose_layouts, plan_save
from ckpt.state.flatten import FlatState, Leaf
from ckpt.state.merged_state import state_hashes, summary
from ckpt.state.state_spec import StateSpec, merge_specs
from formats.catalog import Catalog, TensorRef
from formats.errors import SizeError, TooLargeError
from formats.native import reader
from formats.native.manifest import MANIFEST, Manifest, ShardFile, StoredTensor, dump, load
from formats.native.shard import ALIGN, CHUNK_BYTES, RECORD, TABLE
from formats.safetensors.file import build
from formats.storage import LOCAL_READ_BYTES
from sharding.agreement.call_events import pause_collection
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
    state = flat(described)
    planning = max(
        timed(functools.partial(plan_save, described, state, rank))[1]
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


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="two worlds, one model")
    given = parser.parse_args()
    print(report.machine(), end="\n\n")
    for table in tables(given.short):
        print(table, flush=True)


if __name__ == "__main__":
    main()
