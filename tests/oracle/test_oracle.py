"""Torch is the oracle: each object of the zoo, by each way in and out, has what torch would give.

A cell that differs is a fault, or stands in `KNOWN` with the reason that docs/limits.md gives. An
object that is known to differ by every way and no longer does fails the slow tests: its row is then
wrong. `python -m tests.oracle.table` counts all cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests import selection
from tests.conftest import Cluster
from tests.oracle import ranks, ways
from tests.oracle.optimizers import (
    GROUPINGS,
    INSTALLED,
    LIBRARIES,
    NEEDS_ONE_GROUP,
    OPTIMIZERS,
    SCHEDULERS,
)
from tests.oracle.zoo import ENTRIES
from tests.selection import slow

KNOWN: dict[tuple[str, str], str] = {
    ("sparse buffer", "*"): "sparse tensors are refused",
    ("meta device", "*"): "a tensor on the meta device has nothing to save and is never filled",
    ("wrapper subclass", "*"): "a save refuses parameters that wrap other tensors",
    ("lazy, never called", "*"): "a lazy module without values has nothing to save",
    ("quantised dynamically", "*"): "quantised tensors are refused",
    ("inference tensors", "*"): "ckpt fills tensors of inference mode, torch refuses",
    ("names of an older release", "*"): "names are compared before any user's code runs",
    ("buffer of the * bit", "from torch.save"): "a load computes no conjugate or negative",
    ("buffer of the conjugate bit", "torch's DCP to ckpt.dcp"): "as from torch.save",
    ("expanded buffer", "ckpt.dcp to torch's DCP"): "torch's DCP fills no expanded tensor",
    ("state of an older version", "*dcp*"): "DCP stores no versions of modules",
    ("state of an older version", "*FSDP*"): "flat parameters are filled without the modules' code",
    ("convolution, channels last", "*torch FSDP*"): "flat parameters of another memory format",
    ("child named _*_wrapped_module", "*FSDP*"): "FSDP takes such parts off every name",
    ("hook that *", "*FSDP*"): "a hook that reads a divided parameter is refused",
    ("own save and load", "*FSDP*"): "a method that reads a divided parameter is refused",
    ("hooks that rename", "*FSDP*"): "the hook's own KeyError: flat parameters have other keys",
    ("hook that adds a key", "*fully_shard*"): "the hook makes a partial DTensor, which is refused",
    ("compiled with own entries", "*torch fully_shard*"): "torch sets its entries twice",
    (
        "own state_dict and load_state_dict",
        "* on *",
    ): "wrappers drop what a child's method adds",
    ("adaptive softmax", "*torch fully_shard*"): "torch's full_tensor() of no elements raises",
}
"""(object, way), as patterns, to the reason of the difference."""
SINGLE_GROUPS = ("one group", "frozen parameters", "never trained", "loose tensors")


def reason(name: str, way: str) -> str | None:
    """Why this cell differs, if it is known to."""
    found = [
        text
        for (names, ways_), text in KNOWN.items()
        if fnmatchcase(name, names) and fnmatchcase(way, ways_)
    ]
    return found[0] if found else None


def part(names: Sequence[str], key: str, quick: int, full: int = 2) -> list[str]:
    """One of `quick` parts of the names in `make test`, which one by the key; one of `full` else.

    `make test` thus has every way and most objects, `make test-all` every object by several ways,
    and the slow tests the whole product.
    """
    of = quick if selection.is_quick else full
    return [name for name in names if crc32(f"{name}|{key}".encode()) % of == 0]


def faults(cells: dict[tuple[str, str], list[str]]) -> dict[str, list[str]]:
    """The cells that differ and should not."""
    return {
        f"{name} | {way}": found[:5]
        for (name, way), found in cells.items()
        if found and reason(name, way) is None
    }


def own_folder(folder: Path, number: int) -> Path:
    """A new folder for one cell."""
    made = folder / str(number)
    made.mkdir()
    return made


@pytest.mark.parametrize("way", ways.WAYS)
def test_every_module_comes_back_as_torch_loads_it(way: str, tmp_path: Path) -> None:
    names = part(list(ENTRIES), way, quick=12, full=4)
    assert not faults(
        {
            (name, way): ways.module_cell(ENTRIES[name], way, own_folder(tmp_path, number))
            for number, name in enumerate(names)
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ways.WAYS)
def test_every_module_comes_back_by_every_way(way: str, tmp_path: Path) -> None:
    cells = {
        (name, way): ways.module_cell(entry, way, own_folder(tmp_path, number))
        for number, (name, entry) in enumerate(ENTRIES.items())
    }
    assert not faults(cells)
    if way == "load":  # the rows of objects that differ by every way are still true
        assert [name for name, _ in cells if (name, "*") in KNOWN and not cells[name, way]] == []


@pytest.mark.parametrize("way", ["read", "convert"])
def test_every_module_has_the_names_and_tensors_of_its_state_dict(way: str, tmp_path: Path) -> None:
    names = part(list(ENTRIES), way, quick=4)
    assert not faults(
        {
            (name, way): ways.names_cell(ENTRIES[name], way, own_folder(tmp_path, number))
            for number, name in enumerate(names)
        }
    )


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_every_optimizer_goes_on_as_after_torchs_own_load(grouping: str, tmp_path: Path) -> None:
    several = {} if grouping not in SINGLE_GROUPS else NEEDS_ONE_GROUP
    cells = {}
    for number, name in enumerate({**OPTIMIZERS, **several}):
        turn = crc32(f"{name} {grouping}".encode())
        way = list(ways.OPTIMIZER_WAYS)[turn % len(ways.OPTIMIZER_WAYS)]
        of = 4 if selection.is_quick else 2  # the slow test has them all
        if turn // 8 % of:
            continue
        folder = own_folder(tmp_path, number)
        found = ways.optimizer_cell(name, grouping, way, bool(turn // 4 % 2), folder)
        cells[f"{name}, {grouping}", way] = found
    assert not faults(cells)


@pytest.mark.slow
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("way", ways.OPTIMIZER_WAYS)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_every_optimizer_goes_on_by_every_way_into_fresh_and_used_targets(
    grouping: str, way: str, is_used: bool, tmp_path: Path
) -> None:
    several = {} if grouping not in SINGLE_GROUPS else NEEDS_ONE_GROUP
    assert not faults(
        {
            (f"{name}, {grouping}", way): ways.optimizer_cell(
                name, grouping, way, is_used, own_folder(tmp_path, number)
            )
            for number, name in enumerate({**OPTIMIZERS, **several})
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_optimizer_of_a_library_goes_on_by_every_way(
    library: str, grouping: str, tmp_path: Path
) -> None:
    names = list(LIBRARIES[library])
    if not {*names} <= {*INSTALLED}:
        pytest.skip(f"{library} is not installed: make test-peers tries its {len(names)}: {names}")
    cells = [(name, way, used) for name in names for way in ways.OPTIMIZER_WAYS for used in (0, 1)]
    assert not faults(
        {
            (f"{name}, {grouping}, {'used' if used else 'fresh'}", way): ways.optimizer_cell(
                name, grouping, way, bool(used), own_folder(tmp_path, number)
            )
            for number, (name, way, used) in enumerate(cells)
        }
    )


def test_every_scheduler_goes_on_as_after_torchs_own_load(tmp_path: Path) -> None:
    assert not faults(
        {
            (name, "load"): ways.scheduler_cell(name, own_folder(tmp_path, number))
            for number, name in enumerate(SCHEDULERS)
        }
    )


JOBS = [
    ((2, "replicas"), (3, "replicas")),
    ((1, "replicas"), (2, "fully_shard")),
    ((2, "torch fully_shard"), (3, "fully_shard")),
    ((3, "fully_shard"), (2, "torch FSDP")),
    ((2, "torch FSDP"), (1, "replicas")),
    ((2, "FSDP"), (3, "FSDP, flat")),
    ((3, "FSDP, flat"), (2, "DDP")),
    ((2, "DDP"), (2, "torch fully_shard")),
]
"""(world size, form) of the job that saves and of the job that loads."""
TRAINED = ("replicas", "DDP", "torch fully_shard", "fully_shard")
SIZES = (1, 2, 3)
OF_MODULES = (ranks.save_objects, ranks.load_objects)
OF_TRAININGS = (ranks.save_trainings, ranks.load_trainings)


def every_job(forms: Iterable[str]) -> list[tuple[int, str]]:
    """All world sizes with all forms."""
    return [(size, form) for size in SIZES for form in forms]


def cells_of(
    answers: list[dict[str, list[str]]], saved: tuple[int, str], loaded: tuple[int, str]
) -> dict[tuple[str, str], list[str]]:
    """The differences of all ranks by cell."""
    way = "{1} on {0} to {3} on {2}".format(*saved, *loaded)
    return {(name, way): [line for a in answers for line in a[name]] for name in answers[0]}


def compared(
    clusters: Callable[[int], Cluster],
    place: str,
    saved: tuple[int, str],
    into: Sequence[tuple[int, str]],
    names: Sequence[str],
    functions: tuple[Callable[..., Any], Callable[..., Any]] = OF_MODULES,
) -> dict[tuple[str, str], list[str]]:
    """The differences by cell if one job saves the objects and other jobs load them."""
    save, load = functions
    clusters(saved[0]).run(save, place, names, saved[1])
    found: dict[tuple[str, str], list[str]] = {}
    for loaded in into:
        answers = clusters(loaded[0]).run(load, place, names, loaded[1])
        found |= cells_of(answers, saved, loaded)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [*JOBS[:2], slow(JOBS[2]), *JOBS[3:]])
def test_every_module_comes_back_in_every_form_on_other_ranks(
    jobs: tuple[tuple[int, str], tuple[int, str]],
    clusters: Callable[[int], Cluster],
    tmp_path: Path,
) -> None:
    names = part(list(ENTRIES), str(jobs), quick=20, full=6)
    assert not faults(compared(clusters, str(tmp_path), jobs[0], [jobs[1]], names))


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [job for job in JOBS if {job[0][1], job[1][1]} <= set(TRAINED)])
def test_every_optimizer_comes_back_in_every_form_on_other_ranks(
    jobs: tuple[tuple[int, str], tuple[int, str]],
    clusters: Callable[[int], Cluster],
    tmp_path: Path,
) -> None:
    names = part(list(OPTIMIZERS), str(jobs), quick=8, full=4)
    found = compared(clusters, str(tmp_path), jobs[0], [jobs[1]], names, OF_TRAININGS)
    assert not faults(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ranks.FORMS)
def test_every_module_of_every_job_comes_back_in_every_other_job(
    form: str, size: int, clusters: Callable[[int], Cluster], tmp_path: Path
) -> None:
    into = every_job(ranks.FORMS)
    assert not faults(compared(clusters, str(tmp_path), (size, form), into, list(ENTRIES)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", TRAINED)
def test_every_optimizer_of_every_job_comes_back_in_every_other_job(
    form: str, size: int, clusters: Callable[[int], Cluster], tmp_path: Path
) -> None:
    names = list({**OPTIMIZERS, **INSTALLED})
    into = every_job(TRAINED)
    assert not faults(compared(clusters, str(tmp_path), (size, form), into, names, OF_TRAININGS))
