"""A process that dies at any system call of a save leaves the old checkpoint or the new one.

The calls that the local store makes are counted, and a forked process ends itself without a word at
the n-th of them: once before the call, once, where it writes, with half of it done. What is in the
folder afterwards is then read, for every n up to the end of the save.
"""

import errno
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.stores.local_store import LocalStore
from ckpt.stores.store import open_store
from ckpt.transfer.commit import withdraw
from tests.faults.faulty_store import Fault, Operation, failing

CALLS = ("open", "writev", "pwrite", "fsync", "close", "link", "replace", "unlink")
LOCAL = ("ckpt.stores.local_store", "ckpt.stores.local_files", "ckpt.stores.local_files")
"""The modules that make them."""
DIED = 9


def old() -> dict[str, Any]:
    return {"w": torch.arange(300.0), "b": torch.ones(7), "step": 1}


def new() -> dict[str, Any]:
    """Several blocks in a file, so that there are several writes."""
    return {**{f"w{i}": torch.full((500, 3), float(i)).T for i in range(4)}, "step": 2}


class DyingSystem:
    """`os`, until its n-th call: then the process is gone."""

    def __init__(self, last: int, half: bool) -> None:
        self._left, self._half = last, half

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in CALLS:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                if self._half and name == "writev":
                    descriptor, (first, *_) = arguments
                    os.write(descriptor, first[: len(first) // 2])
                os._exit(DIED)
            return found(*arguments, **options)

        return call


def save_and_die(folder: str, overwrite: bool, compress: bool, last: int, half: bool) -> bool:
    """Save in a process of its own that dies at call number `last`; True when it came that far."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            system = DyingSystem(last, half)
            for module in LOCAL:
                import_module(module).os = system  # type: ignore[attr-defined]
            unlink = system.unlink
            Path.unlink = lambda self, missing_ok=False: unlink(self)  # type: ignore[method-assign]
            ckpt.save(folder, new(), overwrite=overwrite, compress=compress)
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, DIED)
    return status == DIED


def found(folder: str) -> str:
    """Which checkpoint is in the folder, whole and with the right values."""
    try:
        state: Any = ckpt.read(folder)
    except ckpt.NotACheckpointError:
        return "none"
    expected = old() if state["step"] == 1 else new()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name
    return "old" if state["step"] == 1 else "new"


def die_everywhere(folder: str, overwrite: bool, compress: bool, half: bool) -> list[str]:
    """What is found after dying at the first call, the second, ... until a save lives."""
    outcomes = []
    for last in count(1):
        place = f"{folder}/{last}/checkpoint"  # with none beside it, which overwriting looks at
        if overwrite:
            ckpt.save(place, old())
        died = save_and_die(place, overwrite, compress, last, half)
        outcomes.append(found(place))
        # Whatever was left lying there is in nobody's way.
        ckpt.save(place, new(), overwrite=outcomes[-1] != "none")
        assert found(place) == "new"
        if not died:
            return outcomes
    raise AssertionError


@pytest.mark.wide
@pytest.mark.costly
@pytest.mark.parametrize("half", [False, True], ids=["before", "during"])
@pytest.mark.parametrize("compress", [False, True], ids=["raw", "zstd"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
def test_dying_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    clusters: Callable, tmp_path: Path, overwrite: bool, compress: bool, half: bool
) -> None:
    (outcomes,) = clusters(1).run(die_everywhere, str(tmp_path), overwrite, compress, half)
    before = "old" if overwrite else "none"
    committed = outcomes.index("new")
    assert outcomes == [before] * committed + ["new"] * (len(outcomes) - committed)
    assert committed >= 8  # a shard is opened, written, flushed, closed, renamed; then a manifest
    assert len(outcomes) - committed >= 3


class FullDisk:
    """`os`, on a disk with room for a few bytes."""

    def __init__(self, room_bytes: int) -> None:
        self._room = room_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def writev(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        self._room -= sum(map(len, buffers))
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.writev(descriptor, buffers)


def save_to_a_full_disk(folder: str, full_rank: int, room_bytes: int) -> str:
    """The name of what this rank's save raises when one rank's disk is full."""
    writer: Any = import_module("ckpt.stores.local_files")
    if dist.get_rank() == full_rank:
        writer.os = FullDisk(room_bytes)
    note = {"note": "long" * 1000}  # a manifest that needs some room
    with pytest.raises((OSError, ckpt.RankError), match="No space left") as raised:
        ckpt.save(folder, {"w": torch.zeros(1 << 18), "step": 2}, overwrite=True, metadata=note)
    writer.os = os
    if isinstance(raised.value, ckpt.RankError):
        assert raised.value.rank == full_rank
    return type(raised.value).__name__


@pytest.mark.parametrize(
    ("full_rank", "room_bytes"),
    # Rank 0 writes half of the tensor's MiB, header and table; then the manifest.
    [(1, 0), (0, 0), (0, (1 << 19) + 2000)],
    ids=["a shard", "rank 0's shard", "the manifest"],
)
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_old_checkpoint_stays(
    clusters: Callable, tmp_path: Path, full_rank: int, room_bytes: int
) -> None:
    ckpt.save(tmp_path, old())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    raised = clusters(2).run(save_to_a_full_disk, str(tmp_path), full_rank, room_bytes)
    assert raised[full_rank] in ("OSError", "StoreError")
    assert raised[1 - full_rank] == "RankError"
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.items() <= after.items()
    if not room_bytes:
        assert before == after
    assert found(str(tmp_path)) == "old"


def test_a_checkpoint_is_invisible_until_its_manifest_exists(tmp_path: Path) -> None:
    ckpt.save(tmp_path, old())
    (tmp_path / "manifest.json").rename(tmp_path / "elsewhere")
    with pytest.raises(ckpt.NotACheckpointError, match="an unfinished save"):
        ckpt.read(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "manifest.json")
    assert found(str(tmp_path)) == "old"
    with pytest.raises(ckpt.ExistsError, match="pass overwrite=True"):
        ckpt.save(tmp_path, new())


def test_a_save_onto_a_file_is_an_error_with_and_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, place in (("file", "file"), ("file", "file/below"), ("link", "link")):
        for overwrite in (False, True):
            with pytest.raises(ckpt.StoreError, match=f"{tmp_path}/{name} is no folder"):
                ckpt.save(tmp_path / place, {"w": torch.ones(2)}, overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("blocking", [True, False])
def test_no_checkpoint_is_replaced_through_a_link(tmp_path: Path, blocking: bool) -> None:
    ckpt.save(tmp_path / "other", old())
    ckpt.save(tmp_path / "source", new())
    link = tmp_path / "link"
    link.symlink_to("other")
    before = {one: one.read_bytes() for one in (tmp_path / "other").iterdir()}
    for url in (link, f"{link}/", f"file://{link}"):
        with pytest.raises(ckpt.ExistsError, match=f"{link} is a link to {tmp_path}/other, whose"):
            ckpt.save(url, new(), overwrite=True, blocking=blocking)
        with pytest.raises(ckpt.ExistsError, match=f"{link} is a link to {tmp_path}/other, whose"):
            ckpt.convert(tmp_path / "source", url, to="ckpt", overwrite=True)
    assert {one: one.read_bytes() for one in (tmp_path / "other").iterdir()} == before
    # A link above the checkpoint, and one to a folder without any, are places like others.
    (tmp_path / "disk").mkdir()
    (tmp_path / "above").symlink_to("disk")
    ckpt.save(tmp_path / "above" / "one", old())
    ckpt.save(tmp_path / "above" / "one", new(), overwrite=True)
    ckpt.save(tmp_path / "above", new())
    assert found(str(tmp_path / "disk")) == found(str(tmp_path / "disk" / "one")) == "new"


def test_files_that_are_links_are_themselves_replaced_and_deleted(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "one", old())
    kept = {}
    for file in [*(tmp_path / "one").iterdir()]:
        elsewhere = file.rename(tmp_path / file.name)
        kept[elsewhere] = elsewhere.read_bytes()
        file.symlink_to(elsewhere)
    ckpt.save(tmp_path / "one", new(), overwrite=True)
    assert found(str(tmp_path / "one")) == "new"
    assert not any(one.is_symlink() for one in (tmp_path / "one").iterdir())
    assert {one: one.read_bytes() for one in kept} == kept


def test_a_delete_removes_nothing_behind_a_link_that_comes_into_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        ckpt.save(tmp_path / name, old())
    before = {one: one.read_bytes() for one in (tmp_path / "other").iterdir()}
    delete = LocalStore.delete

    def swapped(store: LocalStore, name: str) -> bool:
        if name == "manifest.json":
            (tmp_path / "one").rename(tmp_path / "moved")
            (tmp_path / "one").symlink_to("other")
        return delete(store, name)

    monkeypatch.setattr(LocalStore, "delete", swapped)
    ckpt.delete(tmp_path / "one")
    assert {one: one.read_bytes() for one in (tmp_path / "other").iterdir()} == before
    assert not [*(tmp_path / "moved").iterdir()]


def test_overwriting_a_damaged_checkpoint_deletes_nothing_it_names(tmp_path: Path) -> None:
    ckpt.save(tmp_path, old())
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    files = set(tmp_path.glob("*.safetensors"))
    ckpt.save(tmp_path, new(), overwrite=True)
    assert found(str(tmp_path)) == "new"
    assert files < set(tmp_path.glob("*.safetensors"))


def test_a_store_that_keeps_another_manifest_than_was_written_leaves_the_old_checkpoint(
    tmp_path: Path,
) -> None:
    ckpt.save(tmp_path, old())

    def lying(operation: Operation) -> Fault | None:
        nonlocal count
        is_first = operation.method == "commit" and operation.name == "manifest.json" and not count
        count += is_first
        return Fault.FLIP if is_first else None

    count = 0
    with failing(lying), pytest.raises(ckpt.StoreError, match="there before is restored"):
        ckpt.save(tmp_path, new(), overwrite=True)
    assert count == 1
    assert found(str(tmp_path)) == "old"
    assert ckpt.verify(tmp_path).sound


def test_of_two_deletions_of_one_checkpoint_only_one_may_delete_its_files(tmp_path: Path) -> None:
    ckpt.save(tmp_path, old())
    with open_store(tmp_path) as first, open_store(tmp_path) as second:
        data = first.read_whole("manifest.json", 10**6)
        assert [withdraw(store, data) for store in (first, second)] == [True, False]
        ckpt.save(tmp_path, new(), overwrite=True)
        with pytest.raises(ckpt.ReplacedError, match="nothing was deleted"):
            withdraw(second, data)
    assert found(str(tmp_path)) == "new"
