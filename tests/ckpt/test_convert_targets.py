"""What a conversion may write over, and what it leaves alone whatever it is told."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.converting import convert
from ckpt.errors import ExistsError
from ckpt.stores.local_store import LocalStore
from ckpt.writing import commit

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
    with pytest.raises(OSError, match="hours after it began"):
        convert(source, out / "there")
    assert content(out) == {}
