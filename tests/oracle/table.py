"""Counts the cells of the oracle: `python -m tests.oracle.table` prints the rows of a table.

Every object by every way, in one process and on ranks, as the slow tests have them. It takes an
hour. `--differences FILE` also writes each cell that differs, known or not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.conftest import Cluster, RankDied, RankFailed, RankServer
from tests.oracle import ranks, test_oracle, ways
from tests.oracle.optimizers import (
    GROUPINGS,
    INSTALLED,
    NEEDS_ONE_GROUP,
    OPTIMIZERS,
    SCHEDULERS,
)
from tests.oracle.zoo import ENTRIES

Cells = dict[tuple[str, str], list[str]]
"""What differs by (object, way)."""


def modules(folder: Callable[[], Path]) -> Iterator[Cells]:
    for name, each in ENTRIES.items():
        yield {(name, way): ways.module_cell(each, way, folder()) for way in ways.WAYS}
        yield {(name, way): ways.names_cell(each, way, folder()) for way in ("read", "convert")}


def optimizers(folder: Callable[[], Path]) -> Iterator[Cells]:
    for grouping in GROUPINGS:
        several = NEEDS_ONE_GROUP if grouping in test_oracle.SINGLE_GROUPS else {}
        for name in {**OPTIMIZERS, **INSTALLED, **several}:
            for way in ways.OPTIMIZER_WAYS:
                for is_used in (False, True):
                    found = ways.optimizer_cell(name, grouping, way, is_used, folder())
                    target = "used" if is_used else "fresh"
                    yield {(f"{name}, {grouping}, {target}", way): found}


def schedulers(folder: Callable[[], Path]) -> Iterator[Cells]:
    for name in SCHEDULERS:
        yield {(name, "load"): ways.scheduler_cell(name, folder())}


def on_ranks(folder: Callable[[], Path]) -> Iterator[Cells]:
    """Jobs that save, each with all jobs that load; ranks that die are a cell that differs."""
    servers = [RankServer(seed) for seed in (1, 2)]
    running: dict[int, Cluster] = {}

    def cluster(size: int) -> Cluster:
        if size not in running or not running[size].alive:
            running[size] = Cluster(servers, size)
        return running[size]

    trained = list({**OPTIMIZERS, **INSTALLED})
    for forms, functions, names in (
        (list(ranks.FORMS), test_oracle.OF_MODULES, list(ENTRIES)),
        (list(test_oracle.TRAINED), test_oracle.OF_TRAININGS, trained),
    ):
        for saved in test_oracle.every_job(forms):
            into = test_oracle.every_job(forms)
            try:
                yield test_oracle.compared(cluster, str(folder()), saved, into, names, functions)
            except (RankDied, RankFailed, TimeoutError) as error:
                yield {("the ranks", "{1} on {0}".format(*saved)): [str(error)[-500:]]}
    for each in running.values():
        each.close()
    for server in servers:
        server.close()


PARTS = {
    "modules": modules,
    "optimizers": optimizers,
    "schedulers and scalers": schedulers,
    "on ranks": on_ranks,
}


def main() -> int:
    """Print the rows; the exit status says whether a cell differs that is not known to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--differences", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lines, unknown = [], 0
    print("| objects | cells | differ | of these known | refused by name |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:

        def folder() -> Path:
            return Path(tempfile.mkdtemp(dir=root))

        for part in options.parts or PARTS:
            count: Counter[str] = Counter()
            for cells in PARTS[part](folder):
                for (name, way), found in cells.items():
                    count["cells"] += 1
                    if not found:
                        continue
                    why = test_oracle.reason(name, way)
                    count["differ"] += 1
                    count["known"] += why is not None
                    count["refused"] += "refused by ckpt" in found[0]
                    unknown += why is None
                    lines.append(f"{part} | {name} | {way} | {why} | {found[0][:400]!r}\n")
            row = [part, *(count[key] for key in ("cells", "differ", "known", "refused"))]
            print("|", " | ".join(map(str, row)), "|", flush=True)
    if options.differences is not None:
        options.differences.write_text("".join(lines))
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
