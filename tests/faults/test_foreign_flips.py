"""No bit that is flipped in a file of torch.save or a folder of DCP is read without being named.

Both keep a CRC-32 of each storage and each pickle. What has none (DCP's `.metadata`, the padding
and headers of zips) is checked by what it says twice, or nobody reads it.
"""

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from tests.faults.readers import READERS, Case, is_exact, outcome, state, tensors_of

SEED = 1717
FEW, MANY = 12, 1500
"""Flips in data, and as many elsewhere: in the default run, and in the one that is marked slow."""
KINDS = ("torch.save", "DCP")
REFUSED = (ckpt.FormatError, ckpt.NotACheckpointError)
"""Also a zip that no longer begins like one."""


class Data(NamedTuple):
    """Bytes of a file that have one CRC-32, and the tensors that they are of."""

    file: Path
    lo: int
    hi: int
    tensors: set[str]


def save_over_two(folder: str) -> None:
    """The state, its tensors of two dimensions divided over two ranks, by torch."""
    mesh = init_device_mesh("cpu", (2,))
    given = state(is_tied=False)
    for name in ("w", "empty"):
        given["model"][name] = distribute_tensor(given["model"][name], mesh, [Shard(0)])
    dcp.save(given, checkpoint_id=folder)


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory, clusters: Callable[..., object]
) -> Iterator[dict[str, Case]]:
    """A checkpoint of each kind."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    root = Path(memory or tmp_path_factory.mktemp("flips")) / f"foreign-flips-{os.getpid()}"
    try:
        file = root / "torch.save" / "x.pt"
        file.parent.mkdir(parents=True)
        torch.save(state(), file)
        folder = root / "DCP" / "step"
        clusters(2).run(save_over_two, str(folder))  # type: ignore[attr-defined]
        found = {}
        for kind, place in (("torch.save", file), ("DCP", folder)):
            sound = shutil.copytree(place.parent, root / f"{kind} sound") / place.name
            is_tied = kind == "torch.save"
            values = tensors_of(state(is_tied=is_tied))
            found[kind] = Case(place.parent, place, sound, values, None, is_tied)
        yield found
    finally:
        shutil.rmtree(root, ignore_errors=True)


def data_of(case: Case) -> list[Data]:
    """Where the storages lie."""
    found: dict[tuple[str, int, int], set[str]] = {}
    with ckpt.open(case.folder) as checkpoint:
        for name, record in checkpoint.catalog.tensors.items():
            names = {name, *(a for a, of in checkpoint.catalog.aliases.items() if of == name)}
            for piece in record.pieces:
                assert piece.extent.crc32 is not None
                found.setdefault(piece.extent[:3], set()).update(names)
    folder = case.folder if case.folder.is_dir() else case.folder.parent
    return [
        Data(folder / file, lo, lo + nbytes, names) for (file, lo, nbytes), names in found.items()
    ]


def check_flip(case: Case, data: list[Data], file: Path, bit: int) -> str:
    """What every reader makes of one flipped bit: it is named, or no matter."""
    content = bytearray(file.read_bytes())
    at = bit // 8
    hurt = [each for each in data if each.file == file and each.lo <= at < each.hi]
    content[at] ^= 1 << bit % 8
    file.write_bytes(content)
    ends = set()
    try:
        if hurt:
            (problem,) = ckpt.verify(case.folder).problems
            assert (problem.file, problem.lo, problem.hi) == (file.name, hurt[0].lo, hurt[0].hi)
        for reader in READERS:
            found, said = outcome(reader, case, ckpt.CorruptError if hurt else REFUSED)
            ends.add("no matter" if found is not None else "named")
            assert found is None or is_exact(found, case), f"{reader} noticed nothing"
            if hurt:
                assert found is None, reader
                assert f"{file.name}: " in said
                lo, hi = map(int, re.findall(r"bytes (\d+):(\d+)", said)[0])
                assert (lo, hi) == (hurt[0].lo, hurt[0].hi)
                assert any(f" {tensor}: " in said for tensor in hurt[0].tensors), said
    finally:
        content[at] ^= 1 << bit % 8
        file.write_bytes(content)
    return "named" if "named" in ends else "no matter"


def flip_some(case: Case, flips: int) -> Counter[tuple[str, str]]:
    """How many flips ended how: in data, and in whatever else the files consist of."""
    data, chance = data_of(case), random.Random(SEED)
    folder = case.folder if case.folder.is_dir() else case.folder.parent
    files = sorted(path for path in folder.iterdir() if path.is_file())
    bits: dict[tuple[Path, int], str] = {}
    while len(bits) < flips:
        of = chance.choices(data, [each.hi - each.lo for each in data])[0]
        bits[of.file, chance.randrange(8 * of.lo, 8 * of.hi)] = "data"
    while len(bits) < 2 * flips:
        file = chance.choice(files)
        bit = chance.randrange(8 * file.stat().st_size)
        if not any(each.file == file and each.lo <= bit // 8 < each.hi for each in data):
            bits[file, bit] = file.name if file.name == ".metadata" else "zip"
    ends: Counter[tuple[str, str]] = Counter()
    for (file, bit), where in bits.items():
        try:
            ends[where, check_flip(case, data, file, bit)] += 1
        except AssertionError as error:
            raise AssertionError(f"bit {bit} of {file} ({where}): {error}") from error
    assert ckpt.verify(case.folder).sound
    return ends


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_another_format_is_named_by_all_that_read_it(
    cases: dict[str, Case], kind: str
) -> None:
    assert flip_some(cases[kind], FEW)["data", "named"] == FEW


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", KINDS)
def test_each_of_thousands_of_flipped_bits_of_another_format_is_named(
    cases: dict[str, Case], kind: str
) -> None:
    ends = flip_some(cases[kind], MANY)
    assert ends["data", "named"] == MANY
    shown = ", ".join(f"{where} {end}: {count}" for (where, end), count in sorted(ends.items()))
    print(f"\n{kind}: {sum(ends.values())} bits flipped, {shown}; silent: 0")  # noqa: T201
