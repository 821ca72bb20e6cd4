"""A rank's part of a state on its way into the arena, some of it while training goes on.

Rules:

1. The arena gets what the rank writes and nothing else, in the order of the shard file's data.
2. `COPIED`: the call copies all of it. `OVERLAPPED`: what only optimizers' steps write to, and is
   not small, is copied later, and steps wait for it (`ckpt.background.step_hooks`).
3. A change to what is copied later is found by the tensors' versions, and by a sample of their
   elements where it leaves no version; it fails the save.
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
"""Parts up to this size are copied at once: as quickly as they are put off."""


class Staging:
    """The copies of one save. Made in the caller's thread, finished in another.

    Whoever waits for it helps.
    """

    def __init__(
        self,
        found: Sequence[Slot],
        data: memoryview,
        arena: Arena,
        held: set[int],
        workers: int,
    ) -> None:
        """Copies all but what `held`, the addresses of storages, allows to copy later."""
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
        """Whether everything is copied, or never will be."""
        return self._done.is_set()

    def hold_steps(self) -> None:
        """From now on optimizers' steps wait for the copies; somebody has to call `finish`."""
        if self._later:
            hold_steps(self)

    def finish(self) -> None:
        """Everything is copied when this returns; to be called once, by the thread that copies.

        Raises StateChangedError naming a tensor that was changed meanwhile.
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
                f"{changed[0]}{more} changed, by something else than the step of an optimizer, "
                'before it was copied; leave out staging="overlapped", or call wait_staged() of '
                "the save's handle before the change"
            )

    def wait(self) -> None:
        """Return when everything is copied, or never will be."""
        self.help()
        self._done.wait()

    def help(self) -> None:
        """Copy what nobody has begun; any thread may."""
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
        """The names of tensors of which something else was copied than they held at the call."""
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
    """A slot that keeps the memory it has now, whatever its tensor is given instead."""
    return slot._replace(leaf=slot.leaf._replace(local=slot.local.detach()))


def _version(leaf: Leaf) -> tuple[int, ...]:
    """Changes with every operation in place; a DTensor counts for itself, its local one not."""
    return tuple(
        tensor._version
        for tensor in (leaf.local, leaf.given)
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    )
