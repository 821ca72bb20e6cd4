"""A new version of which few elements differ, from 2 trainers to 3 readers of another host.

    python benchmarks/live_deltas.py --size-mb 500

Every other tensor is cut along its columns by the readers. All readers have the version before; a
whole load, with `unchanged="read"`, takes no notice of it. The rival does what trainers write by
hand: it gathers whole tensors on rank 0, and broadcasts old XOR new, compressed by zstd, to readers
that keep whole tensors and cut their parts from them. Its bytes count once for each reader, as gloo
sends them. The server compares for a reader in a process of its own, whose processor time counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any
from unittest.mock import patch

import measure
import numpy as np
import report
import torch
import torch.distributed as dist
import zstandard
from live_job import RUNTIME, Job

import ckpt
from ckpt.live.store import LiveStore
from ckpt.stores.local_store import LocalStore

PARTS = (0.001, 0.01, 0.03, 0.1, 1.0, None)
"""The part of the elements of bfloat16 that changes; None for a step of AdamW, in float32."""
STORED_PART = 0.01
"""The part for which the version also goes through a folder."""
WHOLE, DELTA, RIVAL = "a whole load", "ckpt.load", "gather, XOR, zstd, broadcast"
STORED_WHOLE, STORED = "whole, from a folder", "from a folder"
TRAINERS, READERS = 2, 3


class ChangingJob(Job):
    """One rank, whose state is bfloat16 and changes by a part of its elements, or by AdamW."""

    def __init__(self, nbytes: int, part: float | None) -> None:
        is_adam = part is None
        dtype = torch.float32 if is_adam else torch.bfloat16
        super().__init__(nbytes if is_adam else 2 * nbytes, TRAINERS, READERS, dtype)
        self.part, self.came, self.server = part, 0, 0.0
        self.random = torch.Generator().manual_seed(dist.get_rank())
        self.adam = None
        if is_adam and self.is_trainer:
            parameters = [torch.nn.Parameter(local.normal_(0, 0.02)) for local in self.locals]
            self.adam = torch.optim.AdamW(parameters, lr=1e-5)
        self.old: dict[str, np.ndarray[Any, Any]] = {}
        """On rank 0 and the readers: the whole tensors of the version before, as the rival's."""

    def before(self) -> None:
        """Brings all to one version, and publishes the next one."""
        super().load()
        full = {name: self.full(name) for name in self.shapes}
        self.old = full if not self.is_trainer or self.rank == 0 else {}
        dist.barrier()
        if self.is_trainer:
            self.train()
            self.live.update().wait()
        dist.barrier()

    def train(self) -> None:
        """Changes elements of the trainers' parts."""
        if self.adam is not None:
            for parameter in self.adam.param_groups[0]["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=self.random)
            self.adam.step()
            self.adam.zero_grad()
            return
        assert self.part is not None
        for local in self.locals:
            flat = local.view(torch.int16).reshape(-1)
            count = int(len(flat) * self.part)
            if self.part < 1:
                flat[torch.randint(len(flat), (count,), generator=self.random)] += 1
            else:
                flat.copy_(torch.randint(-(2**15), 2**15, (count,), generator=self.random))

    def full(self, name: str) -> np.ndarray[Any, Any]:
        """The whole tensor of the ranks of a group, as integers."""
        whole: np.ndarray[Any, Any] = self.state[name].full_tensor().view(torch.int16).numpy()
        return whole.view("u2")

    def load_from(self, **options: Any) -> None:
        """Loads over TCP, and counts the bytes that come and the processor time of the server."""
        fetch, delta, began = LiveStore.fetch, LiveStore.delta, self.server_seconds()

        def fetched(store: LiveStore, file: str, offset: int, views: Any) -> None:
            self.came += sum(map(len, views))
            fetch(store, file, offset, views)

        def differed(store: LiveStore, file: str, areas: Any) -> Any:
            found = delta(store, file, areas)
            self.came += 0 if found is None else found.nbytes
            return found

        with patch.object(LiveStore, "fetch", fetched), patch.object(LiveStore, "delta", differed):
            self.load_over_tcp(**options)
        dist.barrier()
        self.server += self.server_seconds() - began

    def server_seconds(self) -> float:
        """The processor time of the host server so far; 0 on other ranks than the first."""
        if self.rank or self.live.hosts.server is None:
            return 0.0
        with open(f"/proc/{self.live.hosts.server.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def by_hand(self) -> None:
        """The rival."""
        for name in self.shapes:
            message = [b""]
            if self.is_trainer:
                new = self.full(name)
                if self.rank:
                    continue
                message = [zstandard.ZstdCompressor(1).compress(planes(self.old[name] ^ new))]
            dist.broadcast_object_list(message, src=0, group=self.fan)
            if self.rank:
                self.came += len(message[0])
                found = np.frombuffer(zstandard.ZstdDecompressor().decompress(message[0]), "u1")
                whole = self.old[name]
                whole ^= (
                    np.ascontiguousarray(found.reshape(2, -1).T).view("u2").reshape(whole.shape)
                )
                one = self.state[name]
                parts = np.array_split(whole, READERS, one.placements[0].dim)
                mine = np.ascontiguousarray(parts[self.rank - TRAINERS]).view("i2")
                one.to_local().view(torch.int16).copy_(torch.from_numpy(mine))


class StoredJob(ChangingJob):
    """One rank, of a state that goes through a folder; readers follow it."""

    def open(self) -> None:
        """Publishes the state through a folder of its own."""
        folder = [tempfile.mkdtemp(prefix="ckpt-bench-chain-")]
        dist.broadcast_object_list(folder, src=0)
        self.url = folder[0]
        if self.is_trainer:
            group = self.group
            self.live = ckpt.publish(self.state, "stored", group=group, through=self.url)
        dist.barrier()
        self.versions = ckpt.follow(self.url, group=self.group, look_seconds=0)
        self.load_stored(unchanged="auto")

    def before(self) -> None:
        """Publishes a version with changes; the readers have the one before."""
        if self.is_trainer:
            self.train()
            self.live.update().wait()
        dist.barrier()

    def load_stored(self, unchanged: str) -> None:
        """Loads the newest version, and counts the bytes that come."""
        dist.barrier()
        if not self.is_trainer:
            read, fill = LocalStore.read, LocalStore.read_into

            def given(store: LocalStore, name: str, offset: int, length: int) -> bytes:
                self.came += length
                return read(store, name, offset, length)

            def filled(store: LocalStore, name: str, offset: int, *views: memoryview) -> None:
                self.came += sum(view.nbytes for view in views)
                fill(store, name, offset, *views)

            version = next(self.versions)
            with (
                patch.object(LocalStore, "read", given),
                patch.object(LocalStore, "read_into", filled),
            ):
                ckpt.load(version.url, self.state, group=self.group, unchanged=unchanged)
        dist.barrier()


def planes(array: np.ndarray[Any, Any]) -> bytes:
    """The first bytes of all elements, then the second ones."""
    found: bytes = array.reshape(-1).view("u1").reshape(-1, array.itemsize).T.tobytes()
    return found


def through_a_folder(
    nbytes: int, part: float | None, rounds: int
) -> tuple[measure.Samples, dict[str, Any]]:
    """As `hand_over`, of a folder."""
    job = StoredJob(nbytes, part)
    job.open()
    more: dict[str, Any] = {}
    samples: measure.Samples = {}
    for name, unchanged in ((STORED_WHOLE, "read"), (STORED, "auto")):
        job.came = 0
        way = measure.Contestant(lambda word=unchanged: job.load_stored(word), job.before)
        samples |= measure.interleaved({name: way}, rounds)
        more[name] = job.came / rounds, 0.0
    job.close()
    return samples, more


def hand_over(
    nbytes: int, part: float | None, rounds: int
) -> tuple[measure.Samples, dict[str, Any]]:
    """On each rank: the samples of all ways, and their bytes and the server's seconds a round."""
    job = ChangingJob(nbytes, part)
    job.open()
    ways = {
        WHOLE: lambda: job.load_from(unchanged="read"),
        DELTA: job.load_from,
        RIVAL: job.by_hand,
    }
    more: dict[str, Any] = {}
    samples: measure.Samples = {}
    for name, way in ways.items():
        job.came, job.server = 0, 0.0
        samples |= measure.interleaved({name: measure.Contestant(way, job.before)}, rounds)
        more[name] = job.came / rounds, job.server / rounds
    job.close()
    return samples, more


def table(nbytes: int, rounds: int) -> report.Table:
    """A block of rows for each part that changes."""
    os.environ.setdefault(RUNTIME, tempfile.mkdtemp(prefix="ckpt-bench-run-"))
    rows = []
    for part in PARTS:
        changed = "AdamW, float32" if part is None else f"{part:.1%}"
        found = measure.on_ranks(TRAINERS + READERS, hand_over, nbytes, part, rounds)
        if part == STORED_PART:
            stored = measure.on_ranks(TRAINERS + READERS, through_a_folder, nbytes, part, rounds)
            found = [(a | c, b | d) for (a, b), (c, d) in zip(found, stored, strict=True)]
        samples = measure.joined([one for one, _ in found])
        whole: list[float] = []
        for name, some in samples.items():
            came, server = (sum(more[name][at] for _, more in found) for at in (0, 1))
            cpu = [one.cpu_seconds + server for one in some]
            seconds = report.spread([one.seconds for one in some])
            if name in (WHOLE, STORED_WHOLE):
                whole = cpu
            ratio = report.spread([one / base for one, base in zip(cpu, whole, strict=True)])
            wire = f"1/{nbytes / came:.1f}"
            rows.append([changed, name, wire, seconds, report.spread(cpu), ratio])
        report.say(f"{changed} is done")
    columns = (
        *("changed", "way", "bytes on the way ÷ state", "seconds", "CPU seconds"),
        "CPU ÷ whole load's",
    )
    title = f"A version with changes, 2 → 3 ranks over TCP, {nbytes / 1e6:.0f} MB, {rounds} rounds"
    return report.Table(title, columns, rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=500, help="the whole state")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(report.origin(), end="\n\n", flush=True)
    print(table(given.size_mb * 10**6, given.rounds))


if __name__ == "__main__":
    main()
