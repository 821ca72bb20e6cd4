"""What the jobs of the fault tests do, on each of their ranks; and the states that they save."""

from __future__ import annotations

from typing import Any

import torch

import ckpt

SECONDS = 10.0
"""In which a rank gives up on another."""


def state(step: int) -> dict[str, Any]:
    """Tensors small and large, so that each of several ranks writes some; told by their step."""
    names = {f"w{i}": torch.full((40, i + 3), float(step * 10 + i)) for i in range(4)}
    wide = torch.arange(70_000.0).mul_(step)
    return {"model": {**names, "wide": wide, "frozen": torch.arange(50_000.0)}, "step": step}


def save(
    url: str,
    step: int,
    overwrite: bool = False,
    base: str | None = None,
    compress: Any = False,
    blocking: bool = True,
) -> None:
    """Save the state of a step, and return when it is there."""
    handle = ckpt.save(
        url,
        state(step),
        overwrite=overwrite,
        base=base,
        compress=compress,
        blocking=blocking,
        timeout=SECONDS,
    )
    if handle is not None:
        handle.wait()


def convert(source: str, target: str, to: str, overwrite: bool = False) -> None:
    """Write another form of a checkpoint."""
    ckpt.convert(source, target, to=to, overwrite=overwrite)


def delete(url: str) -> None:
    """Remove a checkpoint."""
    ckpt.delete(url)
