"""The cost of `ckpt.events`: saves with and without a subscriber, in turn, in one process.

    python benchmarks/events.py DIR [--mb 256] [--rounds 40]

Each round saves twice, with and without; the order changes from round to round. The difference of
a round belongs to the same moment of the machine, so its median over the rounds counts. A processor
counts only this process. The last lines are the cost of one event, and of a call that nobody
observes, in a loop.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

import report
import torch

import ckpt
from sharding.agreement.call_events import Clock

TENSORS = 64
CALLS = 20_000


def table(folder: str, mb: int = 256, rounds: int = 40) -> report.Table:
    """Seconds of both kinds, and of one event."""
    elements = mb * 1_000_000 // (4 * TENSORS)
    state = {f"w{at}": torch.randn(elements) for at in range(TENSORS)}
    place = Path(folder) / "events"
    _save(place, state)  # imports and first calls
    pairs = [_round(place, state, number) for number in range(rounds)]
    shutil.rmtree(place, ignore_errors=True)
    rows = []
    for label, at in (("wall", 0), ("processor", 1)):
        off = [without[at] * 1e3 for without, _ in pairs]
        on = [with_[at] * 1e3 for _, with_ in pairs]
        differences = [b - a for a, b in zip(off, on, strict=True)]
        relative = 100 * median(differences) / median(off)
        rows.append([label, *map(_spread, (off, on, differences)), f"{relative:+.2f} %"])
    for label, action in (("one stage, observed", _observed), ("one stage, not", _stages)):
        rows.append([label, "", "", f"{_each(action) * 1e6:.2f} µs of the processor", ""])
    title = f"A save of {mb} MB in {TENSORS} tensors and its events, ms, {rounds} rounds"
    return report.Table(title, ("", "without", "with", "difference of a round", "of all"), rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print(report.origin(), end="\n\n")
    print(table(options.folder, options.mb, options.rounds))


def _round(place: Path, state: object, number: int) -> tuple[Sequence[float], Sequence[float]]:
    """Returns wall and processor seconds of a save without events, and of one with them."""
    if number % 2:
        observed = _observed_save(place, state)
        return _save(place, state), observed
    return _save(place, state), _observed_save(place, state)


def _save(place: Path, state: object) -> tuple[float, float]:
    shutil.rmtree(place, ignore_errors=True)
    began, used = time.perf_counter(), time.process_time()
    ckpt.save(place, state)
    return time.perf_counter() - began, time.process_time() - used


def _observed_save(place: Path, state: object) -> tuple[float, float]:
    with ckpt.events.recorded():
        return _save(place, state)


def _each(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return (time.process_time() - began) / CALLS


def _stages() -> None:
    clock = Clock("ckpt.save", 0, 1)
    for _ in range(CALLS):
        clock.doing("writing")
        clock.count(1)
    clock.end("")


def _observed() -> None:
    with ckpt.events.recorded():
        _stages()


def _spread(values: Sequence[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.3g} ({low:.3g}–{high:.3g})"


if __name__ == "__main__":
    main()
