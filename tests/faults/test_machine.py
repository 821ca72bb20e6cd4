"""Saves, loads, deletes, collections and crashes, on stores that fail: played against a model.

The model knows which checkpoints must exist and of which step each is. After an operation that
raised, or a crash, a checkpoint may be the one before or the one that was to be, whole, and what is
found there is what must exist from then on. What a store wrote otherwise than it was told to, and
said nothing, must be found: reading gives the right bits or an error, and `verify` says so.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import ckpt
from ckpt.transfer import commit
from formats.errors import FormatError
from tests.faults.faulty_store import CRASHES, Crash, Fault, at, dead_between, failing

NAMES = ("a", "b", "c")
Schedules = st.one_of(
    st.just(at({})),
    st.dictionaries(st.integers(0, 40), st.sampled_from(Fault), max_size=2).map(at),
    st.tuples(st.integers(0, 20), st.integers(1, 40)).map(
        lambda t: dead_between(t[0], t[0] + t[1])
    ),
)


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((60,), float(step)), "frozen": torch.arange(900.0), "step": step}


def is_of(found: Any, step: int) -> bool:
    wanted = state(step)
    same = all(torch.equal(found[name], wanted[name]) for name in ("w", "frozen"))
    return same and found["step"] == step


class Checkpoints(RuleBasedStateMachine):
    """The folder, and what must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Path(tempfile.mkdtemp(prefix="ckpt-machine-"))
        self.steps: dict[str, int] = {}
        """What must exist."""
        self.doubtful: set[str] = set()
        """What a store may have lied about, and what may have borrowed from it."""
        self.bases: dict[str, set[str]] = {}
        self.last = 0

    def teardown(self) -> None:
        shutil.rmtree(self.run)

    # What is played.

    @rule(
        name=st.sampled_from(NAMES),
        base=st.sampled_from([None, *NAMES]),
        compress=st.sampled_from([False, True, "delta"]),
        blocking=st.booleans(),
        schedule=Schedules,
    )
    def save(
        self, name: str, base: str | None, compress: Any, blocking: bool, schedule: Any
    ) -> None:
        if base == name or base not in self.steps:
            base = None
        if compress == "delta" and base is None:
            compress = True
        self.last += 1

        def save() -> None:
            handle = ckpt.save(
                self.run / name,
                state(self.last),
                overwrite=name in self.steps,
                base=None if base is None else self.run / base,
                compress=compress,
                blocking=blocking,
            )
            if handle is not None:
                handle.wait()

        lied = self._play(save, schedule, {name: self.last}, can_crash=blocking)
        if self.steps.get(name) == self.last:
            self.doubtful.discard(name)
            if lied or base in self.doubtful:
                self.doubtful.add(name)

    @rule(name=st.sampled_from(NAMES), to=st.sampled_from(NAMES), schedule=Schedules)
    def convert(self, name: str, to: str, schedule: Any) -> None:
        if name not in self.steps or name == to:
            return

        def convert() -> None:
            ckpt.convert(self.run / name, self.run / to, overwrite=to in self.steps)

        before = self.steps.get(to)
        lied = self._play(convert, schedule, {to: self.steps[name]})
        if lied and self.steps.get(to) is not None:
            self.doubtful.add(to)
        elif self.steps.get(to) != before:
            self.doubtful.discard(to)

    @rule(name=st.sampled_from(NAMES), schedule=Schedules)
    def delete(self, name: str, schedule: Any) -> None:
        self._play(lambda: ckpt.delete(self.run / name), schedule, {name: None})

    @rule(name=st.sampled_from(NAMES), schedule=Schedules)
    def load(self, name: str, schedule: Any) -> None:
        target = state(0)

        def load() -> None:
            found = ckpt.load(self.run / name, target)
            assert is_of(found, self.steps[name])

        self._play(load, schedule, {})

    @rule(name=st.sampled_from(NAMES), schedule=Schedules)
    def verify(self, name: str, schedule: Any) -> None:
        def verify() -> None:
            report = ckpt.verify(self.run / name)
            assert name in self.steps
            if report.sound and name not in self.doubtful:
                assert is_of(ckpt.read(self.run / name), self.steps[name])

        self._play(verify, schedule, {})

    @rule(schedule=Schedules)
    def gc(self, schedule: Any) -> None:
        self._play(lambda: ckpt.gc(self.run, older_than=0, delete=True), schedule, {})

    # What must hold.

    @invariant()
    def all_that_must_exist_is_there_to_the_bit(self) -> None:
        for name in NAMES:
            self._look(name, {self.steps.get(name)})

    @invariant()
    def what_is_left_over_is_what_is_part_of_nothing(self) -> None:
        for one in ckpt.gc(self.run, older_than=0):
            assert one.is_old

    def _play(
        self, action: Any, schedule: Any, wanted: dict[str, int | None], can_crash: bool = True
    ) -> bool:
        """Do it; what it was to do may have come about. True when a store has lied."""
        met: BaseException | None = None
        with failing(lambda op: _allowed(schedule(op), can_crash)) as faults:
            try:
                action()
            except (ckpt.CkptError, FormatError, OSError, Crash) as error:
                met = error
        if met is not None:
            self._check_error(met, faults)
        for name, step in wanted.items():
            self._set(name, step if met is None else self._look(name, {self.steps.get(name), step}))
        return faults.lied

    def _check_error(self, error: BaseException, faults: Any) -> None:
        """Nothing fails where nothing was wrong, but what cannot be."""
        if not faults.met and not self.doubtful:
            assert isinstance(error, ckpt.InUseError | ckpt.NotACheckpointError), error

    def _set(self, name: str, step: int | None) -> None:
        if step is None:
            self.steps.pop(name, None)
            self.doubtful.discard(name)
        else:
            self.steps[name] = step

    def _look(self, name: str, allowed: set[int | None]) -> int | None:
        """The step of what is there."""
        try:
            found: Any = ckpt.read(self.run / name)
        except ckpt.NotACheckpointError:
            assert None in allowed, f"{name} is lost"
            return None
        except FormatError as error:
            found = error
        if isinstance(found, FormatError):
            assert name in self.doubtful, found
            assert not ckpt.verify(self.run / name).sound
            return self.steps.get(name)
        step = int(found["step"])
        assert step in allowed, f"{name} is of step {step}"
        assert is_of(found, step)
        if name not in self.doubtful:
            assert ckpt.verify(self.run / name).sound
        return step


def _allowed(fault: Fault | None, can_crash: bool) -> Fault | None:
    return None if fault in CRASHES and not can_crash else fault


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "SEEN_PAUSES_SECONDS", (0.0, 0.0))
    # By a thread of this process, whose stores fail.
    monkeypatch.setattr("ckpt.saving.background.place_elsewhere", lambda *_: None)


def play(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Checkpoints,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.thorough
def test_nothing_is_lost_and_nothing_wrong_is_loaded_whatever_the_store_does() -> None:
    play(examples=15, steps=12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_in_many_runs() -> None:
    play(examples=500, steps=30)
