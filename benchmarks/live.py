"""A live state from a trainer's ranks to another job's, beside the ways without it.

    python benchmarks/live.py --size-mb 1000
    python benchmarks/live.py --table near --rounds 25

The floors (`live_floors.py`) move the bytes that the readers need: by one copy of warm memory, by a
copy of mapped memory that is hashed too, and by `sendfile` to `recv_into` over as many loopback
connections as a load has threads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable

import measure
import report
from live_floors import Floors
from live_job import RUNTIME, Job
from live_training import beside_training

TMPFS = "/dev/shm"
CASES = ((2, 2), (2, 3), (4, 1))
"""Trainers and readers. Three readers have every other tensor cut along its columns."""
COPY, SENDFILE, RIVAL = "copy of warm memory", "sendfile → recv_into", "gather, broadcast, load"
HASHED = "copy and xxh3 of mapped memory"
LOAD_HERE, LOAD_TCP = "ckpt.load, same host", "ckpt.load, loopback TCP"
UNVERIFIED = "the same, verify=False"
ALL, UPDATE, COPY_PART = "update, then ckpt.load", "update returns", "copy of a trainer's part"
TO_TMPFS, DCP = "ckpt.save to tmpfs, ckpt.load", "DCP to tmpfs, DCP load"


NEAR = (COPY, HASHED, LOAD_HERE, UNVERIFIED, COPY_PART, UPDATE)
"""The ways in the memory of one host: the fastest, so many rounds of them take little time."""


def hand_over(
    nbytes: int, trainers: int, readers: int, rounds: int, folder: str, near: bool
) -> measure.Samples:
    """On each rank: the samples of all ways, or with `near` of those in `NEAR`."""
    job = Job(nbytes, trainers, readers)
    job.open()
    floors = Floors(job)

    def way(run: Callable[[], object], checked: bool = True) -> measure.Contestant:
        return measure.Contestant(run, job.before, job.check if checked else lambda: None)

    ways = {
        COPY: way(floors.copy, False),
        HASHED: way(floors.copy_and_hash),
        LOAD_HERE: way(job.load),
        UNVERIFIED: way(lambda: job.load(verify=False)),
        LOAD_TCP: way(job.load_over_tcp),
        SENDFILE: way(floors.sendfile, False),
        COPY_PART: way(floors.copy_part, False),
        UPDATE: way(job.update, False),
        ALL: way(job.update_and_load),
        RIVAL: way(job.gather),
        TO_TMPFS: way(lambda: job.through_tmpfs(folder)),
        DCP: way(lambda: job.through_dcp(folder)),
    }
    for one in (job.update_and_load, job.load_over_tcp, job.update_and_load):  # all memory is warm
        job.before()
        one()
    chosen = {name: one for name, one in ways.items() if name in NEAR or not near}
    samples = measure.interleaved(chosen, rounds)
    job.before()
    job.close()
    return samples


FLOORS = {
    HASHED: (COPY,),
    LOAD_HERE: (COPY, HASHED),
    UNVERIFIED: (COPY,),
    LOAD_TCP: (SENDFILE,),
    UPDATE: (COPY_PART,),
    ALL: (RIVAL,),
    TO_TMPFS: (RIVAL,),
    DCP: (RIVAL,),
}
"""The ways to compare with."""


def hand_over_rows(label: str, samples: measure.Samples) -> list[list[str]]:
    """A row for each way."""
    rows = []
    for name, found in samples.items():
        ratios = []
        for other in FLOORS.get(name, ()):
            pairs = zip(found, samples[other], strict=True)
            ratio = report.spread([one.seconds / floor.seconds for one, floor in pairs])
            ratios.append(f"{ratio} of “{other}”")
        extra = f"{max(one.extra_bytes for one in found) / 2**20:.0f}"
        cpu = report.spread([one.cpu_seconds for one in found])
        seconds = report.spread([one.seconds for one in found])
        rows.append([label, name, seconds, ", ".join(ratios), cpu, extra])
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=1000, help="the whole state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", default=tempfile.gettempdir(), help="a folder on a disk")
    tables = ("hand-over", "near", "training")
    parser.add_argument("--table", choices=tables, help="one table; near: of one host's memory")
    given = parser.parse_args()
    nbytes, rounds = given.size_mb * 10**6, given.rounds
    os.environ.setdefault(RUNTIME, tempfile.mkdtemp(prefix="ckpt-bench-run-"))
    print(report.machine(), end="\n\n", flush=True)
    size = f"{given.size_mb} MB, {rounds} rounds"
    if given.table != "training":
        columns = ("ranks", "way", "seconds", "ratio", "CPU seconds", "extra MiB a rank")
        rows = hand_overs(nbytes, rounds, given.table == "near")
        print(report.Table(f"From trainers to readers, {size}", columns, rows), flush=True)
    if given.table in (None, "training"):
        columns = ("", "seconds", "other", "ratio")
        rows = beside_training(nbytes, rounds, given.store)
        print(report.Table(f"Beside the training, {size}", columns, rows))


def hand_overs(nbytes: int, rounds: int, near: bool) -> list[list[str]]:
    """The rows of all cases."""
    rows = []
    for trainers, readers in CASES:
        folder = tempfile.mkdtemp(prefix="ckpt-bench-", dir=TMPFS)
        try:
            world = trainers + readers
            given = nbytes, trainers, readers, rounds, folder, near
            samples = measure.on_ranks(world, hand_over, *given)
        finally:
            shutil.rmtree(folder)
        rows += hand_over_rows(f"{trainers} → {readers}", measure.joined(samples))
        report.say(f"{trainers} → {readers} is done")
    return rows


if __name__ == "__main__":
    main()
