"""No flipped bit goes unnoticed: each reader either names it or did not read it and is exact."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from tests.faults.readers import (
    KINDS,
    READERS,
    Case,
    Held,
    chunks_of,
    is_exact,
    outcome,
    tiny_chunks,
    written,
)

SEED = 20266
FEW, MANY = 50, 3000
"""Flips of each kind: in the default run, and in the one that is marked slow (15,000 in all)."""


@pytest.fixture(scope="module")
def cases() -> Iterator[dict[str, Case]]:
    """A checkpoint of each kind."""
    with tiny_chunks() as folder:
        yield {kind: written(folder / kind, kind) for kind in KINDS}


def check_flip(case: Case, chunks: list[Held], file: Path, bit: int) -> str:
    """What every reader makes of one flipped bit: `named` or `not read`."""
    data = bytearray(file.read_bytes())
    at = bit // 8
    data[at] ^= 1 << bit % 8
    file.write_bytes(data)
    try:
        report = ckpt.verify(case.folder)
        if case.base is not None and file.parent == case.base:
            assert not ckpt.verify(case.base).sound, "the base itself"
        else:
            assert not report.sound
        hurt = {
            held.tensor for held in chunks if held.file == str(file) and held.lo <= at < held.hi
        }
        for problem in report.problems:
            assert file.name in problem.message
            assert problem.lo is None or problem.lo <= at < (problem.hi or 0)
            assert not hurt or problem.tensor in hurt
        for reader in READERS:
            found, said = outcome(reader, case)
            if found is None:
                assert not report.sound, reader
                assert file.name in said, reader
                if hurt:
                    lo, hi = map(int, re.findall(r"bytes (\d+):(\d+)", said)[0])
                    assert lo <= at < hi, reader
                    assert any(f" {tensor}: " in said for tensor in hurt), reader
            else:
                assert report.sound, f"{reader} noticed nothing"
                assert is_exact(found, case), reader
        return "not read" if report.sound else "named"
    finally:
        data[at] ^= 1 << bit % 8
        file.write_bytes(data)


def flip_some(case: Case, flips: int) -> Counter[tuple[str, str]]:
    """How many flips ended how, by the kind of file, each bit flipped at most once."""
    files = sorted(path for path in case.root.rglob("*") if path.is_file())
    chunks = chunks_of(case.folder)
    chance = random.Random(SEED)
    bits = {(file, bit) for file in files for bit in (0, 8 * file.stat().st_size - 1)}
    while len(bits) < flips:
        file = files[len(bits) % len(files)]
        bits.add((file, chance.randrange(8 * file.stat().st_size)))
    ends: Counter[tuple[str, str]] = Counter()
    for file, bit in sorted(bits):
        try:
            end = check_flip(case, chunks, file, bit)
        except AssertionError as error:
            raise AssertionError(f"bit {bit} of {file}: {error}") from error
        ends[file.suffix, end] += 1
    assert ckpt.verify(case.folder).sound
    return ends


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_named_by_all_that_read_it(cases: dict[str, Case], kind: str) -> None:
    ends = flip_some(cases[kind], FEW)
    assert ends[".json", "named"]
    assert ends[".safetensors", "named"]
    # Only a base may have damage that is no concern of the checkpoint that borrows from it.
    in_vain = sum(count for (_, end), count in ends.items() if end == "not read")
    assert bool(in_vain) == (cases[kind].base is not None)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_each_of_thousands_of_flipped_bits_is_named(cases: dict[str, Case], kind: str) -> None:
    ends = flip_some(cases[kind], MANY)
    assert sum(ends.values()) >= MANY
    shown = ", ".join(f"{suffix} {end}: {count}" for (suffix, end), count in sorted(ends.items()))
    print(f"\n{kind}: {sum(ends.values())} bits flipped, {shown}; silent: 0")  # noqa: T201


def test_what_the_flips_are_made_in_has_everything_that_a_checkpoint_can_have(
    cases: dict[str, Case],
) -> None:
    for kind, case in cases.items():
        text = b"".join(path.read_bytes() for path in case.folder.iterdir())
        assert (b"__borrowed__" in text) == (kind in ("borrowed", "delta")), kind
        assert (b"__deltas__" in text) == (kind == "delta"), kind
        assert (b'"ckpt.codec":"zstd"' in text) == (kind in ("zstd", "delta")), kind
        assert len(list(case.folder.iterdir())) == (3 if kind in ("sharded", "zstd") else 2), kind
        assert len(chunks_of(case.folder)) > 8
