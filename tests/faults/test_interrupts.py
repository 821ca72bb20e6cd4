"""Ctrl-C on one rank anywhere in a call: the others are told at once, and all go on together.

Places (`tests.interrupts`) are counted from the moment at which the rank is in the call.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.opening import in_flight
from tests.interrupts import Interrupt
from tests.selection import examples

SECONDS = 20.0
"""The time-out of a call, which nobody should wait for."""
SAMPLE = 12
"""Places of each row."""
STRIDE = 40
"""What lies between the places that one test takes; there are so many tests."""
CALLS = ("save", "save later", "load")


def do(
    call: str, folder: str, new: str, state: dict[str, Any], group: Any, step: Callable[[], Any]
) -> None:
    """The call, on this rank."""
    if call == "load":
        ckpt.load(f"{folder}/old", state, group=group, timeout=SECONDS)
    elif call == "save":
        ckpt.save(new, state, group=group, timeout=SECONDS)
    else:
        handle = ckpt.save(new, state, group=group, timeout=SECONDS, blocking=False)
        step()  # which waits for the copies, and helps
        handle.wait(SECONDS)


def play(call: str, victim: int, first: int, step: int, sample: int, folder: str) -> list[str]:
    """Interrupt at one place after the other; what went wrong, on this rank. `old` is saved before.

    Each `step`-th place, from the `first`; or, with `sample`, so many of them all.
    """
    rank = dist.get_rank()
    model = torch.nn.Linear(256, 256)  # large enough to be copied later than the call
    optimizer = torch.optim.AdamW(model.parameters())
    wrong: list[str] = []

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer}

    def train() -> None:
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()

    def once(at: int) -> int:
        """The places there were."""
        group, new = dist.new_group(), f"{folder}/new-{at}"
        said = ""
        with Interrupt(at if rank == victim else 0, "_open") as interrupt:
            try:
                do(call, folder, new, state(), group, optimizer.step)
            except KeyboardInterrupt:
                said = "KeyboardInterrupt"
            except ckpt.RankError as error:
                said = f"{error.error} on rank {error.rank}"
        train()
        place = f"place {at}, {interrupt.where}"
        if said and said not in (["KeyboardInterrupt"] if rank == victim else told):
            wrong.append(f"{place}: {said}")
        if in_flight.saves.is_busy() and not in_flight.saves._last.finished(SECONDS):  # type: ignore[union-attr]
            wrong.append(f"{place}: a save is in flight for ever")
        if not gc.isenabled():
            wrong.append(f"{place}: garbage is not collected any more")
            gc.enable()
        try:
            do("save later", folder, f"{folder}/next-{at}", state(), group, optimizer.step)
            ckpt.load(f"{folder}/next-{at}", state(), group=group, timeout=SECONDS)
        except ckpt.CkptError as error:  # BusyError, where the turn to save is not given back
            wrong.append(f"{place}: afterwards {error}")
        dist.barrier()
        if rank == 0 and Path(new, "manifest.json").exists() and not ckpt.verify(new).sound:
            wrong.append(f"{place}: {new} is damaged")
        dist.destroy_process_group(group)
        places = torch.tensor(interrupt.seen)
        dist.broadcast(places, victim)
        return int(places)

    told = [
        f"KeyboardInterrupt on rank {victim}",
        f"GeneratorExit on rank {victim}",  # what a `with` gets that has not begun
    ]
    train()
    ckpt.save(f"{folder}/old", state())
    places = once(0)
    assert places > 1000, f"{places} places: the call was not seen to begin"
    for at in range(first, places + 1, step or max(1, places // sample)):
        once(at)
    assert ckpt.verify(f"{folder}/old").sound
    return wrong


def check(
    cluster: Any, folder: Path, call: str, victim: int, first: int, step: int, sample: int = 0
) -> None:
    """Play one row."""
    wrong = cluster.run(play, call, victim, first, step, sample, str(folder))
    assert wrong == [[]] * cluster.world_size, str(wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_anywhere_is_told_and_the_next_call_is_in_step(
    clusters: Callable, tmp_path: Path, call: str, victim: int
) -> None:
    check(clusters(2), tmp_path, call, victim, 5, 0, examples(SAMPLE, 1))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, STRIDE + 1))
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_everywhere_is_told_and_the_next_call_is_in_step(
    clusters: Callable, tmp_path: Path, call: str, victim: int, first: int
) -> None:
    check(clusters(2), tmp_path, call, victim, first, STRIDE)
