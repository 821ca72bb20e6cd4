"""Optimizer steps that wait for copies, and the optimizers of which that can be said.

Rules:

1. One hook serves every optimizer of the process, also those that are in no state. It stays, and
   does nothing between saves: taking it off from another thread would change a dict that an
   optimizer may be going through.
2. It runs before every other hook that a step has, for those may write to parameters.
3. Hooks run where torch's own wrapper is the outermost of `step`. What replaces `step`, on a class
   or on an instance, may write before the hooks run or run none; a learning rate scheduler of
   torch's only counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer, lr_scheduler, optimizer

from ckpt.state.stateful import MAX_DEPTH


class Copying(Protocol):
    """Copies that a step has to wait for."""

    def wait(self) -> None:
        """Return when everything is copied, or never will be."""
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
    """In a forked child: nobody finishes the copies there, and the arena is the parent's."""
    global _holding
    _holding = None


os.register_at_fork(after_in_child=_let_go)

_HOOKING = Optimizer.profile_hook_step(lambda *_: None).__code__
"""The code of torch's wrapper, which all wrapped steps share."""


def runs_hooks(given: Optimizer) -> bool:
    """Whether the hooks of an optimizer run before its step writes anything (rule 3)."""
    step: Any = vars(given).get("step", type(given).step)
    step = getattr(step, "__func__", step)
    if getattr(step, "__globals__", None) is vars(lr_scheduler):
        step = getattr(step, "__wrapped__", None)
    return getattr(step, "__code__", None) is _HOOKING


def optimizers(state: object, depth: int = 0) -> Iterator[Optimizer]:
    """The optimizers in a nest."""
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
    """The addresses of memory that only steps with hooks write to, by what is known of a state."""
    held: set[int] = set()
    free: set[int] = set()
    for found in optimizers(state):
        (held if runs_hooks(found) else free).update(_storages(found))
    return held - free - {0}


def _storages(given: Optimizer) -> Iterator[int]:
    """The memory of an optimizer's parameters and state, by address."""
    for group in given.param_groups:
        yield from map(storage_of, group["params"])
    for state in given.state.values():
        if isinstance(state, Mapping):
            yield from (storage_of(v) for v in state.values() if isinstance(v, torch.Tensor))


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, of a DTensor its local one's; 0 where there is none."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        # torch's way of saying that a subclass has no memory of its own: it is made of tensors that
        # are looked at themselves, or has no data (meta, fake).
        return 0
