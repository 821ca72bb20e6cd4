"""Copies a rank's part of a state into the arena, in the call or while the training goes on.

Each tensor that the rank writes has a slot: its place in the arena, in the order of the shard
file's data. "copied": the call copies all tensors. "overlapped": large tensors that only steps of
optimizers change are copied later, and such a step waits for the copies. An early change of a
tensor that is copied later fails the save: the tensor's version shows it, or a sample of its
elements if the change does not count as a version.

[Note: waves]
With a bound on host memory that is less than the rank's part, tensors that only optimizers' steps
change pass through a ring of memory (`ckpt.transfer.write_job.Ring`): the writer's messages tell
which bytes are in the file, and others take their place, in the order of the file. A step waits
until all of them are copied, so as long as the writer needs for all but a ring of them. All other
tensors are copied in the call and keep their memory until the end.

1. The thread of the save alone copies; a step only waits. An error of the writer ends the wait.
2. Each tensor is compared with its sample and version of the call directly after its last byte is
   copied. A change between its first and its last byte is an error too.

Host memory:

1. One thread copies in pieces of `PIECE_BYTES` and keeps the interpreter's lock. A thread that
   releases the lock waits up to 5 ms for another thread that computes, after every piece. Pieces
   of less than 1 MiB are a tenth slower if the memory has pages of 4 KiB.
2. Several threads copy runs of `RUN_BYTES` and release the lock.
3. The system writes memory that was never touched (`Arena.fill`), which spares a page fault for
   every page.
4. When a call that waits for all copies has ended in any way, no thread copies any more.

Device memory: an arena is registered with CUDA, page-locked, so that a device copies into it on
separate streams while its other streams compute. If CUDA refuses the registration, the copies are
correct, and slower.

Steps of optimizers:

1. One hook serves every optimizer of the process, also those that are in no state. The hook stays,
   and does nothing between saves: to remove it from another thread would change a dict that an
   optimizer may be iterating over.
2. The hook runs before every other hook of a step, because others may write to parameters.
3. Hooks run if torch's own wrapper is the outermost of `step`. A function that replaces `step`, on
   a class or on an instance, may write before the hooks run, or run none. The wrapper of torch's
   learning rate schedulers only counts steps, and does no harm.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal, NamedTuple

import torch
from torch.optim import Optimizer, lr_scheduler, optimizer

from ckpt.errors import StateChangedError
from ckpt.plan.save_plan import SavePlan, WriteItem
from ckpt.saving.arena import Arena, address_of
from ckpt.state.flatten import Leaf
from ckpt.state.memory import blocks, is_plain, start_samples, take_samples
from ckpt.state.stateful import MAX_DEPTH
from ckpt.transfer.write_job import LEAST_RING_BYTES, Ring
from sharding.errors import ArgumentError

When = Literal["copied", "overlapped"]
COPIED: When = "copied"
OVERLAPPED: When = "overlapped"

SMALL_BYTES = 64 << 10
"""Parts up to this size are copied in the call: a later copy would cost the call as much."""


class Slot(NamedTuple):
    """An item of the plan with its tensor; the item's offset is its place in the arena's data."""

    item: WriteItem
    leaf: Leaf

    @property
    def local(self) -> torch.Tensor:
        """The rank's part of the tensor."""
        return self.leaf.local

    @property
    def is_plain(self) -> bool:
        """Whether its bytes lie end to end in host memory."""
        return is_plain(self.leaf.local)

    @property
    def flat(self) -> torch.Tensor:
        """Returns the item's elements in one dimension: without a copy if they are contiguous."""
        return self.leaf.local.reshape(-1)[self.item.lo : self.item.hi]

    @property
    def content(self) -> torch.Tensor:
        """Returns the item's elements: without a copy if they are the whole local tensor."""
        local = self.leaf.local
        return local if self.item.hi - self.item.lo == local.numel() else self.flat

    def address(self) -> int:
        """Returns the address of a plain item's first byte.

        Raises StateChangedError if the tensor has given up its memory.
        """
        item, local = self.item, self.leaf.local
        start: int = local.data_ptr() + item.lo * item.dtype.itemsize
        memory = local.untyped_storage()
        if start + item.nbytes > memory.data_ptr() + memory.nbytes():
            raise StateChangedError(
                f"{item.name} has no memory for its {item.nbytes:,} bytes: it was resized or "
                "offloaded; save it while it has its memory, or call wait_staged() of the save's "
                "handle before it gives its memory up"
            )
        return start


def slots(plan: SavePlan, leaves: Sequence[Leaf], ring: Ring | None = None) -> list[Slot]:
    """Returns the items of a plan with their tensors; `leaves` has the tensors by number."""
    sources = [leaves[item.source] for item in plan.items]
    items = plan.items
    if ring is not None:
        offsets = zip(items, ring.offsets(plan), strict=True)
        items = tuple(item._replace(offset=offset) for item, offset in offsets)
    return list(map(Slot._make, zip(items, sources, strict=True)))


class DeviceCopies:
    """Copies that were started and not yet awaited."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._kept: list[torch.Tensor] = []
        """The tensors that the streams still read from: other streams must not reuse them."""
        self._source: tuple[Slot, torch.Tensor] | None = None
        """The tensor that is copied in parts, and its bytes."""

    def follow(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the stream of copies from a device, which follow the work queued there so far."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            page_lock(self._data, device)
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def start(self, slot: Slot) -> None:
        """Starts the copy of a tensor to its slot, after the work queued on its device so far."""
        with torch.cuda.stream(self.follow(slot.local.device)):
            source = slot.flat.resolve_conj().resolve_neg()
            self.room(slot.item.offset, source.nbytes).view(source.dtype).copy_(
                source, non_blocking=True
            )
        self._kept.append(slot.local)
        # A copy of strided elements is memory of this stream, whose order guards it: it is freed.

    def start_part(self, slot: Slot, lo: int, hi: int, at: int) -> None:
        """Starts the copy of bytes `[lo, hi)` of a tensor to byte `at`, after the last `follow`."""
        with self.stream_of(slot):
            if self._source is None or self._source[0] is not slot:
                flat = slot.flat.resolve_conj().resolve_neg().contiguous()
                self._source = slot, flat.view(torch.uint8)
            self.room(at, hi - lo).copy_(self._source[1][lo:hi], non_blocking=True)

    def stream_of(self, slot: Slot) -> AbstractContextManager[Any]:
        """Returns the context in which a read of a slot waits for no work of the training."""
        stream = self._streams.get(slot.local.device)
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def room(self, at: int, nbytes: int) -> torch.Tensor:
        """Returns the arena's bytes from byte `at` on."""
        return torch.frombuffer(self._data, dtype=torch.uint8, count=nbytes, offset=at)

    def finish(self) -> None:
        """Returns once all started copies are in the arena."""
        for stream in self._streams.values():
            stream.synchronize()
        self._kept.clear()


_locked: dict[int, int] = {}
"""The sizes of registered arenas, by their addresses."""


def page_lock(data: memoryview, device: torch.device) -> None:
    """Registers an arena's memory with CUDA, unless it is registered.

    A new thread has GPU 0, where the registration would make a context: so it names the device.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    if _locked.get(address, 0) >= len(data):
        return
    release(address)
    with suppress(RuntimeError, AttributeError), torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, len(data), 0)) == 0:
            _locked[address] = len(data)
        else:  # a refusal stays as CUDA's last error, and would be that of the next kernel
            ctypes.CDLL(None).cudaGetLastError()


def release(address: int) -> None:
    """Undoes the registration of an arena, before its memory is mapped anew."""
    if _locked.pop(address, 0):
        with suppress(RuntimeError, AttributeError):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address)


def waiting(found: Sequence[Slot], state: object, least_of_device: int = 0) -> list[int]:
    """Returns the numbers of the slots that can be copied later, until a step of an optimizer.

    Parts on a device have more than `least_of_device` bytes: the call starts their copies, and
    would wait for the device's queued work if it copied a single one itself.
    """
    hooked = addresses_of_hooked(state)
    least = least_of_device
    return [
        number for number, slot in enumerate(found) if hooked and _can_wait(slot, hooked, least)
    ]


def divide(found: Sequence[Slot], state: object, bound: int) -> Ring | None:
    """Returns the division of `bound` bytes of host memory; None if all slots fit into them.

    Raises ArgumentError if those that are copied in the call leave no room for a ring.
    """
    total = sum(slot.item.nbytes for slot in found)
    if total <= bound:
        return None
    numbers = waiting(found, state, SMALL_BYTES)
    later = set(numbers)
    now = [slot.item for number, slot in enumerate(found) if number not in later]
    start = sum(item.nbytes for item in now)
    if start + LEAST_RING_BYTES > bound:
        largest = max(now, key=lambda item: item.nbytes)
        raise ArgumentError(
            f"host_memory is {bound:,} bytes, and this rank copies {start:,} bytes in the call: "
            f"tensors that only the steps of an optimizer in the state change can wait, and "
            f"{largest.name} ({largest.nbytes:,} bytes) and others are none of these; give "
            f"{start + LEAST_RING_BYTES:,} bytes or more, save the optimizer with its parameters, "
            "or save with blocking=True, which needs no host memory"
        )
    return Ring(start, bound - start, tuple(numbers))


class Staging:
    """The copies of one save. The caller's thread makes them, another thread finishes them.

    A thread that waits for the copies helps.
    """

    def __init__(
        self,
        found: Sequence[Slot],
        data: memoryview,
        arena: Arena,
        later: Sequence[int],
        workers: int,
        ring: Ring | None = None,
    ) -> None:
        """Copies all tensors but those with a number in `later`, or those that pass the ring."""
        self._data, self._arena, self.ring = data, arena, ring
        self._devices = DeviceCopies(data)
        self._done = threading.Event()
        numbers = set(later if ring is None else ring.waiting)
        self._copy_now([s for n, s in enumerate(found) if n not in numbers], arena, workers)
        self._later = [_of_now(found[number]) for number in sorted(numbers)]
        self._samples = start_samples([slot.content for slot in self._later])
        self._versions = [_version(slot.leaf) for slot in self._later]
        for slot in self._later:
            if slot.local.is_cuda:
                if ring is None:
                    self._devices.start(slot)
                else:
                    self._devices.follow(slot.local.device)
        hosts = [s for s in self._later if ring is None and not s.local.is_cuda]
        self._copies = Copies(hosts, data, arena)
        self._freed = self._copied = 0
        self._filling = self._fill()
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

        Raises StateChangedError with the name of a tensor that has changed meanwhile. Tensors that
        pass a ring are not copied here.
        """
        try:
            if self.ring is not None:
                return
            self._copies.finish()
            self._devices.finish()
            copied = [self._devices.room(item.offset, item.nbytes) for item, _ in self._later]
            changed = self._find_changed(range(len(self._later)), copied)
        finally:
            self.end()
        _check_unchanged(changed)

    def fill(self, freed: int) -> int:
        """Copies into the ring as much as fits once `freed` bytes have passed it ([Note: waves]).

        Returns the bytes copied so far. The thread of the save alone calls this. Raises
        StateChangedError with the name of a tensor that has changed meanwhile.
        """
        self._freed = freed
        if next(self._filling, None) is None:
            self.end()
        return self._copied

    def end(self) -> None:
        """Lets no step wait any more; copies nothing."""
        self._filling.close()
        self._copies.drop()
        with suppress(RuntimeError):  # CUDA's: an error has ended its copies
            self._devices.finish()
        self._later, self._data = [], memoryview(b"")
        self._devices = DeviceCopies(self._data)
        self._done.set()

    def _fill(self) -> Generator[bool, None, None]:
        """Copies the slots of the ring, and yields where it has to wait for room."""
        ring = self.ring
        assert ring is not None
        for number, slot in enumerate(self._later):
            first, nbytes, lo = slot.item.offset, slot.item.nbytes, 0
            while lo < nbytes:
                at = (first + lo) % ring.nbytes
                hi = min(lo + ring.step_bytes, nbytes, lo + ring.nbytes - at)
                while first + hi > self._freed + ring.nbytes:
                    self._devices.finish()
                    yield True
                if slot.local.is_cuda:
                    self._devices.start_part(slot, lo, hi, ring.start + at)
                else:
                    copy_part(slot, lo, hi, ring.start + at, self._data, self._arena)
                self._copied, lo = first + hi, hi
            self._devices.finish()
            with self._devices.stream_of(slot):
                changed = self._find_changed([number], [slot.content])
            _check_unchanged(changed)

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

    def _find_changed(self, numbers: Sequence[int], content: list[torch.Tensor]) -> list[str]:
        """Returns the names of tensors whose content differs from that at the call."""
        differs = (take_samples(content) != self._samples()[numbers]).any(axis=1)
        return [
            self._later[number].item.name
            for number, is_other in zip(numbers, differs, strict=True)
            if is_other or _version(self._later[number].leaf) != self._versions[number]
        ]


def _check_unchanged(changed: Sequence[str]) -> None:
    """Raises StateChangedError if there are names of tensors that have changed."""
    if changed:
        more = f" and {len(changed) - 1} more tensors were" if changed[1:] else " was"
        raise StateChangedError(
            f"{changed[0]}{more} changed, and not by the step of an optimizer, "
            'before it was copied; leave out staging="overlapped" or host_memory=, or call '
            "wait_staged() of the save's handle before the change",
            names=list(changed),
        )


def _can_wait(slot: Slot, hooked: set[int], least: int) -> bool:
    return storage_of(slot.local) in hooked and (
        slot.item.nbytes > least
        if slot.local.is_cuda
        else slot.item.nbytes > SMALL_BYTES and slot.is_plain
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


PIECE_BYTES = 4 << 20
RUN_BYTES = 16 << 20
WORTH_THREADS_BYTES = 64 << 20
"""One thread copies fewer bytes in about the time that other threads need to start."""

Run = tuple[Slot, int, int]
"""Bytes `[lo, hi)` of a slot."""

_locked_memmove = ctypes.PyDLL(None).memmove
"""`memmove` with the interpreter's lock kept."""
_locked_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_locked_memmove.restype = ctypes.c_void_p


def runs(found: Sequence[Slot]) -> Iterator[Run]:
    """Yields the bytes of slots, in runs that can be copied one by one."""
    for slot in found:
        nbytes = slot.item.nbytes
        for lo in range(0, nbytes, RUN_BYTES):
            yield slot, lo, min(lo + RUN_BYTES, nbytes)


class Copies:
    """Runs that are copied once each. Any thread may help, and a waiting thread does."""

    def __init__(self, found: Sequence[Slot], data: memoryview, arena: Arena) -> None:
        self._runs = list(runs(found))
        self._data = data
        """The view that keeps the memory mapped."""
        self._arena = arena
        self._todo = deque(range(len(self._runs)))
        """Numbers of the runs that no thread has begun."""
        self._copied: set[int] = set()
        self._helping: list[threading.Lock] = []
        """Locks, each held by a thread while it copies runs."""

    def help(self) -> None:
        """Copies the runs that no thread has begun. `finish` repeats runs that fail here."""
        mine = threading.Lock()
        self._helping.append(mine)
        with mine, suppress(IndexError):  # no run is left
            while True:
                number = self._todo.popleft()
                with suppress(Exception):
                    self._copy(*self._runs[number])
                    self._copied.add(number)

    def finish(self) -> None:
        """Returns once everything is copied; called once."""
        self.help()
        self._wait_for_helpers()
        for number, run in enumerate(self._runs):
            if number not in self._copied:  # the thread that began it failed, or was interrupted
                self._copy(*run)

    def drop(self) -> None:
        """Drops the runs that are left, and all references to memory."""
        self._todo.clear()
        self._runs = []

    def share(self, helpers: int) -> None:
        """Returns once this thread and so many others have copied everything."""
        try:
            for _ in range(helpers):
                with suppress(RuntimeError):  # no thread can be started
                    threading.Thread(target=self.help, name="ckpt-copy", daemon=True).start()
            self.finish()
        finally:
            self.drop()
            self._wait_for_helpers()

    def _wait_for_helpers(self) -> None:
        for helping in list(self._helping):
            with helping:
                pass

    def _copy(self, slot: Slot, lo: int, hi: int) -> None:
        copy_part(slot, lo, hi, slot.item.offset + lo, self._data, self._arena)


def copy_part(slot: Slot, lo: int, hi: int, at: int, data: memoryview, arena: Arena) -> None:
    """Copies bytes `[lo, hi)` of a slot to byte `at`; other threads can run meanwhile."""
    source, nbytes = slot.address() + lo, hi - lo
    if at + nbytes > arena.touched:
        arena.fill(at, source, nbytes)
    else:
        ctypes.memmove(address_of(data) + at, source, nbytes)


def copy_all(found: Sequence[Slot], data: memoryview, arena: Arena, workers: int) -> None:
    """Returns once this thread and `workers` - 1 others have copied all slots."""
    nbytes = sum(slot.item.nbytes for slot in found)
    end = max((slot.item.offset + slot.item.nbytes for slot in found), default=0)
    if workers > 1 and nbytes >= WORTH_THREADS_BYTES:
        Copies(found, data, arena).share(workers - 1)
    elif end > arena.touched:
        Copies(found, data, arena).finish()
    elif found:
        _copy_in_pieces(found, ctypes.addressof(ctypes.c_char.from_buffer(data)))


def _copy_in_pieces(found: Sequence[Slot], base: int) -> None:
    copy = _locked_memmove
    for (_, _, dtype, lo, hi, _, offset), leaf in found:
        itemsize = dtype.itemsize
        # The call has just checked that the tensor has all of its memory.
        source, target = leaf.local.data_ptr() + lo * itemsize, base + offset
        nbytes = (hi - lo) * itemsize
        for at in range(0, nbytes, PIECE_BYTES):
            copy(target + at, source + at, min(PIECE_BYTES, nbytes - at))


_holding: Staging | None = None
_hook: Any = None
"""The registration of the hook."""


def hold_steps(copying: Staging) -> None:
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


def runs_hooks(optimizer: Optimizer) -> bool:
    """Whether the hooks of an optimizer run before its step writes any tensor (rule 3)."""
    step: Any = vars(optimizer).get("step", type(optimizer).step)
    step = getattr(step, "__func__", step)
    if getattr(step, "__globals__", None) is vars(lr_scheduler):
        step = getattr(step, "__wrapped__", None)
    return getattr(step, "__code__", None) is _HOOKING


def optimizers(state: object, depth: int = 0) -> Iterator[Optimizer]:
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


def addresses_of_hooked(state: object) -> set[int]:
    """Returns the addresses of storages in a state that only steps with hooks write to."""
    addresses: set[int] = set()
    free: set[int] = set()
    for found in optimizers(state):
        (addresses if runs_hooks(found) else free).update(_storages(found))
    return addresses - free - {0}


def _storages(optimizer: Optimizer) -> Iterator[int]:
    """Yields the addresses of the storages of an optimizer's parameters and state."""
    for group in optimizer.param_groups:
        yield from map(storage_of, group["params"])
    for state in optimizer.state.values():
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
