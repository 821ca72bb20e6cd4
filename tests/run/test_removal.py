"""What a run removes, against a model: random saves, failures, kills, metrics and policies.

A program is a policy and a list of actions. After each action the folder is compared with what it
was before:

1. Nothing is gone that the policy keeps, or that another checkpoint borrows from.
2. Nothing is gone unless a newer checkpoint was committed in this action.
3. After a save without a fault, everything is gone that need not be there.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.stores.store import open_store
from tests.faults.faulty_store import CRASHES, Crash, Fault, at, failing
from tests.stores.server import Server

FAULTS = (Fault.DROP, Fault.DROP_ANSWER, Fault.DENY, Fault.FULL, *CRASHES)
SOON, NEVER = 1e-9, 1e9
"""Seconds after which every checkpoint here is old, or none."""
_numbers = count()


@dataclass(frozen=True, slots=True)
class Save:
    """A save of the run, some steps after the last one."""

    gap: int
    loss: float | None
    fault: tuple[int, Fault] | None


@dataclass(frozen=True, slots=True)
class Borrow:
    """A save of another program, which borrows from the newest checkpoint."""

    loss: float | None


@dataclass(frozen=True, slots=True)
class Restart:
    """The run ends and is restored: to the newest checkpoint, or to an older one."""

    older: bool


losses = st.none() | st.sampled_from([0.1, 0.2, 0.5, math.nan, -math.inf])
faults = st.none() | st.tuples(st.integers(0, 60), st.sampled_from(FAULTS))
actions = st.one_of(
    st.builds(Save, st.integers(1, 3), losses, faults),
    st.builds(Save, st.integers(1, 3), losses, st.none()),
    st.builds(Borrow, losses),
    st.builds(Restart, st.booleans()),
)
numbers = st.none() | st.integers(1, 3)
policies = st.builds(
    lambda last, every, best, younger, mode: ckpt.Keep(
        last, every, best, None if best is None else "loss", mode, younger
    ),
    *(numbers, numbers, numbers),
    st.sampled_from([None, None, SOON, NEVER]),
    st.sampled_from(["min", "max"]),
)
programs = st.tuples(policies, st.lists(actions, min_size=1, max_size=10))


@dataclass(frozen=True, slots=True)
class There:
    """A checkpoint that is there: one that replaces it has another number."""

    number: int
    step: int
    loss: float | None
    base: int | None = None
    """The number of the checkpoint that it borrows from."""


def kept(there: Mapping[int, There], keep: ckpt.Keep) -> set[int]:
    """The numbers of the checkpoints that have to stay. A higher number was saved later."""
    if keep.keeps_all:
        return set(there)
    newest = sorted(there, reverse=True)
    stay = set(newest[: keep.last or 1])
    stay |= {one for one in there if keep.every and there[one].step % keep.every == 0}
    stay |= set(there) if keep.younger_than == NEVER else set()
    sign = 1 if keep.mode == "min" else -1
    known = [one for one in newest if (loss := there[one].loss) is not None and loss == loss]
    stay |= set(sorted(known, key=lambda one: sign * (there[one].loss or 0.0))[: keep.best or 0])
    return closed(there, stay)


def closed(there: Mapping[int, There], stay: set[int]) -> set[int]:
    """These checkpoints, and those that they borrow from."""
    bases = {there[one].base for one in stay}
    return stay | {base for base in bases if base is not None and base in there}


@dataclass
class Model:
    """One program on one folder."""

    url: str
    options: Mapping[str, Any]
    keep: ckpt.Keep
    saved: dict[int, There] = field(default_factory=dict)
    """All checkpoints that were ever begun, by their numbers."""
    there: dict[int, There] = field(default_factory=dict)
    step: int = 0
    run: ckpt.Checkpointer = field(init=False)

    def __post_init__(self) -> None:
        self._begin(None)

    def do(self, action: Save | Borrow | Restart) -> None:
        """Do it, and compare the folder with the one before."""
        if isinstance(action, Restart):
            self._restart(action.older)
            self._compare(None, is_faultless=False)
        elif isinstance(action, Borrow):
            if self.there:
                self._compare(self._borrow(action.loss), is_faultless=False)
        else:
            self._save(action)

    def _begin(self, older: int | None) -> None:
        self.run = ckpt.Checkpointer(
            self.url,
            keep=self.keep,
            blocking=True,
            signals=(),
            every_steps=1,
            storage_options=self.options,
        )
        found = self.run.restore({"w": None, "number": 0}, older)
        wanted = self.there[max(self.there)].step if self.there else None
        assert found == (wanted if older is None else older)
        self.step = found or 0

    def _restart(self, older: bool) -> None:
        self.run.close()
        self._begin(self.there[min(self.there)].step if older and self.there else None)

    def _new(self, loss: float | None, base: int | None = None) -> There:
        one = There(next(_numbers), self.step, loss, base)
        self.saved[one.number] = one
        return one

    def _save(self, action: Save) -> None:
        self.step += action.gap
        while self._is_in_use(self.step):  # the save would be refused
            self.step += 1
        new = self._new(action.loss)
        state = {"w": torch.full((40,), float(new.number)), "number": new.number}
        schedule = at({} if action.fault is None else {action.fault[0]: action.fault[1]})
        with failing(schedule) as found:
            try:
                self.run.save(self.step, state, _metrics(new))
                self.run.wait_until_finished()
            except (Crash, ckpt.CkptError, OSError):
                assert found.met
        self._compare(new, is_faultless=not found.met)
        if found.is_dead:
            self._begin(None)

    def _is_in_use(self, step: int) -> bool:
        bases = {one.base for one in self.there.values()}
        return any(one.step == step and one.number in bases for one in self.there.values())

    def _borrow(self, loss: float | None) -> There:
        self.step = max(self.step, *(one.step for one in self.there.values())) + 1
        newest = self.there[max(self.there)]
        new = self._new(loss, newest.number if newest.base is None else newest.base)
        bulk = torch.full((40,), float(newest.number if newest.base is None else newest.base))
        ckpt.save(
            f"{self.url}/step-{self.step}",
            {"w": bulk, "number": new.number},
            base=f"{self.url}/step-{newest.step}",
            overwrite=True,
            metadata=_metadata(new),
            storage_options=self.options,
        )
        return new

    def _compare(self, new: There | None, *, is_faultless: bool) -> None:
        before, found = dict(self.there), self._look()
        if new is not None and new.number in found:
            before[new.number] = new
            before = {
                n: one for n, one in before.items() if n == new.number or one.step != new.step
            }
        gone = before.keys() - found.keys()
        stays = kept(before, self.keep)
        assert found.keys() <= before.keys()
        assert not gone & closed(before, set(found)), "somebody borrows from it"
        assert not gone & stays
        assert not gone or (new is not None and new.number in found)
        if is_faultless and new is not None:
            assert new.number in found
            assert found.keys() == stays
        self.there = found

    def _look(self) -> dict[int, There]:
        """The checkpoints that are there, by a look that shares no code with retention."""
        found = {}
        with open_store(self.url, self.options) as store:
            for name in store.folders():
                if store.exists(f"{name}/manifest.json"):
                    state: Any = ckpt.read(f"{self.url}/{name}", storage_options=self.options)
                    found[state["number"]] = name
        return {number: self.saved[number] for number in found}


def _metrics(one: There) -> dict[str, float]:
    return {} if one.loss is None else {"loss": one.loss}


def _metadata(one: There) -> dict[str, str]:
    """What a run writes into a manifest."""
    metrics = json.dumps(_metrics(one))
    return {"step": str(one.step), "metrics": metrics, "began": f"{time.time():.6f}"}


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is told of saves that fail and of threads that are killed."""
    before = threading.excepthook
    threading.excepthook = lambda told: None if told.exc_type is Crash else before(told)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ckpt.SaveFailedWarning)
            yield
    finally:
        threading.excepthook = before


def check(url: str, options: Mapping[str, Any], program: tuple[ckpt.Keep, list[Any]]) -> None:
    keep, todo = program
    with quiet():
        model = Model(url, options, keep)
        for action in todo:
            model.do(action)
        model.run.close()


SLOW = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
QUICK = settings(SLOW, max_examples=25)


def on_disk(program: Any) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        check(f"{folder}/run", {}, program)


@pytest.mark.thorough
@QUICK
@given(programs)
def test_what_must_stay_stays_and_what_need_not_goes(program: Any) -> None:
    on_disk(program)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@SLOW
@given(programs)
def test_a_thousand_programs_on_a_disk(program: Any) -> None:
    on_disk(program)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_programs_on_s3(servers: Callable[[str], Server]) -> None:
    server = servers("moto")
    runs = count()

    @SLOW
    @given(programs)
    def on_server(program: Any) -> None:
        check(server.url(f"removal/{next(runs)}"), server.options, program)

    on_server()
