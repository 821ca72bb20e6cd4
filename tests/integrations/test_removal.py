"""Integrations remove whatever their library has at a path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.integrations import remove
from ckpt.stores.store import open_store


def test_a_damaged_checkpoint_is_removed_as_a_folder(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "old", {"step": 1})
    (tmp_path / "old" / "manifest.json").write_text("{")
    remove(tmp_path / "old")
    assert not (tmp_path / "old").exists()


def test_a_damaged_checkpoint_from_which_another_borrows_stays(tmp_path: Path) -> None:
    state = {"w": torch.arange(64_000)}
    ckpt.save(tmp_path / "old", state)
    ckpt.save(tmp_path / "new", state, base=tmp_path / "old")
    (tmp_path / "old" / "manifest.json").write_text("{")
    with pytest.raises(ckpt.InUseError, match="new beside it borrows from it"):
        remove(tmp_path / "old")
    assert ckpt.verify(tmp_path / "new").sound


def test_a_damaged_checkpoint_in_a_bucket_is_an_error() -> None:
    with open_store("memory://test_removal") as store:
        store.commit("manifest.json", b"{", replace=True)
    with pytest.raises(ckpt.CorruptError, match="memory://test_removal"):
        remove("memory://test_removal")


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "best", {"step": 1})
    (tmp_path / "last").symlink_to(tmp_path / "best")
    remove(tmp_path / "last")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert ckpt.read(tmp_path / "best") == {"step": 1}


def test_a_file_a_folder_and_nothing_are_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of the library")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for name in ("file", "folder", "nothing"):
        remove(tmp_path / name)
    assert not list(tmp_path.iterdir())
