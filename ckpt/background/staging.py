"""Copies a rank's part of a state into the arena, in the call or while the training goes on.

Rules:

1. The arena gets only the bytes that the rank writes, in the order of the shard file's data.
2. "copied": the call copies all tensors. "overlapped": large tensors that only optimizers' steps
   change are copied later, and steps wait for the copies (`ckpt.background.step_hooks`).
3. An early change of a tensor that is copied later fails the save. The tensor's version shows the
   change, or a sample of its elements if the change does not count as a version.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

import torch

from ckpt.background.arena import Arena
from ckpt.background.copies import Copies, copy_all
from ckpt.background.device_copies import DeviceCopies
from ckpt.background.slots import Slot
from ckpt.background.step_hooks import hold_steps, storage_of
from ckpt.errors import StateChangedError
from ckpt.state.flatten import Leaf
from ckpt.state.memory import is_plain
from ckpt.state.samples import sampled
from ckpt.transfer.write import blocks

When = Literal["copied", "overlapped"]
COPIED: When = "copied"
OVERLAPPED: When = "overlapped"

SMALL_BYTES = 64 << 10
"""Parts up to this size are copied in the call: a later copy would cost the call as much."""


class Staging:
    """The copies of one save. The caller's thread makes them, another thread finishes them.

    A thread that waits for the copies helps.
    """

    def __init__(
        self,
        found: Sequence[Slot],
        data: memoryview,
        arena: Arena,
        held: set[int],
        workers: int,
    ) -> None:
        """Copies all tensors but those with an address in `held`: these can be copied later."""
        self._data = data
        self._devices = DeviceCopies(data)
        self._done = threading.Event()
        self._later = [slot for slot in found if held and _can_wait(slot, held)]
        later = set(map(id, self._later))
        self._copy_now([slot for slot in found if id(slot) not in later], arena, workers)
        self._later = [_of_now(slot) for slot in self._later]
        self._samples = sampled([slot.flat for slot in self._later])
        self._versions = [_version(slot.leaf) for slot in self._later]
        for slot in self._later:
            if slot.local.is_cuda:
                self._devices.start(slot)
        self._copies = Copies([s for s in self._later if not s.local.is_cuda], data, arena)
        if not self._later:
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether everything is copied, or the copies have failed."""
        return self._done.is_set()

    def hold_steps(self) -> None:
        """From now on optimizers' steps wait for the copies; a thread must call `finish`."""
        if self._later:
            hold_steps(self)

    def finish(self) -> None:
        """Returns once everything is copied; the thread that copies calls this once.

        Raises StateChangedError with the name of a tensor that has changed meanwhile.
        """
        try:
            self._copies.finish()
            self._devices.finish()
            changed = list(self._changed())
        finally:
            self._copies.drop()
            self._later, self._data = [], memoryview(b"")
            self._devices = DeviceCopies(self._data)
            self._done.set()
        if changed:
            more = f" and {len(changed) - 1} more tensors were" if changed[1:] else " was"
            raise StateChangedError(
                f"{changed[0]}{more} changed, and not by the step of an optimizer, "
                'before it was copied; leave out staging="overlapped", or call wait_staged() of '
                "the save's handle before the change",
                names=changed,
            )

    def wait(self) -> None:
        """Returns once everything is copied, or the copies have failed."""
        self.help()
        self._done.wait()

    def help(self) -> None:
        """Copies the runs that no thread has begun; any thread may call this."""
        self._copies.help()

    def _copy_now(self, found: Sequence[Slot], arena: Arena, workers: int) -> None:
        plain = [slot for slot in found if is_plain(slot.leaf.local)]
        for slot in () if len(plain) == len(found) else found:
            if slot.is_plain:
                continue
            if slot.local.is_cuda:
                self._devices.start(slot)
            else:
                item, at = slot.item, slot.item.offset
                for block in blocks(slot.local, item.lo, item.hi, item.dtype):
                    self._data[at : at + len(block)] = block
                    at += len(block)
        copy_all(plain, self._data, arena, workers)
        self._devices.finish()

    def _changed(self) -> list[str]:
        """Returns the names of tensors whose copies differ from their content at the call."""
        copied = [
            torch.frombuffer(self._data, dtype=torch.uint8, count=item.nbytes, offset=item.offset)
            for item, _ in self._later
        ]
        differs = (sampled(copied) != self._samples).any(axis=1)
        return [
            slot.item.name
            for slot, version, is_other in zip(self._later, self._versions, differs, strict=True)
            if is_other or _version(slot.leaf) != version
        ]


def _can_wait(slot: Slot, held: set[int]) -> bool:
    return (
        slot.item.nbytes > SMALL_BYTES
        and storage_of(slot.local) in held
        and (slot.local.is_cuda or slot.is_plain)
    )


def _of_now(slot: Slot) -> Slot:
    """Returns a slot that keeps the present memory, even if its tensor gets other memory."""
    return slot._replace(leaf=slot.leaf._replace(local=slot.local.detach()))


def _version(leaf: Leaf) -> tuple[int, ...]:
    """A number that changes with every operation in place; a DTensor has its own."""
    return tuple(
        tensor._version
        for tensor in (leaf.local, leaf.given)
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    )
