"""Workload A on an S3 server: bytes and requests of loads, and the cost of moving them.

    python benchmarks/object_store.py --server radosgw

The server runs on this machine, started here: Ceph's gateway where it is installed, else moto. A
proxy in front of it counts what goes through; seconds and CPU are of other runs, without it. The
floor is what s3fs takes for the same bytes: one stream to write, ranges of 16 MiB to read. DCP's
reader and writer are torch's own for fsspec, as they come.

`needed` is what the ranks together have to have; `files` are those that the checkpoint consists of.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import measure
import report
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import workload
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import ckpt

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.stores import moto_server, radosgw
from tests.stores.fault_proxy import FaultProxy, Seen
from tests.stores.server import Server, s3_client

CHANGES = ((1, 2), (2, 4), (1, 4))
"""World sizes saved with and loaded at."""
PATTERNS = ("model.blocks.7.*", "model.blocks.8.*")
"""Names of 2.7 % of the bytes."""
PIECE_BYTES = 16 << 20
MOST_GIB = 1.0
"""Of state: the server keeps it in memory, once for each contestant."""
OURS, DCP, RAW = "ours", "dcp", "raw"
"""Folders in the bucket, by which requests are told apart."""
FOLDERS = {report.FLOOR: RAW, "ckpt": OURS, "torch DCP": DCP}
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one contestant's run cost the server."""

    requests: int
    sent_bytes: int
    """To the ranks."""


@contextmanager
def servers(name: str | None) -> Iterator[tuple[Server, FaultProxy]]:
    """A server, and the proxy that counts."""
    starter = moto_server if name == "moto" or radosgw.missing() else radosgw
    with (
        TemporaryDirectory(prefix="ckpt-bench-") as folder,
        starter.started(Path(folder)) as server,
        FaultProxy(server) as proxy,
    ):
        yield server, proxy


def traffic(seen: Sequence[Seen]) -> dict[str, Traffic]:
    """Requests and bytes of each contestant."""
    return {
        name: Traffic(
            sum(folder in one.request.target for one in seen),
            sum(one.sent_bytes for one in seen if folder in one.request.target),
        )
        for name, folder in FOLDERS.items()
    }


def files(server: Server, name: str) -> int:
    """How many files a contestant's checkpoint consists of."""
    found = s3_client(server).list_objects_v2(Bucket=server.bucket, Prefix=FOLDERS[name] + "/")
    return int(found["KeyCount"])


def driver(options: Options) -> Any:
    """The file system that floor and rival go through."""
    import s3fs

    return s3fs.S3FileSystem(**options)


def write(fs: Any, path: str, buffers: Sequence[memoryview]) -> None:
    """The floor of a save: one stream."""
    with fs.open(path, "wb") as file:
        for buffer in buffers:
            file.write(buffer)


def read(fs: Any, path: str, nbytes: int) -> None:
    """The floor of a load: ranges, as many at once as the driver likes."""
    starts = list(range(0, nbytes, PIECE_BYTES))
    ends = [min(start + PIECE_BYTES, nbytes) for start in starts]
    fs.cat_ranges([path] * len(starts), starts, ends)


def _save(server: Server, gib: float, rounds: int) -> measure.Samples:
    """Saves of all contestants, timed; the last of each stays."""
    training = workload.build(gib)
    state_dicts = training.state_dicts()
    buffers = training.buffers()
    options, rank = dict(server.options), dist.get_rank()
    fs = driver(options)

    def dcp_save() -> None:
        writer = FsspecWriter(server.url(DCP), **options)
        torch_dcp.save(state_dicts, storage_writer=writer)

    contestants = {
        report.FLOOR: measure.Contestant(
            lambda: write(fs, f"{server.bucket}/{RAW}/{rank}", buffers)
        ),
        "ckpt": measure.Contestant(
            lambda: ckpt.save(
                server.url(OURS), training.state, overwrite=True, storage_options=options
            )
        ),
        "torch DCP": measure.Contestant(dcp_save),
    }
    return measure.interleaved(contestants, rounds)


def _load(
    direct: Server, counted: Server, gib: float, rounds: int, patterns: Sequence[str] | None
) -> tuple[measure.Samples, int]:
    """Loads of all contestants: once through the proxy, then timed. And the bytes needed."""
    training = workload.build(gib)
    ckpt.load(direct.url(OURS), training.state, storage_options=direct.options)
    whole = training.digest()
    state_dicts: dict[str, Any] = training.state_dicts()
    buffers = training.buffers()
    if patterns is not None:
        kept = tuple(pattern.removeprefix("model.").rstrip("*") for pattern in patterns)
        model = {name: t for name, t in state_dicts["model"].items() if name.startswith(kept)}
        state_dicts = {"model": model}
        buffers = [memoryview(workload.local(t).numpy()).cast("B") for t in model.values()]
    needed = sum(buffer.nbytes for buffer in buffers)
    raw = f"{direct.bucket}/{RAW}/{dist.get_rank()}"
    write(driver(direct.options), raw, buffers)
    checks = [bytes(buffer[:64]) for buffer in buffers]

    def clear() -> None:
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))

    def check() -> None:
        if patterns is None and training.digest() != whole:
            raise RuntimeError(f"rank {dist.get_rank()}: what was loaded is not what was saved")
        if [bytes(buffer[:64]) for buffer in buffers] != checks:
            raise RuntimeError(f"rank {dist.get_rank()}: what was loaded is not what was asked for")

    def dcp_load(server: Server) -> None:
        reader = FsspecReader(server.url(DCP), **server.options)
        torch_dcp.load(state_dicts, storage_reader=reader)

    def ours_load(server: Server) -> None:
        ckpt.load(
            server.url(OURS), training.state, include=patterns, storage_options=server.options
        )

    def contestants(server: Server) -> dict[str, measure.Contestant]:
        fs = driver(server.options)
        return {
            report.FLOOR: measure.Contestant(lambda: read(fs, raw, needed)),
            "ckpt": measure.Contestant(lambda: ours_load(server), clear, check),
            "torch DCP": measure.Contestant(lambda: dcp_load(server), clear, check),
        }

    measure.interleaved(contestants(counted), 1)
    return measure.interleaved(contestants(direct), rounds), needed


def _rows(
    label: str,
    samples: measure.Samples,
    nbytes: int,
    last: Callable[[str], Sequence[str]],
) -> list[list[str]]:
    """One row per contestant: seconds, rate, CPU per GB, and what `last` gives for its name."""
    return [
        [
            label,
            name,
            report.spread([sample.seconds for sample in found]),
            report.spread(report.ratios(samples, name, lambda sample: sample.seconds)),
            f"{nbytes / 1e9 / statistics.median(s.seconds for s in found):.2f}",
            f"{statistics.median(s.cpu_seconds for s in found) / (nbytes / 1e9):.2f}",
            f"{max(sample.extra_bytes for sample in found) / 2**20:.0f}",
            *last(name),
        ]
        for name, found in samples.items()
    ]


COLUMNS = ("W", "", "seconds", "÷ floor", "GB/s", "CPU s per GB", "extra MiB a rank")


def _measured_load(
    server: Server,
    proxy: FaultProxy,
    options: report.Options,
    saved: int,
    loaded: int,
    patterns: Sequence[str] | None = None,
) -> list[list[str]]:
    """The rows of loading at one world size what was saved with another."""
    proxy.clear()
    ranks = measure.on_ranks(
        loaded, _load, server, proxy.server, options.gib, options.rounds, patterns
    )
    needed = sum(found for _, found in ranks)
    costs = traffic(list(proxy.seen))

    def last(name: str) -> Sequence[str]:
        cost = costs[name]
        allowed = needed / PIECE_BYTES + files(server, name)
        return (
            f"{cost.sent_bytes / needed:.3f}",
            str(cost.requests),
            "" if name == report.FLOOR else f"{cost.requests / allowed:.2f}",
        )

    return _rows(f"{saved} → {loaded}", measure.joined(s for s, _ in ranks), needed, last)


def tables(options: report.Options, name: str | None = None) -> Iterator[report.Table]:
    """Saves, loads at another world size, and loads of a few names."""
    options = replace(options, gib=min(options.gib, MOST_GIB))
    saves: list[list[str]] = []
    loads: list[list[str]] = []
    few: list[list[str]] = []
    with servers(name) as (server, proxy):
        where = f"{options.gib:g} GiB, S3 by {server.name}"
        for world_size in (1, 2):
            ranks = measure.on_ranks(world_size, _save, server, options.gib, options.rounds)
            nbytes = round(options.gib * 2**30)
            saves += _rows(str(world_size), measure.joined(ranks), nbytes, lambda name: ())
            for saved, loaded in CHANGES:
                if saved == world_size and (loaded == 2 or not options.short):
                    loads += _measured_load(server, proxy, options, saved, loaded)
            if world_size == 2:
                few += _measured_load(server, proxy, options, 2, 2, PATTERNS)
    counted = (*COLUMNS, "downloaded ÷ needed", "requests", "÷ (needed / 16 MiB + files)")
    yield report.Table(f"Save, {where}", COLUMNS, saves)
    yield report.Table(f"Load at another world size, {where}", counted, loads)
    yield report.Table(f"Load of the names of 2.7 % of the bytes, {where}", counted, few)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", choices=("moto", "radosgw"), help="by default radosgw, if here")
    parser.add_argument("--gib", type=float, default=report.GIB, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="by default 5")
    parser.add_argument("--short", action="store_true", help="fewer changes of world size")
    given = parser.parse_args()
    print(report.origin(), end="\n\n")
    options = report.Options("", gib=given.gib, rounds=given.rounds, short=given.short)
    for table in tables(options, given.server):
        print(table)


if __name__ == "__main__":
    main()
