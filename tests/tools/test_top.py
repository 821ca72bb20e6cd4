"""`ckpt top` sees saves and conversions from their files alone, while they run."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.removing.progress_files import FileUnderWay, UnderWay, Watch, rates, seconds_left
from tools import top
from tools.exit_codes import ExitCode

COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from ckpt.__main__ import main
sys.exit(main())
"""
STATE = {f"w{at}": torch.full((1000,), float(at)) for at in range(8)}


def view(run: Any, *arguments: object) -> dict[str, Any]:
    ended = run("top", "--json", "--interval", "0.01s", *arguments)
    assert ended.code == ExitCode.FINE, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


@pytest.mark.parametrize("given", ["1000000001", "99999999999999999", "9" * 400, "12000d"])
def test_an_interval_that_no_clock_takes_is_refused(run, tmp_path, given):
    ended = run("top", tmp_path, "--interval", given)
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert "is no time" in ended.err


def test_a_save_under_way_shows_its_bytes_and_its_planned_size(run, tmp_path):
    views = []
    ckpt.save(tmp_path / "step-1", STATE, progress=lambda _: views.append(view(run, tmp_path)))
    assert len(views) == 8
    (shard,) = (tmp_path / "step-1").glob("*.safetensors")
    for seen in views:
        (one,) = seen["under_way"]
        (file,) = one["files"]
        assert (one["name"], one["attempt"], file["rank"]) == ("step-1", shard.name[:16], 0)
        assert 0 <= file["nbytes"] <= shard.stat().st_size
        assert file["planned_bytes"] in (None, shard.stat().st_size)  # None until a header is there
        assert seen["checkpoints"] == []
    after = view(run, tmp_path)
    assert after["under_way"] == []
    (kept,) = after["checkpoints"]
    assert kept["name"] == "step-1"
    assert kept["bytes"] == sum(file.stat().st_size for file in (tmp_path / "step-1").iterdir())
    assert 0 < kept["stall_seconds"] == kept["save_seconds"] < 3600


def test_a_save_that_replaces_a_checkpoint_is_under_way_beside_it(run, tmp_path):
    ckpt.save(tmp_path / "step-1", STATE)
    views = []
    look = lambda _: views.append(view(run, tmp_path))  # noqa: E731 - the save calls it
    ckpt.save(tmp_path / "step-1", {"w": torch.ones(3)}, overwrite=True, progress=look)
    (seen,) = views
    assert [one["name"] for one in seen["under_way"]] == ["step-1"]
    assert [one["name"] for one in seen["checkpoints"]] == ["step-1"]


def test_the_stall_of_a_background_save_is_the_time_of_its_copy(run, tmp_path):
    ckpt.save(tmp_path / "step-1", STATE, blocking=False).wait()
    (kept,) = view(run, tmp_path)["checkpoints"]
    assert 0 < kept["stall_seconds"] <= kept["save_seconds"]


def test_files_without_a_manifest_are_told_with_their_age(run, saved):
    (saved / "manifest.json").unlink()
    ended = run("top", "--once", "--interval", "0.01s", saved.parent)
    assert "step-3: 1 file written, " in ended.out
    assert "; not committed; last write " in ended.out


def test_files_that_are_older_than_a_committed_checkpoint_are_not_called_a_save(run, saved) -> None:
    ckpt.save(saved.parent / "step-4", {"w": torch.ones(2)})
    for file in saved.glob("*.safetensors"):
        os.utime(file, (1e9, 1e9))
    (saved / "manifest.json").unlink()  # a removal begins with it
    ended = run("top", "--once", "--interval", "0.01s", saved.parent)
    assert "nothing is under way" in ended.out
    assert "without a manifest and older than step-4: being removed, or left over" in ended.out
    (one,) = json.loads(run("top", "--json", "--interval", "0.01s", saved.parent).out)["under_way"]
    assert one["committed_later"] == "step-4"
    for file in saved.glob("*.safetensors"):
        os.utime(file)  # written last: a save that is about to commit
    assert "not committed; last write" in run("top", "--interval", "0.01s", saved.parent).out


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["c.safetensors", "c.pt", "hf", "dcp", "native"])
def test_a_conversion_under_way_is_seen_at_its_target(run, tmp_path: Path, name: str) -> None:
    ckpt.save(tmp_path / "source", STATE)
    to = name if name in ("hf", "dcp") else None
    seen: list[dict[str, Any]] = []

    def look(_: int) -> None:
        for place in (tmp_path / name, tmp_path):
            seen.append(view(run, place))

    ckpt.convert(tmp_path / "source", tmp_path / name, to=to, progress=look)
    assert seen
    for one in seen:
        (work,) = one["under_way"]
        assert work["name"] == name
        assert all(file["nbytes"] >= 0 for file in work["files"])
    assert view(run, tmp_path)["under_way"] == []


def test_a_place_that_does_not_exist_is_an_error(run, tmp_path):
    ended = run("top", "--once", tmp_path / "absent")
    assert ended.code == ExitCode.NOT_A_CHECKPOINT
    assert "there is no such folder" in ended.err


def test_an_empty_folder_has_nothing_under_way(run, tmp_path):
    ended = run("top", "--once", "--interval", "0.01s", tmp_path)
    assert ended.out.splitlines()[1:] == ["nothing is under way"]


@pytest.mark.parametrize("count", [1, 8, 3000])
def test_the_header_of_a_file_under_way_tells_its_whole_size(tmp_path: Path, count: int) -> None:
    name = '"data_offsets":[0,9]'
    ckpt.save(tmp_path / "a", {f"{name}{at}": torch.ones(1 + at) for at in range(count)})
    (shard,) = (tmp_path / "a").glob("*.safetensors")
    (tmp_path / "b").mkdir()
    data = shard.read_bytes()
    for nbytes, phase in ((len(data) - 1, "writing"), (len(data), "flushing")):
        (tmp_path / "b" / f".{shard.name}.0123abcd.part").write_bytes(data[:nbytes])
        (one,) = Watch(tmp_path).look()
        (file,) = one.files
        assert (file.nbytes, file.planned_bytes, file.phase) == (nbytes, len(data), phase)


def test_a_place_between_the_shares_of_two_ranks_does_not_count(tmp_path: Path) -> None:
    """Ranks that convert together write into one file, each from its own place on."""
    part = tmp_path / ".c.pt.0123abcd.part"
    with part.open("wb") as file:
        file.seek(1 << 24)
        file.write(bytes(1 << 16))
    if part.stat().st_blocks * 512 >= part.stat().st_size:
        pytest.skip("this disk stores holes")
    (one,) = Watch(tmp_path / "c.pt").look()
    assert (1 << 16) <= (one.files[0].nbytes or 0) < 1 << 20


def test_a_conversion_without_a_file_yet_and_a_rank_that_stands_still_are_shown(
    run: Any, tmp_path: Path
) -> None:
    (tmp_path / ".hf.0123abcd.part").mkdir()
    assert (
        "hf: 0 files written, 0 B; not committed" in run("top", "--interval", "0.01s", tmp_path).out
    )
    looks = [top.Look(0.0, under_way(0, 100)), top.Look(2.0, under_way(200, 100))]
    lines = list(top._lines(top.Options("run", True, 1.0, False, False), looks, []))
    assert lines[2] == "step-1: 0 of 2 files written, 300 B of 800 B, 100 B/s, slowest: rank 1"


def test_a_conversion_does_not_take_over_the_times_of_the_save(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", STATE, blocking=False).wait()
    ckpt.convert(tmp_path / "a", tmp_path / "b")
    times = {"save_seconds", "staged_seconds"}
    assert times <= set(ckpt.open(tmp_path / "a").metadata)
    assert not times & set(ckpt.open(tmp_path / "b").metadata)


def test_a_header_of_hostile_bytes_tells_no_size(tmp_path):
    folder = tmp_path / "step-1"
    folder.mkdir()
    for at, data in enumerate((b"", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"{" * 16, b"\0" * 64)):
        name = f".0123456789abcdef-0000{at}.safetensors.0000000{at}.part"
        (folder / name).write_bytes(data)
    (one,) = Watch(tmp_path).look()
    assert [file.planned_bytes for file in one.files] == [None] * 4
    assert [file.phase for file in one.files] == ["writing"] * 4


def under_way(*nbytes: int) -> list[UnderWay]:
    files = [
        FileUnderWay(f"f{rank}", rank, "written" if done == 400 else "writing", done, 400, None)
        for rank, done in enumerate(nbytes)
    ]
    return [UnderWay("step-1", "a" * 16, tuple(files), is_committing=False)]


def test_rates_and_remaining_times_come_from_two_looks():
    found = rates(under_way(0, 100, 400), under_way(200, 150, 400), 2.0)
    (one,) = under_way(200, 150, 400)
    assert list(found.values()) == [100.0, 25.0, 0.0]
    times = [seconds_left(file, found["step-1", "a" * 16, file.name]) for file in one.files]
    assert times == [2.0, 10.0, 0.0]
    assert seconds_left(one.files[0], 0.0) is None


def test_the_slowest_rank_comes_first_and_the_whole_needs_its_time() -> None:
    looks = [top.Look(0.0, under_way(0, 100, 400)), top.Look(2.0, under_way(200, 150, 400))]
    options = top.Options("run", True, 1.0, False, False)
    _, _, *lines = top._lines(options, looks, [])
    assert lines == [
        "step-1: 1 of 3 files written, 750 B of 1.20 kB, 125 B/s, 10.0 s left, slowest: rank 1",
        "RANK  PHASE     DONE     OF     RATE    LEFT  LAST WRITE",
        "1     writing  150 B  400 B   25 B/s  10.0 s           -",
        "0     writing  200 B  400 B  100 B/s   2.0 s           -",
        "2     written  400 B  400 B        -       -           -",
    ]


@pytest.mark.thorough
def test_a_terminal_gets_a_new_view_until_an_interrupt(tmp_path: Path) -> None:
    """The command runs on a pseudo-terminal. Jobs in the background are started without SIGINT."""
    ours, theirs = os.openpty()
    program = [sys.executable, "-c", COMMAND, "top", "--interval", "0.01s", str(tmp_path)]
    with subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        seen = b""
        while seen.count(b"nothing is under way") < 3:
            assert select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 4096)
        child.send_signal(signal.SIGINT)
        while select.select([ours], [], [], 60)[0]:  # until the other end is closed
            try:
                seen += os.read(ours, 4096)
            except OSError:
                break
        assert child.wait(60) == ExitCode.FINE
    os.close(ours)
    assert seen.count(b"\x1b[H") >= 3
    assert b"Traceback" not in seen


def test_a_save_to_a_bucket_shows_files_and_no_bytes_of_those_on_their_way(run) -> None:
    place = "memory://runs-of-test-top"
    views = []
    ckpt.save(f"{place}/step-1", STATE, progress=lambda _: views.append(view(run, place)))
    for seen in views:
        assert {one["name"] for one in seen["under_way"]} <= {"step-1"}
        assert seen["checkpoints"] == []
    after = view(run, place)
    assert after["under_way"] == []
    assert [one["name"] for one in after["checkpoints"]] == ["step-1"]
