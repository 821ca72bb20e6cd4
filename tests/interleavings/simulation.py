"""Processes of one machine or of several, as actors in one process, over a store in memory.

The actors run the product as it is. Inside `simulation` this process gives each actor what a
process has for itself: a clock, random names, a queue of background saves with its arena. A thread
of an actor is refused, as by a system that has no more of them, so that the product works in the
thread that it has; only the removals of a run are a second actor of the same process.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import ckpt.run.exchange
import ckpt.saving.background
import ckpt.stores.store
from ckpt.opening import in_flight
from ckpt.run.owner import Ownership
from ckpt.saving.writers import ArenaWriter
from ckpt.stores.object_store import ObjectStore
from ckpt.stores.retries import RetryPolicy
from ckpt.transfer import facts
from tests.interleavings.bucket import SCHEME, Bucket, Conditions
from tests.interleavings.disk import ROOT, Disk, system_calls
from tests.interleavings.scheduler import Actor, Call, Policy, Scheduler, Threads, current

BEGAN = 1.8e9
"""The time of all clocks at the start, in seconds since 1970."""
Store = Conditions | str
"""DISK, or the conditions of a bucket."""
DISK = "disk"
CLOCK_SECONDS = 600.0
"""By so much the clock of a process jumps each time that it is read."""
_arena_writers: dict[int, ArenaWriter] = {}


@dataclass(eq=False)
class Process:
    """What one process has for itself."""

    name: str
    number: int
    clock_seconds: float
    """Its clock jumps by up to so much, forward and back, each time that it is read."""
    queue: in_flight.SaveQueue = field(default_factory=in_flight.SaveQueue)
    warned: list[Warning] = field(default_factory=list)
    looked: tuple[int, int] = (0, 0)
    """The numbers of calls, of all, at the begin and the end of its last look for another owner."""
    listed: tuple[int, int] = (0, 0)
    """The same, of its last listing of all files."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.name)


class World:
    """A store with a folder of a run, the processes that use it, and one run of them."""

    def __init__(self, store: Store, seed: int, watch: Callable[[str, str], None]) -> None:
        """`watch` hears of each change: "makes" or "removes", and the path below the store."""
        self.scheduler: Scheduler | None = None
        self.now = 0.0
        clock = lambda: BEGAN + self.now  # noqa: E731

        def changed(verb: str, path: str) -> None:
            watch(verb, _below(path))

        self._processes: dict[str, Process] = {}
        self.process = self.process_of("setup")
        """The process of calls before the run."""
        self.bucket: Bucket | None = None
        self.disk: Disk | None = None
        if isinstance(store, Conditions):
            self.bucket = Bucket(lambda: self.scheduler, changed, clock, lambda: here().name, store)
        else:
            self.disk = Disk(self._before, changed, clock, seed)
        root = ROOT if self.bucket is None else f"{SCHEME}://bucket"
        self.run = f"{root}/run"
        """The path or URL of the run."""
        self.root = root

    def files(self) -> Mapping[str, bytes]:
        """The files by path below the store."""
        files = self.bucket.files() if self.disk is None else self.disk.files()  # type: ignore[union-attr]
        return {_below(path): files[path] for path in files}

    def warned(self) -> list[Warning]:
        """The warnings of all processes."""
        return [one for process in self._processes.values() for one in process.warned]

    def process_of(self, name: str) -> Process:
        """The process of an actor."""
        number = len(self._processes)
        return self._processes.setdefault(name, Process(name, number, CLOCK_SECONDS))

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """Calls inside the block, before the run, are those of the process with this name."""
        self.process, before = self.process_of(name), self.process
        try:
            yield
        finally:
            self.process = before

    def start(self, policy: Policy, threads: Threads, is_late: bool) -> Scheduler:
        """From now on all calls are those of actors; with `is_late`, some come late to a bucket."""
        if self.bucket is not None:
            self.bucket.is_late = is_late
        self.scheduler = Scheduler(policy, threads)
        facts.forget()
        return self.scheduler

    def fail(self, said: str) -> None:
        """Ends the run: a state is wrong."""
        if self.scheduler is None or current() is None:
            raise AssertionError(said)
        self.scheduler.fail(AssertionError(said))

    def _before(self, call: Call) -> None:
        self.now += 0.001
        if self.scheduler is not None and current() is not None:
            self.scheduler.before(call)


def _below(path: str) -> str:
    return path.removeprefix(f"{ROOT}/").removeprefix("bucket/")


_world: World | None = None


def here() -> Process:
    """The process in which this code runs."""
    actor = current()
    if actor is not None and actor.process is not None:
        return actor.process  # type: ignore[no-any-return]
    assert _world is not None
    return _world.process


def _inside() -> World | None:
    """The world of this code; None in a thread of another test, or of a server beside it."""
    is_ours = current() is not None or threading.get_ident() == threading.main_thread().ident
    return _world if is_ours else None


@contextmanager
def inside(world: World) -> Iterator[None]:
    """Calls of the product in this block concern this world."""
    global _world
    _world = world
    facts.forget()  # the steps of a run before, which had the same URL
    try:
        yield
    finally:
        _world = None


class _QueueOfProcess:
    """The queue of background saves that each process has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(here().queue, name)


def _arena_writer() -> ArenaWriter:
    number = here().number
    if number not in _arena_writers:
        _arena_writers[number] = ArenaWriter()
    return _arena_writers[number]


@contextmanager
def simulation() -> Iterator[Threads]:
    """Inside the block, code of actors, and of tests inside a world, lives in the simulation."""
    kept: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    real_time, real_gmtime, real_sleep = time.time, time.gmtime, time.sleep
    real_start, real_join = threading.Thread.start, threading.Thread.join
    real_submit, real_bucket = ThreadPoolExecutor.submit, ckpt.stores.store._bucket
    real_look, real_below = Ownership.look, ObjectStore.below
    real_hex, real_bits = secrets.token_hex, secrets.randbits

    def now() -> float:
        world = _inside()
        if world is None:
            return real_time()
        world.now += 0.001
        process = here()
        wrong = process.clock_seconds
        return BEGAN + world.now + process.chance.uniform(-wrong, wrong)

    def steady(real: Callable[..., float]) -> Callable[..., float]:
        """A clock for durations: those of the machine would make two equal runs differ."""

        def seconds(*clock: int) -> float:
            world = _inside()
            if world is None:
                return real(*clock)
            world.now += 1e-6
            return world.now

        return seconds

    def gmtime(seconds: float | None = None) -> time.struct_time:
        return real_gmtime(now() if seconds is None else seconds)

    def sleep(seconds: float) -> None:
        world = _inside()
        if world is None:
            real_sleep(seconds)
        elif world.scheduler is not None and current() is not None:
            world.now += seconds
            world.scheduler.before(Call("sleeps"))

    def start(thread: threading.Thread) -> None:
        actor, world = current(), _inside()
        if world is None or thread.name == "actor":
            real_start(thread)
        elif thread.name != "ckpt-keep":
            raise RuntimeError("can't start new thread")
        elif actor is None or world.scheduler is None:
            removals[thread] = None
            thread.run()
        else:
            name = f"{actor.name}'s removals"
            removals[thread] = world.scheduler.add(name, thread.run, actor.process)

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread not in removals:
            real_join(thread, timeout)
        elif (actor := removals[thread]) is not None:
            assert _world is not None
            assert _world.scheduler is not None
            _world.scheduler.join(actor)

    def submit(self: ThreadPoolExecutor, function: Any, /, *args: Any, **options: Any) -> Any:
        if _inside() is None:
            return real_submit(self, function, *args, **options)
        raise RuntimeError("can't start new thread")

    def bucket(url: str, options: dict[str, Any]) -> Any:
        if _world is None or not url.startswith(f"{SCHEME}://"):
            return real_bucket(url, options)
        assert _world.bucket is not None
        root = url.removeprefix(f"{SCHEME}://").rstrip("/")
        patient = RetryPolicy(deadline_seconds=1e9, sleep=lambda _: None)
        return ObjectStore(url, root, _world.bucket, options, patient)  # type: ignore[arg-type]

    def token_hex(nbytes: int | None = None) -> str:
        bits = 8 * (nbytes or 32)
        return real_hex(nbytes) if _inside() is None else f"{randbits(bits):0{bits // 4}x}"

    def randbits(bits: int) -> int:
        return real_bits(bits) if _inside() is None else here().chance.getrandbits(bits)

    def shows(message: Warning | str, *_: Any, **__: Any) -> None:
        if isinstance(message, Warning) and _world is not None:
            here().warned.append(message)

    def look(owner: Ownership, *how: Any) -> Any:
        scheduler = None if _world is None else _world.scheduler
        if scheduler is None:
            return real_look(owner, *how)
        if how and how[0] is not None:  # the listing of all files has shown the names
            here().looked = here().listed
            return real_look(owner, *how)
        began = len(scheduler.trace)
        names = real_look(owner, *how)
        here().looked = began, len(scheduler.trace)
        return names

    def below(store: ObjectStore) -> Any:
        scheduler = None if _world is None else _world.scheduler
        began = 0 if scheduler is None else len(scheduler.trace)
        found = real_below(store)
        if scheduler is not None:
            here().listed = began, len(scheduler.trace)
        return found

    queue, removals = _QueueOfProcess(), WeakKeyDictionary[threading.Thread, Actor | None]()
    for name, call in system_calls(lambda: None if _world is None else _world.disk).items():
        put(os, name, call)
    put(time, "time", now)
    put(time, "gmtime", gmtime)
    put(time, "sleep", sleep)
    for clock in ("monotonic", "perf_counter", "clock_gettime"):
        put(time, clock, steady(getattr(time, clock)))
    put(secrets, "token_hex", token_hex)
    put(secrets, "randbits", randbits)
    put(threading.Thread, "start", start)
    put(threading.Thread, "join", join)
    put(ThreadPoolExecutor, "submit", submit)
    put(ckpt.stores.store, "_bucket", bucket)
    put(ckpt.saving.background, "arena_writer", _arena_writer)
    put(ckpt.saving.background, "place_elsewhere", lambda *_: None)
    put(ckpt.saving.background.Folder.__init__, "__defaults__", (queue, None))
    put(in_flight, "saves", queue)
    put(Ownership, "look", look)
    put(ObjectStore, "below", below)
    put(ckpt.run.owner, "git_revision", lambda *_: "")
    gc.disable()  # a cycle that is collected in the middle of a run costs more than the run
    try:
        with warnings.catch_warnings(), Threads() as threads:
            warnings.simplefilter("always")
            put(warnings, "showwarning", shows)
            yield threads
    finally:
        for owner, name, value in reversed(kept):
            setattr(owner, name, value)
        gc.enable()
