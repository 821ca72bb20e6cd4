"""Only chunks that differ from the bytes in the target travel from a live state elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.transfer.read import MISSES
from formats.native.shard import CHUNK_BYTES
from tests.live.offered import RUNTIME, Offer, offered

ITEMS = CHUNK_BYTES // 4
CHUNKS = 6
"""The whole chunks of the large tensor; a part of one follows."""
SMALL = 10
TOTAL = 4 * (CHUNKS * ITEMS + SMALL + SMALL)


def state() -> dict[str, Any]:
    return {"w": torch.arange(CHUNKS * ITEMS + SMALL, dtype=torch.float32), "b": torch.ones(SMALL)}


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The folder of the servers' sockets, and an empty one, as of another host."""
    found = {place: str(tmp_path_factory.mktemp(place)) for place in ("here", "elsewhere")}
    for folder in found.values():
        os.chmod(folder, 0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNTIME, found["here"])
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "c"
    ckpt.save(place, state())
    return place


@pytest.fixture(scope="module")
def offer(folder: Path, sockets: dict[str, str]) -> Iterator[Offer]:
    """The checkpoint as a live state of another host."""
    with offered(folder, name="unchanged") as one, pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNTIME, sockets["elsewhere"])
        yield one


def read_bytes(url: str | Path, target: object, **options: Any) -> int:
    """Loads, and returns the bytes of tensors that were read."""
    found: list[int] = []
    ckpt.load(url, target, progress=found.append, **options)
    return sum(found)


@pytest.mark.thorough
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    places=st.sets(st.integers(0, CHUNKS * ITEMS + SMALL - 1), max_size=5),
    is_skipped=st.booleans(),
    verify=st.booleans(),
)
def test_the_result_is_that_of_a_full_read_and_unchanged_chunks_stay(
    offer: Offer, places: set[int], is_skipped: bool, verify: bool
) -> None:
    target = state()
    target["w"][list(places)] = -1.0
    rule = "skip" if is_skipped else "auto"
    count = read_bytes(offer.url, target, unchanged=rule, verify=verify)
    assert torch.equal(target["w"], state()["w"])
    changed = {place // ITEMS for place in places}
    wanted = sum(4 * (SMALL if chunk == CHUNKS else ITEMS) for chunk in changed)
    if not verify:
        assert count == TOTAL  # without checksums there is nothing to compare
    elif is_skipped or len(changed) < MISSES:
        assert count == wanted
    else:
        assert wanted <= count <= TOTAL


def test_a_second_load_of_the_same_version_reads_no_tensor(offer: Offer) -> None:
    target = {"w": torch.zeros(CHUNKS * ITEMS + SMALL), "b": torch.zeros(SMALL)}
    assert read_bytes(offer.url, target) == TOTAL
    assert read_bytes(offer.url, target) == 0
    assert read_bytes(offer.url, target, unchanged="read") == TOTAL


def test_a_folder_of_a_disk_is_read_whole_unless_told(folder: Path) -> None:
    target = state()
    assert read_bytes(folder, target) == TOTAL
    assert read_bytes(folder, target, unchanged="skip") == 0


def test_targets_of_another_dtype_or_with_gaps_get_the_same_elements(offer: Offer) -> None:
    target = {name: tensor.bfloat16() for name, tensor in state().items()}
    target["w"] += 1
    ckpt.load(offer.url, target, dtype="target", unchanged="skip")
    assert torch.equal(target["w"], state()["w"].bfloat16())
    gaps = torch.zeros(CHUNKS * ITEMS + SMALL, 2)
    ckpt.load(offer.url, {"w": gaps[:, 0], "b": torch.zeros(SMALL)}, unchanged="skip")
    assert torch.equal(gaps[:, 0], state()["w"])
    assert not gaps[:, 1].any()


def test_another_word_is_an_error(folder: Path) -> None:
    with pytest.raises(ckpt.ArgumentError, match="unchanged is 'some'"):
        ckpt.load(folder, state(), unchanged="some")
