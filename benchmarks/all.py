"""All benchmarks, on a tmpfs and on a disk; `--write-table` puts the results into README.md.

    python benchmarks/all.py --short
    python benchmarks/all.py --write-table

The first takes a few minutes: a small state, two ranks, few rounds, so fixed costs weigh more than
in the tables. Keep the machine quiet for the half hour that the second takes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import async_save
import convert
import floor
import load
import report
import reshard
import save
import small

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- results: written by all.py -->", "<!-- end of the results -->"
TMPFS = "/dev/shm"

Tables = Callable[[report.Options], list[report.Table]]
SCRIPTS: tuple[Tables, ...] = (
    floor.tables,
    save.tables,
    load.tables,
    reshard.tables,
    convert.tables,
    small.tables,
    async_save.tables,
)


def run(
    stores: Sequence[str], world_sizes: Sequence[int], gib: float, rounds: int
) -> Iterator[str]:
    """The texts of all tables, each as soon as it is measured."""
    for tables in SCRIPTS:
        for store in stores:
            options = report.Options(store, tuple(world_sizes), gib, rounds)
            for table in tables(options):
                yield str(table)


def write_tables(texts: Sequence[str]) -> None:
    """Replace what stands between the two marks in README.md."""
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{README}: the lines {BEGIN} and {END} are not there")
    README.write_text("\n".join([before + begin, "", *texts, end + after]))


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="128 MiB, 2 ranks, 3 rounds, tmpfs")
    parser.add_argument("--write-table", action="store_true", help="write the tables to README.md")
    parser.add_argument("--tmpfs", default=TMPFS, help=f"by default {TMPFS}")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="by default where /tmp is")
    parser.add_argument("--gib", type=float, default=0.5, help="size of the state, by default 0.5")
    parser.add_argument("--rounds", type=int, default=7, help="by default 7")
    given = parser.parse_args()
    heading = report.machine()
    print(heading, end="\n\n", flush=True)
    if given.short:
        tmpfs = given.tmpfs if os.path.isdir(given.tmpfs) else given.disk
        texts = run([tmpfs], [2], 1 / 8, 3)
    else:
        texts = run([given.tmpfs, given.disk], [1, 2, 4], given.gib, given.rounds)
    done = [heading + "\n"]
    for text in texts:
        print(text, flush=True)
        done.append(text)
    if given.write_table:
        write_tables(done)


if __name__ == "__main__":
    main()
