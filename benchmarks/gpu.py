"""Tensors on a GPU: saves, stalls of saves in the background, and loads, beside DCP and torch.save.

    python benchmarks/gpu.py --gib 8 --rounds 5 --store DIR

One process, one device. The contestants take turns in every round, in an order that rotates, and a
figure is the median of the rounds with the least and the largest. The floor of a save is a copy of
all bytes from the device into warm page-locked memory. `--device cpu` tries whether all of it runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt

SECONDS = 600
BLOCKS = 12
Action = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to do a job."""

    run: Action
    """What is timed."""
    after: Action = lambda: None
    """What is waited for before the next one, outside the time."""


class Training:
    """A model and Adam's moments on a device, filled and never trained."""

    def __init__(self, gib: float, device: str) -> None:
        width = max(64, round((gib * 2**30 / (12 * 12 * BLOCKS)) ** 0.5 / 64) * 64)
        torch.manual_seed(0)
        with torch.device(device):
            self.model = nn.Sequential(
                *(
                    nn.Sequential(
                        nn.Linear(width, 3 * width, bias=False),
                        nn.Linear(width, width, bias=False),
                        nn.Linear(width, 4 * width, bias=False),
                        nn.Linear(4 * width, width, bias=False),
                    )
                    for _ in range(BLOCKS)
                )
            )
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            moments = {key: torch.randn_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(10.0), **moments}

    @property
    def state(self) -> dict[str, Any]:
        """What ckpt is given."""
        return {"model": self.model, "optim": self.optimizer}

    def state_dicts(self) -> dict[str, Any]:
        """What the others are given."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """All that lies on the device."""
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if value.ndim
        ]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]


def synchronized(device: str) -> None:
    """The device has done all that it was told."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(action: Action, device: str) -> float:
    """Seconds until the call returns and the device is idle."""
    gc.collect()
    synchronized(device)
    start = time.perf_counter()
    action()
    synchronized(device)
    return time.perf_counter() - start


def measured(
    contestants: dict[str, Contestant], rounds: int, device: str
) -> dict[str, tuple[float, list[float]]]:
    """By contestant, the seconds of its first run and of the later ones."""
    names = list(contestants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(timed(contestants[name].run, device))
            contestants[name].after()
            os.sync()
    return {name: (seconds[0], seconds[1:]) for name, seconds in found.items()}


def table(
    title: str, found: dict[str, tuple[float, list[float]]], nbytes: int, floor: str
) -> report.Table:
    """Seconds, the ratio to the floor's median, and bytes per second."""
    least = statistics.median(found[floor][1])
    rows = []
    for name, (first, later) in found.items():
        middle = statistics.median(later)
        rows.append(
            [
                name,
                f"{first:.3f}",
                f"{middle:.3f} ({min(later):.3f} to {max(later):.3f})",
                f"{middle / least:.2f}",
                f"{nbytes / middle / 1e9:.1f}",
            ]
        )
    columns = ("", "first, seconds", "later, seconds", f"÷ {floor}", "GB/s")
    return report.Table(title, columns, rows)


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of one, which DCP's saves in the background need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Measurement:
    """One state, one folder, three tables."""

    def __init__(self, folder: str, gib: float, rounds: int, device: str) -> None:
        self._folder, self._rounds, self._device = Path(folder), rounds, device
        self._training = Training(gib, device)
        self._tensors = self._training.tensors()
        self._nbytes = sum(tensor.nbytes for tensor in self._tensors)
        pinned = device == "cuda"
        self._host = [torch.empty_like(t, device="cpu", pin_memory=pinned) for t in self._tensors]
        self._running: list[Action] = []

    def tables(self) -> Iterator[report.Table]:
        """Saves, stalls, loads."""
        size = f"{self._nbytes / 2**30:.1f} GiB on {self._device}"
        options = self._rounds, self._device
        yield table(f"Save, {size}", measured(self._saves(), *options), self._nbytes, "copy")
        stalls = measured(self._stalls(), *options)
        yield table(f"Until training goes on, {size}", stalls, self._nbytes, "copy")
        yield table(f"Load, {size}", measured(self._loads(), *options), self._nbytes, "copy")

    def _copy(self) -> None:
        for target, source in zip(self._host, self._tensors, strict=True):
            target.copy_(source, non_blocking=True)

    def _copy_back(self) -> None:
        for target, source in zip(self._tensors, self._host, strict=True):
            target.copy_(source, non_blocking=True)

    def _path(self, name: str) -> str:
        """Where a contestant saves; what it saved before is gone."""
        report.remove(str(self._folder / name))
        return str(self._folder / name)

    def _saves(self) -> dict[str, Contestant]:
        state, dicts = self._training.state, self._training.state_dicts
        (self._folder / "torch").mkdir(exist_ok=True)
        return {
            "copy": Contestant(self._copy),
            "ckpt": Contestant(lambda: ckpt.save(self._path("ckpt"), state)),
            "torch DCP": Contestant(lambda: dcp.save(dicts(), checkpoint_id=self._path("dcp"))),
            "torch.save": Contestant(lambda: torch.save(dicts(), self._folder / "torch" / "m.pt")),
        }

    def _finish(self) -> None:
        for finish in self._running:
            finish()
        self._running.clear()

    def _stalls(self) -> dict[str, Contestant]:
        state, dicts = self._training.state, self._training.state_dicts

        def ours() -> None:
            handle = ckpt.save(self._path("background"), state, blocking=False)
            self._running.append(lambda: handle.wait(SECONDS))

        def theirs() -> None:
            future: Any = dcp.async_save(dicts(), checkpoint_id=self._path("dcp-background"))
            self._running.append(future.result)

        return {
            "copy": Contestant(self._copy),
            "ckpt": Contestant(ours, self._finish),
            "torch DCP, thread": Contestant(theirs, self._finish),
        }

    def _loads(self) -> dict[str, Contestant]:
        state, dicts = self._training.state, self._training.state_dicts

        def torch_load() -> None:
            found = torch.load(self._folder / "torch" / "m.pt", map_location=self._device)
            self._training.model.load_state_dict(found["model"])
            self._training.optimizer.load_state_dict(found["optim"])

        return {
            "copy": Contestant(self._copy_back),
            "ckpt": Contestant(lambda: ckpt.load(str(self._folder / "ckpt"), state)),
            "torch DCP": Contestant(
                lambda: dcp.load(dicts(), checkpoint_id=str(self._folder / "dcp"))
            ),
            "torch.load": Contestant(torch_load),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", default="/dev/shm", help="an existing folder")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device", file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU"
    print(f"torch {torch.__version__}, {name}, {os.cpu_count()} cores, {options.store}\n")
    with TemporaryDirectory(prefix="ckpt-bench-", dir=options.store) as folder, one_process():
        measurement = Measurement(folder, options.gib, options.rounds, options.device)
        for each in measurement.tables():
            print(each, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
