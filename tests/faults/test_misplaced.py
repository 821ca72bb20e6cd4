"""Files that were cut, went on, or stand in the place of others: named by all that read them."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckpt
from tests.faults.readers import (
    KINDS,
    READERS,
    Case,
    chunks_of,
    is_exact,
    outcome,
    state,
    tiny_chunks,
    written,
)

SEED = 20267


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tiny_chunks() as found:
        yield found


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Case]:
    """A checkpoint of each kind."""
    return {kind: written(folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def others(folder: Path) -> dict[str, Case]:
    """The same with other numbers in their tensors: attempts of the same sizes and headers."""
    return {kind: written(folder / f"other-{kind}", kind, seed=2) for kind in ("sharded", "zstd")}


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Case], Case]:
    """Copies a case to a place where it may be changed."""

    def copy(case: Case) -> Case:
        root = Path(shutil.copytree(case.root, tmp_path / case.root.name))
        base = None if case.base is None else root / case.base.name
        return case._replace(root=root, folder=root / case.folder.name, base=base)

    return copy


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def check_named(case: Case, *names: str) -> None:
    """Verify and every reader say that the checkpoint is damaged, with one of these files."""
    report = ckpt.verify(case.folder)
    assert not report.sound
    assert any(name in problem.message for problem in report.problems for name in names)
    for reader in READERS:
        found, said = outcome(reader, case)
        assert found is None, f"{reader} noticed nothing"
        assert any(name in said for name in names), (reader, said)


def lengths(case: Case, file: Path) -> list[int]:
    """Lengths to cut a file to: about every border of its structure, and some anywhere."""
    data = file.read_bytes()
    borders = {0, 8, len(data)}
    if file.suffix == ".safetensors":
        borders.add(8 + int.from_bytes(data[:8], "little"))
        for held in chunks_of(case.folder):
            if held.file == str(file):
                borders |= {held.lo, held.hi}
    near = {at + step for at in borders for step in (-1, 0, 1)}
    chance = random.Random(SEED)
    anywhere = {chance.randrange(len(data)) for _ in range(5)}
    return sorted(at for at in near | anywhere if 0 <= at < len(data))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_anywhere_is_named(
    cases: dict[str, Case], copied: Callable[[Case], Case], kind: str
) -> None:
    case = copied(cases[kind])
    for file in sorted(case.folder.iterdir()):
        data = file.read_bytes()
        for size in lengths(case, file):
            file.write_bytes(data[:size])
            check_named(case, file.name)
        file.write_bytes(data)
    assert ckpt.verify(case.folder).sound


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_to_any_length_whatever_is_named(
    cases: dict[str, Case], copied: Callable[[Case], Case], kind: str
) -> None:
    case, cuts = copied(cases[kind]), 0
    for file in sorted(case.folder.iterdir()):
        data = file.read_bytes()
        for size in range(len(data)):
            file.write_bytes(data[:size])
            check_named(case, file.name)
        file.write_bytes(data)
        cuts += len(data)
    print(f"\n{kind}: {cuts} truncations, silent: 0")  # noqa: T201


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_appended_to_a_file_is_named(
    cases: dict[str, Case], copied: Callable[[Case], Case], kind: str
) -> None:
    case = copied(cases[kind])
    for file in sorted(case.folder.iterdir()):
        data = file.read_bytes()
        for junk in (b"\0", b" ", b"\n", b"}", bytes(64), data):
            file.write_bytes(data + junk)
            check_named(case, file.name)
        file.write_bytes(data)


@pytest.mark.parametrize("kind", ["borrowed", "delta"])
def test_a_file_of_a_base_that_was_cut_or_is_gone_is_named(
    cases: dict[str, Case], copied: Callable[[Case], Case], kind: str
) -> None:
    case = copied(cases[kind])
    assert case.base is not None
    (file,) = shards(case.base)
    data = file.read_bytes()
    for changed in (b"", data[:-1], data + b"\0"):
        file.write_bytes(changed)
        check_named(case, f"{case.base.name}/{file.name}")
    file.unlink()
    check_named(case, f"{case.base.name}/{file.name}")


@pytest.mark.parametrize("kind", ["sharded", "zstd"])
def test_two_files_of_one_checkpoint_in_each_other_s_place_are_named(
    cases: dict[str, Case], copied: Callable[[Case], Case], kind: str
) -> None:
    case = copied(cases[kind])
    first, second = shards(case.folder)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    check_named(case, first.name, second.name)
    assert {p.file for p in ckpt.verify(case.folder).problems} >= {first.name, second.name}


@pytest.mark.parametrize("kind", ["sharded", "zstd"])
def test_a_mix_of_two_attempts_is_named_whichever_files_are_of_the_other(
    cases: dict[str, Case],
    others: dict[str, Case],
    copied: Callable[[Case], Case],
    kind: str,
) -> None:
    case = copied(cases[kind])
    own, foreign = shards(case.folder), shards(others[kind].folder)
    whole = [file.read_bytes() for file in own]
    assert [file.name[16:] for file in own] == [file.name[16:] for file in foreign]
    for chosen in ([0], [1], [0, 1]):
        for rank in chosen:
            own[rank].write_bytes(foreign[rank].read_bytes())
        check_named(case, *(own[rank].name for rank in chosen))
        for rank in chosen:
            own[rank].write_bytes(whole[rank])
    if kind == "sharded":  # nothing but the digest tells them apart
        assert own[0].stat().st_size == foreign[0].stat().st_size


def test_data_of_another_attempt_below_the_own_header_and_table_is_named(
    cases: dict[str, Case], others: dict[str, Case], copied: Callable[[Case], Case]
) -> None:
    case = copied(cases["sharded"])
    own, foreign = shards(case.folder)[0], shards(others["sharded"].folder)[0]
    chunks = [held for held in chunks_of(case.folder) if held.file == str(own)]
    lo, hi = min(held.lo for held in chunks), max(held.hi for held in chunks)
    data = own.read_bytes()
    own.write_bytes(data[:lo] + foreign.read_bytes()[lo:hi] + data[hi:])
    check_named(case, own.name)
    named = {problem.tensor for problem in ckpt.verify(case.folder).problems}
    assert named == {"model.w", "model.half"}, "what differs between the two"


@pytest.mark.parametrize("kind", ["sharded", "zstd"])
def test_the_manifest_of_another_checkpoint_lacks_its_files(
    cases: dict[str, Case],
    others: dict[str, Case],
    copied: Callable[[Case], Case],
    kind: str,
) -> None:
    case, other = copied(cases[kind]), others[kind]
    shutil.copy(other.folder / "manifest.json", case.folder)
    check_named(case, *(file.name for file in shards(other.folder)))


@pytest.mark.parametrize("compress", [False, True])
def test_an_old_manifest_put_back_after_its_checkpoint_was_overwritten_lacks_its_files(
    cases: dict[str, Case], tmp_path: Path, compress: bool
) -> None:
    case = cases["whole"]._replace(folder=tmp_path / "c", root=tmp_path)
    ckpt.save(case.folder, state(3), compress=compress)
    old = (case.folder / "manifest.json").read_bytes()
    gone = shards(case.folder)[0].name
    ckpt.save(case.folder, state(), compress=compress, overwrite=True)
    assert ckpt.diff(case.folder, cases["whole"].folder).equal
    (case.folder / "manifest.json").write_bytes(old)
    check_named(case, gone)


def test_files_of_the_same_numbers_are_the_same_files(
    cases: dict[str, Case], copied: Callable[[Case], Case]
) -> None:
    """The files of a rank whose part did not change between two attempts are interchangeable."""
    case = copied(cases["whole"])
    again = written(case.root / "again", "whole")
    shutil.copy(shards(again.folder)[0], shards(case.folder)[0])
    assert ckpt.verify(case.folder).sound
    found, _ = outcome(READERS[0], case)
    assert found is not None
    assert is_exact(found, case)


@pytest.mark.parametrize("kind", ["borrowed", "delta"])
def test_a_base_in_the_place_of_another_is_named(
    cases: dict[str, Case], copied: Callable[[Case], Case], kind: str
) -> None:
    """Another run's checkpoint, and one whose file even has the name and the size of the base's."""
    case = copied(cases[kind])
    assert case.base is not None
    (file,) = shards(case.base)
    shutil.rmtree(case.base)
    ckpt.save(case.base, state(5), compress=kind == "delta")
    check_named(case, file.name)
    (case.base / file.name).write_bytes(shards(case.base)[0].read_bytes())
    check_named(case, file.name)
