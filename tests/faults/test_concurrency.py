"""Jobs that meet at one place: nothing is lost, and whoever loses a race is told."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.stores.local_store import LocalStore
from ckpt.transfer import commit
from tests.faults.commands import found_step, save, state
from tests.faults.conftest import Jobs
from tests.faults.places import Bucket, Disk, Place, belonging
from tests.selection import thorough


def holds(place: Path | str, step: int) -> bool:
    """Whether a sound checkpoint is there, with the state of this step to the bit."""
    found: Any = ckpt.read(place)
    wanted = state(step)
    same = all(torch.equal(found["model"][name], w) for name, w in wanted["model"].items())
    return same and found["step"] == step and ckpt.verify(place).sound


# A base that goes while it is borrowed from.


@contextmanager
def at_the_manifest(
    monkeypatch: pytest.MonkeyPatch, method: str, before: bool, action: Callable[[], object]
) -> Iterator[None]:
    """Once, just before or after a manifest is committed or deleted, something else happens."""
    call = getattr(LocalStore, method)
    waiting = [action]

    def instead(self: LocalStore, name: str, *arguments: Any, **options: Any) -> Any:
        now = name == "manifest.json" and waiting
        if now and before:
            waiting.pop()()
        result = call(self, name, *arguments, **options)
        if now and not before:
            waiting.pop()()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, method, instead)
        yield
    assert not waiting


def remove_base(run: Path, how: str) -> None:
    if how == "delete":
        ckpt.delete(run / "base")
    elif how == "convert":
        ckpt.convert(run / "other", run / "base", overwrite=True)
    else:
        ckpt.save(run / "base", state(7), overwrite=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name, step in (("base", 1), ("other", 5)):
        ckpt.save(tmp_path / name, state(step))
    return tmp_path


@pytest.mark.parametrize("how", ["delete", "overwrite", "convert"])
def test_a_base_that_goes_before_the_borrower_commits_fails_the_borrower(
    run: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with (
        at_the_manifest(monkeypatch, "commit", True, lambda: remove_base(run, how)),
        pytest.raises(OSError, match="its base was deleted or replaced"),
    ):
        ckpt.save(run / "new", state(2), base=run / "base")
    assert not (run / "new" / "manifest.json").exists()


def test_an_overwriting_borrower_whose_base_goes_leaves_what_was_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(run / "new", state(3))
    with (
        at_the_manifest(monkeypatch, "commit", True, lambda: ckpt.delete(run / "base")),
        pytest.raises(OSError, match="its base was deleted or replaced"),
    ):
        ckpt.save(run / "new", state(2), base=run / "base", overwrite=True)
    assert holds(run / "new", 3)


@pytest.mark.parametrize("how", ["delete", "overwrite", "convert"])
def test_a_base_cannot_go_once_the_borrower_has_committed(
    run: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def remove() -> None:
        with pytest.raises(ckpt.InUseError, match="new beside it"):
            remove_base(run, how)

    with at_the_manifest(monkeypatch, "commit", False, remove):
        ckpt.save(run / "new", state(2), base=run / "base")
    assert holds(run / "new", 2)
    assert holds(run / "base", 1)


def borrow(run: Path) -> None:
    ckpt.save(run / "new", state(2), base=run / "base")


def test_a_borrower_that_commits_just_before_its_base_is_withdrawn_keeps_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        at_the_manifest(monkeypatch, "delete", True, lambda: borrow(run)),
        pytest.raises(ckpt.InUseError, match="new beside it"),
    ):
        ckpt.delete(run / "base")
    assert holds(run / "new", 2)
    assert holds(run / "base", 1)


def test_a_borrower_that_comes_just_after_its_base_is_withdrawn_finds_none(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        with pytest.raises(ckpt.NotACheckpointError, match="cannot be the base"):
            borrow(run)

    with at_the_manifest(monkeypatch, "delete", False, refused):
        ckpt.delete(run / "base")
    assert not (run / "base").exists()


def test_a_borrower_that_commits_just_before_its_base_is_replaced_keeps_the_files(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody saw it before the base was another checkpoint: what it needs of the old one stays."""
    borrowed = sorted(path.name for path in (run / "base").glob("*.safetensors"))
    with at_the_manifest(monkeypatch, "commit", True, lambda: borrow(run)):
        ckpt.save(run / "base", state(7), overwrite=True)
    assert holds(run / "new", 2)
    assert holds(run / "base", 7)
    assert set(borrowed) < {path.name for path in (run / "base").glob("*.safetensors")}


# Jobs of several processes, at one moment.


@pytest.fixture(params=["disk", "moto"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "disk":
        return Disk(str(tmp_path))
    return Bucket(request.getfixturevalue("moto"), f"race-{tmp_path.name}")


def rounds(place: Place) -> int:
    return 4 if isinstance(place, Disk) else 1


@pytest.mark.thorough
def test_of_jobs_that_save_to_one_place_one_wins_and_the_others_are_told(
    jobs: Jobs, place: Place
) -> None:
    for number in range(rounds(place)):
        url = f"{place.url}/{number}"
        told = [
            ("save", {"url": url, "step": step, "options": place.options}) for step in (1, 2, 3)
        ]
        ended = jobs.race(*told)
        assert sorted(one.error for one in ended) == ["", "ExistsError", "ExistsError"], ended
        (winner,) = [step for step, one in enumerate(ended, 1) if not one.error]
        assert found_step(url, place.options) == winner
    ckpt.gc(place.url, older_than=0, delete=True, storage_options=place.options)
    assert place.files() == belonging(place)


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.costly
@pytest.mark.parametrize("to", ["ckpt", "safetensors", "hf", thorough("torch"), thorough("dcp")])
def test_of_jobs_that_convert_to_one_place_one_wins_and_the_others_are_told(
    jobs: Jobs, place: Place, to: str
) -> None:
    for step in (1, 2, 3):
        save(f"{place.url}/from/{step}", step, options=place.options)
    for number in range(rounds(place)):
        url = f"{place.url}/to/{number}"
        told = {"target": url, "to": to, "options": place.options}
        ended = jobs.race(
            *(("convert", {**told, "source": f"{place.url}/from/{step}"}) for step in (1, 2, 3))
        )
        assert sorted(one.error for one in ended) == ["", "ExistsError", "ExistsError"], ended
        (winner,) = [step for step, one in enumerate(ended, 1) if not one.error]
        assert found_step(url, place.options) == winner
    for found in (f"{place.url}/to", place.url):
        assert ckpt.gc(found, older_than=0, storage_options=place.options) == []


@pytest.mark.thorough
def test_of_jobs_that_overwrite_one_place_one_is_there_whole(jobs: Jobs, place: Place) -> None:
    for _ in range(rounds(place)):
        told = {"url": f"{place.url}/a", "overwrite": True, "options": place.options}
        ended = jobs.race(*(("save", {**told, "step": step}) for step in (1, 2)))
        assert [one.error for one in ended] == ["", ""], ended
        assert found_step(f"{place.url}/a", place.options) in (1, 2)
    ckpt.gc(place.url, older_than=0, delete=True, storage_options=place.options)
    assert place.files() == belonging(place)


@pytest.mark.thorough
@pytest.mark.costly
@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ("save_often", {"whole", "ReplacedError"}),
        ("come_and_go", {"whole", "ReplacedError", "ReplacedLoadError", "NotACheckpointError"}),
    ],
)
def test_a_reader_gets_one_checkpoint_whole_or_a_clear_error(
    jobs: Jobs, place: Place, command: str, allowed: set[str]
) -> None:
    """Never that something is damaged; a load that may go back never does."""
    url, count = f"{place.url}/a", 10 * rounds(place)
    told = {"url": url, "options": place.options}
    if command == "save_often":
        save(url, 1, options=place.options)
    _, reader = jobs.race(
        (command, {**told, "steps": range(2, count)}), ("read_often", {**told, "times": count})
    )
    assert not reader.error, reader
    assert {met.partition(":")[0] for met in reader.result} <= allowed, reader.result
    for met in reader.result:
        assert met == "whole" or url in met, met


@pytest.mark.wide
@pytest.mark.thorough
@pytest.mark.costly
@pytest.mark.parametrize("command", ["delete", "save"])
def test_a_borrower_and_one_who_removes_its_base_never_both_win(
    jobs: Jobs, place: Place, command: str
) -> None:
    for number in range(2 * rounds(place)):
        run = f"{place.url}/{number}"
        told = {"options": place.options}
        save(f"{run}/base", 1, **told)
        borrowing = {"url": f"{run}/new", "step": 2, "base": f"{run}/base", **told}
        removing: dict[str, Any] = {"url": f"{run}/base", **told}
        if command == "save":
            removing |= {"step": 3, "overwrite": True}
        borrower, remover = jobs.race(("save", borrowing), (command, removing))
        assert borrower.error in ("", "StoreError", "NotACheckpointError"), borrower
        assert remover.error in ("", "InUseError"), remover
        found = found_step(f"{run}/new", place.options)
        assert found == (None if borrower.error else 2)
        base = found_step(f"{run}/base", place.options)
        assert base == (1 if remover.error else 3 if command == "save" else None)
        ckpt.gc(run, older_than=0, delete=True, storage_options=place.options)
        assert found_step(f"{run}/new", place.options) == found


# The commit point.


def test_a_save_that_took_longer_than_its_grace_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(tmp_path, state(1))
    with monkeypatch.context() as patch:
        patch.setattr(commit, "GRACE_SECONDS", 0.0)
        with pytest.raises(OSError, match="its files count as left-overs"):
            ckpt.save(tmp_path, state(2), overwrite=True)
    assert holds(tmp_path, 1)


@pytest.mark.parametrize("missing", [True, False], ids=["removed", "truncated"])
def test_a_file_that_is_not_as_it_was_written_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    monkeypatch.setattr(commit, "SEEN_PAUSES_SECONDS", (0.0,))
    flush = LocalStore.sizes

    def hurt(self: LocalStore) -> dict[str, int]:
        (shard,) = tmp_path.glob("*.safetensors")
        shard.unlink() if missing else shard.write_bytes(shard.read_bytes()[:-1])
        return flush(self)

    monkeypatch.setattr(LocalStore, "sizes", hurt)
    message = "rank 0 does not see .* give all ranks the same URL" if missing else "rank 0 wrote"
    with pytest.raises(OSError, match=message):
        ckpt.save(tmp_path, state(1))
    assert not (tmp_path / "manifest.json").exists()
