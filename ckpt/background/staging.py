"""A rank's part of a state on its way into the arena, some of it while training goes on.

Rules:

1. The arena gets what the rank writes and nothing else, in the order of the shard file's data.
2. What is copied later than the call is what an optimizer of the state owns: its parameters and its
   state. Nothing but its step changes those, and a hook before the step waits for the copies.
   Everything else, and what is small, is copied before the call returns.
3. A change that goes past the hook is found by the tensors' versions, and fails the save. What
   leaves no trace in them, writes through `.data` or numpy, has to wait for `wait_staged` itself.
4. The hook stays on its optimizer and does nothing between saves: taking it off from another thread
   would change a dict that the optimizer may be going through.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from ckpt.background.device_copies import DeviceCopies
from ckpt.errors import StateChangedError
from ckpt.states.stateful import MAX_DEPTH
from ckpt.writing.arena import populate
from ckpt.writing.own_parts import OwnPart

SMALL_BYTES = 64 << 10
"""Parts up to this size are copied at once: as quickly as they are put off."""
RUN_BYTES = 16 << 20
"""What a thread copies at once, without the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A part, and where it belongs in the arena."""

    part: OwnPart
    lo: int

    @property
    def hi(self) -> int:
        """Where it ends."""
        return self.lo + self.part.nbytes

    @property
    def is_on_cuda(self) -> bool:
        """Whether a stream of the device can copy it."""
        return self.part.leaf.local.device.type == "cuda"


def slots(parts: Sequence[OwnPart]) -> list[Slot]:
    """The parts end to end, in the order in which they lie in a shard file.

    That is by falling size of their elements, so that each is aligned to it.
    """
    found, at = [], 0
    for part in sorted(parts, key=lambda part: -part.dtype.itemsize):
        found.append(Slot(part, at))
        at += part.nbytes
    return found


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


class Staging:
    """The copies of one save. Made in the caller's thread, finished in another.

    Whoever waits for it helps.
    """

    def __init__(
        self,
        found: Sequence[Slot],
        data: memoryview,
        owners: list[Optimizer],
        touched: int,
    ) -> None:
        self._data = data
        self._touched = touched
        self._devices = DeviceCopies(data)
        self._owners = owners
        self._later: list[Slot] = []
        self._runs: list[tuple[Slot, int, int]] = []
        """Bytes of slots that can be copied one by one."""
        self._copied: set[int] = set()
        """Numbers of runs."""
        self._helping: list[threading.Lock] = []
        """Each is held by a thread while it copies runs."""
        self._done = threading.Event()
        owned = _storages(owners)
        for slot in found:
            if slot.part.nbytes > SMALL_BYTES and _storage(slot.part.leaf.local) in owned:
                self._later.append(slot)
            elif slot.is_on_cuda:
                self._devices.start(slot.part, slot.lo)
            else:
                self._copy(slot, 0, slot.part.nbytes)
        self._devices.finish()
        self._versions = [_version(slot.part) for slot in self._later]
        for slot in self._later:
            if slot.is_on_cuda:
                self._devices.start(slot.part, slot.lo)
            else:
                self._runs += _runs(slot)
        self._todo = deque(range(len(self._runs)))
        """The runs that nobody has begun."""
        if not self._later:
            self._done.set()

    def hold_steps(self) -> None:
        """From now on the owners' steps wait for the copies; somebody has to call `finish`."""
        if self._later:
            _hold_steps(self, self._owners)

    def finish(self) -> None:
        """Everything is copied when this returns; to be called once, by the thread that copies.

        Raises StateChangedError naming a tensor that was changed meanwhile.
        """
        try:
            self.help()
            for helping in list(self._helping):
                with helping:
                    pass
            for number, run in enumerate(self._runs):
                if number not in self._copied:  # who had begun it failed, or was interrupted
                    self._copy(*run)
            self._devices.finish()
            changed = [
                slot.part.name
                for slot, version in zip(self._later, self._versions, strict=True)
                if _version(slot.part) != version
            ]
        finally:
            self._todo.clear()
            self._later, self._runs, self._data = [], [], memoryview(b"")
            self._devices = DeviceCopies(self._data)
            self._done.set()
        if changed:
            more = f" and {len(changed) - 1} more tensors were" if changed[1:] else " was"
            raise StateChangedError(
                f"{changed[0]}{more} changed in place, by something else than the step of an "
                "optimizer in the state, before it was copied; call wait_staged() of the save's "
                "handle before that"
            )

    def wait(self) -> None:
        """Return when everything is copied, or never will be."""
        self.help()
        self._done.wait()

    def help(self) -> None:
        """Copy what nobody has begun; any thread may. What fails here, `finish` tries again."""
        mine = threading.Lock()
        self._helping.append(mine)
        with mine, suppress(IndexError):  # none is left
            while True:
                number = self._todo.popleft()
                with suppress(Exception):
                    self._copy(*self._runs[number])
                    self._copied.add(number)

    def _copy(self, slot: Slot, lo: int, hi: int) -> None:
        """Copy bytes of a slot; all of them where they do not lie in host memory end to end."""
        part = slot.part
        if not part.is_in_memory:
            at = slot.lo
            for block in part.blocks():
                self._data[at : at + len(block)] = block
                at += len(block)
            return
        source = part.leaf.local.data_ptr() + part.lo * part.dtype.itemsize + lo
        memory = part.leaf.local.untyped_storage()
        if source + hi - lo > memory.data_ptr() + memory.nbytes():
            raise StateChangedError(
                f"{part.name} gave up its memory before it was copied, as where it is offloaded; "
                "call wait_staged() of the save's handle before that"
            )
        target = _address(self._data) + slot.lo + lo
        if slot.lo + hi > self._touched and hi - lo > SMALL_BYTES:
            populate(target, hi - lo)
        # Lets go of the interpreter's lock, starts no threads, and makes no tensor of the target.
        ctypes.memmove(target, source, hi - lo)


_holding: Staging | None = None
_held: WeakSet[Optimizer] = WeakSet()


def _hold_steps(staging: Staging, owners: Iterable[Optimizer]) -> None:
    """From now on the optimizers' steps wait for this staging (rule 4)."""
    global _holding
    _holding = staging
    for optimizer in owners:
        if optimizer not in _held:
            optimizer.register_step_pre_hook(_before_step)
            _held.add(optimizer)


def _before_step(*_: object) -> None:
    if _holding is not None:
        _holding.wait()


def _let_go() -> None:
    """In a forked child: nobody finishes the copies there, and the arena is the parent's."""
    global _holding
    _holding = None


os.register_at_fork(after_in_child=_let_go)


def _runs(slot: Slot) -> Iterator[tuple[Slot, int, int]]:
    """A slot's bytes, in runs that can be copied one by one."""
    step = RUN_BYTES if slot.part.is_in_memory else slot.part.nbytes
    for lo in range(0, slot.part.nbytes, step):
        yield slot, lo, min(lo + step, slot.part.nbytes)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _storages(owners: Iterable[Optimizer]) -> set[int]:
    """The memory of what the optimizers own, by address."""
    found = set()
    for optimizer in owners:
        for group in optimizer.param_groups:
            found |= {_storage(parameter) for parameter in group["params"]}
        for state in optimizer.state.values():
            if isinstance(state, Mapping):
                found |= {_storage(v) for v in state.values() if isinstance(v, torch.Tensor)}
    return found - {0}


def _storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, of a DTensor its local one's; 0 where there is none."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        # torch's way of saying that a subclass has no memory of its own: it is made of tensors that
        # are looked at themselves, or has no data (meta, fake).
        return 0


def _version(part: OwnPart) -> tuple[int, ...]:
    """Changes with every operation in place; a DTensor counts for itself, its local one not."""
    return tuple(
        tensor._version
        for tensor in (part.leaf.local, part.leaf.given)
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    )
