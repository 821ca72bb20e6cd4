"""`ckpt.gc` finds what is part of nothing, and nothing else."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.removing import gc as collecting
from ckpt.removing.gc import FOLDER, PART, SHARD, UPLOAD
from ckpt.saving import agreement as save_steps
from ckpt.stores.store import open_store
from ckpt.transfer import commit
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import no_faults
from tests.stores.server import Server, s3_client

ATTEMPT = "0123456789abcdef"
SHARD_NAME = f"{ATTEMPT}-00000.safetensors"
STRANGERS = (
    "model.safetensors",
    "0123456789abcdef-0000.safetensors",
    "0123456789ABCDEF-00000.safetensors",
    "0123456789abcdef-00000.safetensors.bak",
    ".notes.txt.01234567.part",
    ".model.safetensors.part",
    ".model.safetensors.0123456.part",
    "model.safetensors.01234567.part",
    "notes.txt",
)
"""What resembles what we write, and is not that."""


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(step)), "frozen": torch.ones(50_000), "step": step}


def names(found: list[ckpt.LeftOver], root: Path) -> set[str]:
    return {os.path.relpath(os.path.join(one.folder, one.name).rstrip("/"), root) for one in found}


def modify(path: Path, hours: float) -> None:
    """Make a file look as if it had been modified so many hours from now."""
    then = time.time() + hours * 3600
    os.utime(path, (then, then))


def pass_hours(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    """It is so much later, for whoever collects."""
    monkeypatch.setattr(collecting, "now", lambda: time.time() + hours * 3600)


def fill(folder: Path, *files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / name).write_bytes(b"xyz")


def test_left_overs_are_listed_beside_checkpoints_and_instead_of_them(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", state(1))
    parts = (f".{SHARD_NAME}.01234567.part", ".manifest.json.89abcdef.part")
    fill(tmp_path / "a", SHARD_NAME, *parts, *STRANGERS)
    fill(tmp_path / "b", SHARD_NAME)
    fill(tmp_path, f".model.safetensors.{'0' * 8}.part")
    fill(tmp_path / ".hf.01234567.part", "model-00001.safetensors", "model.safetensors.index.json")
    fill(tmp_path / ".hf.01234567.part", "config.json", ".tokenizer.json.01234567.part")
    expected = {f"a/{SHARD_NAME}": SHARD, f"b/{SHARD_NAME}": SHARD, ".hf.01234567.part": FOLDER}
    expected |= {f"a/{part}": PART for part in parts}
    expected |= {f".model.safetensors.{'0' * 8}.part": PART}
    found = ckpt.gc(tmp_path, older_than=0)
    assert names(found, tmp_path) == set(expected)
    assert sorted(one.kind for one in found) == sorted(expected.values())
    assert all(one.is_old and not one.was_removed for one in found)
    assert names(ckpt.gc(tmp_path / "a"), tmp_path) == {n for n in expected if n.startswith("a/")}


def test_beside_an_old_left_over_a_young_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    young = f"{ATTEMPT[::-1]}-00000.safetensors"
    fill(tmp_path, SHARD_NAME, young)
    modify(tmp_path / young, 1.5)
    pass_hours(monkeypatch, 26)
    found = ckpt.gc(tmp_path, delete=True)
    assert {one.name: one.was_removed for one in found} == {SHARD_NAME: True, young: False}
    assert os.listdir(tmp_path) == [young]


@pytest.mark.parametrize("to", ["safetensors", "torch", "gguf", "npz"])
def test_a_file_that_was_being_converted_to_is_found_whatever_its_name(
    tmp_path: Path, to: str
) -> None:
    ckpt.save(tmp_path / "a", state(1))
    ckpt.convert(tmp_path / "a", tmp_path / "out", to=to)
    whole = (tmp_path / "out").read_bytes()
    parts = {f".out.{length:08x}.part": length for length in (0, 50, len(whole))}
    for part, length in parts.items():
        (tmp_path / part).write_bytes(whole[:length])
    fill(tmp_path, *STRANGERS)
    (tmp_path / ".thesis.01234567.part").write_bytes(b"of another program {")
    found = ckpt.gc(tmp_path, delete=True, older_than=0)
    assert {one.name: one.nbytes for one in found} == parts
    assert all(one.was_removed and one.kind == PART for one in found)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("a", "out", ".thesis.01234567.part"),
        *STRANGERS,
    }


def test_only_old_ones_are_removed_and_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(tmp_path / "a", state(1))
    committed = set((tmp_path / "a").iterdir())
    fill(tmp_path / "a", SHARD_NAME, "notes.txt")
    fill(tmp_path / "b", SHARD_NAME)
    modify(tmp_path / "b" / SHARD_NAME, 1.5)
    pass_hours(monkeypatch, 26)
    for delete in (False, True):
        found = ckpt.gc(tmp_path, delete=delete)
        told = {one.folder[-1]: (one.is_old, one.was_removed) for one in found}
        assert told == {"a": (True, delete), "b": (False, False)}
    assert set((tmp_path / "a").iterdir()) == {*committed, tmp_path / "a" / "notes.txt"}
    assert ckpt.verify(tmp_path / "a").sound
    (removed,) = ckpt.gc(tmp_path, delete=True, older_than=24 * 3600)
    assert removed.was_removed
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_that_is_being_copied_in_is_as_young_as_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(tmp_path / "run" / "a", state(1))
    for path in (tmp_path / "run" / "a").iterdir():
        modify(path, -1000)
    shard, manifest = sorted((tmp_path / "run" / "a").iterdir())
    (tmp_path / "copies" / "a").mkdir(parents=True)
    (tmp_path / "copies" / ".hf.01234567.part").mkdir()
    part = f".{SHARD_NAME}.01234567.part"
    for name in (shard.name, part):  # both as cp -a and rsync -a leave them
        shutil.copy2(shard, tmp_path / "copies" / "a" / name)
    shutil.copy2(shard, tmp_path / "copies" / ".hf.01234567.part" / "model.safetensors")
    modify(tmp_path / "copies" / ".hf.01234567.part", -1000)
    found = ckpt.gc(tmp_path / "copies", delete=True)
    assert {one.kind for one in found} == {SHARD, PART, FOLDER}
    assert not any(one.is_old or one.was_removed for one in found)
    shutil.copy2(manifest, tmp_path / "copies" / "a")
    assert ckpt.verify(tmp_path / "copies" / "a").sound
    pass_hours(monkeypatch, 26)
    assert all(one.was_removed for one in ckpt.gc(tmp_path / "copies", delete=True))
    assert ckpt.verify(tmp_path / "copies" / "a").sound


def test_the_files_of_a_deleted_base_stay_while_somebody_borrows_from_them(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", state(1))
    ckpt.save(tmp_path / "b", state(2), base=tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink()
    for place in (tmp_path, tmp_path / "a"):
        assert ckpt.gc(place, older_than=0, delete=True) == []
    assert ckpt.verify(tmp_path / "b").sound
    manifest = tmp_path / "b" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])  # it may still be put right
    assert ckpt.gc(tmp_path, older_than=0, delete=True) == []
    manifest.unlink()
    assert {one.folder[-1] for one in ckpt.gc(tmp_path, older_than=0, delete=True)} == {"a", "b"}
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_over_beside_a_damaged_manifest(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", state(1))
    manifest = tmp_path / "a" / "manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-1])
    assert ckpt.gc(tmp_path, older_than=0, delete=True) == []
    manifest.write_bytes(data)
    assert ckpt.verify(tmp_path / "a").sound


def test_a_folder_that_was_moved_away_is_left_over_when_the_new_one_is_there(
    tmp_path: Path,
) -> None:
    fill(tmp_path / ".hf.01234567.old", "model.safetensors")
    assert ckpt.gc(tmp_path, older_than=0, delete=True) == []
    fill(tmp_path / "hf", "model.safetensors")
    (found,) = ckpt.gc(tmp_path, older_than=0, delete=True)
    assert (found.kind, found.was_removed) == (FOLDER, True)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_a_folder_with_something_else_in_it_is_no_left_over(tmp_path: Path) -> None:
    fill(tmp_path / ".hf.01234567.part", "model.safetensors", "thesis.tex")
    assert ckpt.gc(tmp_path, older_than=0) == []


def test_a_live_save_that_loses_its_file_fails_and_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    write = save_steps.commit

    def collected_before(*arguments: Any) -> None:
        (found,) = ckpt.gc(tmp_path, older_than=0, delete=True)
        assert found.was_removed
        write(*arguments)

    monkeypatch.setattr(save_steps, "commit", collected_before)
    monkeypatch.setattr(commit, "SEEN_PAUSES_SECONDS", ())
    with pytest.raises(OSError, match="another process has removed the files"):
        ckpt.save(tmp_path / "a", state(1))
    assert not (tmp_path / "a" / "manifest.json").exists()


@pytest.mark.thorough
def test_an_upload_to_a_folder_that_does_not_exist_yet_is_found(moto: Server) -> None:
    url, options = moto.url("uploads"), dict(moto.options)
    key = f"uploads/step-1/{SHARD_NAME}"
    client = s3_client(moto)
    others = ("uploads/step-1/thesis.tex", f"uploads/notes/of/{SHARD_NAME}")
    for begun in (key, *others):
        upload = client.create_multipart_upload(Bucket=moto.bucket, Key=begun)["UploadId"]
        part = {"UploadId": upload, "PartNumber": 1, "Body": bytes(1000)}
        client.upload_part(Bucket=moto.bucket, Key=begun, **part)
    for place in (url, f"{url}/step-1"):
        (found,) = ckpt.gc(place, older_than=0, storage_options=options)
        assert (found.folder, found.name, found.kind) == (f"{url}/step-1", SHARD_NAME, UPLOAD)
        assert found.nbytes == 1000
    assert ckpt.gc(url, delete=True, older_than=0, storage_options=options)[0].was_removed
    left = client.list_multipart_uploads(Bucket=moto.bucket, Prefix="uploads/")["Uploads"]
    assert sorted(one["Key"] for one in left) == sorted(others)
    for one in left:  # the bucket is other tests' too
        client.abort_multipart_upload(Bucket=moto.bucket, Key=one["Key"], UploadId=one["UploadId"])


@pytest.mark.thorough
def test_to_list_many_left_overs_takes_no_request_for_each(moto: Server) -> None:
    with FaultProxy(moto, no_faults) as proxy:
        url, options = proxy.server.url("test_collecting/many"), dict(proxy.server.options)
        with open_store(url, options) as store:
            for number in range(20):
                store.commit(f"{number:016x}-00000.safetensors", b"x", replace=True)
        proxy.clear()
        assert len(ckpt.gc(url, older_than=0, storage_options=options)) == 20
        assert len(proxy.seen) < 10
        found = ckpt.gc(url, delete=True, older_than=0, storage_options=options)
        assert all(one.was_removed for one in found)


def test_a_link_in_a_folder_is_not_followed_and_one_that_is_named_is_only_listed(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    ckpt.save(other / "step-1", state(1))
    os.remove(other / "step-1" / "manifest.json")
    (other / ".model.01234567.part").mkdir()
    (other / ".model.01234567.part" / "model.safetensors").write_bytes(b"")
    (tmp_path / "mine").mkdir()
    for name in ("step-1", ".model.01234567.part"):
        (tmp_path / "mine" / name).symlink_to(other / name)
    before = sorted(tmp_path.rglob("*"))
    assert ckpt.gc(tmp_path / "mine", delete=True, older_than=0) == []
    link = tmp_path / "mine" / "step-1"
    assert [one.kind for one in ckpt.gc(link, older_than=0)] == [SHARD]
    for url in (link, f"{link}/", f"file://{link}/."):
        with pytest.raises(ckpt.ArgumentError, match=f"{link}: a link to {other}/step-1, which"):
            ckpt.gc(url, delete=True, older_than=0)
    assert sorted(tmp_path.rglob("*")) == before
    assert len(ckpt.gc(other, delete=True, older_than=0)) == 2
