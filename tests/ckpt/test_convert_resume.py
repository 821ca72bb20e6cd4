"""A conversion to a folder goes on where an interrupted one stopped, and only that one."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ckpt
from ckpt.converting.targets import Journal
from ckpt.errors import ExistsError
from sharding.errors import ArgumentError

MOST = 4 * 64 * 4
"""Four tensors a file."""


class Stop(Exception):
    """Ends a conversion in the middle."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Twelve tensors: three files of a Hugging Face folder."""
    ckpt.save(tmp_path / "run", {f"w{i:02d}": torch.full((8, 8), float(i)) for i in range(12)})
    return tmp_path / "run"


def convert(source: Any, target: Path, stop_after: int | None = None, **more: Any) -> int:
    """Converts, or stops after so many bytes were read; returns the number of bytes read."""
    read = 0

    def progress(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        if stop_after is not None and read > stop_after:
            raise Stop

    arguments: dict[str, Any] = {"to": "hf", "max_shard_bytes": MOST, "resume": True}
    ckpt.convert(source, target, progress=progress, **arguments | more)
    return read


def work(target: Path) -> Path:
    """The folder beside the target with the complete files."""
    return target.parent / f".{target.name}.resumed.part"


def journal_of(target: Path) -> Path:
    """The journal of that folder."""
    return target.parent / f".{target.name}.resumed.journal"


def test_complete_files_are_kept_and_not_read_again(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    with pytest.raises(Stop):
        convert(saved, target, stop_after=2 * MOST)
    assert not target.exists()
    kept = {file.name for file in work(target).iterdir()}
    assert kept == {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"}
    assert convert(saved, target, verify=True) == MOST
    assert not work(target).exists()
    assert not journal_of(target).exists()
    ckpt.convert(saved, tmp_path / "other", to="hf", max_shard_bytes=MOST)
    names = sorted(file.name for file in (tmp_path / "other").iterdir())
    assert sorted(file.name for file in target.iterdir()) == names
    for name in names:
        assert (target / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


@pytest.mark.parametrize(
    ("more", "read"),
    [
        ({}, MOST),
        ({"max_shard_bytes": MOST - 1}, 3 * MOST),
        ({"dtype": "float16"}, 3 * MOST),
        ({"rename": {"w00": "w01", "w01": "w00"}}, 3 * MOST),
        ({"exclude": "w11"}, 3 * MOST - 256),
    ],
)
def test_another_conversion_begins_anew(
    saved: Path, tmp_path: Path, more: dict[str, Any], read: int
) -> None:
    target = tmp_path / "hf"
    with pytest.raises(Stop):
        convert(saved, target, stop_after=2 * MOST)
    assert convert(saved, target, verify=True, **more) == read


def test_another_part_with_the_same_names_and_shapes_begins_anew(tmp_path: Path) -> None:
    parts = {
        key: {f"w{i:02d}": torch.full((8, 8), key + i) for i in range(12)} for key in (0.0, 50.0)
    }
    ckpt.save(tmp_path / "run", {"model": parts[0.0], "average": parts[50.0]})
    target = tmp_path / "hf"
    with pytest.raises(Stop):
        convert(tmp_path / "run", target, stop_after=2 * MOST, select="model")
    assert convert(tmp_path / "run", target, select="average", verify=True) == 3 * MOST


def test_another_source_begins_anew(saved: Path, tmp_path: Path) -> None:
    target, source = tmp_path / "hf", tmp_path / "s.safetensors"
    ckpt.convert(saved, source)
    with pytest.raises(Stop):
        convert(source, target, stop_after=2 * MOST)
    os.utime(source, (0, 0))
    assert convert(source, target) == 3 * MOST


def test_a_sum_goes_on_with_equal_sources_and_weights_alone(saved: Path, tmp_path: Path) -> None:
    target, second = tmp_path / "hf", tmp_path / "second.safetensors"
    ckpt.convert(saved, second)

    def total(weight: float) -> Any:
        return ckpt.WeightedSum((str(saved), str(second)), (weight, 0.5))

    for change in ("none", "weight", "source"):
        with pytest.raises(Stop):
            convert(total(0.5), target, stop_after=2 * MOST, overwrite=True)
        if change == "source":
            os.utime(second, (0, 0))
        weight = 0.25 if change == "weight" else 0.5
        read = convert(total(weight), target, verify=True, overwrite=True)
        assert read == (MOST if change == "none" else 3 * MOST), change


@pytest.mark.parametrize("damage", ["byte", "cut", "gone", "journal", "end of the journal"])
def test_a_file_that_is_not_what_the_journal_says_is_written_again(
    saved: Path, tmp_path: Path, damage: str
) -> None:
    target = tmp_path / "hf"
    with pytest.raises(Stop):
        convert(saved, target, stop_after=2 * MOST)
    file, journal = work(target) / "model-00002-of-00003.safetensors", journal_of(target)
    data = bytearray(file.read_bytes())
    expected = 2 * MOST
    if damage == "byte":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage == "journal":
        journal.write_bytes(b"\0" + journal.read_bytes())
        expected = 3 * MOST
    else:
        journal.write_bytes(journal.read_bytes()[:-3])
    assert convert(saved, target, verify=True) == expected


def test_a_journal_names_no_file_elsewhere(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    with pytest.raises(Stop):
        convert(saved, target, stop_after=2 * MOST)
    name = "model-00002-of-00003.safetensors"
    (work(target) / name).rename(tmp_path / name)
    journal = journal_of(target)
    journal.write_text(journal.read_text().replace(name, f"../{name}"))
    assert convert(saved, target, verify=True) == 2 * MOST


def test_files_of_another_conversion_are_not_in_the_result(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    with pytest.raises(Stop):
        convert(saved, target, stop_after=2 * MOST)
    convert(saved, target, max_shard_bytes=12 * MOST)
    assert [file.name for file in target.iterdir()] == ["model.safetensors"]


def test_dcp_goes_on_too(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "dcp"
    with pytest.raises(Stop):
        convert(saved, target, stop_after=0, to="dcp", max_shard_bytes=None)
    done = convert(saved, target, to="dcp", max_shard_bytes=None, verify=True)
    assert done == 3 * MOST
    assert ckpt.diff(saved, target).equal


def test_two_processes_do_not_work_on_one_folder(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    with pytest.raises(Stop):
        convert(saved, target, stop_after=2 * MOST)
    with journal_of(target).open() as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(ExistsError, match="another process resumes this conversion"):
            convert(saved, target)
    assert convert(saved, target) == MOST


def test_a_conversion_that_begins_before_another_is_in_place_takes_none_of_its_files(
    saved: Path, tmp_path: Path
) -> None:
    target, refused = tmp_path / "hf", []

    def just_before_the_rename(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and called is os.rename and not refused:
            with pytest.raises(ExistsError, match="another process resumes this conversion") as one:
                convert(saved, target, dtype="float16")
            refused.append(one)

    sys.setprofile(just_before_the_rename)
    try:
        convert(saved, target)
    finally:
        sys.setprofile(None)
    assert refused
    assert ckpt.diff(saved, target).equal


def test_a_folder_among_the_kept_files_is_removed(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    (work(target) / "folder").mkdir(parents=True)
    (work(target) / "folder" / "file").touch()
    assert convert(saved, target) == 3 * MOST
    assert not (target / "folder").exists()


def test_a_journal_is_opened_once_at_a_time(tmp_path: Path) -> None:
    with (
        Journal.open(str(tmp_path / "work"), None, False, "conversion"),
        pytest.raises(ExistsError, match="another process resumes this conversion"),
        Journal.open(str(tmp_path / "work"), None, False, "conversion"),
    ):
        pass
    with Journal.open(str(tmp_path / "work"), None, False, "conversion") as journal:
        assert journal.done == {}


@pytest.mark.parametrize(
    ("to", "name"), [("ckpt", "c"), ("safetensors", "c.safetensors"), ("hf", "memory://c")]
)
def test_a_target_without_complete_files_cannot_go_on(
    saved: Path, tmp_path: Path, to: Any, name: str
) -> None:
    target = name if "://" in name else tmp_path / name
    with pytest.raises(ArgumentError, match="can go on only to a folder of hf or dcp on a disk"):
        ckpt.convert(saved, target, to=to, resume=True)


def test_a_journal_that_another_conversion_ends_before_the_lock_is_not_used(
    saved: Path, tmp_path: Path
) -> None:
    target = tmp_path / "hf"

    def just_before_the_lock(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and called is fcntl.flock:
            journal_of(target).unlink()

    sys.setprofile(just_before_the_lock)
    try:
        with pytest.raises(ExistsError, match="another process resumes this conversion"):
            convert(saved, target)
    finally:
        sys.setprofile(None)


def test_ranks_that_convert_together_cannot_go_on(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="by several ranks leaves nothing to go on from"):
        ckpt.convert(saved, tmp_path / "hf", to="hf", resume=True, group=None)
