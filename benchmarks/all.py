"""All benchmarks, on a tmpfs and on a disk; `--write-table` puts the results into README.md.

    python benchmarks/all.py --short
    python benchmarks/all.py --write-table
    python benchmarks/all.py --write-table --only save load
    python benchmarks/all.py --only save load --world-size 2 --disk /dev/shm

The first takes some minutes: a small state, two ranks, few rounds, so fixed costs weigh more than
in the tables. Keep the machine quiet for the half hour that the second takes. The last prints the
row of the project's README in two minutes. `train.py` and `state_dicts.py` write their own tables.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import async_save
import compress
import convert
import deltas
import finetune
import fixed
import floor
import load
import object_store
import replicated
import report
import reshard
import run as run_manager
import save
import scale
import small
import stages
import weights

TMPFS = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Script:
    """One benchmark."""

    tables: Callable[[report.Options], Iterable[report.Table]]
    on_disk: bool = True
    """Whether a disk is another matter than a tmpfs."""


SCRIPTS = {
    "floor": Script(floor.tables),
    "save": Script(save.tables),
    "load": Script(load.tables),
    "reshard": Script(reshard.tables),
    "stages": Script(stages.tables, on_disk=False),
    "convert": Script(convert.tables),
    "weights": Script(weights.everything),
    "object_store": Script(object_store.tables, on_disk=False),
    "async_save": Script(async_save.tables, on_disk=False),
    "small": Script(small.tables),
    "fixed": Script(fixed.tables, on_disk=False),
    "replicated": Script(replicated.tables, on_disk=False),
    "finetune": Script(finetune.tables, on_disk=False),
    "deltas": Script(deltas.tables, on_disk=False),
    "compress": Script(compress.tables, on_disk=False),
    "run": Script(run_manager.tables),
    "scale": Script(lambda options: scale.tables(options.short), on_disk=False),
}


def run(script: Script, options: report.Options, disk: str | None) -> Iterator[str]:
    """The texts of one script's tables, each as soon as it is measured."""
    stores = [options.store, disk] if script.on_disk and disk is not None else [options.store]
    for store in stores:
        for table in script.tables(replace(options, store=store)):
            yield str(table)


def write_tables(name: str, heading: str, texts: Sequence[str]) -> None:
    """Replace what stands between a script's two marks in README.md."""
    begin, end = f"<!-- {name}: written by all.py -->", f"<!-- end of {name} -->"
    report.write_between(begin, end, "\n".join([heading + "\n", *texts]))


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="128 MiB, 2 ranks, 3 rounds, tmpfs")
    parser.add_argument("--write-table", action="store_true", help="write the tables to README.md")
    parser.add_argument(
        "--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="some of them"
    )
    parser.add_argument("--tmpfs", default=TMPFS, help=f"by default {TMPFS}")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="by default where /tmp is")
    parser.add_argument(
        "--gib", type=float, default=report.GIB, help=f"size of the state, by default {report.GIB}"
    )
    parser.add_argument("--world-size", type=int, nargs="+", help="by default 1 2 4")
    parser.add_argument("--rounds", type=int, default=5, help="by default 5")
    given = parser.parse_args()
    heading = report.machine()
    print(heading, end="\n\n", flush=True)
    tmpfs = given.tmpfs if os.path.isdir(given.tmpfs) else given.disk
    disk = None if given.short or tmpfs == given.disk else given.disk
    options = report.Options(tmpfs, gib=given.gib, rounds=given.rounds)
    if given.world_size is not None:
        options = replace(options, world_sizes=tuple(given.world_size))
    if given.short:
        options = report.Options(tmpfs, (2,), 1 / 8, 3, short=True)
    for name in given.only:
        texts = []
        for text in run(SCRIPTS[name], options, disk):
            print(text, flush=True)
            texts.append(text)
        if given.write_table:
            write_tables(name, heading, texts)


if __name__ == "__main__":
    main()
