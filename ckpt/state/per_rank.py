"""State that belongs to one rank, under a name of that rank: random states, positions of loaders.

Rules:

1. The object of rank 3 is saved under `rank3`, below the name of the entry. The number is the rank
   in the default process group.
2. A load by the ranks that saved gives each rank its own entry back, and reads no other.
3. A load by other ranks follows `on_resize`: only the object's class knows how to divide its state.
4. `rng` has the random states of a process: Python's, numpy's, torch's on the CPU and on devices.
   Python's 625 numbers and numpy's key are tensors in a checkpoint, to keep manifests small.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from ckpt.state.stateful import Stateful
from sharding.errors import ArgumentError, ArgumentTypeError

__all__ = ["OnResize", "PerRank", "per_rank", "rng"]

Divide = Callable[[Mapping[int, object], int, int], object]
OnResize = Literal["refuse", "keep"] | Divide
"""The rule for a load by other ranks than those that saved."""
_KEY = re.compile(r"rank(0|[1-9]\d{0,8})")
SHOWN = 8


class PerRank:
    """An object whose state is saved once for each rank; `per_rank` makes it."""

    def __init__(self, held: Stateful, on_resize: OnResize) -> None:
        self.held = held
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"per_rank({self.held!r}, on_resize={self.on_resize!r})"

    def state_dict(self) -> dict[str, object]:
        """Returns the state of this rank's object, under the name of this rank."""
        return {key_of(this_rank()): self.held.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Gives this rank's object the state of this rank, if there is one."""
        self.install({rank: state_dict[key] for rank, key in ranks_in(state_dict).items()})

    def problem(self, saved: Collection[int], here: Collection[int]) -> str | None:
        """Returns why the ranks `here` cannot load states of the ranks `saved`, or None."""
        if self.on_resize != "refuse" or set(saved) == set(here):
            return None
        return (
            f"{_format_ranks(saved)} saved a state each, and {_format_ranks(here)} would "
            "load them: pass "
            'on_resize="keep" to per_rank to give each rank its own state if it saved one, or a '
            "function to divide them anew; or leave the entry out with exclude="
        )

    def ranks_to_read(self, saved: Collection[int], here: Collection[int]) -> list[int]:
        """Returns the ranks whose states this rank needs."""
        if callable(self.on_resize) and set(saved) != set(here):
            return sorted(saved)
        return [rank for rank in saved if rank == this_rank()]

    def install(self, states: Mapping[int, object], new_ranks: Sequence[int] = ()) -> None:
        """Gives this rank's object its state; with `new_ranks`, the function makes the state."""
        here = this_rank()
        if new_ranks and callable(self.on_resize):
            state = self.on_resize(states, list(new_ranks).index(here), len(new_ranks))
        else:
            state = states.get(here)
        if state is not None:
            self.held.load_state_dict(state)


def per_rank(held: Stateful, *, on_resize: OnResize = "refuse") -> PerRank:
    """Returns an entry of a state for an object that differs between ranks, like a data loader.

    `held` is any object with `state_dict()` and `load_state_dict()`. Each rank saves the state of
    its own object as `rank0`, `rank1` and so on, and gets this state back. A load reads such a
    state whole, on the CPU, and does not call `state_dict()`. If other ranks load than saved,
    `on_resize` decides:

    - "refuse": a MismatchError on all ranks, before any change.
    - "keep": a rank that saved gets its own state; a new rank's object stays as it is, and states
      of ranks that no longer exist are not read.
    - a function of all saved states by rank, this rank and the number of ranks: it returns the
      state for this rank's object, or None to leave the object as it is.

    Raises ArgumentTypeError for an object without the two methods, and ArgumentError for another
    `on_resize`.

    >>> import ckpt, tempfile
    >>> class Loader:
    ...     position = 0
    ...     def state_dict(self):
    ...         return {"position": self.position}
    ...     def load_state_dict(self, state):
    ...         self.position = state["position"]
    >>> loader = Loader()
    >>> loader.position = 7
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(folder, {"loader": ckpt.per_rank(loader)})
    ...     fresh = Loader()
    ...     _ = ckpt.load(folder, {"loader": ckpt.per_rank(fresh)})
    ...     ckpt.read(folder), fresh.position
    ({'loader': {'rank0': {'position': 7}}}, 7)
    """
    if isinstance(held, type) or not isinstance(held, Stateful):
        raise ArgumentTypeError(
            f"per_rank takes an object with state_dict() and load_state_dict(), not "
            f"{type(held).__qualname__}; give a plain value a key of its rank, as "
            'f"seen-rank{rank}"'
        )
    if not callable(on_resize) and on_resize not in ("refuse", "keep"):
        raise ArgumentError(
            f'on_resize={on_resize!r}: it can be "refuse", "keep" or a function of the saved '
            "states, the rank and the number of ranks"
        )
    return PerRank(held, on_resize)


def this_rank() -> int:
    """Returns this process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def key_of(rank: int) -> str:
    """Returns the name of a rank's state.

    >>> key_of(3)
    'rank3'
    """
    return f"rank{rank}"


def ranks_in(nest: object) -> dict[int, str]:
    """Returns the ranks with a state in a nest, and their keys; empty if a key names no rank."""
    if not isinstance(nest, Mapping):
        return {}
    found = [_KEY.fullmatch(key) if isinstance(key, str) else None for key in nest]
    known = [match for match in found if match is not None]
    return {int(match[1]): match[0] for match in known} if len(known) == len(found) else {}


def _format_ranks(ranks: Collection[int]) -> str:
    """Returns ranks as a short text.

    >>> _format_ranks(range(4)), _format_ranks([2]), _format_ranks([1, 3])
    ('ranks 0 to 3', 'rank 2', 'ranks 1, 3')
    """
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return "ranks " + ", ".join(map(str, ordered[:SHOWN])) + more


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
