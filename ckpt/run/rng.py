"""The random states of a process: Python's, numpy's, torch's on the CPU and on devices.

Python's 625 numbers and numpy's key are tensors in a checkpoint, to keep manifests small.
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
    """Returns an entry of a state that saves each rank's random states and restores them.

    The states are those of Python, numpy and torch, and of the devices that the process uses. After
    a load by as many ranks as saved, all generators continue with equal bits. Otherwise `on_resize`
    decides, as in `ckpt.per_rank`: by default a rank that saved continues with its own state, and a
    new rank with the program's seeds.

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
    """The global generators of this process; the object itself holds no state."""

    def __repr__(self) -> str:
        return "rng()"

    def state_dict(self) -> dict[str, object]:
        """Returns copies of the states."""
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
        """Sets the states, except for those of devices that this process does not use."""
        python = state_dict["python"]
        numbers = tuple(python["state"].tolist())
        random.setstate((python["version"], numbers, python["gauss"]))
        np.random.set_state(_as_arrays(state_dict["numpy"]))
        torch.set_rng_state(state_dict["torch"])
        for kind, module in _devices().items():
            states = list(state_dict.get(kind, ()))
            module.set_rng_state_all(states[: module.device_count()])


def _devices() -> dict[str, ModuleType]:
    """Returns torch's modules for the kinds of devices that this process uses, by name."""
    found = {kind: getattr(torch, kind) for kind in DEVICES if hasattr(torch, kind)}
    return {kind: module for kind, module in found.items() if module.is_initialized()}


def _as_arrays(nest: object) -> Any:
    """Returns the nest with numpy arrays in the place of tensors."""
    if isinstance(nest, torch.Tensor):
        return nest.numpy()
    if isinstance(nest, Mapping):
        return {key: _as_arrays(item) for key, item in nest.items()}
    return nest
