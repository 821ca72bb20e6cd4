"""Options, tables and the machine's description: what the benchmark scripts share to speak."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import strftime

from measure import Sample, Samples

GIB = 1.93
"""Size of the whole state: 2.07 GB."""
FLOOR = "floor"
"""The contestant that the others are divided by."""
ROOT = Path(__file__).parent.parent
README = ROOT / "benchmarks" / "README.md"
MEASURED = ("ckpt", "sharding", "formats", "tools", "benchmarks/*.py")
RATIOS = ("÷", "ratio", "step ÷", "CPU ÷")
"""How the head of a column of ratios begins."""
LEFT_OUT = (
    "extra MiB a rank",
    "write calls",
    "losses of FSDP2, to the bit",
    "GB/s",
    "MiB read by calls",
)
"""The columns that a page does not show."""
WAYS_LEFT_OUT = ("ckpt, verify=False", "the same, verify=False", "torch DCP, plans cached")
"""The rows that a page does not show: by the name of a way, which another row is close to."""
TABLES_LEFT_OUT = ("Peak memory of ckpt fully_shard by the size of units", "Checksums of chunks")
"""How the titles of the tables begin that a page does not show."""
NAMED_ONCE = 8
"""The characters from which on a page names what its rows have in common in the first of them."""
SPREAD = re.compile(r"^(\S+) \([^()]*–[^()]*\)$")
"""A cell of `spread`."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run, how large, how often and where."""

    store: str
    """An existing folder; everything is written into a new folder inside it."""
    world_sizes: tuple[int, ...] = (1, 2, 4)
    gib: float = GIB
    """Size of the whole state."""
    rounds: int = 5
    short: bool = False
    """A look at whether everything runs, in little time."""

    @property
    def where(self) -> str:
        """The store in words: `tmpfs`, or the kind of its disk's file system."""
        path, best, kind = os.path.realpath(self.store) + "/", "", "disk"
        for line in Path("/proc/mounts").read_text().splitlines():
            mount, found = line.split()[1:3]
            mount = mount.rstrip("/") + "/"
            if path.startswith(mount) and len(mount) >= len(best):
                best, kind = mount, found
        return kind if kind == "tmpfs" else f"disk ({kind})"

    @contextmanager
    def folder(self) -> Iterator[str]:
        """A new folder in the store, removed in the end."""
        with TemporaryDirectory(prefix="ckpt-bench-", dir=self.store) as folder:
            yield folder


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        """The table in Markdown, its columns aligned."""
        lines = [list(self.columns), *map(list, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = ["-" * width for width in widths]
        shown = [
            "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
            for line in (lines[0], rule, *lines[1:])
        ]
        return "\n".join([f"### {self.title}", "", *shown, ""])

    def brief(self) -> str:
        """The table of a page: cells are not padded, and only ratios show their spread.

        In a table without ratios the first column that has a spread shows it.
        It has not the columns of `LEFT_OUT` and the rows of `WAYS_LEFT_OUT`, for which a reader
        runs the script. A long first cell stands in the first of its rows alone.
        """
        is_ratio = [one.startswith(RATIOS) for one in self.columns]
        if not any(is_ratio):
            spreads = [any(map(SPREAD.match, cells)) for cells in zip(*self.rows, strict=True)]
            is_ratio = [one and not any(spreads[:at]) for at, one in enumerate(spreads)]
        lines = [list(self.columns), ["-"] * len(self.columns)]
        above = ""
        for row in self.rows:
            if not set(row[:2]).isdisjoint(WAYS_LEFT_OUT):
                continue
            is_named = row[0] == above and len(above) > NAMED_ONCE
            cells = zip(["" if is_named else row[0], *row[1:]], is_ratio, strict=True)
            above = row[0]
            lines.append([cell if ratio else SPREAD.sub(r"\1", cell) for cell, ratio in cells])
        kept = [at for at, name in enumerate(self.columns) if name not in LEFT_OUT]
        shown = ("|".join(["", *(line[at] for at in kept), ""]) for line in lines)
        return "\n".join([f"### {self.title}", "", *shown, ""])


def spread(values: Sequence[float]) -> str:
    """The median with the least and the most, `1.23 (1.10–1.40)`, or alone where they are equal."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.3g}" + (f" ({least:.3g}–{most:.3g})" if least < most else "")


def ratios(samples: Samples, name: str, figure: Callable[[Sample], float]) -> list[float]:
    """A contestant's figure over the floor's, round by round."""
    pairs = zip(samples[name], samples[FLOOR], strict=True)
    return [figure(mine) / figure(least) for mine, least in pairs]


def rows(
    label: str,
    samples: Samples,
    last: Callable[[Sequence[Sample]], str],
) -> list[list[str]]:
    """One row per contestant: seconds, ratios to the floor, memory, and a last column."""
    return [
        [
            label,
            name,
            spread([sample.seconds for sample in found]),
            spread(ratios(samples, name, lambda sample: sample.seconds)),
            f"{statistics.median(ratios(samples, name, lambda s: s.cpu_seconds)):.2f}",
            f"{max(sample.extra_bytes for sample in found) / 2**20:.0f}",
            last(found),
        ]
        for name, found in samples.items()
    ]


def columns(first: str, last: str) -> tuple[str, ...]:
    """The heads of what `rows` gives."""
    return (first, "", "seconds", "÷ floor", "CPU ÷ floor's", "extra MiB a rank", last)


def write_calls(samples: Sequence[Sample]) -> str:
    """For the last column: system calls that wrote, all ranks together."""
    return f"{statistics.median(sample.write_calls for sample in samples):,.0f}"


def read_mib(samples: Sequence[Sample]) -> str:
    """For the last column: MiB that system calls read, all ranks together."""
    return f"{statistics.median(sample.read_bytes for sample in samples) / 2**20:,.0f}"


def remove(path: str) -> None:
    """Delete a file or a folder; no error where there is none."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.unlink(path)


def size_of(folder: str) -> int:
    """Bytes of all files directly in a folder."""
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())


def origin() -> str:
    """One line: when, of which code and on which machine."""
    return f"{heading()}, {machine()}."


def heading(rivals: Sequence[str] = ()) -> str:
    """The date, the commit, and the versions of a script's rivals."""
    versions = (f"{one} {version(one)}" for one in rivals if find_spec(one.replace("-", "_")))
    return ", ".join([strftime("%Y-%m-%d"), f"commit {commit()}", *versions])


def machine() -> str:
    """The processor, its cores, and the versions of the software that all scripts run on."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    processor = names[0] if names else platform.machine()
    versions = ", ".join(f"{one} {version(one)}" for one in ("torch", "safetensors"))
    return (
        f"{os.cpu_count()} cores of {processor}, Python {platform.python_version()}, {versions}, "
        f"Linux {platform.release()}"
    )


def commit() -> str:
    """The commit of the code that is measured, and whether the code differs from it."""
    command = ["git", "-C", str(ROOT)]
    changes = [*command, "status", "--porcelain", "--", *MEASURED]
    try:
        name = subprocess.check_output([*command, "rev-parse", "--short=8", "HEAD"], text=True)
        return name.strip() + (" with changes" if subprocess.check_output(changes) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # an unpacked archive, or no git


def say(line: str) -> None:
    """Tells at once how far a script is."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(description: str | None, tables: Callable[[Options], list[Table]]) -> None:
    """The command line of one script."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", required=True, help="an existing folder, on a tmpfs or a disk")
    parser.add_argument(
        "--world-size", type=int, nargs="+", default=[1, 2, 4], help="by default 1 2 4"
    )
    parser.add_argument(
        "--gib", type=float, default=GIB, help=f"size of the state, by default {GIB}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="by default 5")
    given = parser.parse_args()
    print(origin(), end="\n\n")
    options = Options(given.store, tuple(given.world_size), given.gib, given.rounds)
    for table in tables(options):
        print(table)
