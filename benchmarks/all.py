"""All benchmarks; `--write-tables` puts the results into the pages of the project.

    python benchmarks/all.py --short
    python benchmarks/all.py --write-tables
    python benchmarks/all.py --write-tables --only save load
    python benchmarks/all.py --only save load --world-size 2 --disk /dev/shm

The first takes some minutes: a small state, two ranks, few rounds, so fixed costs weigh more than
in the tables. Keep the machine quiet for the hour that the second takes. It writes the tables of
benchmarks/README.md, and what docs/performance.md and the project's README quote of them
(`pages.py`). The last prints the row of the project's README in two minutes. MERGEKIT=PROGRAM
names the `mergekit-pytorch` of an environment of its own; other rivals are measured where they are
installed: zipnn, torch_checkpointing, fastsafetensors, runai-model-streamer[s3]. As root, readers
that share have hosts of their own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import async_save
import compress
import convert
import deltas
import events
import finetune
import fixed
import live
import live_deltas
import live_swarm
import load
import object_store
import pages
import replicated
import report
import reshard
import run as run_manager
import save
import scale
import small
import stages
import state_dicts
import train
import weights

TMPFS = "/dev/shm"
PAGE_WORLDS = (2, 4)
"""The world sizes of the tables that are written."""
LIVE_BYTES, CHANGING_BYTES, SWARM_BYTES = 10**9, 500 * 10**6, 200 * 10**6


@dataclass(frozen=True, slots=True)
class Script:
    """One benchmark."""

    tables: Callable[[report.Options], Iterable[report.Table]]
    on_disk: bool = False
    """Whether a disk is another matter than a tmpfs."""
    rivals: tuple[str, ...] = ()
    """Packages whose versions the page tells beside those of torch and safetensors."""


def _live(options: report.Options) -> Iterator[report.Table]:
    if options.short:
        return
    on_disk = replace(options, gib=LIVE_BYTES / 2**30, store=tempfile.gettempdir())
    yield from live.tables(on_disk)
    yield live_deltas.table(CHANGING_BYTES, 3)
    if os.geteuid() == 0:
        yield live_swarm.table(SWARM_BYTES)


SCRIPTS = {
    "train": Script(lambda options: () if options.short else train.tables(2, 7)),
    "state_dicts": Script(lambda options: [state_dicts.table(2, options.rounds)]),
    "save": Script(save.tables, on_disk=True, rivals=("torch_checkpointing",)),
    "load": Script(load.tables),
    "reshard": Script(reshard.tables),
    "stages": Script(stages.tables),
    "convert": Script(convert.tables),
    "weights": Script(
        weights.everything, rivals=("fastsafetensors", "runai-model-streamer", "s3fs")
    ),
    "object_store": Script(object_store.tables, rivals=("s3fs",)),
    "async_save": Script(async_save.tables),
    "small": Script(small.tables),
    "fixed": Script(fixed.tables),
    "replicated": Script(replicated.tables),
    "finetune": Script(finetune.tables),
    "deltas": Script(deltas.tables),
    "compress": Script(compress.tables, rivals=("zstandard", "zipnn")),
    "run": Script(run_manager.tables, rivals=("torchdata",)),
    "scale": Script(lambda options: [scale.rival_table(scale.SHORT_WORLDS)]),
    "live": Script(_live),
    "events": Script(lambda options: [events.table(options.store)]),
}


def run(script: Script, options: report.Options, disk: str | None) -> Iterator[report.Table]:
    """One script's tables, each as soon as it is measured."""
    stores = [options.store, disk] if script.on_disk and disk is not None else [options.store]
    for store in stores:
        yield from script.tables(replace(options, store=store))


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="128 MiB, 2 ranks, 3 rounds, tmpfs")
    parser.add_argument("--write-tables", action="store_true", help="write them to the pages")
    parser.add_argument(
        "--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="some of them"
    )
    parser.add_argument("--tmpfs", default=TMPFS, help=f"by default {TMPFS}")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="by default where /tmp is")
    parser.add_argument(
        "--gib", type=float, default=report.GIB, help=f"size of the state, by default {report.GIB}"
    )
    parser.add_argument("--world-size", type=int, nargs="+", help="by default 2 4")
    parser.add_argument("--rounds", type=int, default=5, help="by default 5")
    given = parser.parse_args()
    print(report.origin(), end="\n\n", flush=True)
    tmpfs = given.tmpfs if os.path.isdir(given.tmpfs) else given.disk
    disk = None if given.short or tmpfs == given.disk else given.disk
    options = report.Options(tmpfs, PAGE_WORLDS, given.gib, given.rounds)
    if given.world_size is not None:
        options = replace(options, world_sizes=tuple(given.world_size))
    if given.short:
        options = report.Options(tmpfs, (2,), 1 / 8, 3, short=True)
    if given.write_tables and given.only == list(SCRIPTS):
        pages.write_machine()
    for name in given.only:
        _run_one(name, options, disk, given.write_tables)


def _run_one(name: str, options: report.Options, disk: str | None, is_written: bool) -> None:
    heading, tables = report.heading(SCRIPTS[name].rivals), []
    for table in run(SCRIPTS[name], options, disk):
        print(table, flush=True)
        tables.append(table)
    if is_written:
        pages.write(name, heading, tables)
        pages.quote()


if __name__ == "__main__":
    main()
