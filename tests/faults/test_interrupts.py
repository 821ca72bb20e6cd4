"""Ctrl-C on one rank at any line of a call: the others are told at once, and all go on together.

Lines are counted from the moment at which the rank is in the call. Python lets a signal's exception
through wherever a function begins or has returned, so nearly every line is a place. Not that of a
`with`, nor the first of a `finally`: what ends a block would be skipped, which no signal does.
"""

import ast
import gc
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import in_flight

SECONDS = 20.0
"""The time-out of a call, which nobody should wait for."""
PRODUCT = ("ckpt", "formats", "sharding")
ROOT = Path(ckpt.__file__).parents[1]
SAMPLE = 12
"""Lines of each row."""
STRIDE = 40
"""What lies between the lines that one test takes; there are so many tests."""
CALLS = ("save", "save later", "load")


@cache
def unbroken(file: str) -> set[int]:
    """The lines of a file before which no signal comes."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.With):
            found.update(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.Try) and node.finalbody:
            found.add(node.finalbody[0].lineno)
    return found


class Interrupt:
    """Raises KeyboardInterrupt in this thread before line number `at` inside of a call."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.where = at, 0, ""
        self._is_in_call = False
        self._known: dict[CodeType, bool] = {}

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._called)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code not in self._known:
            file = Path(code.co_filename)
            is_ours = ROOT in file.parents and file.relative_to(ROOT).parts[0] in PRODUCT
            self._known[code] = is_ours and code.co_name != "<module>"
        self._is_in_call |= self._known[code] and code.co_name == "_open"
        return self._line if self._known[code] else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and self._is_in_call and not self.where:
            if frame.f_lineno in unbroken(frame.f_code.co_filename):
                return self._line
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


def do(call: str, folder: str, new: str, state: dict[str, Any], group: Any) -> None:
    """The call, on this rank."""
    if call == "load":
        ckpt.load(f"{folder}/old", state, group=group, timeout=SECONDS)
    elif call == "save":
        ckpt.save(new, state, group=group, timeout=SECONDS)
    else:
        ckpt.save(new, state, group=group, timeout=SECONDS, blocking=False).wait(SECONDS)


def play(call: str, victim: int, first: int, step: int, sample: int, folder: str) -> list[str]:
    """Interrupt one line after the other; what went wrong, on this rank. `old` is saved before.

    Each `step`-th line, from the `first`; or, with `sample`, so many of them all.
    """
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    wrong: list[str] = []

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer}

    def train() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    def once(at: int) -> int:
        """The lines there were."""
        group, new = dist.new_group(), f"{folder}/new-{at}"
        said = ""
        with Interrupt(at if rank == victim else 0) as interrupt:
            try:
                do(call, folder, new, state(), group)
            except KeyboardInterrupt:
                said = "KeyboardInterrupt"
            except ckpt.RankError as error:
                said = f"{error.error} on rank {error.rank}"
        train()
        place = f"line {at}, {interrupt.where}" if rank == victim else f"line {at}"
        if said and said not in (["KeyboardInterrupt"] if rank == victim else told):
            wrong.append(f"{place}: {said}")
        if in_flight.is_busy() and not in_flight._last.finished(SECONDS):  # type: ignore[union-attr]
            wrong.append(f"{place}: a save is in flight for ever")
        if not gc.isenabled():
            wrong.append(f"{place}: garbage is not collected any more")
            gc.enable()
        try:
            do("save later", folder, f"{folder}/next-{at}", state(), group)
            ckpt.load(f"{folder}/next-{at}", state(), group=group, timeout=SECONDS)
        except ckpt.CkptError as error:  # BusyError, where the turn to save is not given back
            wrong.append(f"{place}: afterwards {error}")
        dist.barrier()
        if rank == 0 and Path(new, "manifest.json").exists() and not ckpt.verify(new).sound:
            wrong.append(f"{place}: {new} is damaged")
        dist.destroy_process_group(group)
        lines = torch.tensor(interrupt.seen)
        dist.broadcast(lines, victim)
        return int(lines)

    told = [
        f"KeyboardInterrupt on rank {victim}",
        f"GeneratorExit on rank {victim}",  # what a `with` gets that has not begun
    ]
    if victim == 0:
        told.append("ProcessEnded on rank 0")  # all that is seen, if it accepted others just then
    train()
    ckpt.save(f"{folder}/old", state())
    lines = once(0)
    assert lines > 1000, f"{lines} lines: the call was not seen to begin"
    for at in range(first, lines + 1, step or max(1, lines // sample)):
        once(at)
    assert ckpt.verify(f"{folder}/old").sound
    return wrong


def check(
    cluster: Any, folder: Path, call: str, victim: int, first: int, step: int, sample: int = 0
) -> None:
    """Play one row."""
    wrong = cluster.run(play, call, victim, first, step, sample, str(folder))
    assert wrong == [[]] * cluster.world_size, str(wrong)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_line_is_told_and_the_next_call_is_in_step(
    clusters: Callable, tmp_path: Path, call: str, victim: int
) -> None:
    check(clusters(2), tmp_path, call, victim, 5, 0, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, STRIDE + 1))
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_each_line_is_told_and_the_next_call_is_in_step(
    clusters: Callable, tmp_path: Path, call: str, victim: int, first: int
) -> None:
    check(clusters(2), tmp_path, call, victim, first, STRIDE)
