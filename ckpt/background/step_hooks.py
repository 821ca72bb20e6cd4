"""Optimizer steps that wait for copies, and the optimizers whose steps can wait.

Rules:

1. One hook serves every optimizer of the process, also those that are in no state. The hook stays,
   and does nothing between saves: to remove it from another thread would change a dict that an
   optimizer may be iterating over.
2. The hook runs before every other hook of a step, because others may write to parameters.
3. Hooks run if torch's own wrapper is the outermost of `step`. A function that replaces `step`, on
   a class or on an instance, may write before the hooks run, or run none. The wrapper of torch's
   learning rate schedulers only counts steps, and does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer, lr_scheduler, optimizer

from ckpt.state.stateful import MAX_DEPTH


class Copying(Protocol):
    """Copies that a step must wait for."""

    def wait(self) -> None:
        """Returns once everything is copied, or the copies have failed."""
        ...


_holding: Copying | None = None
_hook: Any = None
"""The registration of the hook."""


def hold_steps(copying: Copying) -> None:
    """From now on the step of every optimizer waits for these copies (rules 1 and 2)."""
    global _holding, _hook
    _holding = copying
    if _hook is None:
        _hook = optimizer.register_optimizer_step_pre_hook(_before_step)
    hooks: Any = optimizer._global_optimizer_pre_hooks
    hooks.move_to_end(_hook.id, last=False)


def _before_step(*_: object) -> None:
    if _holding is not None:
        _holding.wait()


def _let_go() -> None:
    """Drops the copies in a forked child, where no thread finishes them."""
    global _holding
    _holding = None


os.register_at_fork(after_in_child=_let_go)

_HOOKING = Optimizer.profile_hook_step(lambda *_: None).__code__
"""The code of torch's wrapper, which all wrapped steps share."""


def runs_hooks(given: Optimizer) -> bool:
    """Whether the hooks of an optimizer run before its step writes any tensor (rule 3)."""
    step: Any = vars(given).get("step", type(given).step)
    step = getattr(step, "__func__", step)
    if getattr(step, "__globals__", None) is vars(lr_scheduler):
        step = getattr(step, "__wrapped__", None)
    return getattr(step, "__code__", None) is _HOOKING


def optimizers(state: object, depth: int = 0) -> Iterator[Optimizer]:
    """Yields the optimizers in a nest."""
    if isinstance(state, Optimizer):
        yield state
    elif depth > MAX_DEPTH:
        return
    elif isinstance(state, Mapping):
        for item in state.values():
            yield from optimizers(item, depth + 1)
    elif isinstance(state, list | tuple):
        for item in state:
            yield from optimizers(item, depth + 1)


def held_storages(state: object) -> set[int]:
    """Returns the addresses of storages in a state that only steps with hooks write to."""
    held: set[int] = set()
    free: set[int] = set()
    for found in optimizers(state):
        (held if runs_hooks(found) else free).update(_storages(found))
    return held - free - {0}


def _storages(given: Optimizer) -> Iterator[int]:
    """Yields the addresses of the storages of an optimizer's parameters and state."""
    for group in given.param_groups:
        yield from map(storage_of, group["params"])
    for state in given.state.values():
        if isinstance(state, Mapping):
            yield from (storage_of(v) for v in state.values() if isinstance(v, torch.Tensor))


def storage_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage, or of a DTensor's local one; 0 without one."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # torch's, for a tensor without a storage
        # A subclass without memory of its own: it wraps tensors that are visited themselves, or has
        # no data (meta, fake).
        return 0
