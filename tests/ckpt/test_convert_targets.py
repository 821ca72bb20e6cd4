"""What a conversion may write over, and what it leaves alone whatever it is told."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.converting.convert import convert
from ckpt.errors import ExistsError, InUseError
from ckpt.stores.local_store import LocalStore
from ckpt.transfer import commit

PLACES = {"ckpt": "c", "safetensors": "c.safetensors", "hf": "hf", "torch": "c.pt", "dcp": "dcp"}
FOLDERS = ("ckpt", "hf", "dcp")
FILES = ("safetensors", "torch")


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((40, 30), value), "b": torch.arange(7.0)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A native checkpoint of ones."""
    ckpt.save(tmp_path / "one" / "step", state(1))
    return tmp_path / "one" / "step"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A native checkpoint of twos."""
    ckpt.save(tmp_path / "two" / "step", state(2))
    return tmp_path / "two" / "step"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where conversions go; nothing else is there."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def value_at(place: Path) -> float:
    found: Any = ckpt.read(place)
    assert torch.equal(found["b"], torch.arange(7.0))
    return float(found["w"][0, 0])


def content(folder: Path) -> dict[str, bytes | str | None]:
    """All that is below a folder: bytes of files, targets of links, None for the rest."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.read_bytes() if path.is_file() else None
        if path.is_symlink():
            found[name] = os.readlink(path)
    return found


def meanwhile(action: Callable[[], object]) -> Callable[[int], None]:
    """For `progress`: something happens once, when the first bytes have been read."""
    waiting = [action]

    def told(_: int) -> None:
        while waiting:
            waiting.pop()()

    return told


# What comes while a conversion runs.


@pytest.mark.parametrize("to", PLACES)
def test_a_conversion_does_not_replace_a_checkpoint_that_came_while_it_ran(
    source: Path, other: Path, out: Path, to: str
) -> None:
    place, came = out / PLACES[to], {}

    def come() -> None:
        convert(other, place, to=to)
        came.update(content(out))

    with pytest.raises(ExistsError) as caught:
        convert(source, place, to=to, progress=meanwhile(come))
    assert str(place) in str(caught.value)
    assert value_at(place) == 2
    assert content(out) == {name: data for name, data in came.items() if ".part" not in name}


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_conversion_does_not_remove_a_strangers_files_that_came_while_it_ran(
    source: Path, out: Path, to: str
) -> None:
    place = out / PLACES[to]

    def come() -> None:
        place.mkdir()
        (place / "notes.txt").write_text("precious")

    with pytest.raises(ExistsError, match="has appeared there since"):
        convert(source, place, to=to, progress=meanwhile(come))
    assert content(out) == {PLACES[to]: None, f"{PLACES[to]}/notes.txt": b"precious"}


@pytest.mark.parametrize("to", [*FILES, "hf", "dcp"])
def test_a_conversion_with_overwrite_replaces_what_came_while_it_ran(
    source: Path, other: Path, out: Path, to: str
) -> None:
    place = out / PLACES[to]
    convert(
        *(source, place),
        to=to,
        overwrite=True,
        progress=meanwhile(lambda: convert(other, place, to=to)),
    )
    assert value_at(place) == 1
    assert [name for name in content(out) if name.startswith(".")] == []


def test_a_conversion_to_a_folder_does_not_take_away_a_checkpoint_that_came_into_it(
    source: Path, other: Path, out: Path
) -> None:
    convert(other, out / "hf", to="hf")
    with pytest.raises(ExistsError, match=r"holds step-1/"):
        convert(
            *(source, out / "hf"),
            to="hf",
            overwrite=True,
            progress=meanwhile(lambda: ckpt.save(out / "hf" / "step-1", state(3))),
        )
    assert value_at(out / "hf") == 2
    assert value_at(out / "hf" / "step-1") == 3


@pytest.mark.parametrize("to", FILES)
def test_where_there_are_no_hard_links_what_came_meanwhile_is_looked_for(
    source: Path, other: Path, out: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    place = out / PLACES[to]
    with pytest.raises(ExistsError):
        convert(source, place, to=to, progress=meanwhile(lambda: convert(other, place, to=to)))
    assert value_at(place) == 2
    assert list(content(out)) == [PLACES[to]]


def test_an_empty_folder_is_filled(source: Path, out: Path) -> None:
    for to in FOLDERS:
        (out / to).mkdir()
        convert(source, out / to, to=to)
        assert value_at(out / to) == 1


# What the source needs.


def test_the_source_given_by_its_manifest_is_no_target(source: Path, tmp_path: Path) -> None:
    before = content(tmp_path)
    for to in FOLDERS:
        with pytest.raises(ExistsError, match=r"is the source itself|holds the source"):
            convert(source / "manifest.json", source, to=to, overwrite=True, dtype="float16")
    assert content(tmp_path) == before


def test_a_file_that_the_replaced_checkpoint_would_take_along_is_no_source(
    source: Path, tmp_path: Path
) -> None:
    (shard,) = source.glob("*.safetensors")
    before = content(tmp_path)
    with pytest.raises(ExistsError, match="would be removed with the replaced checkpoint"):
        convert(shard, source, to="ckpt", overwrite=True)
    assert content(tmp_path) == before


def test_what_the_source_borrows_from_is_not_replaced(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "s1", state(1))
    ckpt.save(tmp_path / "s2", state(1) | {"c": torch.ones(3)}, base=tmp_path / "s1")
    (shard,) = (tmp_path / "s1").glob("*.safetensors")
    before = content(tmp_path)
    with pytest.raises(ExistsError, match="which the source borrows from"):
        convert(tmp_path / "s2", shard, overwrite=True)
    for to in FOLDERS:
        with pytest.raises(ExistsError):
            convert(tmp_path / "s2", tmp_path / "s1", to=to, overwrite=True)
    assert content(tmp_path) == before


def test_what_the_sources_links_lead_to_is_not_replaced(source: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    convert(source, hub / "blobs" / "abc", to="safetensors")
    (hub / "snap").mkdir()
    (hub / "snap" / "model.safetensors").symlink_to("../blobs/abc")
    before = content(hub)
    with pytest.raises(ExistsError, match="is a file of the source"):
        convert(hub / "snap", hub / "blobs" / "abc", to="safetensors", overwrite=True)
    for to in ("hf", "dcp"):
        with pytest.raises(ExistsError, match="holds the source"):
            convert(hub / "snap", hub / "blobs", to=to, overwrite=True)
    assert content(hub) == before


# What others need.


@pytest.mark.parametrize("name", ["manifest.json", "shard"])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_of_another_checkpoint_is_not_replaced(
    source: Path, other: Path, name: str, damaged: bool
) -> None:
    (shard,) = other.glob("*.safetensors")
    if damaged:
        manifest = other / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"float", b"flaot")[:-1])
    before = content(other)
    target = shard if name == "shard" else other / name
    with pytest.raises(ExistsError, match="whose manifest names it"):
        convert(source, target, to="safetensors", overwrite=True)
    assert content(other) == before


def test_a_file_that_is_only_borrowed_from_is_not_replaced(source: Path, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "s1", state(1))
    (shard,) = (tmp_path / "s1").glob("*.safetensors")
    ckpt.save(tmp_path / "s2", state(1) | {"c": torch.ones(3)}, base=tmp_path / "s1")
    (tmp_path / "s1" / "manifest.json").unlink()
    with pytest.raises(ExistsError, match=r"a checkpoint beside .* borrows from"):
        convert(source, shard, overwrite=True)
    assert value_at(tmp_path / "s2") == 1


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_conversion_does_not_put_another_formats_checkpoint_out_of_sight(
    source: Path, other: Path, out: Path, to: str
) -> None:
    convert(other, out / "there", to=to)
    before = content(out)
    with pytest.raises(ExistsError, match="is a checkpoint of another format"):
        convert(source, out / "there")
    assert content(out) == before
    convert(source, out / "there", overwrite=True)
    assert value_at(out / "there") == 1


def test_a_folder_of_checkpoints_gets_no_checkpoint_beside_them(
    source: Path, other: Path, tmp_path: Path
) -> None:
    run = source.parent
    before = content(run)
    with pytest.raises(ExistsError, match=f"{run} is a folder of checkpoints, such as {source}"):
        ckpt.convert(other, run)
    assert content(run) == before
    ckpt.convert(other, run / "exported")
    ckpt.convert(other, run, overwrite=True)
    assert value_at(run) == value_at(run / "exported") == 2


@pytest.mark.parametrize(("ending", "name"), [(".PT", "torch"), (".SafeTensors", "safetensors")])
def test_the_ending_of_a_target_may_have_capital_letters(
    source: Path, out: Path, ending: str, name: str
) -> None:
    assert ckpt.convert(source, out / f"c{ending}").target_format == name
    assert (out / f"c{ending}").is_file()
    assert value_at(out / f"c{ending}") == 1


def test_another_formats_checkpoint_that_came_meanwhile_is_not_put_out_of_sight(
    source: Path, other: Path, out: Path
) -> None:
    def come() -> None:
        convert(other, out / "there" / "model.safetensors")

    with pytest.raises(ExistsError, match="is a checkpoint of another format"):
        convert(source, out / "there", progress=meanwhile(come))
    assert value_at(out / "there") == 2
    assert list(content(out)) == ["there", "there/model.safetensors"]


def test_what_an_unfinished_save_left_is_in_nobodys_way(source: Path, out: Path) -> None:
    ckpt.save(out / "c", state(5))
    (out / "c" / "manifest.json").unlink()
    (out / "c" / "notes.txt").write_text("kept")
    convert(source, out / "c")
    assert value_at(out / "c") == 1
    assert (out / "c" / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize("to", ["hf", "dcp"])
@pytest.mark.parametrize(
    "make",
    [
        lambda place: ckpt.save(place / "deep" / "step-2", state(3)),
        lambda place: torch.save(state(3), place / "optimizer.pt"),
        lambda place: convert(place, place / "deep" / "dcp", to="dcp"),
        lambda place: convert(place, place / "deep" / "hf", to="hf"),
    ],
    ids=["native", "torch", "dcp", "hf"],
)
def test_a_folder_with_more_checkpoints_than_one_is_not_replaced(
    source: Path, other: Path, out: Path, to: str, make: Callable[[Path], object]
) -> None:
    convert(other, out / "there", to="hf", max_shard_bytes=200)
    make(out / "there")
    before = content(out)
    with pytest.raises(ExistsError, match=r"more than the one checkpoint .* move the files away"):
        convert(source, out / "there", to=to, overwrite=True)
    assert content(out) == before


def test_a_base_is_not_replaced_by_a_folder_of_another_format(source: Path, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "s1", state(1))
    ckpt.save(tmp_path / "s2", state(1) | {"c": torch.ones(3)}, base=tmp_path / "s1")
    with pytest.raises(InUseError, match="s2 beside it"):
        convert(source, tmp_path / "s1", to="hf", overwrite=True)


# What is no checkpoint.


def pipe(place: Path) -> None:
    os.mkfifo(place)


def broken_link(place: Path) -> None:
    place.symlink_to("nowhere")


def device(place: Path) -> None:
    place.symlink_to("/dev/null")


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (pipe, "pipe|not a folder"),
        (broken_link, "a broken link, to nowhere"),
        (device, "device|not a folder"),
    ],
)
def test_what_is_neither_file_nor_folder_is_refused(
    source: Path, out: Path, to: str, overwrite: bool, make: Callable[[Path], None], said: str
) -> None:
    make(out / "there")
    before = (out / "there").lstat()
    with pytest.raises(ExistsError, match=rf"there is .*({said})"):
        convert(source, out / "there", to=to, overwrite=overwrite, progress=pytest.fail)
    assert (out / "there").lstat().st_mode == before.st_mode
    assert os.listdir(out) == ["there"]


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_where_a_folder_goes_and_the_reverse_are_refused_before_anything_is_read(
    source: Path, out: Path, to: str, overwrite: bool
) -> None:
    if to in FILES:
        (out / "there").mkdir()
    else:
        (out / "there").write_text("precious")
    before = content(out)
    with pytest.raises(ExistsError, match=r"there is (a folder|a file|not a folder)"):
        convert(source, out / "there", to=to, overwrite=overwrite, progress=pytest.fail)
    assert content(out) == before


@pytest.mark.parametrize("to", PLACES)
def test_a_target_in_a_file_is_refused_before_anything_is_read(
    source: Path, out: Path, to: str
) -> None:
    (out / "there").write_text("precious")
    with pytest.raises(ExistsError, match="a part of this path is a file"):
        convert(source, out / "there" / PLACES[to], to=to, progress=pytest.fail)
    assert content(out) == {"there": b"precious"}


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_where_a_disk_begins_is_refused_before_anything_is_read(source: Path, to: str) -> None:
    with pytest.raises(ExistsError, match="is a mount point"):
        convert(source, "/proc", to=to, overwrite=True, progress=pytest.fail)


@pytest.mark.parametrize("to", FOLDERS)
def test_the_folder_one_is_in_can_be_given_as_a_dot(
    source: Path, out: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out)
    convert(source, ".", to=to)
    assert value_at(out) == 1


@pytest.mark.parametrize("to", FILES)
def test_a_link_to_a_file_is_itself_replaced(source: Path, out: Path, to: str) -> None:
    (out / "real").write_text("precious")
    (out / "there").symlink_to("real")
    with pytest.raises(ExistsError, match="overwrite=True"):
        convert(source, out / "there", to=to)
    convert(source, out / "there", to=to, overwrite=True)
    assert (out / "real").read_text() == "precious"
    assert not (out / "there").is_symlink()
    assert value_at(out / "there") == 1
    assert sorted(content(out)) == ["real", "there"]


@pytest.mark.parametrize("to", ["hf", "dcp"])
@pytest.mark.parametrize("exchanged", [True, False])
def test_a_link_to_a_folder_is_itself_replaced_and_nothing_stays_over(
    source: Path,
    other: Path,
    out: Path,
    to: str,
    exchanged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not exchanged:  # as where the system cannot
        monkeypatch.setattr("ckpt.stores.local_store._renameat2", None)
    ckpt.save(out / "real" / "inner", state(3))
    (out / "there").symlink_to("real")
    with pytest.raises(ExistsError, match="overwrite=True"):
        convert(source, out / "there", to=to)
    convert(source, out / "there", to=to, overwrite=True)
    assert value_at(out / "there") == 1
    assert value_at(out / "real" / "inner") == 3
    assert sorted(os.listdir(out)) == ["real", "there"]


# A conversion that fails.


@pytest.mark.parametrize("shards", [1, 3])
def test_a_conversion_that_loses_against_another_leaves_nothing_in_its_folder(
    source: Path, other: Path, out: Path, shards: int
) -> None:
    def come() -> None:
        convert(other, out / "there")

    with pytest.raises(ExistsError):
        convert(
            *(source, out / "there"),
            max_shard_bytes=10_000 // shards,
            progress=meanwhile(come),
        )
    assert value_at(out / "there") == 2
    assert len(list((out / "there").iterdir())) == 2


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "disk full")])
def test_a_conversion_that_fails_leaves_no_folder(
    source: Path, out: Path, compress: bool, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises((KeyboardInterrupt, OSError)):
        convert(source, out / "there", compress=compress, progress=meanwhile(fail))
    assert content(out) == {}


def test_a_conversion_that_fails_leaves_the_folder_that_was_there(source: Path, out: Path) -> None:
    (out / "there").mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(source, out / "there", progress=meanwhile(interrupt))
    assert content(out) == {"there": None}


def interrupt() -> None:
    raise KeyboardInterrupt


def at_the_commit(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """An interrupt comes just before a manifest is written, or just after."""
    call = LocalStore.commit

    def instead(self: LocalStore, *arguments: Any, **options: Any) -> None:
        if not before:
            call(self, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "commit", instead)


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_at_the_commit_leaves_a_whole_checkpoint_or_nothing(
    source: Path, out: Path, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        at_the_commit(patch, before)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out / "there")
    if before:
        assert content(out) == {}
    else:
        assert value_at(out / "there") == 1
        assert ckpt.verify(out / "there").sound


def test_a_conversion_that_took_too_long_leaves_nothing(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "GRACE_SECONDS", 0.0)
    with pytest.raises(OSError, match="its files count as left-overs"):
        convert(source, out / "there")
    assert content(out) == {}


# In memory and in buckets.


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}"


def test_a_bucket_keeps_to_the_same_rules(source: Path, other: Path, bucket: str) -> None:
    convert(other, f"{bucket}/hf", to="hf")
    with pytest.raises(ExistsError, match="is a checkpoint of another format"):
        convert(source, f"{bucket}/hf")
    with pytest.raises(ExistsError, match="is not empty"):
        convert(source, f"{bucket}/hf", to="hf", overwrite=True)
    convert(other, f"{bucket}/c")
    with pytest.raises(ExistsError, match="is the source itself"):
        convert(f"{bucket}/c/manifest.json", f"{bucket}/c", overwrite=True)
    with pytest.raises(ExistsError, match="whose manifest names it"):
        convert(source, f"{bucket}/c/manifest.json", to="torch", overwrite=True)
    for name in ("hf", "c"):
        found: Any = ckpt.read(f"{bucket}/{name}")
        assert torch.equal(found["w"], state(2)["w"])
