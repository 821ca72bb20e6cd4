"""The newest sound checkpoint of a folder."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import xxhash
from fsspec.implementations.memory import MemoryFileSystem

import ckpt
from ckpt.loading.newest import list_committed
from ckpt.transfer.facts import HEAD_BYTES


def save(folder: Path, value: float = 0.0, **options: object) -> Path:
    ckpt.save(folder, {"w": torch.full((40,), value)}, **options)  # type: ignore[arg-type]
    return folder


def dated(folder: Path, time: str) -> Path:
    """A checkpoint with another time in its manifest."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["writer"]["time"] = time
    body = json.dumps(content, separators=(",", ":")).encode()
    path.write_bytes(b'{"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'",' + body[1:])
    assert ckpt.verify(folder).sound
    return folder


def shard(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


def test_the_newest_is_the_one_committed_last_whatever_its_name(tmp_path: Path) -> None:
    dated(save(tmp_path / "step-300"), "2026-01-01T00:00:00Z")
    dated(save(tmp_path / "step-200"), "2026-01-01T00:00:01Z")
    dated(save(tmp_path / "best"), "2025-12-31T23:59:59Z")
    assert ckpt.latest(tmp_path) == str(tmp_path / "step-200")
    names = [one.name for one in list_committed(tmp_path, None)]
    assert names == ["step-200", "step-300", "best"]


def test_of_one_second_the_largest_number_in_the_name_counts(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        dated(save(tmp_path / f"step-{step}"), "2026-01-01T00:00:00Z")
    assert ckpt.latest(f"{tmp_path}/") == str(tmp_path / "step-100")


@pytest.mark.parametrize("time", ["yesterday", "2026-01-01", "x" * 2 * HEAD_BYTES])
def test_a_time_that_is_none_gives_way_to_the_store_s(tmp_path: Path, time: str) -> None:
    dated(save(tmp_path / "b"), time)
    os.utime(tmp_path / "b" / "manifest.json", (1e9, 1e9))
    dated(save(tmp_path / "a"), time)
    assert list_committed(tmp_path, None)[1][:2] == ("b", "2001-09-09T01:46:40Z")
    assert ckpt.latest(tmp_path) == str(tmp_path / "a")


def test_what_was_not_committed_is_passed_over_without_a_word(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    (save(tmp_path / "step-2") / "manifest.json").unlink()
    (tmp_path / "step-3").mkdir()
    (tmp_path / "notes.txt").write_text("")
    save(tmp_path / "lost+found")  # a disk's own, whatever is in it
    assert ckpt.latest(tmp_path) == str(tmp_path / "step-1")


def damaged(folder: Path, how: str) -> Path:
    if how == "manifest":
        path = folder / "manifest.json"
        path.write_bytes(path.read_bytes().replace(b'"writer"', b'"Writer"'))
    elif how == "missing":
        shard(folder).unlink()
    elif how == "cut":
        shard(folder).write_bytes(shard(folder).read_bytes()[:-1])
    else:
        data = bytearray(shard(folder).read_bytes())
        data[-60] ^= 1
        shard(folder).write_bytes(data)
    return folder


@pytest.mark.parametrize("how", ["manifest", "missing", "cut"])
def test_a_newer_one_that_is_not_sound_is_skipped_with_a_warning(tmp_path: Path, how: str) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}")
    newer = damaged(save(tmp_path / "step-3"), how)
    with pytest.warns(ckpt.FallbackWarning) as warned:
        assert ckpt.latest(tmp_path) == str(tmp_path / "step-2")
    (warning,) = (entry.message for entry in warned)
    assert isinstance(warning, ckpt.FallbackWarning)
    assert warning.taken == str(tmp_path / "step-2")
    assert [(one.url, one.kind) for one in warning.skipped] == [(str(newer), "corrupt")]
    assert str(newer) in str(warning)
    assert Path(warned[0].filename) == Path(__file__)


def test_a_flipped_bit_is_found_where_every_bit_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    newer = damaged(save(tmp_path / "step-2"), "flip")
    assert ckpt.latest(tmp_path) == str(newer)
    with pytest.warns(ckpt.FallbackWarning, match=r"step-2/.*w: bytes"):
        assert ckpt.latest(tmp_path, verify=True) == str(tmp_path / "step-1")


@pytest.mark.parametrize("gone", ["folder", "file"])
def test_a_checkpoint_whose_base_is_gone_is_skipped(tmp_path: Path, gone: str) -> None:
    save(tmp_path / "step-0")
    base = save(tmp_path / "step-1", 1.0)
    save(tmp_path / "step-2", 1.0, base=base)
    if gone == "file":
        shard(base).unlink()
    else:
        shutil.rmtree(base)
    with pytest.warns(ckpt.FallbackWarning, match=r"step-2: it borrows from .*step-1"):
        assert ckpt.latest(tmp_path) == str(tmp_path / "step-0")


def test_where_none_is_sound_the_error_says_what_is_wrong_with_each(tmp_path: Path) -> None:
    for step, how in ((1, "missing"), (2, "cut")):
        damaged(save(tmp_path / f"step-{step}"), how)
    with pytest.raises(ckpt.CorruptError, match=r"none of the 2 .*step-2/.*; .*step-1/.*missing"):
        ckpt.latest(tmp_path)


def test_where_there_is_none_the_error_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ckpt.NotACheckpointError, match="nothing is there"):
        ckpt.latest(tmp_path / "nowhere")
    (save(tmp_path / "step-1") / "manifest.json").unlink()
    with pytest.raises(ckpt.NotACheckpointError, match=r"no folder in it is a committed .*step-1"):
        ckpt.latest(tmp_path)
    with pytest.raises(ckpt.NotACheckpointError, match="the folder that it lies in"):
        ckpt.latest(save(tmp_path / "step-2"))


def test_one_of_a_later_version_is_no_damage(tmp_path: Path) -> None:
    path = save(tmp_path / "step-1") / "manifest.json"
    body = b"{" + path.read_bytes()[45:].replace(b'"version":1', b'"version":9')
    path.write_bytes(b'{"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'",' + body[1:])
    with pytest.raises(ckpt.UnsupportedError, match="version 9"):
        ckpt.latest(tmp_path)


def test_a_url_is_looked_through_like_a_folder() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    try:
        for step in (1, 2, 10):
            save(f"memory://newest/run/step-{step}")  # type: ignore[arg-type]
        assert ckpt.latest("memory://newest/run") == "memory://newest/run/step-10"
        memory.rm("/newest/run/step-10/manifest.json")
        assert ckpt.latest("memory://newest/run/") == "memory://newest/run/step-2"
    finally:
        memory.rm("/newest", recursive=True)


class Moving(MemoryFileSystem):  # type: ignore[misc] # it ships no types
    """A store in which retention replaces step-N by step-(N+1) while a manifest is read."""

    protocol = "moving"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    moves = 0
    reads = 0

    def cat_file(self, path: str, *more: Any, **options: Any) -> Any:
        cls = type(self)
        if "manifest.json" in path:
            cls.reads += 1
            if cls.reads % 2 == 0 and cls.moves:  # listed, and not yet checked
                cls.moves -= 1
                run, _, step = path.removesuffix("/manifest.json").rpartition("-")
                for file in self.find(f"{run}-{step}"):
                    name = file.rpartition("/")[2]
                    self.store[f"{run}-{int(step) + 1}/{name}"] = self.store.pop(file)
        return super().cat_file(path, *more, **options)


@pytest.mark.parametrize("moves", [1, 3])
def test_a_checkpoint_that_retention_removes_meanwhile_gives_way_to_the_one_that_is_there(
    moves: int,
) -> None:
    fsspec.register_implementation("moving", Moving, clobber=True)
    Moving.store.clear()
    save("moving://run/step-1")  # type: ignore[arg-type]
    Moving.reads, Moving.moves = 0, moves
    assert ckpt.latest("moving://run") == f"moving://run/step-{1 + moves}"
    assert Moving.moves == 0
    Moving.reads, Moving.moves = 0, 0
    with ckpt.Checkpointer("moving://run", signals=()) as run:
        Moving.reads, Moving.moves = 0, 1
        state = {"w": torch.ones(40)}
        assert run.restore(state) == 2 + moves
        assert state["w"].sum() == 0


@contextmanager
def powerless(folder: Path) -> Iterator[None]:
    """Without root's right to read everywhere; the folders above this one are open."""
    for above in (folder, *folder.parents[:3]):
        above.chmod(0o755)
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.mark.parametrize("closed", ["folder", "manifest"])
def test_what_may_not_be_read_does_not_keep_the_sound_from_being_found(
    tmp_path: Path, closed: str
) -> None:
    sound, other = save(tmp_path / "step-1"), save(tmp_path / "step-2")
    bad = other if closed == "folder" else other / "manifest.json"
    bad.chmod(0)
    with powerless(tmp_path), pytest.warns(ckpt.FallbackWarning, match=r"step-2.*denied") as warned:
        assert ckpt.latest(tmp_path) == str(sound)
    (warning,) = (entry.message for entry in warned)
    assert isinstance(warning, ckpt.FallbackWarning)
    assert [(one.url, one.kind) for one in warning.skipped] == [(str(other), "unreadable")]
    shutil.rmtree(sound)
    with powerless(tmp_path), pytest.raises(PermissionError, match="step-2"):
        ckpt.latest(tmp_path)
    bad.chmod(0o755)


def test_a_base_that_may_not_be_read_is_told_of_and_an_older_one_found(tmp_path: Path) -> None:
    sound, base = save(tmp_path / "step-1"), save(tmp_path / "step-2", 1.0)
    newest = save(tmp_path / "step-3", 1.0, base=base)
    base.chmod(0)
    with powerless(tmp_path), pytest.warns(ckpt.FallbackWarning) as warned:
        assert ckpt.latest(tmp_path) == str(sound)
    (warning,) = (entry.message for entry in warned)
    assert isinstance(warning, ckpt.FallbackWarning)
    assert {one.url for one in warning.skipped} == {str(newest), str(base)}
    base.chmod(0o755)


def test_links_that_lead_to_themselves_are_nobody_s_concern(tmp_path: Path) -> None:
    sound = save(tmp_path / "step-1")
    (tmp_path / "loop").symlink_to("loop")
    assert ckpt.latest(tmp_path) == str(sound)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "manifest.json").symlink_to("manifest.json")
    with pytest.warns(ckpt.FallbackWarning, match="Too many levels"):
        assert ckpt.latest(tmp_path) == str(sound)


def test_a_folder_in_the_place_of_a_manifest_is_told_of_and_passed_over(tmp_path: Path) -> None:
    sound = save(tmp_path / "step-1")
    (tmp_path / "step-2" / "manifest.json").mkdir(parents=True)
    with pytest.warns(ckpt.FallbackWarning, match="in place of a file"):
        assert ckpt.latest(tmp_path) == str(sound)
