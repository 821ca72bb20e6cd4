"""What disks do to blocks: zeroed, filled, written to the wrong place, half of an older write."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from tests.faults.readers import KINDS, READERS, Case, is_exact, outcome, tiny_chunks, written

SEED = 20269
FEW, MANY = 30, 1000


@pytest.fixture(scope="module")
def cases() -> Iterator[dict[str, tuple[Case, Case]]]:
    """A checkpoint of each kind, and another attempt at it with other numbers."""
    with tiny_chunks() as folder:
        yield {
            kind: (written(folder / kind, kind), written(folder / f"{kind}-other", kind, seed=4))
            for kind in KINDS
        }


def harmed(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """The content of a file after one mishap; `other` is a file of another attempt."""
    size = min(len(data), chance.choice((1, 7, 16, 64, 512, 4096)))
    at, there = (chance.randrange(len(data) - size + 1) for _ in range(2))
    block = data[at : at + size]
    how = chance.randrange(6)
    if how < 2:  # lost: zeros or ones
        return data[:at] + (b"\0", b"\xff")[how] * size + data[at + size :]
    if how == 2:  # written to another place
        return data[:there] + block + data[there + size :]
    if how == 3:  # two exchanged
        swapped = bytearray(data)
        swapped[at : at + size] = data[there : there + size]
        swapped[there : there + size] = block
        return bytes(swapped)
    if how == 4:  # of another attempt
        return (data[:at] + other[at : at + size] + data[at + size :])[: len(data)]
    return data[:at] + other[at:]  # torn: the end is another attempt's


def harm_some(pair: tuple[Case, Case], count: int) -> tuple[int, int]:
    """How many mishaps changed a file, and how many of them were named; the rest was not read."""
    case, attempt = pair
    chance = random.Random(SEED)
    files = sorted(path for path in case.root.rglob("*") if path.is_file())
    others = sorted(path for path in attempt.root.rglob("*") if path.is_file())
    happened = named = 0
    for number in range(count):
        at = number % len(files)
        data, other = files[at].read_bytes(), others[at].read_bytes()
        changed = harmed(data, other, chance)
        if changed in (data, other):  # a whole file of another attempt: see test_misplaced.py
            continue
        happened += 1
        files[at].write_bytes(changed)
        try:
            named += check_harm(case, files[at])
        except AssertionError as error:
            raise AssertionError(f"{files[at]}, mishap {number}: {error}") from error
        finally:
            files[at].write_bytes(data)
    assert ckpt.verify(case.folder).sound
    return happened, named


def check_harm(case: Case, file: Path) -> bool:
    """Whether verify names a harmed file; then all readers do, and else they are exact."""
    report = ckpt.verify(case.folder)
    in_base = case.base is not None and file.parent == case.base
    assert in_base or not report.sound
    assert not in_base or not ckpt.verify(file.parent).sound
    assert all(file.name in problem.message for problem in report.problems)
    for reader in READERS:
        found, said = outcome(reader, case)
        if report.sound:
            assert found is not None, said
            assert is_exact(found, case), reader
        else:
            assert found is None, f"{reader} noticed nothing"
            assert file.name in said, reader
    return not report.sound


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_what_befell_a_block_is_named_by_all_that_read_it(
    cases: dict[str, tuple[Case, Case]], kind: str
) -> None:
    happened, named = harm_some(cases[kind], FEW)
    assert happened > FEW / 2
    assert (named == happened) == (cases[kind][0].base is None)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_what_befell_any_of_thousands_of_blocks_is_named(
    cases: dict[str, tuple[Case, Case]], kind: str
) -> None:
    happened, named = harm_some(cases[kind], MANY)
    print(f"\n{kind}: {happened} blocks harmed, {named} named, silent: 0")  # noqa: T201
