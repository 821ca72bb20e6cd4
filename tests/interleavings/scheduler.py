"""Runs programs in turns: one moves at a time, and a policy decides which one before each call.

A *call* is one access of an actor to what all actors share: a system call on a disk, a request to a
bucket. An actor is a thread that waits before each of its calls until the policy picks it; all that
it does between two calls touches nothing shared. So a *schedule*, the list of picks, decides a run
completely, and the same schedule gives the same run.

- `Randomly` picks by a seed. It may also kill actors, and lose answers of requests.
- `Replay` repeats a schedule that a failure has printed.
- `Exhaustive` has one run for each order of *dependent* calls: two calls on one key of which one
  writes. Runs that differ only in the order of independent calls end alike. This is dynamic
  partial-order reduction with sleep sets (Flanagan and Godefroid, POPL 2005).
"""

from __future__ import annotations

import random
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

STUCK_SECONDS = 60.0
"""A run takes milliseconds: after so long an actor waits for one that does not move."""
MOST_CALLS = 5_000


class Ended(BaseException):
    """Ends an actor whose process was killed, or whose run is not needed."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that an actor is about to make."""

    name: str
    place: str = ""
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()

    def depends_on(self, other: Call) -> bool:
        """Whether the order of both calls makes a difference."""
        return not (
            self.writes.isdisjoint(other.writes)
            and self.writes.isdisjoint(other.reads)
            and self.reads.isdisjoint(other.writes)
        )


BEGIN = Call("begins")


class Actor:
    """A program with its place in the schedule. `process` is what it shares with no other one."""

    def __init__(self, name: str, index: int, process: Any) -> None:
        self.name, self.index, self.process = name, index, process
        self.pending = BEGIN
        self.waits_for: Actor | None = None
        self.is_over = self.is_dead = False
        self.is_request = False
        """Whether this is a request in the network, whose errors nobody hears."""
        self.result: Any = None
        self.error: Exception | None = None
        self.turn = threading.Lock()
        self.turn.acquire()

    @property
    def is_ready(self) -> bool:
        return not self.is_over and (self.waits_for is None or self.waits_for.is_over)


class Policy(Protocol):
    """Decides what happens next."""

    def pick(self, ready: Sequence[Actor], last: Actor) -> str:
        """The name of the actor that moves; after "kill ", its process ends before its call."""
        ...

    def choose(self, outcomes: Sequence[str]) -> str:
        """One of the outcomes that the environment may have here; the first is the usual one."""
        ...


_current = threading.local()


def current() -> Actor | None:
    """The actor whose thread this is, while it runs; None for any other thread."""
    return getattr(_current, "actor", None)


class Scheduler:
    """One run. `threads` makes threads, which runs after it use again."""

    def __init__(self, policy: Policy, threads: Threads) -> None:
        self._policy, self._threads = policy, threads
        self.actors: list[Actor] = []
        self.trace: list[tuple[Actor, Call]] = []
        """The calls that were made."""
        self.decisions: list[str] = []
        """The schedule: what the policy has answered."""
        self.failure: BaseException | None = None
        """What ended the run before its end: a wrong state that a check has found."""
        self.is_cut = False
        """Whether the policy has ended the run, because another one has this order."""
        self._is_ending = False
        self._over = threading.Semaphore(0)

    def add(self, name: str, program: Callable[[], object], process: Any) -> Actor:
        """An actor that begins when the policy picks it; another actor may add one."""
        actor = Actor(name, len(self.actors), process)
        self.actors.append(actor)
        self._threads.run(lambda: self._act(actor, program))
        return actor

    def run(self) -> None:
        """Returns when all actors have ended. Raises the failure of a check."""
        self._hand_over(None)
        if not self._over.acquire(timeout=STUCK_SECONDS):
            stacks = "".join(
                f"\nthread {number}:\n{''.join(traceback.format_stack(frame))}"
                for number, frame in sys._current_frames().items()
            )
            said = f"an actor waits for one that does not move: {self.lines()[-5:]}"
            raise AssertionError(said + stacks)
        if self.failure is not None:
            raise self.failure

    def before(self, call: Call) -> None:
        """Called by an actor before each call; returns when it may make the call."""
        actor = _current.actor
        self._stop_if_ended(actor)
        actor.pending = call
        self._hand_over(actor)
        self._stop_if_ended(actor)
        self.trace.append((actor, call))
        if len(self.trace) > MOST_CALLS:
            self.fail(AssertionError(f"more than {MOST_CALLS} calls: does a retry have an end?"))

    def join(self, other: Actor) -> None:
        """Called by an actor; returns when the other one is over."""
        _current.actor.waits_for = other
        try:
            self.before(Call("waits for", other.name))
        finally:
            _current.actor.waits_for = None

    def choose(self, *outcomes: str) -> str:
        """What the environment does at this call."""
        if self._is_ending:
            return outcomes[0]
        chosen = self._policy.choose(outcomes)
        self.decisions.append(chosen)
        return chosen

    def fail(self, failure: BaseException) -> None:
        """Ends the run with a failure; called by an actor."""
        self.failure = self.failure or failure
        self._is_ending = True
        raise Ended

    def lines(self) -> list[str]:
        """The calls as text, one line each."""
        wide = max((len(actor.name) for actor in self.actors), default=0)
        return [
            f"{at:4} {actor.name:{wide}} {call.name} {call.place}"
            for at, (actor, call) in enumerate(self.trace, 1)
        ]

    def _act(self, actor: Actor, program: Callable[[], object]) -> None:
        actor.turn.acquire()
        _current.actor = actor
        try:
            if not (self._is_ending or actor.is_dead):
                actor.result = program()
        except Ended:
            pass
        except Exception as error:
            actor.error = error
        except BaseException as error:
            self.failure, self._is_ending = self.failure or error, True
        _current.actor = None
        actor.is_over = True
        self._hand_over(actor)

    def _hand_over(self, actor: Actor | None) -> None:
        """Lets the next actor move; returns when it is this one's turn again."""
        chosen = self._next(actor)
        if chosen is None:
            self._over.release()
        elif chosen is not actor:
            chosen.turn.release()
            if actor is not None and not actor.is_over:
                actor.turn.acquire()

    def _next(self, actor: Actor | None) -> Actor | None:
        ready = [one for one in self.actors if one.is_ready]
        if not ready:
            return None
        if self._is_ending:
            return next((one for one in self.actors if not one.is_over), None)
        try:
            picked = self._policy.pick(ready, actor or ready[0])
            name = picked.removeprefix("kill ")
            chosen = {one.name: one for one in ready}[name]
        except BaseException as error:
            if not isinstance(error, Ended):  # nobody would hear of it in the thread of an actor
                self.failure = self.failure or error
            self.is_cut = self._is_ending = True
            return self._next(actor)
        self.decisions.append(picked)
        if name != picked:
            for one in self.actors:
                one.is_dead = one.is_dead or one.process is chosen.process
        return chosen

    def _stop_if_ended(self, actor: Actor) -> None:
        if self._is_ending or actor.is_dead:
            raise Ended


class Threads:
    """Threads that run one actor after the other; use it in a `with` statement."""

    def __init__(self) -> None:
        self._free: list[_Worker] = []
        self._all: list[_Worker] = []

    def run(self, work: Callable[[], None]) -> None:
        """Runs `work` in a thread."""
        if not self._free:
            self._all.append(_Worker(self._free))
            self._free.append(self._all[-1])
        self._free.pop().do(work)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._all:
            worker.do(None)
            worker.thread.join(STUCK_SECONDS)


class _Worker:
    def __init__(self, free: list[_Worker]) -> None:
        self._free, self._work = free, None
        self._has_work = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name="actor", daemon=True)
        self.thread.start()

    def do(self, work: Callable[[], None] | None) -> None:
        self._work = work  # type: ignore[assignment]
        self._has_work.release()

    def _run(self) -> None:
        while True:
            self._has_work.acquire()
            work: Callable[[], None] | None = self._work
            if work is None:
                return
            try:
                work()
            except BaseException:  # a mistake in the scheduler: the run waits for its time-out
                traceback.print_exc()
            self._free.append(self)


# Schedules as text.


def written(decisions: Sequence[str]) -> str:
    """A schedule as one short text.

    >>> written(["saver", "saver", "reader", "kill saver"])
    'saver*2, reader, kill saver'
    """
    runs = [(label, len([*same])) for label, same in groupby(decisions)]
    return ", ".join(label if count == 1 else f"{label}*{count}" for label, count in runs)


def read(text: str) -> list[str]:
    """The schedule that `written` made into text.

    >>> read("saver*2, reader")
    ['saver', 'saver', 'reader']
    """
    decisions: list[str] = []
    for part in filter(None, text.split(", ")):
        found = re.fullmatch(r"(.+?)(?:\*(\d+))?", part)
        assert found is not None
        decisions += [found[1]] * int(found[2] or 1)
    return decisions


# Policies.


class Replay:
    """Repeats a schedule. Where it does not fit any more, the last actor goes on."""

    def __init__(self, decisions: Sequence[str]) -> None:
        self._left = list(reversed(decisions))

    def pick(self, ready: Sequence[Actor], last: Actor) -> str:
        while self._left:
            label = self._left.pop()
            if label.removeprefix("kill ") in [one.name for one in ready]:
                return label
        return last.name if last in ready else ready[0].name

    def choose(self, outcomes: Sequence[str]) -> str:
        if self._left and self._left[-1] in outcomes:
            return self._left.pop()
        return outcomes[0]


class Randomly:
    """Picks by a seed: some seeds switch at each second call, others a few times in a run."""

    def __init__(self, seed: object, mortal: Sequence[str] = (), losses: int = 0) -> None:
        """`mortal` are the actors of which one may be killed; `losses` the most lost answers."""
        self._chance = random.Random(str(seed))
        self._switches = self._chance.choice((0.5, 0.2, 0.05))
        self._mortal = list(mortal) if self._chance.random() < 0.5 else []
        self._losses = losses if self._chance.random() < 0.8 else 0

    def pick(self, ready: Sequence[Actor], last: Actor) -> str:
        chance = self._chance
        if last not in ready or chance.random() < self._switches:
            last = chance.choice(ready)
        if last.name in self._mortal and last.pending is not BEGIN and chance.random() < 0.02:
            self._mortal = []
            return f"kill {last.name}"
        return last.name

    def choose(self, outcomes: Sequence[str]) -> str:
        if self._losses and self._chance.random() < 0.15:
            self._losses -= 1
            return self._chance.choice(outcomes[1:])
        return outcomes[0]


@dataclass
class _Node:
    """The state before a call: the calls that could be made, and those that are to be tried."""

    ready: Mapping[str, Call]
    sleeping: Mapping[str, Call]
    """Actors whose next call was tried before in an equal state."""
    chosen: str
    to_try: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)


class Exhaustive:
    """The policies of all runs, by `runs`; each run's trace leads to further ones."""

    def __init__(self) -> None:
        self._path: list[_Node] = []
        self._depth = 0
        self.runs = 0

    def policies(self) -> Iterator[Exhaustive]:
        """Yields a policy for each run, until all orders were tried."""
        while True:
            self._depth = 0
            self.runs += 1
            yield self
            self._note_races()
            while self._path:
                node = self._path[-1]
                node.tried.add(node.chosen)
                left = node.to_try - node.tried - node.sleeping.keys()
                if left:
                    node.chosen = min(left)
                    break
                self._path.pop()
            if not self._path:
                return

    def pick(self, ready: Sequence[Actor], last: Actor) -> str:
        at, self._depth = self._depth, self._depth + 1
        if at == len(self._path):
            calls = {one.name: one.pending for one in ready}
            sleeping = self._sleeping_below() if at else {}
            awake = [name for name in calls if name not in sleeping]
            if not awake:  # another run has, or will have, this order
                raise Ended
            chosen = last.name if last.name in awake else awake[0]
            self._path.append(_Node(calls, sleeping, chosen, {chosen}))
        elif (calls := {one.name: one.pending for one in ready}) != self._path[at].ready:
            raise AssertionError(
                f"at call {at + 1} the actors are about to make {calls}, and the run before with "
                f"the same schedule {self._path[at].ready}: something survives a run"
            )
        return self._path[at].chosen

    def choose(self, outcomes: Sequence[str]) -> str:
        return outcomes[0]

    def _sleeping_below(self) -> dict[str, Call]:
        node = self._path[-1]
        made = node.ready[node.chosen]
        asleep = {**node.sleeping, **{name: node.ready[name] for name in node.tried}}
        return {
            name: call
            for name, call in asleep.items()
            if name != node.chosen and not call.depends_on(made)
        }

    def _note_races(self) -> None:
        """Adds, for each two dependent calls that nothing orders, the second in place of the first.

        A call comes *after* another if it is the same actor's, or depends on it, directly or over
        calls between. `before[j]` has, by actor, how many of its calls come before call j.
        """
        calls = [(node.chosen, node.ready[node.chosen]) for node in self._path]
        before: list[dict[str, int]] = []
        last: dict[str, int] = {}
        made: dict[str, int] = {}
        numbers = []
        for j, (name, call) in enumerate(calls):
            known = dict(before[last[name]]) if name in last else {}
            known[name] = made.get(name, 0)
            for i in range(j - 1, -1, -1):
                other, earlier = calls[i]
                if numbers[i] <= known.get(other, 0) or not call.depends_on(earlier):
                    continue
                node = self._path[i]
                node.to_try |= {name} if name in node.ready else set(node.ready)
                for each, count in before[i].items():
                    known[each] = max(known.get(each, 0), count)
                known[other] = numbers[i]
            made[name] = known[name] = made.get(name, 0) + 1
            numbers.append(made[name])
            before.append(known)
            last[name] = j
