"""What the jobs of the fault tests do, on each of their ranks; and the states that they save."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import ckpt

SECONDS = 10.0
"""In which a rank gives up on another."""


def state(step: int, wide: int = 70_000) -> dict[str, Any]:
    """Tensors small and large, so that each of several ranks writes some; told by their step."""
    names = {f"w{i}": torch.full((40, i + 3), float(step * 10 + i)) for i in range(4)}
    row = torch.arange(float(wide)).mul_(step)
    return {"model": {**names, "wide": row, "frozen": torch.arange(50_000.0)}, "step": step}


def found_step(url: str, options: Any) -> int | None:
    """The step of the checkpoint that is there, sound and right to the bit; None for none."""
    try:
        found: Any = ckpt.read(url, storage_options=options)
    except ckpt.NotACheckpointError:
        return None
    assert ckpt.verify(url, storage_options=options).sound
    # Formats without a tree have the names of its leaves, and no plain values.
    model = found.get("model") or {n.removeprefix("model."): t for n, t in found.items()}
    step = int(model["w0"][0, 0] / 10)
    assert found.get("step", step) == step
    _check(model, step)
    return step


def _check(model: Any, step: int) -> None:
    for name, value in state(step, len(model["wide"]))["model"].items():
        assert torch.equal(model[name], value), f"{name} has wrong bits"


def save(
    url: str,
    step: int,
    overwrite: bool = False,
    base: str | None = None,
    compress: Any = False,
    blocking: bool = True,
    wide: int = 70_000,
    also: str | None = None,
    options: Any = None,
) -> None:
    """Save the state of a step, and return when it is there."""
    output = None if also is None else ckpt.HuggingFace(also, overwrite=True)
    handle = ckpt.save(
        url,
        state(step, wide),
        overwrite=overwrite,
        base=base,
        compress=compress,
        blocking=blocking,
        timeout=SECONDS,
        storage_options=options,
        also=output,
    )
    if handle is not None:
        handle.wait()


def convert(
    source: str, target: str, to: str, overwrite: bool = False, options: Any = None
) -> None:
    """Write another form of a checkpoint."""
    ckpt.convert(source, target, to=to, overwrite=overwrite, storage_options=options)


def load(url: str, step: int, wide: int, options: Any = None) -> None:
    """Load a checkpoint and look at every bit."""
    found: Any = ckpt.load(url, state(0, wide), storage_options=options)
    assert found["step"] == step, f"it is of step {found['step']}"
    _check(found["model"], step)


def verify(url: str, options: Any = None) -> None:
    """Check a checkpoint."""
    ckpt.verify(url, storage_options=options)


def gc(url: str, options: Any = None) -> None:
    """Remove what is left over."""
    ckpt.gc(url, older_than=0, delete=True, storage_options=options)


def delete(url: str, options: Any = None) -> None:
    """Remove a checkpoint."""
    ckpt.delete(url, storage_options=options)


def race(what: Sequence[tuple[str, dict[str, Any]]], at: float) -> object:
    """This rank's of several commands, at a time by the clock that all processes share."""
    name, arguments = what[int(os.environ["RANK"])]
    while time.monotonic() < at:
        pass
    return globals()[name](**arguments)


def save_often(url: str, steps: Sequence[int], options: Any = None) -> None:
    """Overwrite again and again."""
    for step in steps:
        save(url, step, overwrite=True, options=options)


def come_and_go(url: str, steps: Sequence[int], options: Any = None) -> None:
    """Save and delete again and again."""
    for step in steps:
        save(url, step, options=options)
        delete(url, options)


def read_often(url: str, times: int, options: Any = None) -> list[str]:
    """What comes of reading again and again, in each way: `whole`, or the name of the error."""
    met = []
    for number in range(times):
        way = READERS[number % len(READERS)]
        try:
            way(url, options)
            met.append("whole")
        except Exception as error:
            met.append(f"{type(error).__name__}: {error}")
    return met


def _loads(url: str, options: Any) -> None:
    found: Any = ckpt.load(url, state(0), storage_options=options)
    _check(found["model"], found["step"])


def _loads_or_older(url: str, options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there may be no reason to go back
        found: Any = ckpt.load(url, state(0), fallback=True, storage_options=options)
    _check(found["model"], found["step"])


def _reads(url: str, options: Any) -> None:
    found: Any = ckpt.read(url, storage_options=options)
    _check(found["model"], found["step"])


def _verifies(url: str, options: Any) -> None:
    assert ckpt.verify(url, storage_options=options).problems == ()


def _opens(url: str, options: Any) -> None:
    with ckpt.open(url, storage_options=options) as checkpoint:
        step = checkpoint["model.w0"][0, 0] / 10
        assert torch.equal(checkpoint["model.wide"][:], torch.arange(70_000.0).mul_(step))


READERS = (_loads, _loads_or_older, _reads, _verifies, _opens)
