"""Ctrl-C in one process, at every place of a save in the background and the step after it."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.opening import in_flight
from ckpt.saving.arena import Arena
from tests.interrupts import Interrupt

SECONDS = 60
SAMPLE = 75
"""Places of a save; an odd stride comes by all kinds of them."""


# Python swallows what is raised in a `__del__`, an interrupt too, and says so.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("staging", ["copied", "overlapped"])
def test_steps_and_saves_go_on_wherever_a_save_in_the_background_was_interrupted(
    tmp_path: Path, staging: Any
) -> None:
    model = torch.nn.Linear(256, 256)  # large enough to be copied later than the call
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def interrupted(at: int) -> Interrupt:
        with Interrupt(at, "agree_on_attempt") as interrupt:
            try:
                handle = ckpt.save(tmp_path / f"new-{at}", state, blocking=False, staging=staging)
                optimizer.step()
                handle.wait(SECONDS)
            except KeyboardInterrupt:
                assert interrupt.where
        return interrupt

    optimizer.step()
    places = interrupted(0).seen
    assert places > 500
    for at in range(1, places + 1, places // SAMPLE | 1):
        where = interrupted(at).where
        optimizer.step()
        ckpt.save(tmp_path / "next", state, blocking=False, overwrite=True).wait(SECONDS)
        assert not in_flight.saves.is_busy(), where
        assert ckpt.open(tmp_path / "next")["model.weight"][:].equal(model.weight), where
        if (tmp_path / f"new-{at}" / "manifest.json").exists():
            assert ckpt.verify(tmp_path / f"new-{at}").sound, where


def test_an_interrupted_save_leaves_no_error_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread runs, and fails, after the call was interrupted: nobody asks how it ended."""
    (tmp_path / "file").touch()
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(tmp_path / "file" / "a", {"w": torch.ones(3)}, blocking=False)
    started[-1].join(SECONDS)
    failed = in_flight.saves._last
    assert failed is not None
    assert "failed" in repr(failed)
    assert failed.untold() is None  # at exit
    ckpt.save(tmp_path / "b", {"w": torch.ones(3)})


def test_a_save_that_was_interrupted_before_its_thread_ran_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(tmp_path / "a", {"w": torch.ones(3)}, blocking=False)
    late[-1].run()  # as if the system had been slow to start it
    ckpt.save(tmp_path / "b", {"w": torch.ones(3)}, blocking=False).wait(SECONDS)
    assert not (tmp_path / "a").exists() or not list((tmp_path / "a").iterdir())
    assert ckpt.verify(tmp_path / "b").sound


def test_the_arena_serves_the_next_save_wherever_its_growing_was_interrupted() -> None:
    places = 0
    for at in range(50):
        arena = Arena()
        arena.reserve(10)
        with Interrupt(at, "reserve") as interrupt:
            try:
                arena.reserve(1 << 20)
            except KeyboardInterrupt:
                assert interrupt.where
        data = arena.reserve(1 << 20)
        data[-3:] = b"end"
        del data
        arena.close()
        places = max(places, interrupt.seen)
    assert 10 < places < 50
