"""A hostile checkpoint touches nothing but its own folder and the target, and runs nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import safetensors.torch
import torch

import ckpt
from tests.conftest import Program
from tests.fuzz.folders import Files
from tests.fuzz.seeds import Seed, seeds


@pytest.fixture
def touches(programs: Callable[..., Program], tmp_path: Path) -> Callable[[int, int], object]:
    """What reading the hostile checkpoints of these numbers by every public way touches."""

    def found(first: int, end: int) -> object:
        code = Path(__file__).with_name("outside.py").read_text()
        program = programs(code, tmp_path, first, end)
        said, complained = program.communicate(timeout=3600)
        assert program.returncode == 0, complained
        return json.loads(said.splitlines()[-1])

    return found


NOTHING = {"touched": [], "bugs": []}


@pytest.mark.thorough
def test_reading_hostile_checkpoints_touches_nothing_else(
    touches: Callable[[int, int], object],
) -> None:
    assert touches(0, 1) == NOTHING


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_reading_many_hostile_checkpoints_touches_nothing_else(
    touches: Callable[[int, int], object],
) -> None:
    assert touches(1000, 2000) == NOTHING


def written(folder: Path, files: Files) -> Path:
    """A folder with these files; those of a folder beside it there."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def one(kind: str) -> Seed:
    return next(seed for seed in seeds() if seed.kind == kind)


HOSTILE_NAMES = (
    *("../../escaped", "/tmp/escaped", "a/b/../../../c", "..", ".", "con", "a\0b", "\x1b[2Jclear"),
    *("manifest.json", "model.safetensors.index.json", ".metadata", "%2e%2e/x", "a\\..\\b", "~/x"),
)


@pytest.mark.parametrize("to", ["ckpt", "safetensors", "hf", "torch", "dcp"])
def test_no_name_of_a_tensor_becomes_a_path(tmp_path: Path, to: str) -> None:
    source = tmp_path / "source.safetensors"
    safetensors.torch.save_file({name: torch.ones(3) for name in HOSTILE_NAMES}, source)
    sizes = {"max_shard_bytes": 20} if to in ("ckpt", "hf") else {}
    ckpt.convert(source, tmp_path / "in" / "target", to=to, **sizes)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "source.safetensors"}
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["target"]
    assert set(ckpt.open(tmp_path / "in" / "target")) == set(HOSTILE_NAMES)


@pytest.mark.parametrize("kind", ["native", "safetensors", "hf", "torch", "dcp"])
@pytest.mark.parametrize("what", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, kind: str, what: str
) -> None:
    seed = one(kind)
    folder = written(tmp_path / "checkpoint", seed.files)
    for name in seed.files:
        path = folder / name
        path.unlink()
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
        refused = pytest.raises((ckpt.FormatError, ckpt.NotACheckpointError))
        with (
            nullcontext() if name.endswith(".index.json") else refused
        ):  # complete shards need none
            ckpt.read(folder / (seed.file or ""))
        path.rmdir() if what == "folder" else path.unlink()
        path.write_bytes(seed.files[name])
    ckpt.read(folder / (seed.file or ""))


@pytest.mark.parametrize("kind", ["native", "safetensors", "hf", "torch", "dcp"])
def test_links_are_followed_to_read_as_caches_of_downloads_need_it(
    tmp_path: Path, kind: str
) -> None:
    seed = one(kind)
    blobs = written(tmp_path / "blobs", seed.files)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for number, name in enumerate(seed.files):
        (blobs / name).rename(blobs / str(number))
        (folder / name).symlink_to(blobs / str(number))
    ckpt.read(folder / (seed.file or ""))
    assert ckpt.verify(folder / (seed.file or "")).sound


@pytest.mark.parametrize("to", ["ckpt", "safetensors", "hf", "torch", "dcp"])
def test_nothing_is_written_or_deleted_through_a_link(tmp_path: Path, to: str) -> None:
    ckpt.save(tmp_path / "source", {"w": torch.arange(6.0)})
    ckpt.save(tmp_path / "other", {"w": torch.zeros(2)})
    outside = tmp_path / "outside"
    target = tmp_path / "in" / "target"
    ckpt.convert(tmp_path / "other", outside, to=to)
    before = tree(outside)
    target.parent.mkdir()
    if outside.is_dir():
        target.mkdir()
        for path in outside.iterdir():
            (target / path.name).symlink_to(path)
    else:
        target.symlink_to(outside)
    ckpt.convert(tmp_path / "source", target, to=to, overwrite=True)
    assert tree(outside) == before
    assert not any(path.is_symlink() for path in target.parent.rglob("*"))
    assert torch.equal(ckpt.open(target)["w"][...], torch.arange(6.0))


def test_what_is_deleted_is_the_link(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "outside", {"w": torch.zeros(2)})
    before = tree(tmp_path / "outside")
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "outside").iterdir():
        (tmp_path / "in" / path.name).symlink_to(path)
    ckpt.delete(tmp_path / "in")
    assert tree(tmp_path / "outside") == before
    assert not (tmp_path / "in").exists()


def tree(place: Path) -> dict[str, bytes]:
    """All files at a place, with what is in them."""
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("native", "manifest.json"), ("hf", "model.safetensors.index.json"), ("dcp", ".metadata")],
)
def test_a_file_that_is_mostly_a_hole_is_not_read(tmp_path: Path, kind: str, name: str) -> None:
    folder = written(tmp_path / "checkpoint", one(kind).files)
    os.truncate(folder / name, 1 << 40)
    with pytest.raises(ckpt.HostileError, match="_bytes"):
        ckpt.read(folder)


def test_a_header_and_a_table_that_are_mostly_holes_are_not_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "checkpoint", one("native").files)
    from tests.fuzz.mutations import signed

    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["digest"]
    entry = manifest["files"][0]
    os.truncate(folder / entry[0], 1 << 40)
    for header_bytes, table_bytes in ((1 << 39, entry[4]), (entry[3], 1 << 39)):
        entry[2:5] = [1 << 40, header_bytes, table_bytes]
        (folder / "manifest.json").write_bytes(signed(json.dumps(manifest).encode()))
        with pytest.raises(ckpt.HostileError, match=r"header_bytes|table_bytes"):
            ckpt.read(folder)
