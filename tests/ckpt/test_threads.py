"""Several threads of one process that save and load at once, without a process group."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ckpt

NUMEL = 1 << 18


def numbers(seed: int) -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.float32) * (seed + 1)


class Acting:
    """What does something while its state is described, which is before it is copied."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, object]:
        self.act()
        return {"acted": True}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError("it is saved, and never loaded")


def test_of_two_threads_one_at_a_time_begins_a_save_in_the_background(tmp_path: Path) -> None:
    refused: list[object] = []

    def save_another() -> None:
        try:
            state = {"w": numbers(2)}
            ckpt.save(tmp_path / "other", state, blocking=False, when_busy="refuse")
        except ckpt.BusyError as error:
            refused.append(str(error))

    def in_another_thread() -> None:
        thread = threading.Thread(target=save_another)
        thread.start()
        thread.join()

    state = {"acting": Acting(in_another_thread), "w": numbers(1)}
    ckpt.save(tmp_path / "one", state, blocking=False).wait()
    assert len(refused) == 1
    assert "another thread's checkpoint is still being saved; nothing else was saved" in str(
        refused[0]
    )
    assert torch.equal(ckpt.read(tmp_path / "one")["w"], numbers(1))
    save_another()  # the turn has been left
    assert len(refused) == 1
    assert torch.equal(ckpt.read(tmp_path / "other")["w"], numbers(2))


def test_a_save_that_fails_leaves_its_turn(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no state today")

    with pytest.raises(RuntimeError, match="no state today"):
        ckpt.save(tmp_path / "one", {"acting": Acting(fail)}, blocking=False)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: ckpt.save(tmp_path / "two", {}, blocking=False).wait()).result()


@pytest.mark.parametrize("blocking", [True, False])
def test_threads_that_save_and_load_at_once_have_their_own_states(
    tmp_path: Path, blocking: bool
) -> None:
    ckpt.save(tmp_path / "shared", {"w": numbers(99)})
    with ckpt.open(tmp_path / "shared") as shared, ThreadPoolExecutor(4) as pool:

        def work(seed: int) -> None:
            place = tmp_path / str(seed)
            handle = ckpt.save(place, {"w": numbers(seed)}, blocking=blocking)
            if handle is not None:
                handle.wait()
            target = {"w": torch.zeros(NUMEL), "v": torch.zeros(NUMEL)}
            ckpt.load(place, target, strict=False, include="w")
            assert torch.equal(target["w"], numbers(seed))
            assert torch.equal(ckpt.read(place)["w"], numbers(seed))
            assert torch.equal(shared["w"][seed : seed + 9], numbers(99)[seed : seed + 9])
            ckpt.load(tmp_path / "shared", {"w": target["v"]})
            assert torch.equal(target["v"], numbers(99))

        for done in [pool.submit(work, seed) for seed in range(12)]:
            done.result()
