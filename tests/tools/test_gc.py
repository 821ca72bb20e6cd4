"""`ckpt gc`."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.removing import gc as collecting

Run = Callable[..., Any]
SHARD_NAME = "0123456789abcdef-00000.safetensors"


def test_the_command_lists_and_deletes(
    saved: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("gc", saved.parent).out == "0 left-overs, 0 B\n"
    left = saved / SHARD_NAME
    left.write_bytes(b"xyz")
    monkeypatch.setattr(collecting, "now", lambda: time.time() + 3 * 3600)
    shown = run("gc", saved.parent).out.splitlines()
    assert shown[0].split() == ["NAME", "KIND", "SIZE", "AGE", "STATE"]
    assert shown[1].split(None, 6)[1:] == [
        "shard",
        "3",
        "B",
        "3",
        "h",
        "young: perhaps being saved",
    ]
    said = (
        "1 young file that a save may still need: left over at the age of 25 h, or of --older-than"
    )
    assert shown[2].startswith(f"0 left-overs, 0 B; {said} ")
    kept = run("gc", saved.parent, "--delete").out.splitlines()[2]
    assert kept == shown[2].replace("left-overs,", "left-overs removed,")
    assert run("gc", saved, "--older-than", "4h").out.endswith("0 B; 1 younger file\n")
    ended = run("gc", saved, "--older-than", "2h", "--json")
    (one,) = json.loads(ended.out)["left_overs"]
    assert (one["name"], one["is_old"], one["was_removed"]) == (SHARD_NAME, True, False)
    assert run("gc", saved, "--older-than", "2h").out.endswith("; --delete removes them\n")
    ended = run("gc", saved, "--older-than", "2h", "--delete")
    assert ended.code == 0
    assert ended.out.endswith("1 left-over removed, 3 B\n")
    assert ckpt.verify(saved).sound


def test_an_age_that_is_none_is_a_usage_error(saved: Path, run: Run) -> None:
    assert run("gc", saved, "--older-than", "soon").code == 2


@pytest.mark.parametrize("url", ["{tmp_path}/run", "{tmp_path}/file", "memory://test_gc/run"])
def test_a_folder_that_is_not_there_is_told_apart_from_a_clean_one(
    url: str, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "file").touch()
    place = url.format(tmp_path=tmp_path)
    ended = run("gc", place, "--delete")
    assert (ended.code, ended.out) == (3, "")
    assert ended.err == f"ckpt: {place}: there is no such folder\n"
    assert ckpt.gc(place) == []  # whoever collects in a program may come a second time
    (tmp_path / "empty").mkdir()
    assert run("gc", tmp_path / "empty").code == 0
