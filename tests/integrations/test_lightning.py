"""The strategies store and restore the values of Lightning's own files, whatever hooks change."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.selection import slow

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="these tests need lightning"
    ),
]
PROGRAM = """
import sys
name, world_size, folder = sys.argv[1:]
from tests.integrations.as_torchrun import as_torchrun
from tests.integrations import lightning_hooks
as_torchrun(int(world_size), getattr(lightning_hooks, name), [folder], folder)
"""
"""Trains as many ranks by Lightning; rank N writes the differences to the file `rankN`."""


def differences(
    programs: Callable[..., Any], name: str, world_size: int, folder: Path
) -> list[str]:
    program = programs(PROGRAM, name, str(world_size), str(folder))
    out, err = program.communicate(timeout=280)
    assert program.returncode == 0, err + out
    told = [(folder / f"rank{rank}").read_text() for rank in range(world_size)]
    return [text for text in told if "different: []" not in text]


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_every_hook_has_the_effect_that_it_has_on_lightnings_own_files(
    programs: Callable[..., Any], world_size: int, tmp_path: Path
) -> None:
    """Averaged weights; values that a hook adds, replaces, renames or leaves out; own methods.

    `load_from_checkpoint` makes the same module of the folder as of the file, or fails alike.
    """
    assert not differences(programs, "main", world_size, tmp_path)


def test_hooks_of_a_sharded_module_change_its_shards(
    programs: Callable[..., Any], tmp_path: Path
) -> None:
    assert not differences(programs, "sharded", 2, tmp_path)
