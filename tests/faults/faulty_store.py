"""A store that fails: what each of its operations meets is on a schedule.

    with failing(seeded(7, 0.05)) as faults:
        ckpt.save(folder, state)
    assert faults.met

Inside `failing`, every store that the library opens in this process is wrapped. After a `CRASH`
nothing reaches the store any more, and nothing is cleaned up, as when the process is killed.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import ckpt.stores.store
from ckpt.stores.driver import StoreCapabilities, Unfinished
from ckpt.stores.store import Store
from formats.errors import CorruptError
from formats.storage import Buffer, FileWriter


class Fault(Enum):
    """What an operation meets; where it makes no sense, nothing."""

    DROP = "nothing is done, EIO"
    DROP_ANSWER = "it is done, and then EIO all the same"
    DENY = "nothing is done, EACCES"
    FULL = "half of what is to be written is, then ENOSPC"
    FLIP = "one bit of what is read or written is another, and nobody says so"
    CUT = "what is read ends early, and that is said; the end of what is written is lost"
    STALE = "a listing is as it was before"
    DELAY = "another thread comes first"
    CRASH = "the process is gone before"
    CRASH_AFTER = "the process is gone just after"


CRASHES = (Fault.CRASH, Fault.CRASH_AFTER)
HONEST = tuple(fault for fault in Fault if fault not in (*CRASHES, Fault.FLIP, Fault.CUT))
"""After which an operation that returns has done what it should."""


class Crash(BaseException):
    """Stands for the end of the process."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on one store."""

    number: int
    """From 0, over all stores."""
    method: str
    name: str


Schedule = Callable[[Operation], Fault | None]


def seeded(seed: int, probability: float, faults: Sequence[Fault] = HONEST) -> Schedule:
    """A fault for some of the operations, the same for a seed and a number."""

    def schedule(operation: Operation) -> Fault | None:
        chance = random.Random(f"{seed} {operation.number}")
        return chance.choice(faults) if chance.random() < probability else None

    return schedule


def at(faults: Mapping[int, Fault]) -> Schedule:
    """Faults for the operations of these numbers."""
    return lambda operation: faults.get(operation.number)


def dead_between(first: int, end: int) -> Schedule:
    """A store that is gone for the operations of these numbers."""
    return lambda operation: Fault.DROP if first <= operation.number < end else None


@dataclass
class Faults:
    """What is wrong with the stores of this process, and what was."""

    schedule: Schedule
    met: list[tuple[Operation, Fault]] = field(default_factory=list)
    operations: int = 0
    is_dead: bool = False
    lied: bool = False
    """Whether something that was written is not what was to be."""
    abandoned: list[object] = field(default_factory=list)
    """Kept, so that nothing is cleaned up."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, method: str, name: str) -> tuple[Operation, Fault | None]:
        """The fault of an operation that begins."""
        with self.lock:
            if self.is_dead:
                raise Crash
            operation = Operation(self.operations, method, name)
            self.operations += 1
        return operation, self.schedule(operation)

    def meet(self, operation: Operation, fault: Fault) -> None:
        """Write down a fault that had its effect."""
        with self.lock:
            self.met.append((operation, fault))
            self.is_dead = self.is_dead or fault in CRASHES

    def do(
        self,
        method: str,
        name: str,
        call: Callable[[], Any],
        lie: Callable[[], None] | None = None,
        stale: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The result of an operation, or of what it meets; `lie` is done in place of it."""
        operation, fault = self.next(method, name)
        if fault in (Fault.DROP, Fault.DENY, Fault.CRASH):
            self.meet(operation, fault)
            raise _error(fault, name)
        if fault is Fault.FLIP and lie is not None:
            self.meet(operation, fault)
            self.lied = True
            return lie()
        result = call()
        if fault in (Fault.DROP_ANSWER, Fault.CRASH_AFTER):
            self.meet(operation, fault)
            raise _error(fault, name)
        if fault is Fault.STALE and stale is not None:
            self.meet(operation, fault)
            return stale(result)
        if fault in (Fault.FLIP, Fault.CUT) and isinstance(result, bytes) and result:
            self.meet(operation, fault)
            if fault is Fault.CUT:
                raise CorruptError(f"{name}: the file ends early: it was truncated")
            return _flipped(result)
        return result


def _error(fault: Fault, name: str) -> BaseException:
    if fault in CRASHES:
        return Crash()
    number = errno.EACCES if fault is Fault.DENY else errno.EIO
    return OSError(number, os.strerror(number), name)


def _flipped(data: bytes) -> bytes:
    found = bytearray(data)
    found[len(found) // 2] ^= 4
    return bytes(found)


class FaultyStore:
    """A store behind faults."""

    def __init__(self, inner: Store, faults: Faults) -> None:
        self._inner, self._faults = inner, faults
        self.url, self.read_bytes = inner.url, inner.read_bytes
        self.options: Mapping[str, Any] = inner.options
        self.capabilities: StoreCapabilities = inner.capabilities

    def __str__(self) -> str:
        return str(self._inner)

    def __getattr__(self, name: str) -> Any:
        """What stores have beside operations."""
        return getattr(self._inner, name)

    def names(self) -> list[str]:
        return list(self._faults.do("names", "", self._inner.names, stale=_without_last))

    def entries(self, folder: str = "") -> list[str]:
        def listed() -> list[str]:
            return self._inner.entries(folder)

        return list(self._faults.do("names", folder, listed, stale=_without_last))

    def sizes(self) -> dict[str, int]:
        def stale(found: dict[str, int]) -> dict[str, int]:
            return {name: found[name] for name in _without_last(list(found))}

        return dict(self._faults.do("sizes", "", self._inner.sizes, stale=stale))

    def folders(self) -> list[str]:
        return list(self._faults.do("folders", "", self._inner.folders))

    def exists(self, name: str) -> bool:
        return bool(self._faults.do("exists", name, lambda: self._inner.exists(name)))

    def size(self, name: str) -> int:
        return int(self._faults.do("size", name, lambda: self._inner.size(name)))

    def modified(self, name: str) -> float:
        return float(self._faults.do("modified", name, lambda: self._inner.modified(name)))

    def arrivals(self) -> dict[str, float]:
        return dict(self._faults.do("arrivals", "", self._inner.arrivals))

    def list_unfinished(self) -> list[Unfinished]:
        return list(self._faults.do("list_unfinished", "", self._inner.list_unfinished))

    def unfinished_bytes(self, unfinished: Unfinished) -> int:
        return self._inner.unfinished_bytes(unfinished)

    def abort(self, unfinished: Unfinished) -> None:
        self._faults.do("abort", unfinished.name, lambda: self._inner.abort(unfinished))

    def read_whole(self, name: str, limit: int) -> bytes:
        return bytes(self._faults.do("read", name, lambda: self._inner.read_whole(name, limit)))

    def read_end(self, name: str, size: int, length: int) -> bytes:
        def read() -> bytes:
            return self._inner.read_end(name, size, length)

        return bytes(self._faults.do("read", name, read))

    def read(self, name: str, offset: int, length: int) -> bytes:
        return bytes(self._faults.do("read", name, lambda: self._inner.read(name, offset, length)))

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        length = sum(target.nbytes for target in targets)
        data = memoryview(self.read(name, offset, length))
        for target in targets:
            if target.nbytes:
                target.cast("B")[:] = data[: target.nbytes]
                data = data[target.nbytes :]

    @contextmanager
    def create(
        self, name: str, rewritable: bool = False, replace: bool = True
    ) -> Iterator[FileWriter]:
        context = self._inner.create(name, rewritable, replace)
        file = self._faults.do("create", name, context.__enter__)
        try:
            yield FaultyWriter(file, name, self._faults)
        except Crash:
            self._faults.abandoned.append(context)
            raise
        except BaseException:
            if not context.__exit__(*sys.exc_info()):
                raise
        else:
            self._finish(context, name)

    def _finish(self, context: AbstractContextManager[FileWriter], name: str) -> None:
        operation, fault = self._faults.next("finish", name)
        if fault in (Fault.DROP, Fault.DENY, Fault.FULL):
            self._faults.meet(operation, fault)
            error = OSError(errno.EIO, os.strerror(errno.EIO), name)
            if not context.__exit__(type(error), error, None):
                raise error
        if fault is Fault.CRASH:
            self._faults.meet(operation, fault)
            self._faults.abandoned.append(context)
            raise Crash
        context.__exit__(None, None, None)
        if fault in (Fault.CRASH_AFTER, Fault.DROP_ANSWER):
            self._faults.meet(operation, fault)
            raise _error(fault, name)

    def commit(
        self, name: str, data: bytes, replace: bool, check: Callable[[], object] | None = None
    ) -> None:
        def commit(data: bytes) -> None:
            self._inner.commit(name, data, replace, check)

        self._faults.do("commit", name, lambda: commit(data), lambda: commit(_flipped(data)))

    def delete(self, name: str) -> bool:
        return bool(self._faults.do("delete", name, lambda: self._inner.delete(name)))

    def remove_if_empty(self) -> None:
        self._faults.do("remove_if_empty", "", self._inner.remove_if_empty)

    def flush(self) -> None:
        self._faults.do("flush", "", self._inner.flush)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> FaultyStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FaultyWriter:
    """A file that is being written, behind faults."""

    def __init__(self, inner: FileWriter, name: str, faults: Faults) -> None:
        self._inner, self._name, self._faults = inner, name, faults

    def write(self, buffers: Iterable[Buffer]) -> None:
        data = b"".join(bytes(buffer) for buffer in buffers)
        self._write(data, lambda some: self._inner.write([some]))

    def rewrite_start(self, data: Buffer) -> None:
        self._write(bytes(data), self._inner.rewrite_start)

    def _write(self, data: bytes, call: Callable[[bytes], None]) -> None:
        operation, fault = self._faults.next("write", self._name)
        half = data[: len(data) // 2]
        if fault in (Fault.FULL, Fault.CRASH_AFTER):
            self._faults.meet(operation, fault)
            call(half)
            if fault is Fault.CRASH_AFTER:
                raise Crash
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name)
        if fault in (Fault.DROP, Fault.DENY, Fault.CRASH):
            self._faults.meet(operation, fault)
            raise _error(fault, self._name)
        if fault in (Fault.FLIP, Fault.CUT) and data:
            self._faults.meet(operation, fault)
            self._faults.lied = True
            data = half if fault is Fault.CUT else _flipped(data)
        call(data)


def _without_last(names: list[str]) -> list[str]:
    """A listing that has not yet heard of a file."""
    return names[:-1]


def import_all() -> None:
    """All modules that open stores are imported."""
    for module in iter_modules(ckpt.__path__, "ckpt."):
        if not module.name.endswith("__main__"):
            import_module(module.name)


@contextmanager
def failing(schedule: Schedule) -> Iterator[Faults]:
    """Every store that is opened in this process fails as the schedule says."""
    faults = Faults(schedule)
    import_all()  # what is imported inside would keep what it finds
    original = ckpt.stores.store.open_store

    def opened(*arguments: Any, **options: Any) -> FaultyStore:
        return FaultyStore(original(*arguments, **options), faults)

    users = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "ckpt" and vars(module).get("open_store") is original
    ]
    for module in users:
        module.open_store = opened  # type: ignore[attr-defined]
    try:
        yield faults
    finally:
        for module in users:
            module.open_store = original  # type: ignore[attr-defined]
