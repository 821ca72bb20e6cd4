"""The pages that show figures: each script's tables in README.md, and the quotes of other pages.

    python benchmarks/pages.py            write the quotes anew
    python benchmarks/pages.py --check    exit status 1 if a quote differs from the tables

`docs/performance.md` and the project's README quote cells of the tables of this folder's README, so
that the same figure stands in all of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import report

PERFORMANCE = report.ROOT / "docs" / "performance.md"
PROJECT = report.ROOT / "README.md"
MACHINE = "machine"
"""The mark of the line about the machine of a page's tables."""
OURS, DCP, SAVE, LOAD = "ckpt", "torch DCP", "torch.save", "torch.load"


@dataclass(frozen=True, slots=True)
class Quote:
    """One row of the comparison: three rows of a table."""

    label: str
    script: str
    title: str
    """How the table's title begins."""
    key: tuple[str, ...]
    """The cells before the contestant's name."""
    goal: str = ""
    """The ratio to the floor that the project wants."""
    ours: str = OURS
    rival: str = DCP
    floor: str = report.FLOOR


QUOTES = (
    Quote("save, 2 ranks", "save", "Save, 1.93 GiB, tmpfs", ("2",), "1.25"),
    Quote("save, 4 ranks", "save", "Save, 1.93 GiB, tmpfs", ("4",), "1.25"),
    Quote("save, 2 ranks, disk, flushed", "save", "Save, 1.93 GiB, disk", ("2",), "1.2"),
    Quote("load, 2 ranks", "load", "Load, 1.93", ("2",), "1.3"),
    Quote("load, 4 ranks", "load", "Load, 1.93", ("4",), "1.3"),
    Quote("load, 2 ranks, disk, not in memory", "load", "Load of files", ("2",), "1.1"),
    Quote("saved by 4, loaded by 2", "reshard", "Reshard", ("4 → 2",), "1.25"),
    Quote("saved by 2, loaded by 4", "reshard", "Reshard", ("2 → 4",), "1.4"),
    Quote("saved by 4, loaded by 1", "reshard", "Reshard", ("4 → 1",), "1.1"),
    Quote("rows saved, columns loaded, 2 ranks", "reshard", "Reshard", ("2 → 2, columns",), "1.4"),
    *(
        Quote(
            f"stall of the {when} save, {ranks} ranks",
            "async_save",
            "Until training goes on",
            (f"{ranks}, {when}",),
            goal,
            "ckpt, copied",
            "torch DCP, thread",
        )
        for when, ranks, goal in (
            ("first", 2, ""),
            ("prepared", 2, "1.5"),
            ("Checkpointer's first", 2, "1.5"),
            ("later", 2, "1.15"),
            ("later", 4, "1.4"),
        )
    ),
    Quote("10,000 tensors of 16 KiB, save, CPU", "small", "Save 10,000", (), "0.7", floor=SAVE),
    Quote("10,000 tensors of 16 KiB, load, CPU", "small", "Load 10,000", (), "0.35", floor=LOAD),
    *(
        Quote(f"100 KB, {does}, {ranks}, CPU", "fixed", f"{title} 100 KB", (ranks[0],), goal)
        for does, title, goal in (("save", "Save", "1.3"), ("load", "Load", "1.2"))
        for ranks in ("1 rank", "8 ranks")
    ),
)


def write_machine() -> None:
    """Says in both pages that their tables are of this machine."""
    for page in (report.README, PERFORMANCE):
        page.write_text(_with(page.read_text(), MACHINE, f"{report.machine()}."))


def write(script: str, heading: str, tables: Sequence[report.Table]) -> None:
    """Replaces a script's tables in this folder's README, or those of stages in performance.md.

    Tables of another machine than that of the whole page say theirs.
    """
    page, machine = PERFORMANCE if script == "stages" else report.README, report.machine()
    if f"{machine}." != _between(page.read_text(), MACHINE).strip():
        heading += f", {machine}"
    shown = [one.brief() for one in tables if not one.title.startswith(report.TABLES_LEFT_OUT)]
    text = "\n".join([f"{heading}.\n", *shown])
    page.write_text(_with(page.read_text(), script, text))


def quote() -> None:
    """Writes the quotes of the other pages anew."""
    for page, text in _quoted():
        page.write_text(text)


def differences() -> list[str]:
    """The pages whose quotes are not those of today's tables."""
    return [str(page) for page, text in _quoted() if page.read_text() != text]


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by benchmarks/all.py -->", f"<!-- end of {name} -->"


def _between(text: str, name: str) -> str:
    begin, end = _marks(name)
    return text.partition(begin)[2].partition(end)[0]


def _with(text: str, name: str, new: str) -> str:
    """A page with a text between its two marks."""
    begin, end = _marks(name)
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise SystemExit(f"the lines {begin} and {end} are not there")
    return f"{before}{first}\n\n{new.strip()}\n\n{last}{after}"


def _quoted() -> list[tuple[Path, str]]:
    """Each page that quotes, with the quotes of today."""
    performance = _with(PERFORMANCE.read_text(), "comparison", _comparison())
    return [(PERFORMANCE, performance), (PROJECT, _project(PROJECT.read_text()))]


def _comparison() -> str:
    head = ["", "floor, seconds", "ckpt ÷ floor", "torch DCP ÷ floor", "goal"]
    lines = ["|".join(["", *head, ""]), "|".join(["", *["-"] * len(head), ""])]
    for one in QUOTES:
        cells = [_cell(one, name) for name in (one.floor, one.ours, one.rival)]
        lines.append("|".join(["", one.label, *cells, one.goal, ""]))
    return "\n".join(lines)


def _cell(quote: Quote, name: str) -> str:
    """The seconds of the floor, and the ratio of others to it, ours with its spread."""
    found = _row(quote, name)
    if found is None:
        return "–"
    seconds, ratio = found[0], found[1]
    if name == quote.rival:
        ratio = report.SPREAD.sub(r"\1", ratio)
    return seconds if name == quote.floor else ratio


def _row(quote: Quote, name: str) -> list[str] | None:
    """The cells after the name of a contestant: seconds and ratio come first."""
    section = _between(report.README.read_text(), quote.script).partition(f"### {quote.title}")[2]
    first, named = "", (*quote.key, name)
    for line in section.partition("###")[0].splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        first = cells[0] = cells[0] or first  # a page names what rows have in common once
        if tuple(cells[: len(named)]) == named:
            return cells[len(named) :]
    return None


def _project(text: str) -> str:
    """The project's README with the seconds of a save and a load, and where they come from."""
    pairs = []
    for name in (OURS, DCP):
        found = [_row(one, name) for one in (QUOTES[0], QUOTES[3])]
        pairs.append(", ".join(f"{float(cells[0]):.2g} s" for cells in found if cells))
    heading = _between(report.README.read_text(), "save").strip()
    found = re.match(r"([\d-]+), (commit \w+)", heading)
    date, commit = found.groups() if found else ("", "")
    text = re.sub(
        r"(\| 2\.07 GB by 2 ranks: save, load) \|[^|]*\|[^|]*\|",
        rf"\1 | {' | '.join(pairs)} |",
        text,
    )
    return re.sub(r"of \d{4}-\d\d-\d\d,(\s)commit \w+", rf"of {date},\g<1>{commit}", text)


if __name__ == "__main__":
    if "--check" in sys.argv:
        found = differences()
        print("\n".join(found))
        sys.exit(bool(found))
    quote()
