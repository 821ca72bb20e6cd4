"""A checkpoint that is replaced or deleted while it is read is not damaged: it is begun again."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.opening.sources import TRIES
from ckpt.stores.local_store import LocalStore
from ckpt.stores.object_store import ObjectStore
from tests.ckpt.test_fallback import remove_file

ROWS = 40_000


def state(value: float) -> dict[str, Any]:
    return {name: torch.full((ROWS, 2), float(value)) for name in ("a", "b")} | {"step": int(value)}


@pytest.fixture(params=["disk", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Two checkpoints: `a-old` of step 1 and `last` of step 2."""
    at = str(tmp_path) if request.param == "disk" else f"memory://{uuid4().hex}"
    ckpt.save(f"{at}/a-old", state(1))
    ckpt.save(f"{at}/last", state(2))
    return at


@contextmanager
def once_its_manifest_is_read(
    monkeypatch: pytest.MonkeyPatch, url: str, action: Callable[[], object], times: int = 1
) -> Iterator[None]:
    """So often, when the manifest at a place was read, something happens before anything else."""
    left = [times]

    def of(kind: Any) -> Any:
        read_whole = kind.read_whole

        def instead(self: Any, name: str, limit: int) -> bytes:
            data: bytes = read_whole(self, name, limit)
            if name == "manifest.json" and self.url == url and left[0]:
                left[0], before = 0, left[0]  # what happens may read it too
                action()
                left[0] = before - 1
            return data

        return instead

    with monkeypatch.context() as patch:
        for kind in (LocalStore, ObjectStore):
            patch.setattr(kind, "read_whole", of(kind))
        yield
    assert left[0] == 0 or times == ALWAYS


ALWAYS = 1_000_000


def load(url: str) -> Any:
    return ckpt.load(url, state(0))


def load_or_older(url: str) -> Any:
    return ckpt.load(url, state(0), fallback=True)


def verify(url: str) -> Any:
    assert ckpt.verify(url).problems == ()
    return ckpt.read(url)


def latest(url: str) -> Any:
    assert ckpt.latest(url.rpartition("/")[0]) == url
    return ckpt.read(url)


@pytest.mark.thorough
@pytest.mark.parametrize("reader", [load, load_or_older, ckpt.read, verify, latest])
def test_who_reads_while_it_is_replaced_gets_what_replaced_it(
    run: str, monkeypatch: pytest.MonkeyPatch, reader: Callable[[str], Any]
) -> None:
    url = f"{run}/last"

    def replace() -> None:
        ckpt.save(url, state(3), overwrite=True)

    with once_its_manifest_is_read(monkeypatch, url, replace):
        found = reader(url)
    assert found["step"] == 3
    assert all((found[name] == 3).all() for name in "ab")


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.parametrize("reader", [load, load_or_older, ckpt.read, ckpt.verify, latest])
def test_where_it_is_replaced_each_time_the_error_says_so_and_is_no_damage(
    run: str, monkeypatch: pytest.MonkeyPatch, reader: Callable[[str], Any]
) -> None:
    url, begun = f"{run}/last", []

    def replace() -> None:
        begun.append(url)
        ckpt.save(url, state(3), overwrite=True)

    message = "last: the checkpoint was replaced by another one while it was read.* read it again"
    with (
        once_its_manifest_is_read(monkeypatch, url, replace, ALWAYS),
        pytest.raises(ckpt.ReplacedError, match=message) as error,
    ):
        reader(url)
    assert isinstance(error.value, ckpt.StoreError)
    assert not isinstance(error.value, ckpt.FormatError | ckpt.PartialLoadError)
    assert len(begun) >= TRIES


@pytest.mark.parametrize("reader", [load, ckpt.read, ckpt.verify])
def test_one_that_is_deleted_while_it_is_read_is_no_checkpoint(
    run: str, monkeypatch: pytest.MonkeyPatch, reader: Callable[[str], Any]
) -> None:
    url = f"{run}/last"
    with (
        once_its_manifest_is_read(monkeypatch, url, lambda: ckpt.delete(url)),
        pytest.raises(ckpt.NotACheckpointError, match="last"),
    ):
        reader(url)


def test_from_one_that_is_deleted_while_it_is_read_a_load_goes_back(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{run}/last"
    with (
        once_its_manifest_is_read(monkeypatch, url, lambda: ckpt.delete(url)),
        pytest.warns(ckpt.FallbackWarning) as warned,
    ):
        assert load_or_older(url)["step"] == 1
    (warning,) = (entry.message for entry in warned)
    assert isinstance(warning, ckpt.FallbackWarning)
    assert [one.kind for one in warning.skipped] == ["not_a_checkpoint"]


def test_an_open_checkpoint_and_a_conversion_say_what_happened(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{run}/last"
    with ckpt.open(url) as checkpoint:
        ckpt.save(url, state(3), overwrite=True)
        with pytest.raises(ckpt.ReplacedError, match=r"replaced .* and .*-00000\.safetensors went"):
            checkpoint["a"][0]

    def replace() -> None:
        ckpt.save(url, state(4), overwrite=True)

    with (
        once_its_manifest_is_read(monkeypatch, url, replace),
        pytest.raises(ckpt.ReplacedError),
    ):
        ckpt.convert(url, f"{run}/other")
    with pytest.raises(ckpt.NotACheckpointError):
        ckpt.read(f"{run}/other")


def test_a_file_that_is_lost_is_damage_whatever_comes_later(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a-old", state(1))
    ckpt.save(tmp_path / "last", state(2))
    remove_file(tmp_path / "last")
    with pytest.raises(ckpt.CorruptError, match="the file is missing: rank"):
        load(str(tmp_path / "last"))
    with pytest.warns(ckpt.FallbackWarning):
        assert load_or_older(str(tmp_path / "last"))["step"] == 1


# When some has been read into the target. On a disk what is open can be read to its end.


@pytest.fixture
def divided() -> str:
    """A checkpoint in two files, in memory, of step 2."""
    url = f"memory://{uuid4().hex}"
    ckpt.save(f"{url}/whole", state(2))
    ckpt.convert(f"{url}/whole", f"{url}/last", max_shard_bytes=ROWS * 8)
    return f"{url}/last"


@pytest.mark.parametrize("fallback", [False, True])
def test_one_that_is_replaced_half_way_is_begun_again_and_no_mix(
    divided: str, fallback: bool
) -> None:
    replaced: list[int] = []

    def progress(nbytes: int) -> None:
        if not replaced:
            replaced.append(nbytes)
            ckpt.save(divided, state(3), overwrite=True)

    found = ckpt.load(divided, state(0), fallback=fallback, progress=progress)
    assert replaced
    assert found["step"] == 3
    assert all((found[name] == 3).all() for name in "ab")


@pytest.mark.parametrize("fallback", [False, True])
def test_what_was_filled_before_it_was_replaced_is_named_where_it_cannot_be_begun_again(
    divided: str, fallback: bool
) -> None:
    def progress(nbytes: int) -> None:
        ckpt.save(divided, {"other": torch.ones(3)}, overwrite=True)

    message = r"last was replaced while it was read; then .*last failed with MismatchError"
    with pytest.raises(ckpt.PartialLoadError, match=message) as error:
        ckpt.load(divided, state(0), fallback=fallback, progress=progress)
    assert set(error.value.touched) == {"a", "b"}


def test_one_that_is_replaced_half_way_each_time_names_what_it_touched(divided: str) -> None:
    def progress(nbytes: int) -> None:
        ckpt.convert(f"{divided[:-4]}whole", divided, max_shard_bytes=ROWS * 8, overwrite=True)

    with pytest.raises(ckpt.ReplacedError, match="replaced by another one") as error:
        ckpt.load(divided, state(0), fallback=True, progress=progress)
    assert isinstance(error.value, ckpt.PartialLoadError)
    assert set(error.value.touched) == {"a", "b"}


# Several ranks.


def load_while_it_is_replaced(folder: str, fallback: bool) -> tuple[float, int]:
    """What a rank gets; once all have opened `last`, one of them puts `next` in its place."""
    begun: list[str] = []

    def rename(name: str) -> str:
        if not begun:
            dist.barrier()
            if dist.get_rank() == 1:
                replace(Path(folder, "last"), Path(folder, "next"))
        begun.append(name)
        return name

    target = state(0)
    ckpt.load(f"{folder}/last", target, rename=rename, fallback=fallback)
    return float(target["a"].mean()), target["step"]


def replace(folder: Path, other: Path) -> None:
    """What a save that overwrites does: files first, then the manifest; then old files go."""
    old = list(folder.glob("*.safetensors"))
    for path in other.glob("*.safetensors"):
        shutil.copy(path, folder)
    shutil.copy(other / "manifest.json", folder / "manifest.json.new")
    os.replace(folder / "manifest.json.new", folder / "manifest.json")
    for path in old:
        path.unlink()


@pytest.mark.parametrize("fallback", [False, True])
def test_ranks_begin_again_on_all_alike(clusters: Callable, tmp_path: Path, fallback: bool) -> None:
    for step, name in enumerate(("a-old", "last", "next"), 1):
        ckpt.save(tmp_path / name, state(step))
    found = clusters(2).run(load_while_it_is_replaced, str(tmp_path), fallback)
    assert found == [(3.0, 3)] * 2
