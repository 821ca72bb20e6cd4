"""A live state from a trainer's ranks to another job's, beside the ways without it.

    python benchmarks/live.py --size-mb 1000
    python benchmarks/live.py --tables near

The floors (`live_floors.py`) move the bytes that the readers need: by one copy of warm memory, by a
copy of mapped memory that is hashed too, and by `sendfile` to `recv_into` over as many loopback
connections as a load has threads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence

import measure
import report
from live_floors import Floors
from live_job import RUNTIME, Job
from live_training import beside_training

TMPFS = "/dev/shm"
CASES = ((2, 2), (2, 3), (4, 1))
"""Trainers and readers. Three readers have every other tensor cut along its columns."""
COPY, SENDFILE, RIVAL = "copy", "sendfile", "gather, broadcast"
HASHED = "copy and hash"
LOAD_HERE, LOAD_TCP = "ckpt.load, same host", "ckpt.load, loopback TCP"
UNVERIFIED = "the same, verify=False"
ALL, UPDATE, COPY_PART = "update, then ckpt.load", "update returns", "copy of a trainer's"
TO_TMPFS, DCP = "ckpt.save to tmpfs, ckpt.load", "DCP to tmpfs, DCP load"


TABLES = HAND_OVER, NEAR_ONES, TRAINING = "hand-over", "near", "training"
NEAR_ROUNDS = 5
"""Times as many rounds of the ways in one host's memory, which take little time."""
NEAR = (COPY, HASHED, LOAD_HERE, UNVERIFIED, COPY_PART, UPDATE)
"""The ways in the memory of one host."""


def hand_over(
    nbytes: int, trainers: int, readers: int, rounds: int, folder: str, near: bool
) -> measure.Samples:
    """On each rank: the samples of the ways in `NEAR`, or of all others."""
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
    chosen = {name: one for name, one in ways.items() if (name in NEAR) is near}
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
"""The ways to compare with: those in one host's memory with a copy, and some with a hash too."""


def hand_over_rows(label: str, samples: measure.Samples, near: bool) -> list[list[str]]:
    """A row for each way, with one ratio, or two if `near`."""
    rows = []
    for name, found in samples.items():
        ratios = []
        for other in FLOORS.get(name, ()):
            pairs = zip(found, samples[other], strict=True)
            ratios.append(report.spread([one.seconds / floor.seconds for one, floor in pairs]))
        ratios += [""] * (1 + near - len(ratios))
        extra = f"{max(one.extra_bytes for one in found) / 2**20:.0f}"
        cpu = report.spread([one.cpu_seconds for one in found])
        seconds = report.spread([one.seconds for one in found])
        rows.append([label, name, seconds, *ratios, cpu, extra])
    return rows


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
        rows += hand_over_rows(f"{trainers} → {readers}", measure.joined(samples), near)
        report.say(f"{trainers} → {readers} is done")
    return rows


def tables(options: report.Options, which: Sequence[str] = TABLES) -> Iterator[report.Table]:
    """The tables: of all ways between hosts, of those in one host's memory, beside a training."""
    os.environ.setdefault(RUNTIME, tempfile.mkdtemp(prefix="ckpt-bench-run-"))
    nbytes = round(options.gib * 2**30)
    first, last = ("ranks", "way", "seconds"), ("CPU seconds", "extra MiB a rank")
    if HAND_OVER in which:
        rows = hand_overs(nbytes, options.rounds, near=False)
        title = f"From trainers to readers, {options.gib:.3g} GiB; ratio to {RIVAL}"
        yield report.Table(f"{title}, TCP to {SENDFILE}", (*first, "ratio", *last), rows)
    if NEAR_ONES in which:
        rows = hand_overs(nbytes, NEAR_ROUNDS * options.rounds, near=True)
        columns = (*first, "÷ copy", "÷ copy and hash", *last)
        yield report.Table(f"In the memory of one host, {options.gib:.3g} GiB", columns, rows)
    if TRAINING in which:
        rows = beside_training(nbytes, options.rounds, options.store)
        columns = ("", "seconds", "other", "ratio")
        yield report.Table(f"Beside the training, {options.gib:.3g} GiB", columns, rows)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=1000, help="the whole state")
    parser.add_argument("--rounds", type=int, default=5, help="by default 5")
    parser.add_argument("--store", default=tempfile.gettempdir(), help="a folder on a disk")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    given = parser.parse_args()
    print(report.origin(), end="\n\n", flush=True)
    options = report.Options(given.store, gib=given.size_mb * 10**6 / 2**30, rounds=given.rounds)
    for table in tables(options, given.tables):
        print(table, flush=True)


if __name__ == "__main__":
    main()
