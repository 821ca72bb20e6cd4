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


NO_HOOK = """
import inspect
from lightning.pytorch import LightningModule
from lightning.pytorch.core import saving
import ckpt.integrations.lightning

print("pl_load" in saving._load_from_checkpoint.__code__.co_names, saving.pl_load.__module__)
print(*inspect.signature(LightningModule.load_from_checkpoint).parameters)
"""


def test_lightning_has_no_public_hook_and_opens_checkpoints_by_the_function_that_is_replaced(
    programs: Callable[..., Any],
) -> None:
    """If this fails, look for a public hook, or for the new name: [Note: load_from_checkpoint]."""
    out, err = programs(NO_HOOK).communicate(timeout=200)
    opened, arguments = out.splitlines()[-2:]
    assert opened == "True lightning.fabric.utilities.cloud_io", err
    known = "cls checkpoint_path map_location hparams_file strict weights_only kwargs"
    assert set(arguments.split()) <= set(known.split())
