"""The random states of a process: Python's, numpy's, torch's on the CPU and on devices.

Python's 625 numbers and numpy's key are tensors in a checkpoint, for a manifest is read whole.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ckpt.state.per_rank import OnResize, PerRank

__all__ = ["rng"]

DEVICES = ("cuda", "xpu")
"""Kinds of devices with random states of their own."""


def rng(*, on_resize: OnResize = "keep") -> PerRank:
    """An entry of a state for the random states of each rank, which a load sets.

    Those of Python, numpy and torch, and of torch's devices where the process uses them. After a
    load by as many ranks as saved, all of them go on to the bit. Otherwise `on_resize` answers, as
    in `ckpt.per_rank`: by default a rank goes on with its own state, and a new rank, which has
    none, with the seeds that the program gave it.

    >>> import ckpt, random, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(folder, {"rng": ckpt.rng()})
    ...     first = random.random()
    ...     _ = ckpt.load(folder, {"rng": ckpt.rng()})
    ...     random.random() == first
    True
    """
    return PerRank(_RandomStates(), on_resize)


class _RandomStates:
    """The global generators of this process; it holds nothing itself."""

    def __repr__(self) -> str:
        return "rng()"

    def state_dict(self) -> dict[str, object]:
        """The states, in memory of their own."""
        version, numbers, gauss = random.getstate()
        found: dict[str, object] = {
            "python": {"version": version, "state": np.array(numbers, np.int64), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        for kind, module in _devices().items():
            found[kind] = torch.stack(module.get_rng_state_all())
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the states; those of devices that this process does not use are passed over."""
        python = state_dict["python"]
        numbers = tuple(python["state"].tolist())
        random.setstate((python["version"], numbers, python["gauss"]))
        np.random.set_state(_as_arrays(state_dict["numpy"]))
        torch.set_rng_state(state_dict["torch"])
        for kind, module in _devices().items():
            states = list(state_dict.get(kind, ()))
            module.set_rng_state_all(states[: module.device_count()])


def _devices() -> dict[str, ModuleType]:
    """The modules of torch for the devices that this process has begun to use, by their names."""
    found = {kind: getattr(torch, kind) for kind in DEVICES if hasattr(torch, kind)}
    return {kind: module for kind, module in found.items() if module.is_initialized()}


def _as_arrays(nest: object) -> Any:
    """A nest with numpy arrays where it has tensors."""
    if isinstance(nest, torch.Tensor):
        return nest.numpy()
    if isinstance(nest, Mapping):
        return {key: _as_arrays(item) for key, item in nest.items()}
    return nest
