"""What a first save in the background needs can be there before it."""

import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from tests.ckpt.late_copies import SECONDS, late_copies


def prepare_and_save(folder: str) -> tuple[int, int, int]:
    """Bytes that this rank writes, of memory that is touched, and of the arena."""
    rank = dist.get_rank()
    place = import_module("ckpt.saving.writers").arena_writer()
    state = {"both": torch.arange(300_000.0), f"own{rank}": torch.full((1000 + rank,), 2.0)}
    ckpt.prepare(state)
    place.wait_prepared()
    touched, size, writer = place.arena.touched, place.arena.size, place.writer()
    handle = ckpt.save(f"{folder}/a", state, blocking=False)
    handle.wait(SECONDS)
    assert (place.arena.size, place.writer()) == (size, writer)
    found: Any = ckpt.read(f"{folder}/a")
    assert all(found[name].equal(tensor) for name, tensor in state.items())
    return handle.result().nbytes, touched, size


def test_after_it_a_save_meets_memory_that_is_there_and_a_writer_that_runs(
    clusters: Callable, tmp_path: Path
) -> None:
    for nbytes, touched, size in clusters(2).run(prepare_and_save, str(tmp_path)):
        assert 600_000 < nbytes <= touched == size  # which an earlier test may have made larger


def prepare_wrongly() -> str:
    state = {"w": object() if dist.get_rank() else torch.ones(3)}
    try:
        ckpt.prepare(state)
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_one_rank_cannot_save_is_told_to_all(clusters: Callable) -> None:
    rank0, rank1 = clusters(2).run(prepare_wrongly)
    assert rank0.startswith("RankError: describing the state failed on rank 1 with StateError")
    assert rank1.startswith("StateError: state['w']: a builtins.object cannot be stored")


def test_it_waits_for_a_save_that_uses_the_memory(tmp_path: Path) -> None:
    with late_copies() as go:
        handle = ckpt.save(tmp_path, {"w": torch.ones(100_000)}, blocking=False)
        waiting = threading.Timer(0.01, go.set)
        waiting.start()
        ckpt.prepare({"w": torch.ones(9)})
        assert handle.done()
    assert ckpt.read(tmp_path)["w"].equal(torch.ones(100_000))  # type: ignore[index]


@pytest.mark.parametrize("blocking", [False, True])
def test_staging_is_one_of_two_words(tmp_path: Path, blocking: Any) -> None:
    staging: Any = "later"
    with pytest.raises(ValueError, match="staging is 'later'; it can be 'copied' or 'overlapped'"):
        ckpt.save(tmp_path, {"m": nn.Linear(2, 2)}, blocking=blocking, staging=staging)
    assert not list(tmp_path.iterdir())
